"""Steps: which are measured, what a snapshot covers, when and how often it arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.watch import drain
from tests.plain import OF_OUTPUTS, hearing


def run(model: nn.Module, seed: int = 0) -> torch.Tensor:
    loss = model(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).square().sum()
    loss.backward()
    return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


def steps(snapshots: list[Snapshot | None]) -> list[int]:
    return [snapshot.step for snapshot in snapshots if snapshot is not None]


def test_every_may_be_a_callable() -> None:
    net = model()
    asked = []

    def due(step: int) -> bool:
        asked.append(step)
        return step in (2, 3)

    mon = hookstats.attach(net, every=due)
    snapshots = [(run(net), mon.step())[1] for _ in range(6)]
    assert steps(snapshots) == [0, 2, 3]
    assert asked == [1, 2, 3, 4, 5, 6]


def test_the_trainers_own_step_numbers_are_kept() -> None:
    net = model()
    mon = hookstats.attach(net, every=10)
    snapshots = []
    for step in range(995, 1012):
        run(net)
        snapshots.append(mon.step(step))
    assert steps(snapshots) == [995, 1000, 1010]


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (torch.tensor(1.0), "a Tensor"),
        (torch.tensor(3), "a Tensor"),
        (nn.Parameter(torch.tensor(1.0)), "a Parameter"),
        (True, "True"),
        (1.5, r"1\.5"),
        ("3", "'3'"),
        (np.array([1, 2]), r"array\(\[1, 2\]\)"),
    ],
)
def test_what_is_no_step_number_is_refused_with_a_hint_at_scalars(step: Any, got: str) -> None:
    mon = hookstats.attach(model())
    with pytest.raises(TypeError, match=f"step: expected an int, the number .*, got {got}; scalars .*loss=loss"):
        mon.step(step)
    assert mon.snapshot().step == 0


def test_step_numbers_of_numpy_are_ints() -> None:
    snapshot = hookstats.attach(model()).step(np.int64(7))  # type: ignore[arg-type]
    assert type(snapshot.step) is int


@pytest.mark.parametrize("numbers", [[3, 3, 4, 4], [5, 4, 3, 7], [None, 0, 0, None]])
def test_numbers_that_do_not_grow_are_told_once_and_every_snapshot_comes(numbers: list[int | None]) -> None:
    net = model()
    seen: list[Snapshot] = []
    mon = hookstats.attach(net, every=lambda step: True, sinks=seen.append)
    run(net)
    with hearing() as told:
        first = mon.step(numbers[0])
    assert told == []
    returned = [first]
    with hearing() as told:
        for number in numbers[1:]:
            run(net)
            returned.append(mon.step(number))
    (text,) = told
    assert "step: expected a larger number than that of the step before" in text
    assert returned == seen
    assert steps(returned) == [number if number is not None else 0 if i == 0 else 1 for i, number in enumerate(numbers)]
    assert {snapshot["0", "output"].calls for snapshot in seen} == {1}


def test_scalars_travel_with_their_step() -> None:
    net = model()
    mon = hookstats.attach(net, every=2)
    losses, got = [], []
    for seed in range(3):
        loss = run(net, seed)
        losses.append(loss.item())
        snapshot = mon.step(loss=loss, lr=0.5, norm=torch.tensor([seed], dtype=torch.int32))
        if snapshot:
            got.append(snapshot.scalars)
    assert got == [{"loss": losses[0], "lr": 0.5, "norm": 0.0}, {"loss": losses[2], "lr": 0.5, "norm": 2.0}]
    assert list(got[0]) == ["loss", "lr", "norm"]


def test_what_is_no_scalar_is_refused_at_every_step_and_changes_nothing() -> None:
    net = model()
    mon = hookstats.attach(net, every=2)
    for _ in range(2):
        run(net)
        with pytest.raises(ValueError, match=r"loss: expected a number, got a tensor of shape \(2,\)"):
            mon.step(loss=torch.zeros(2))
        with pytest.raises(TypeError, match="norm: expected a number or one-element tensor, got None"):
            mon.step(norm=None)
        for wrong in ("high", torch.zeros((), dtype=torch.complex64)):
            with pytest.raises(TypeError, match="loss: expected a number or one-element tensor"):
                mon.step(loss=wrong)
        with pytest.raises(TypeError, match=r"loss: expected a number or a tensor with data, got tensor.*meta"):
            mon.step(loss=torch.zeros((), device="meta"))
        with pytest.raises(TypeError, match=r"expected an int, the number of the step, got 1\.5"):
            mon.step(1.5)  # type: ignore[arg-type]
        assert mon.snapshot()["0", "output"].calls == 1
        mon.step()


def test_an_every_that_fails_measures_nothing_and_says_so_once() -> None:
    def broken(step: int) -> bool:
        raise RuntimeError("no idea")

    net = model()
    mon = hookstats.attach(net, every=broken)
    run(net)
    with pytest.warns(UserWarning, match="the step is not measured: RuntimeError.'no idea'"):
        assert mon.step() is not None
    run(net)
    with hearing() as told:
        assert mon.step() is None
    assert told == []
    with pytest.raises(RuntimeError, match="no idea"):
        hookstats.attach(net, every=broken, options=hookstats.Options(strict=True)).step()


def test_a_step_that_cannot_be_copied_is_lost_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    mon = hookstats.attach(net, every=1)
    run(net)

    def no_memory(*args: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(mon._store, "take", no_memory)
    with pytest.warns(UserWarning, match=r"step 0 .*could not be copied.*no memory"):
        assert mon.step() is None
    monkeypatch.undo()
    run(net)
    snapshot = mon.step()
    assert snapshot["0", "output"].calls == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_sink_that_raises_keeps_no_snapshot_from_other_sinks_or_later_steps(
    strict: bool, error: type[BaseException]
) -> None:
    seen: dict[str, list[int]] = {"first": [], "last": []}
    raising: list[BaseException] = []

    def first(snapshot: Snapshot) -> None:
        seen["first"].append(snapshot.step)
        if raising:
            raise raising.pop()

    net = model()
    mon = hookstats.attach(
        net,
        every=2,
        sinks=[first, lambda snapshot: seen["last"].append(snapshot.step)],
        options=hookstats.Options(strict=strict),
    )
    returned = []
    for step in range(7):
        run(net)
        if step == 2:
            raising.append(error("stop"))
        if step == 2 and (strict or error is KeyboardInterrupt):
            with pytest.raises(error, match="stop"):
                mon.step()
            assert mon.snapshot().step == 2
        elif step == 2:
            with pytest.warns(UserWarning, match="failed: OSError"):
                returned.append(mon.step())
        else:
            returned.append(mon.step())
    assert seen == {"first": [0, 2, 4, 6], "last": [0, 2, 4, 6]}
    got = [None if snapshot is None else snapshot.step for snapshot in returned]
    assert got == [0, None, *([] if strict or error is KeyboardInterrupt else [2]), None, 4, None, 6]


def test_of_two_sinks_that_raise_the_first_one_is_heard_also_from_detach() -> None:
    seen: list[Snapshot] = []

    def interrupted(snapshot: Snapshot) -> None:
        raise KeyboardInterrupt("first")

    def exits(snapshot: Snapshot) -> None:
        seen.append(snapshot)
        raise SystemExit("second")

    net = model()
    mon = hookstats.attach(net, sinks=[interrupted, exits])
    run(net)
    with pytest.raises(KeyboardInterrupt, match="first"):
        mon.detach()
    assert len(seen) == 1
    assert not net[0]._forward_hooks
    mon.detach()


def test_paused_measures_nothing_and_nests() -> None:
    net = model()
    mon = hookstats.attach(net, every=1)
    run(net)
    with mon.paused():
        run(net)
        with mon.paused():
            run(net)
        run(net)
    run(net)
    assert mon.snapshot()["0", "output"].calls == 2
    with pytest.raises(KeyError), mon.paused():
        raise KeyError
    run(net)
    assert mon.snapshot()["0", "output"].calls == 3


def test_pause_lasts_until_resume_and_nothing_else_ends_it() -> None:
    net = model()
    mon = hookstats.attach(net, every=1)
    mon.pause()
    mon.pause()
    with mon.paused():
        pass
    mon.step()
    run(net)
    assert mon.snapshot().order == []
    mon.resume()
    run(net)
    with mon.paused():
        mon.resume()
        run(net)
    assert mon.snapshot()["0", "output"].calls == 1


def test_reset_forgets_the_open_step() -> None:
    net = model()
    mon = hookstats.attach(net, tensors=OF_OUTPUTS)
    run(net)
    mon.reset()
    assert mon.snapshot().order == []
    run(net)
    assert mon.snapshot()["0", "output"].calls == 1


def test_snapshot_shows_the_open_step_else_the_last_measured_one() -> None:
    net = model()
    mon = hookstats.attach(net, every=2)
    assert mon.snapshot().order == []
    run(net)
    assert mon.snapshot().step == 0
    assert mon.snapshot()["0", "output"].calls == 1  # reading clears nothing
    mon.step()
    run(net)  # not measured
    assert mon.snapshot().step == 0
    mon.step()
    run(net)
    assert mon.snapshot().step == 2


def test_detach_returns_what_nobody_has_fetched_and_makes_no_step_of_a_part_of_one() -> None:
    net = model()
    seen: list[Snapshot] = []
    mon = hookstats.attach(net, every=1, sinks=seen.append)
    arrive, drain.Pending.ready = drain.Pending.ready, lambda self: False  # as on a GPU that is behind
    try:
        for seed in range(2):
            run(net, seed)
            assert mon.step() is None
    finally:
        drain.Pending.ready = arrive  # type: ignore[method-assign]
    run(net)  # of a step that never ends
    left = mon.detach()
    assert [snapshot.step for snapshot in left] == [snapshot.step for snapshot in seen] == [0, 1]
    assert mon.detach() == []
    assert mon.step() is None
    assert mon.snapshot() is left[1]


def test_a_training_that_never_called_step_is_told_so_by_detach() -> None:
    """One step of an optimizer may be meant as the only one."""
    for times in (1, 3):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for sinks, is_told in (([], False), ([lambda snapshot: None], times > 1)):
            monitor = hookstats.attach(net, sinks=sinks)
            for _ in range(times):
                run(net)
                optimizer.step()
            with hearing() as heard:
                monitor.detach()
            told = "monitor.step() was never called: 3 steps of an optimizer are together in step 0"
            assert [told in each for each in heard] == [True] * is_told


def test_without_steps_detach_makes_a_snapshot_of_what_there_is() -> None:
    net = model()
    mon = hookstats.attach(net, tensors=OF_OUTPUTS)
    for seed in range(2):
        run(net, seed)
    (whole,) = mon.detach()
    assert whole["0", "output"].calls == 2
    assert hookstats.attach(net, tensors=OF_OUTPUTS).detach() == []
    with hookstats.attach(net, tensors=OF_OUTPUTS) as mon:
        run(net)
    assert mon.snapshot()["0", "output"].calls == 1
    assert [snapshot["0", "output"].calls for snapshot in mon.detach()] == [1]


def test_a_gradient_that_arrives_after_its_step_lands_in_the_open_one() -> None:
    net = model()
    mon = hookstats.attach(net, every=1)
    loss = net(torch.randn(3, 4)).sum()
    first = mon.step()
    loss.backward()
    second = mon.step()
    assert first["0", "output"].calls == 1
    assert first["0", "grad_output"].calls == 0
    assert second["0", "output"].calls == 0
    assert second["0", "grad_output"].calls == 1


@pytest.mark.gpu
@pytest.mark.parametrize("channels_every", [1, 3])
def test_on_a_gpu_no_step_waits_and_every_snapshot_arrives(channels_every: int) -> None:
    net = model().cuda()
    mon = hookstats.attach(net, every=2, channels=hookstats.Channels(every=channels_every))
    arrived: list[Any] = []
    x = torch.randn(6, 4, device="cuda")
    net(x).square().sum().backward()  # the extension's own first use is outside
    mon.reset()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(9):
            loss = net(x).square().sum()
            loss.backward()
            arrived.append(mon.step(loss=loss, lr=0.1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    arrived += [mon.step(), mon.step(), mon.step(), mon.step(), mon.step()]
    assert steps(arrived)[:5] == [0, 2, 4, 6, 8]
    plain = net[0](x).detach().double()
    for snapshot in arrived:
        if snapshot is not None and snapshot.step <= 8:
            assert snapshot["0", "output"].total.mean == pytest.approx(plain.mean().item(), rel=1e-5)
            assert snapshot["0", "grad_output"].calls == 1
            assert (snapshot["0", "output"].channels is None) == (channels_every == 3 and snapshot.step in (2, 4, 8))
            assert set(snapshot.scalars) == {"loss", "lr"}
