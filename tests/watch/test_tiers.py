"""Two tiers of drain: totals at every measured step, channels and histograms at every n-th."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins, Site, Snapshot, _native
from hookstats.numbers import fields
from hookstats.watch.drain import Pending
from tests.conftest import Backend, State, compare
from tests.kernels.test_kernels import normal
from tests.plain import OF_OUTPUTS

INF, NAN = float("inf"), float("nan")
WIDTHS = [1, 2, 63, 64, 257, 5000]
WORDS = len(fields.FIELDS) + _native.COUNTERS


def totals_of(backend: Backend, states: list[State]) -> tuple[np.ndarray[Any, Any], list[list[int]]]:
    """Return each site's fields [sites, fields] and counters."""
    out = backend.totals([s.moments for s in states], [s.counters for s in states]).take([]).cpu()
    assert out.shape == (len(states), WORDS)
    moments = out[:, : len(fields.FIELDS)].contiguous().view(torch.float64).numpy()
    return moments, out[:, len(fields.FIELDS) :].tolist()


def finished(moments: np.ndarray[Any, Any]) -> dict[str, float]:
    stats = hookstats.results.SiteStats(moments[:, None], 1, None, False).total
    return {name: getattr(stats, name) for name in fields.STATISTICS}


def apart(channels: int, rows: int = 20) -> torch.Tensor:
    """Channels whose means are 1e3 of their deviations apart, the first one farther still."""
    means = 1e3 * normal(channels, seed=channels)
    means[0] += 1e5
    return normal(rows, channels) + means


# The kernel.


def with_what_is_not_finite() -> list[torch.Tensor]:
    tensors = [apart(channels, 30) for channels in WIDTHS]
    for x in tensors:
        x[3, ::2], x[4:6, ::3], x[6:9, ::5] = NAN, INF, -INF
        x[9, -1] = 0
    tensors[3][:, :60] = NAN  # first channels of a thread or lane, and most of all
    tensors[4][:, 200:] = INF
    tensors[5][:, ::7] = -INF
    return tensors


def with_empty_channels(sign: int) -> list[torch.Tensor]:
    tensors = [sign * (10 + normal(4, channels).abs()) for channels in WIDTHS[1:]]
    for x in tensors:
        x[:, ::3] = NAN
    return tensors


@pytest.mark.parametrize(
    "make",
    [
        lambda: [apart(channels) for channels in WIDTHS],
        lambda: [1e4 + normal(20, channels) for channels in WIDTHS],
        with_what_is_not_finite,
        lambda: with_empty_channels(1),
        lambda: with_empty_channels(-1),
    ],
    ids=["means apart", "a small deviation", "not finite", "empty channels", "empty channels, negative"],
)
def test_totals_match_float64_on_the_same_data(backend: Backend, make: Callable[[], list[torch.Tensor]]) -> None:
    tensors = make()
    states = [backend.accumulate(x, 1) for x in tensors]
    moments, _ = totals_of(backend, states)
    for x, state, row in zip(tensors, states, moments, strict=True):
        compare(finished(row), x.reshape(-1).numpy(), f"{x.shape[1]} channels", 1e-5)
        np.testing.assert_allclose(row, fields.fold_channels(state.moments.cpu().numpy()), rtol=1e-10)


def test_counts_beyond_32_bits_are_exact(backend: Backend) -> None:
    state = State(300, "none", backend.device)
    for kind in ("count", "zeros", "nans", "posinfs", "neginfs"):
        state.moments[fields.FIELDS.index(kind)] = torch.arange(300, device=backend.device).double() + 2.0**40 + 1
    moments, _ = totals_of(backend, [state])
    for kind in ("count", "zeros", "nans", "posinfs", "neginfs"):
        assert moments[0][fields.FIELDS.index(kind)] == 300 * (2**40 + 1) + 299 * 150


def test_a_site_that_met_nothing_is_all_zeros(backend: Backend) -> None:
    x = normal(8, 70)
    states = [State(300, "none", backend.device), backend.accumulate(x, 1), State(1, "none", backend.device)]
    moments, counters = totals_of(backend, states)
    assert not moments[0].any()
    assert not moments[2].any()
    assert counters[0] == counters[2] == [0, 0]
    compare(finished(moments[1]), x.reshape(-1).numpy(), "between empty sites", 1e-5)


def test_many_sites_of_all_widths_at_once(backend: Backend) -> None:
    tensors = [apart(1 + 7 * i % 130, 3) for i in range(500)]
    states = [backend.accumulate(x, 1) for x in tensors]
    moments, counters = totals_of(backend, states)
    for x, state, row, counts in zip(tensors, states, moments, counters, strict=True):
        np.testing.assert_allclose(row, fields.fold_channels(state.moments.cpu().numpy()), rtol=1e-10)
        assert row[0] == x.numel()
        assert counts == state.counters.tolist()
        assert counts[0] == 1
    assert [first for _, first in counters] == sorted(first for _, first in counters)


