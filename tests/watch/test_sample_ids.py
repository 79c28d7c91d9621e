"""Ids of samples: what is given to `Monitor.step` is kept with the step, measured or not, and named by findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.numbers.given import Given
from hookstats.records import wire
from hookstats.records.ring import RingError
from hookstats.rules import Finding
from hookstats.rules.samples import add_samples
from hookstats.rules.step import SiteIds, Step
from tests.rules.test_judging import model
from tests.watch.test_scalars import train


def ids_of(step: int) -> list[int]:
    return [1000 * step + i for i in range(3)]


def given(step: int) -> dict[str, Any]:
    return {"loss": 1.0, "sample_ids": ids_of(step)}


def lists(ids: dict[int, Any]) -> dict[int, list[int]]:
    return {step: each.tolist() for step, each in ids.items()}


def test_a_snapshot_has_those_of_its_step_and_of_the_steps_before_that_were_not_measured() -> None:
    net = model()
    monitor = hookstats.attach(net, every=3)
    found = train(monitor, net, range(7), given) + monitor.detach()
    assert [snapshot.step for snapshot in found] == [0, 3, 6]
    assert [list(snapshot.sample_ids) for snapshot in found] == [[0], [1, 2, 3], [4, 5, 6]]
    assert lists(found[1].sample_ids) == {step: ids_of(step) for step in (1, 2, 3)}
    assert found[1].sample_ids[3].dtype == np.int64
    again = Snapshot.from_dict(json.loads(json.dumps(found[1].to_dict())))
    assert again.equals(found[1])
    again.sample_ids[2] = again.sample_ids[2] + 1
    assert not again.equals(found[1])
    assert lists(found[1].select("0").sample_ids) == lists(found[1].sample_ids)


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)])
def test_lists_arrays_and_tensors_are_taken_and_copied(form: Any) -> None:
    net = model()
    monitor = hookstats.attach(net, every=1)
    buffer = form([3, 1, 2**31 - 1])
    net(torch.ones(3, 4))
    snapshot = monitor.step(sample_ids=buffer)
    buffer[0] = 77
    assert lists(snapshot.sample_ids) == {0: [3, 1, 2**31 - 1]}


def test_steps_without_any_have_none_and_empty_ones_are_kept() -> None:
    net = model()
    monitor = hookstats.attach(net, every=1)
    kept = []
    for ids in (None, [], [4]):
        net(torch.ones(3, 4))
        kept.append(monitor.step(sample_ids=ids))
    assert [lists(snapshot.sample_ids) for snapshot in kept if snapshot] == [{}, {1: []}, {2: [4]}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["a", "b"], r"expected integers \[samples\].*; got <U1 of shape \(2,\)"),
        ([1.0, 2.0], "got float64 of shape"),
        (torch.ones(2, 2, dtype=torch.int64), r"got int64 of shape \(2, 2\)"),
        (7, r"got int64 of shape \(\)"),
        ([[1], [2, 3]], r"got \[\[1\], \[2, 3\]\]"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "on the CPU; got a tensor on meta"),
        (np.array([2**63], np.uint64), "below 2 \\*\\* 63, got 9223372036854775808"),
    ],
)
def test_anything_else_is_refused_with_what_was_expected(wrong: Any, said: str) -> None:
    monitor = hookstats.attach(model())
    with pytest.raises((TypeError, ValueError), match=f"step: sample_ids: .*{said}"):
        monitor.step(sample_ids=wrong)


def test_a_recorded_run_has_those_of_every_step(tmp_path: Path) -> None:
    net = model()
    monitor = hookstats.attach(net, every=4, sinks=hookstats.record(tmp_path / "run", rules=[]))
    found = train(monitor, net, range(11), given) + monitor.detach()  # 9 and 10 come without a measured step
    run = hookstats.load(tmp_path / "run")
    assert [run.sample_ids(step).tolist() for step in range(11)] == [ids_of(step) for step in range(11)]
    assert all(got.equals(want) for got, want in zip(run, found, strict=True))
    with pytest.raises(KeyError, match="expected a step with which sample_ids were given, got 11"):
        run.sample_ids(11)
    narrow = hookstats.load(tmp_path / "run", sites="0", steps=[4])
    assert narrow.sample_ids(2).tolist() == ids_of(2)
    assert lists(narrow[4].sample_ids) == {step: ids_of(step) for step in (1, 2, 3, 4)}


@pytest.mark.parametrize("steps", [[0], [0, 1, 2]])
def test_many_go_through_the_ring_as_they_are(steps: list[int]) -> None:
    many = {step: np.arange(10**5) * 2**40 + step for step in steps} | {9: np.array([], np.int64)}
    given = Given({step: {"loss": 0.5} for step in steps}, many)
    pieces = wire.encode_given(given, 3.0)
    assert sum(piece.nbytes for piece in pieces) < 8.1 * 10**5 * len(steps)
    payload = np.concatenate([np.ascontiguousarray(piece).view(np.uint8) for piece in pieces])
    found, time = wire.decode_given(payload)
    assert (found.scalars, time) == (given.scalars, 3.0)
    assert lists(found.sample_ids) == lists(many)
    for wrong in (payload[:-8], np.concatenate([payload, payload[:8]])):
        with pytest.raises(RingError, match="expected what was given with steps, got"):
            wire.decode_given(wrong)


def test_a_resumed_run_has_those_of_the_later_attempt(tmp_path: Path) -> None:
    for first, shift in ((0, 0), (3, 500)):
        net = model()
        monitor = hookstats.attach(net, every=4, sinks=hookstats.record(tmp_path / "run", rules=[]))
        train(monitor, net, range(first, 7), lambda step, shift=shift: {"sample_ids": [step + shift]})
        monitor.detach()
    run = hookstats.load(tmp_path / "run")
    assert [run.sample_ids(step).tolist() for step in range(7)] == [[0], [1], [2], [503], [504], [505], [506]]


def test_ranks_that_are_merged_afterwards_have_one_rank_after_the_other(tmp_path: Path) -> None:
    """Not all need have some."""
    for rank in (0, 1, 2):
        net = model()
        monitor = hookstats.attach(net, every=2, sinks=hookstats.record(tmp_path / f"run{rank}", rules=[]))
        train(monitor, net, range(4), lambda n, rank=rank: {"sample_ids": [10 * n + rank]} if rank and n else {})
        monitor.detach()
        (tmp_path / f"run{rank}" / "rank=0").rename(tmp_path / f"rank={rank}")
    run = hookstats.load(tmp_path, ranks="merged")
    assert [run.sample_ids(step).tolist() for step in (1, 2, 3)] == [[11, 12], [21, 22], [31, 32]]
    assert lists(run[2].sample_ids) == {1: [11, 12], 2: [21, 22]}
    with pytest.raises(KeyError, match="expected a step with which sample_ids were given, got 0"):
        run.sample_ids(0)


def test_of_what_waits_the_oldest_go() -> None:
    kept = Given({}, {})
    for step in range(5):
        kept.add(Given({step: {"loss": 1.0}, step + 100: {}}, {step: np.array([step])}), most=3)
    assert list(kept.scalars) == list(kept.sample_ids) == [2, 3, 4]


# What findings say of them.


class Rows(nn.Module):
    """A linear layer, whose input is measured sample by sample, or row by row."""

    def __init__(self, by_row: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.by_row = by_row
        self.monitor: hookstats.Monitor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.monitor is not None:
            self.monitor.tap(x.flatten(0, 1) if self.by_row else x, "rows", channel_dim=0)
        return self.layer(x)


def judged(batches: list[torch.Tensor], ids: list[int], rule: str = "loss-spike", by_row: bool = False) -> Finding:
    """Judge the samples of a step of these microbatches."""
    net = Rows(by_row)
    net.monitor = hookstats.attach(net, every=1, tensors="output")
    for batch in batches:
        net(batch)
    snapshot = net.monitor.step(sample_ids=ids)
    assert snapshot is not None
    step = Step(snapshot, SiteIds())
    return add_samples(step.finding(rule, None, 2.0, 1.0, "warning", "Something."), step)


def batch(samples: int, *large: int, value: float = 50.0) -> torch.Tensor:
    made = torch.randn(samples, 3, 4, generator=torch.Generator().manual_seed(samples))
    for sample in large:
        made[sample, 1] = value
    return made


def test_the_samples_that_stand_out_are_named_where_a_site_keeps_them_apart() -> None:
    finding = judged([batch(8, 5)], [10, 11, 12, 13, 14, 915, 16, 17])
    assert finding.sample_ids == (915,)
    rms = batch(8, 5).double().square().mean((1, 2)).sqrt()
    ratio = float(rms[5] / np.median(rms))
    where = f"its rms at the output of rows is {ratio:.3g} times that of the median sample."
    assert finding.sentence == f"Something. Of the 8 samples of step 0, 1 stands out (915): {where}"
    both = judged([batch(8, 5, 2)], list(range(8)))
    assert set(both.sample_ids) == {2, 5}
    assert "2 stand out (" in both.sentence
    assert "their rms at the output of rows is up to " in both.sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_come_first(value: float) -> None:
    x = batch(8, 5)
    x[2, 0, 0] = value
    finding = judged([x], list(range(100, 108)), "nonfinite")
    assert finding.sample_ids == (102, 105)
    assert finding.sentence.endswith("2 stand out (102, 105): their rms at the output of rows is not finite.")


def test_rows_of_samples_are_put_together() -> None:
    assert judged([batch(8, 5)], list(range(8)), by_row=True).sample_ids == (5,)


def test_of_several_microbatches_it_may_have_been_any_with_that_place() -> None:
    ids = [*range(8), *range(50, 58)]
    assert judged([batch(8), batch(8, 3)], ids).sample_ids == (3, 53)


def test_where_none_stands_out_or_no_site_tells_all_samples_are_named() -> None:
    for x, ids in ((batch(8), list(range(8))), (batch(8, 5), list(range(7)))):  # of another number
        finding = judged([x], ids)
        assert finding.sample_ids == tuple(ids)
        assert finding.sentence == f"Something. Step 0 had samples 0, 1, 2 and {len(ids) - 3} more."
    assert judged([batch(1)], [9]).sentence == "Something. Step 0 had sample 9."


def test_what_no_single_batch_sets_off_names_no_samples() -> None:
    assert judged([batch(8, 5)], list(range(8)), "dead-channels").sample_ids == ()
    net = Rows()
    net.monitor = hookstats.attach(net, every=1, tensors="output")
    for _ in range(2):
        net(batch(8, 5))
        snapshot = net.monitor.step(sample_ids=range(8))
    assert snapshot is not None
    step = Step(snapshot, SiteIds())
    long = step.finding("loss-spike", None, 2.0, 1.0, "critical", "It diverges.", since=0)
    assert add_samples(long, step) == long


def test_a_recorded_finding_names_the_samples_of_its_own_step(tmp_path: Path) -> None:
    """Also where it is a step that was not measured."""
    net = nn.Sequential(nn.Linear(4, 4))
    monitor = hookstats.attach(net, every=10, sinks=hookstats.record(tmp_path / "run"))
    for step in range(61):
        net(torch.randn(4, 4)).square().mean().backward()
        monitor.step(loss=float("nan") if step == 45 else 2.0, sample_ids=[step, 100 + step])
    monitor.detach()
    (finding,) = [each for each in hookstats.load(tmp_path / "run").findings if each.rule == "nonfinite"]
    assert (finding.step, finding.sample_ids) == (45, (45, 145))
    assert finding.sentence.endswith("Step 45 had samples 45, 145.")
    told = json.loads(json.dumps(finding.to_json()))
    assert Finding.from_json(told).sample_ids == (45, 145)
    with pytest.raises(ValueError, match="sample_ids of a finding: expected a list of ints, got"):
        Finding.from_json(told | {"sample_ids": ["a"]})


def test_samples_of_the_models_input_are_kept_apart_where_that_is_asked_for(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    channels = hookstats.Channels(dim={"": 0})
    monitor = hookstats.attach(net, every=1, channels=channels, sinks=hookstats.record(tmp_path / "run"))
    for step in range(20):
        x = torch.randn(6, 4)
        if step == 15:
            x[4] *= 1000
        net(x).sum().backward()
        monitor.step(sample_ids=range(6 * step, 6 * step + 6))
    monitor.detach()
    run = hookstats.load(tmp_path / "run")
    rms = x.double().square().mean(1).sqrt()
    torch.testing.assert_close(torch.from_numpy(run[19]["", "input"].channels.rms), rms)
    (finding,) = [each for each in run.findings if each.because is None]
    assert (finding.rule, finding.step, finding.sample_ids) == ("input-shift", 15, (94,))
    with pytest.raises(ValueError, match="the glob '' matches nothing"):
        hookstats.attach(net, tensors="output", channels=channels)


def test_rules_about_channels_do_not_take_samples_for_some() -> None:
    net = Rows()
    net.monitor = hookstats.attach(net, every=1, tensors="output")
    for ids, is_channel in ((range(8), False), (None, True)):
        net(batch(8, 5))
        snapshot = net.monitor.step(sample_ids=ids)
        assert snapshot is not None
        step = Step(snapshot, SiteIds())
        site = step.sites.index(hookstats.Site("rows", "output"))
        assert bool(step.has_channels[site]) == is_channel
        assert (step.channels(site) is not None) == is_channel
        assert list(step.of_samples) == ([] if is_channel else [site])
