"""A Snapshot as whole tables: totals of all sites, channels of all sites, parts of it, JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins, Site, Snapshot
from hookstats.numbers import fields
from hookstats.numbers.ranks import StepRanks
from tests import scaled

OF_ALL = ("output", "grad_output", "param_grad")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 70), nn.ReLU(), nn.Linear(70, 3), nn.Tanh())


def taken(scale: float | None = None, **settings: Any) -> Snapshot:
    """Take a step with scaled gradients, a tanh that did not fire and one infinite output."""
    model = network()
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    settings = {"tensors": OF_ALL, "every": 1, **settings}
    mon = hookstats.attach(model, **settings)
    with torch.no_grad():
        model[0].bias[3] = 1e3
    loss = model[2](model[1](model[0](torch.randn(9, 4)))).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaled.show(scaler, model)
    mon.tap(torch.tensor([1.0, float("inf"), float("nan")]), "scores")
    snapshot = mon.step(loss=1.5) or mon.snapshot()
    snapshot.frame.skipped = {
        Site("x", "output"): fields.Skipped("a reason", 2),
        Site("y", "output"): fields.Skipped("b", None),
    }
    return snapshot


@pytest.mark.parametrize("scale", [None, 64.0, 1000.0])
@pytest.mark.parametrize("channels", [True, False, "2"])
def test_totals_are_those_of_each_site_to_the_bit(scale: float | None, channels: Any) -> None:
    snapshot = taken(scale, channels=channels)
    assert len(snapshot.order) < len(snapshot)
    for name in fields.STATISTICS:
        column = getattr(snapshot.totals, name)
        wanted = np.array([getattr(snapshot[site].total, name) for site in snapshot.order])
        assert column.dtype == np.float64
        assert column.tobytes() == wanted.tobytes(), name
    gradients = [i for i, site in enumerate(snapshot.order) if site.tensor == "grad_output"]
    plain = taken().totals.rms[gradients]  # of which nothing was scaled
    np.testing.assert_allclose(snapshot.totals.rms[gradients], plain, rtol=1e-4)


def test_totals_of_a_step_in_which_nothing_fired_are_empty() -> None:
    mon = hookstats.attach(network())
    snapshot = mon.snapshot()
    assert snapshot.totals.rms.shape == (0,)
    assert snapshot.flat() == {}
    assert snapshot.top_channels("rms", 3) == []
    assert (snapshot.first_nonfinite, snapshot.grad_norm) == (None, None)
    assert snapshot.table().splitlines()[2].startswith("did not fire: 0 output")


def test_the_model_itself_has_a_name_in_flat_that_no_module_has() -> None:
    model = nn.Linear(2, 2)
    mon = hookstats.attach(model, "", tensors=("output", "grad_output"))
    model(torch.ones(1, 2))
    assert list(mon.snapshot().flat("rms")) == ["output/rms/whole-model"]


@pytest.mark.parametrize("scale", [None, 1000.0])
@pytest.mark.parametrize("statistic", ["abs_max", "mean", "std", "posinfs"])
@pytest.mark.parametrize("k", [1, 12, 10**6])
def test_top_channels_are_the_largest_of_all_sites(statistic: str, k: int, scale: float | None) -> None:
    snapshot = taken(scale, channels=["0", "1", "2", "2.weight"])
    every = [
        (site, channel, value)
        for site in snapshot.order
        for stats in [snapshot[site].channels]
        if stats is not None
        for channel, value in enumerate(getattr(stats, statistic).tolist())
        if not np.isnan(value)
    ]
    assert len(every) > 200
    top = snapshot.top_channels(statistic, k)
    assert top == sorted(every, key=lambda each: -each[2])[:k]  # sorted() keeps the order of equal ones
    assert top[0].value == max(value for *_, value in every)
    assert isinstance(top[0].site, Site)


def test_top_channels_refuse_what_is_no_statistic_and_no_number() -> None:
    with pytest.raises(ValueError, match=r"top_channels: expected one of count.*got 'size'"):
        taken().top_channels("size", 3)
    with pytest.raises(ValueError, match="top_channels: expected k, a number of at least 1, got 0"):
        taken().top_channels("rms", 0)


def test_a_data_frame_of_channels_has_a_row_for_each() -> None:
    pytest.importorskip("pandas")
    snapshot = taken(1000.0, channels=["0", "2"])
    frame = snapshot.to_pandas(channels=True)
    assert frame.index.names == ["name", "tensor", "channel"]
    assert list(frame.columns) == ["calls", *fields.STATISTICS]
    kept = [site for site in snapshot.order if snapshot[site].channels is not None]
    assert 0 < len(kept) < len(snapshot.order)
    assert list(dict.fromkeys(row[:2] for row in frame.index)) == kept
    for site in kept:
        part, stats = frame.xs(tuple(site), level=["name", "tensor"]), snapshot[site].channels
        assert list(part.index) == list(range(len(stats.rms)))
        assert set(part["calls"]) == {snapshot[site].calls}
        for name in fields.STATISTICS:
            np.testing.assert_array_equal(part[name], getattr(stats, name))


def test_select_takes_sites_by_name_and_tensor_in_the_same_order() -> None:
    snapshot = taken(64.0)
    part = snapshot.select(["2*", "scores"])
    assert list(part) == [site for site in snapshot if site.name in ("2", "2.weight", "2.bias", "scores")]
    assert part.order == [site for site in snapshot.order if site in part]
    np.testing.assert_array_equal(part["2", "output"]._measured, snapshot["2", "output"]._measured)
    assert (part.step, part.scalars, part.grad_scale, part.overflowed) == (0, {"loss": 1.5}, 64.0, False)
    assert part.skipped == {}
    assert snapshot.select("x").skipped == {Site("x", "output"): fields.Skipped("a reason", 2)}
    assert part.grad_norm == pytest.approx(np.sqrt(sum(part.select(tensors="param_grad").totals.l2_norm ** 2)))
    assert {site.tensor for site in snapshot.select(tensors="output")} == {"output"}
    assert list(snapshot.select("0", ("grad_output", "param_grad"))) == [Site("0", "grad_output")]
    with pytest.raises(ValueError, match=r"select: names: the glob '7\*' matches nothing; the names are '0', '1'"):
        snapshot.select(["2", "7*"])
    with pytest.raises(ValueError, match=r"select: tensors: expected some of output, .*got 'input'"):
        snapshot.select(tensors="input")


def test_select_takes_the_parts_of_a_container_with_it() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x + 1

    model = Two()
    mon = hookstats.attach(model, "", tensors="output")
    model(torch.ones(2, 2))
    names = [Site("", "output.0"), Site("", "output.1")]
    assert mon.snapshot().select("", tensors="output").order == names
    assert mon.snapshot().select(tensors="output.1").order == names[1:]


BINS = [
    None,
    ExponentBins(),
    ExponentBins(block=16, block_dim=0),
    ExponentBins(per_channel=True),
    LinearBins(np.float32(-0.1), 1, 7),
    LinearBins(-1, 1, 3, per_channel=True),
]


@pytest.mark.parametrize("histogram", BINS)
@pytest.mark.parametrize("scale", [None, 1000.0])
@pytest.mark.parametrize("channels", [True, "2"])
def test_json_gives_a_snapshot_back_to_the_bit(histogram: Any, scale: float | None, channels: Any) -> None:
    snapshot = taken(scale, histogram=histogram, channels=channels)
    snapshot.frame.scalars = {"loss": float("nan"), "lr": 0.1, "norm": float("inf"), "zero": -0.0}
    snapshot["0", "output"]._measured[1, 0] = np.nan  # as in float64 data beyond 1e154
    snapshot["0", "output"]._measured[2, 0] = np.inf
    snapshot["1", "output"]._measured[3] = -0.0
    if histogram is not None:
        snapshot["1", "output"]._histogram.reshape(-1)[1] = 2**62 + 1
    back = Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict())))
    assert back.equals(snapshot)
    for name in ("step", "grad_scale", "overflowed", "order", "skipped"):
        assert getattr(back, name) == getattr(snapshot, name), name
    assert list(back) == list(snapshot)
    assert all(isinstance(site, Site) for site in [*back, *back.order, *back.skipped])
    np.testing.assert_equal(back.scalars, snapshot.scalars)
    assert np.signbit(back.scalars["zero"])
    for site, stats in snapshot.items():
        mine = back[site]
        for name in ("calls", "channel_dim"):
            assert getattr(mine, name) == getattr(stats, name)
        assert (mine.channels is None) == (stats.channels is None)
        pairs = [(mine._measured, stats._measured)]
        pairs += [(getattr(mine.total, name), getattr(stats.total, name)) for name in fields.STATISTICS]
        if stats.histogram is not None:
            for name in ("counts", "edges", "underflow", "overflow"):
                pairs.append((getattr(mine.histogram, name), getattr(stats.histogram, name)))
            assert mine._bins == stats._bins
        for got, wanted in pairs:
            got, wanted = np.asarray(got), np.asarray(wanted)
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)
            np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted) & ~np.isnan(wanted))
        np.testing.assert_equal(mine.quantile(0.3) if histogram else None, stats.quantile(0.3) if histogram else None)


def changes() -> dict[str, Any]:
    def state(snapshot: Snapshot) -> None:
        snapshot["2", "output"]._measured[1, 2] = np.nextafter(snapshot["2", "output"]._measured[1, 2], 9)

    def zero(snapshot: Snapshot) -> None:
        snapshot["1", "output"]._measured[3] *= -1

    return {
        "state": state,
        "sign of zero": zero,
        "bin": lambda s: s["2", "output"]._histogram.__setitem__(130, 7),
        "calls": lambda s: setattr(s["2", "output"], "calls", 9),
        "channel_dim": lambda s: setattr(s["2", "output"], "channel_dim", 9),
        "order": lambda s: s.order.reverse(),
        "step": lambda s: setattr(s.frame, "step", 9),
        "scalars": lambda s: s.scalars.update(loss=1.0),
        "skipped": lambda s: s.skipped.popitem(),
        "grad_scale": lambda s: setattr(s.frame, "grad_scale", 9.0),
        "overflowed": lambda s: setattr(s.frame, "overflowed", True),
        "ranks": lambda s: setattr(s.frame, "ranks", StepRanks((1,), 1)),
        "world_size": lambda s: setattr(s.frame, "ranks", StepRanks((0,), 2)),
    }


@pytest.mark.parametrize("what", list(changes()))
def test_snapshots_that_differ_anywhere_are_not_equal(what: str) -> None:
    one, other = taken(64.0), taken(64.0)
    assert one.equals(other)
    changes()[what](other)
    assert not one.equals(other)
    assert not other.equals(one)


def test_what_is_no_snapshot_is_refused() -> None:
    def made(**changed: Any) -> Any:
        d = json.loads(json.dumps(taken().to_dict()))
        d["sites"][0].update(changed)
        return d

    with pytest.raises(ValueError, match="from_dict: expected version 4, got 5"):
        Snapshot.from_dict(made() | {"version": 5})
    state, histogram = made()["sites"][0]["state"], made()["sites"][0]["histogram"]
    with pytest.raises(ValueError, match=r"'0' output: expected the fields count, .*; got mean"):
        Snapshot.from_dict(made(state={"mean": [1.0]}))
    with pytest.raises(ValueError, match="expected as many channels in each field"):
        Snapshot.from_dict(made(state=state | {"mean": [1.0]}))
    with pytest.raises(ValueError, match=r"expected counts of shape \(512,\), got \(2,\)"):
        Snapshot.from_dict(made(histogram=histogram | {"counts": [1, 2]}))
