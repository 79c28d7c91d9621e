"""Scalars of every step: what is given to `Monitor.step` is kept, whether the step is measured or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.records.store import Store
from hookstats.report import loading, planes
from hookstats.report.record import Recorded
from hookstats.rules import Judge
from hookstats.rules.step import Step
from hookstats.terminal.following import Followed
from tests.rules.test_judging import Recorder, model


def loss_of(step: int) -> float:
    return 100.0 + step / 8


def train(
    monitor: hookstats.Monitor, net: nn.Module, steps: range, given: Any = lambda step: {"loss": loss_of(step)}
) -> list[Snapshot]:
    found = []
    for step in steps:
        net(torch.ones(3, 4)).sum().backward()
        snapshot = monitor.step(step, **given(step))
        found += [] if snapshot is None else [snapshot]
    return found


def recorded(path: Path, steps: range, every: int, detach: bool = True, **how: Any) -> list[Snapshot]:
    net = model()
    monitor = hookstats.attach(net, every=every, sinks=[hookstats.record(path, rules=[])], **how)
    return train(monitor, net, steps) + (monitor.detach() if detach else [])


def losses(run: Any) -> dict[int, float]:
    table = run.scalars
    assert set(table["name"].to_pylist()) <= {"loss"}
    steps = table["step"].to_pylist()
    assert steps == sorted(set(steps))
    return dict(zip(steps, table["value"].to_pylist(), strict=True))


def test_scalars_of_steps_that_are_not_measured_come_with_the_next_measured_one() -> None:
    net = model()
    monitor = hookstats.attach(net, every=5)
    found = train(monitor, net, range(12)) + monitor.detach()
    assert [snapshot.step for snapshot in found] == [0, 5, 10]
    assert [snapshot.scalars for snapshot in found] == [{"loss": loss_of(step)} for step in (0, 5, 10)]
    assert [list(snapshot.earlier_scalars) for snapshot in found] == [[], [1, 2, 3, 4], [6, 7, 8, 9]]
    assert all(each == {"loss": loss_of(n)} for snapshot in found for n, each in snapshot.earlier_scalars.items())


def test_a_step_of_rules_has_them_and_equal_snapshots_have_the_same() -> None:
    net = model()
    monitor = hookstats.attach(net, every=4)
    *_, last = train(monitor, net, range(5)) + monitor.detach()
    judge = Judge([])
    assert Step(last, judge._sites).earlier_scalars == {n: {"loss": loss_of(n)} for n in (1, 2, 3)}
    again = Snapshot.from_dict(last.to_dict())
    assert again.equals(last)
    assert list(again.earlier_scalars) == [1, 2, 3]
    again.earlier_scalars[2]["loss"] += 1
    assert not again.equals(last)
    assert last.select("0").earlier_scalars == last.earlier_scalars


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_tensor_that_is_overwritten_afterwards_is_kept_as_it_was(kind: torch.dtype) -> None:
    net, buffer = model(), torch.zeros(1, 1, dtype=kind)
    monitor = hookstats.attach(net, every=4)

    def given(step: int) -> Mapping[str, torch.Tensor]:
        return {"loss": buffer.fill_(step + 3)}

    *_, last = train(monitor, net, range(5), given)
    assert (last.earlier_scalars, last.scalars) == ({n: {"loss": n + 3.0} for n in (1, 2, 3)}, {"loss": 7.0})


class NotOnTheCpu(torch.Tensor):
    """A tensor like a GPU's: the host must not read it before its step has arrived."""

    is_cpu = False  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.cpu)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_lies_on_a_device_is_copied_there_and_not_read_before_it_travels(dtype: torch.dtype) -> None:
    net, buffer = model(), torch.zeros((), dtype=dtype).as_subclass(NotOnTheCpu)
    monitor = hookstats.attach(net, every=600)

    def given(step: int) -> dict[str, Any]:
        return {"lr": step / 2, "loss": buffer.fill_(step + 3)}

    *_, last = train(monitor, net, range(601), given)  # more than one piece of memory holds
    assert list(last.earlier_scalars) == list(range(1, 600))
    assert all(each == {"lr": n / 2, "loss": n + 3.0} for n, each in last.earlier_scalars.items())
    assert last.scalars == {"lr": 300.0, "loss": 603.0}


def test_of_a_number_that_comes_twice_the_later_counts() -> None:
    net = model()
    monitor = hookstats.attach(net, every=lambda step: step in (0, 8))
    found = []
    for step, loss in ((0, 1.0), (6, 2.0), (9, 3.0), (6, 4.0), (7, 5.0), (8, 6.0)):
        net(torch.ones(3, 4)).sum().backward()
        if step == 6 and loss == 4.0:
            with pytest.warns(UserWarning, match="larger number"):
                found.append(monitor.step(step, loss=loss))
        else:
            found.append(monitor.step(step, loss=loss))
    last = [snapshot for snapshot in found if snapshot is not None][-1]
    assert last.earlier_scalars == {6: {"loss": 4.0}, 7: {"loss": 5.0}}  # 9 was trained anew, or will be


def test_a_record_has_the_scalars_of_every_step_those_after_the_last_measured_one_too(tmp_path: Path) -> None:
    found = recorded(tmp_path, range(43), every=10)
    run = hookstats.load(tmp_path)
    assert losses(run) == {step: loss_of(step) for step in range(43)}
    assert run.steps == [0, 10, 20, 30, 40]
    measured = dict(zip(run.scalars["step"].to_pylist(), run.scalars["measured"].to_pylist(), strict=True))
    assert [step for step, each in measured.items() if each] == run.steps
    assert all(run[snapshot.step].equals(snapshot) for snapshot in found)