def test_rows_of_a_state_may_lie_apart(backend: Backend) -> None:
    x = apart(90)
    whole = backend.accumulate(x, 1)
    part, single = State(1, "none", backend.device), State(1, "none", backend.device)
    part.moments, single.moments = whole.moments[:, 20:85], whole.moments[:, 89:]
    moments, _ = totals_of(backend, [part, single])
    compare(finished(moments[0]), x[:, 20:85].reshape(-1).numpy(), "a slice of channels", 1e-5)
    compare(finished(moments[1]), x[:, 89].numpy(), "one channel", 1e-5)


def test_two_runs_are_bit_identical(backend: Backend) -> None:
    states = [backend.accumulate(apart(channels), 1) for channels in WIDTHS]
    threads = torch.get_num_threads()
    runs = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            runs.append(totals_of(backend, states * 20)[0].view(np.int64))
    finally:
        torch.set_num_threads(threads)
    assert all(np.array_equal(run, runs[0]) for run in runs)


# Through attach.


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 70), nn.ReLU(), nn.Linear(70, 3))


def run(model: nn.Module, seed: int = 0, *shape: int) -> torch.Tensor:
    x = torch.randn(shape or (6, 4), generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(x.requires_grad_()).square().sum()
    loss.backward()
    return loss


def whole(snapshot: Snapshot) -> bool:
    """Return whether channels and histograms are there; all sites must agree."""
    (answer,) = {(stats.channels is not None, stats.histogram is not None) for stats in snapshot.values()}
    assert answer in ((True, True), (False, False))
    return answer[0]


def same_totals(one: Snapshot, other: Snapshot) -> None:
    assert list(one) == list(other)
    assert one.order == other.order
    assert one.step == other.step
    for site in one:
        a, b = one[site], other[site]
        assert a.calls == b.calls
        for name in fields.STATISTICS:
            got, want = getattr(a.total, name), getattr(b.total, name)
            if name in ("count", "min", "max", "abs_max", "zeros", "nans", "posinfs", "neginfs"):
                assert got == want or (np.isnan(got) and np.isnan(want)), (site, name)
            else:
                scale = b.total.std if name == "mean" else 0.0
                assert got == pytest.approx(want, rel=1e-12, abs=1e-12 * scale, nan_ok=True), (site, name)


def both(model: nn.Module, **how: Any) -> tuple[hookstats.Monitor, hookstats.Monitor]:
    """A monitor of two tiers, and one that has everything at each step."""
    how = {"tensors": OF_OUTPUTS} | how
    return hookstats.attach(model, channels=hookstats.Channels(every=3), **how), hookstats.attach(model, **how)


def test_channels_leave_at_every_nth_measured_step_from_the_first_on_and_totals_at_each() -> None:
    net = network()
    tiers, full = both(net, every=2)
    seen = {}
    for seed in range(15):
        run(net, seed)
        if seed % 5 == 0:
            run(net, seed + 100)  # microbatches
        if seed == 8:
            with torch.no_grad():
                net[0].weight[3] = NAN
        snapshot, wanted = tiers.step(), full.step()
        assert (snapshot is None) == (wanted is None) == bool(seed % 2)
        if snapshot is not None and wanted is not None:
            seen[snapshot.step] = whole(snapshot)
            assert whole(wanted)
            same_totals(snapshot, wanted)
    assert seen == {0: True, 2: False, 4: False, 6: True, 8: False, 10: False, 12: True, 14: False}
    snapshot = tiers.snapshot()
    assert snapshot["0", "output"].total.nans > 0


def test_a_totals_step_sends_kilobytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Pending.send

    def counted(pending: Pending, key: Any, memory: torch.Tensor, side: Any) -> None:
        sent[-1] += memory.untyped_storage().nbytes()
        send(pending, key, memory, side)

    monkeypatch.setattr(Pending, "send", counted)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    mon = hookstats.attach(
        net, tensors=OF_OUTPUTS, every=1, channels=hookstats.Channels(every=2), histogram=ExponentBins(per_channel=True)
    )
    for _ in range(4):
        sent.append(0)
        loss = run(net, 0, 5, 64)
        mon.step(loss=loss)
    assert len(mon.sites) == 8
    assert sent == [mon.state_bytes, 8 * 8 * WORDS] * 2  # a scalar on a CPU is read at once
    assert mon.state_bytes > 100 * sent[1]


def test_whoever_waits_gets_everything() -> None:
    net = network()
    mon = hookstats.attach(net, tensors=OF_OUTPUTS, every=1, channels=hookstats.Channels(every=3))
    for seed in range(2):
        run(net, seed)
        mon.step()
    run(net, 2)  # of which step() would send totals
    assert whole(mon.snapshot())
    assert whole(mon.snapshot())
    assert mon.detach() == []
    alone = hookstats.attach(net, tensors=OF_OUTPUTS, channels=hookstats.Channels(every=3))
    run(net, 0)
    (last,) = alone.detach()
    assert whole(last)


def test_a_site_that_moves_loses_nothing_and_its_table_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    table = _native.Totals

    def counted(moments: Any, counters: Any) -> Any:
        made.append(len(moments))
        return table(moments, counters)

    monkeypatch.setattr(_native, "Totals", counted)
    net = nn.Sequential(nn.ReLU())
    tiers, full = both(net, every=1)
    for seed in range(9):
        held = net(torch.ones(6, 4, requires_grad=True))
        if seed == 4:
            with pytest.warns(UserWarning, match="folded into one"):
                run(net, seed, 5, 7)
            run(net, seed, 2, 9)
        held.sum().backward()  # to where its site was
        snapshot = tiers.step()
        same_totals(snapshot, full.step())
        assert snapshot["0", "grad_output"].total.count == 24 + (seed == 4) * (35 + 18)
    assert made == [2] * 4  # at first, with what is folded, and as what was left is free, in two steps


def test_what_is_left_behind_counts_in_the_same_step() -> None:
    net = nn.Sequential(nn.ReLU())
    mon = hookstats.attach(net, every=1, channels=hookstats.Channels(every=9), tensors="output")
    mon.step()
    a, b = normal(6, 4) + 50, normal(5, 7)
    net(a)
    net(b)
    snapshot = mon.step()
    stats = snapshot["0", "output"]
    assert stats.calls == 2
    both_ = torch.cat([a.relu().reshape(-1), b.relu().reshape(-1)]).numpy()
    compare({name: getattr(stats.total, name) for name in fields.STATISTICS}, both_, "two places", 1e-5)


@pytest.mark.parametrize(
    "histogram", [None, LinearBins(-1, 1, 9, per_channel=True), LinearBins(-1, 1, 9), ExponentBins()]
)
def test_histograms_travel_with_channels(histogram: Any) -> None:
    net = network()
    mon = hookstats.attach(net, every=1, channels=hookstats.Channels(every=2), histogram=histogram)
    for step in range(4):
        run(net, step)
        stats = mon.step()["0", "output"]
        assert (stats.channels is not None) == (step % 2 == 0)
        assert (stats.histogram is not None) == (step % 2 == 0 and histogram is not None)
        if stats.histogram is None:
            with pytest.raises(ValueError, match=r"expected a site with a histogram.*Channels.every"):
                stats.quantile(0.5)
        else:
            outside = stats.histogram.underflow + stats.histogram.overflow
            assert stats.histogram.counts.sum() + np.sum(outside) == 6 * 70


def test_tables_and_flat_numbers_of_totals() -> None:
    net = network()
    tiers, full = both(net, every=1)
    for seed in range(2):
        run(net, seed)
        snapshot, wanted = tiers.step(), full.step()
    assert not whole(snapshot)
    assert snapshot.flat("rms", "count") == pytest.approx(wanted.flat("rms", "count"), rel=1e-12)
    assert len(snapshot.flat()) == 6 * len(fields.STATISTICS)
    lines, wanted_lines = snapshot.table().splitlines(), wanted.table().splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [line.split()[:3] for line in wanted_lines[2:]]
    assert {line.split()[3] for line in lines[2:]} == {"-"}  # channels
    assert "6 of 6 sites fired" in repr(snapshot)
    assert snapshot.table(sort="rms").splitlines()[0].split() == lines[0].split()


def test_tapped_tensors_and_sites_that_did_not_fire() -> None:
    net = network()
    tiers, full = both(net, modules=["0", "2"], tensors="output", every=1)
    for seed in range(2):
        for mon in (tiers, full):
            mon.tap(torch.ones(3, 5) * seed, "scores")
        with torch.no_grad():
            net[0](torch.ones(2, 4))
        snapshot, wanted = tiers.step(), full.step()
        same_totals(snapshot, wanted)
        assert snapshot["2", "output"].calls == 0
        assert snapshot.order == [Site("scores", "output"), Site("0", "output")]


def test_a_monitor_without_a_site_yet_has_nothing_to_send() -> None:
    mon = hookstats.attach(nn.Sequential(nn.ReLU()), every=1, channels=hookstats.Channels(every=2))
    assert [mon.step().order for _ in range(2)] == [[], []]


def test_totals_that_cannot_be_taken_are_lost_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    mon = hookstats.attach(net, tensors=OF_OUTPUTS, every=1, channels=hookstats.Channels(every=2))
    run(net)
    mon.step()
    run(net)

    def no_memory(*args: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(_native, "Totals", no_memory)
    with pytest.warns(UserWarning, match=r"step 1 .*could not be copied.*no memory"):
        assert mon.step() is None
    monkeypatch.undo()
    for step in (2, 3, 4):
        run(net)
        snapshot = mon.step()
        assert snapshot.step == step
        assert snapshot["0", "output"].calls == 1
        assert whole(snapshot) == (step % 2 == 0)