def test_some_steps_of_a_record_have_the_scalars_that_are_asked_for(tmp_path: Path) -> None:
    recorded(tmp_path, range(43), every=10)
    assert list(losses(hookstats.load(tmp_path, steps=slice(15, 33)))) == list(range(15, 33))
    assert list(losses(hookstats.load(tmp_path, steps=slice(35, None)))) == list(range(35, 43))
    assert list(losses(hookstats.load(tmp_path, steps=[10, 40]))) == [10, 40]


def test_scalars_are_kept_where_no_step_is_ever_measured_in_bounded_memory(tmp_path: Path) -> None:
    net, most = model(), 0
    monitor = hookstats.attach(net, every=lambda step: False, sinks=[hookstats.record(tmp_path, rules=[])])
    monitor.step(loss=loss_of(0))  # a monitor measures its first step
    for step in range(1, 9000):
        monitor.step(loss=loss_of(step))
        most = max(most, len(monitor._delivery._kept.rows))
    monitor.detach()
    assert most < 5000
    assert losses(hookstats.load(tmp_path)) == {step: loss_of(step) for step in range(9000)}


def test_an_attempt_that_was_resumed_replaces_scalars_of_the_one_before_as_it_does_steps(tmp_path: Path) -> None:
    recorded(tmp_path, range(35), every=10)
    net = model()
    monitor = hookstats.attach(net, every=lambda step: step in (28, 38), sinks=[hookstats.record(tmp_path, rules=[])])
    for step in range(25, 43):
        net(torch.ones(3, 4)).sum().backward()
        monitor.step(step, loss=-float(step))
    monitor.detach()
    run = hookstats.load(tmp_path)
    assert losses(run) == {step: loss_of(step) if step < 25 else -float(step) for step in range(43)}
    assert 30 not in run.steps


def test_scalars_and_ids_that_no_measured_step_took_along_are_judged_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "seen_scalars.py"
    path.write_text(
        "from hookstats.rules import Finding\n"
        "def rule(step):\n"
        "    numbers = [*step.earlier_scalars]\n"
        "    said = f'{numbers[:1]} {numbers[-1:]} {[*step.sample_ids][:2]}'\n"
        "    return [step.finding(f'seen {step.number}', None, 0, 0, 'note', said)]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        net = model()
        recording = hookstats.record(tmp_path / "run", rules=["seen_scalars:rule"])
        monitor = hookstats.attach(net, every=lambda step: step == 5000, sinks=[recording])
        for step in range(5001):
            if step in (0, 5000):
                net(torch.ones(3, 4)).sum().backward()
            monitor.step(loss=loss_of(step), sample_ids=[step])
        monitor.detach()
    assert [finding.sentence for finding in hookstats.load(tmp_path / "run").findings] == [
        "[] [] [0]",
        "[1] [4999] [1, 2]",
    ]


def test_ranks_that_are_merged_afterwards_have_the_mean_of_every_step(tmp_path: Path) -> None:
    for rank in (0, 1):
        net, recorder = model(), Recorder()
        monitor = hookstats.attach(net, every=4, sinks=[recorder])
        train(monitor, net, range(7), lambda step, rank=rank: {"loss": loss_of(step) + rank})
        monitor.detach()
        store = Store(tmp_path / f"rank={rank}")
        store.begin(0, {"rank": rank})
        for frame in recorder.taken:
            store.add(frame)
        store.add_given(recorder.given[0], 0.0)
        store.finish(0)
        store.close()
    run = hookstats.load(tmp_path, ranks="merged")
    assert losses(run) == {step: loss_of(step) + 0.5 for step in range(7)}
    assert run[4].earlier_scalars == {n: {"loss": loss_of(n) + 0.5} for n in (1, 2, 3)}
    assert list(losses(hookstats.load(tmp_path, ranks="merged", steps=slice(2, 6)))) == [2, 3, 4, 5]


def test_recorders_get_what_is_left_at_detach_and_nothing_where_nothing_is() -> None:
    net, recorder = model(), Recorder()
    monitor = hookstats.attach(net, every=5, sinks=[recorder])
    train(monitor, net, range(8), lambda step: {"loss": loss_of(step), "sample_ids": [step]})
    monitor.detach()
    assert recorder.given == [({6: {"loss": loss_of(6)}, 7: {"loss": loss_of(7)}}, {6: [6], 7: [7]})]
    net, recorder = model(), Recorder()
    monitor = hookstats.attach(net, every=5, sinks=[recorder])
    train(monitor, net, range(6))
    monitor.detach()
    assert recorder.given == []


def test_the_page_and_the_screen_show_what_lies_between_measured_steps(tmp_path: Path) -> None:
    found = recorded(tmp_path / "run", range(43), every=10)
    lows, means, highs = planes.scalars(loading.load_recorded(tmp_path / "run"))["loss"]
    assert lows == [planes.round_number(loss_of(n)) for n in (0, 1, 11, 21, 31)]
    assert highs == [planes.round_number(loss_of(n)) for n in (0, 10, 20, 30, 42)]  # what came last, too
    assert means[1] == planes.round_number(sum(map(loss_of, range(1, 11))) / 10)
    given = planes.scalars(Recorded.of(found))["loss"]
    assert [each[:4] for each in given] == [each[:4] for each in (lows, means, highs)]
    followed = Followed(tmp_path / "run")
    followed.look()
    assert followed.values("loss", 100) == [loss_of(n) for n in range(41)]
    assert followed.values("loss", 2) == [sum(map(loss_of, range(21))) / 21, sum(map(loss_of, range(21, 41))) / 20]
