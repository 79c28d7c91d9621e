"""Blocks in a training: what sites of every kind count, in graphs, under masks, in records and over ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, Site, Snapshot
from hookstats.numbers.fields import kernel_block
from hookstats.report.record import Recorded
from hookstats.report.writing import PageContents
from hookstats.rules import fit, judge, low_precision_fit
from tests.kernels.test_blocks import counted
from tests.reference import Array

BINS = {"blocks of 32": ExponentBins(block=32), "blocks of 16 along rows": ExponentBins(block=16, block_dim=0)}
ALL = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "param_update")


def model(width: int = 40) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 70), nn.GELU(), nn.Linear(70, width))


def batch(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 11, 40, generator=generator) * torch.exp2(4 * torch.randn(3, 11, 40, generator=generator))


def blocks_of(snapshot: Snapshot, site: Site) -> Array:
    """The 576 counters."""
    raw = snapshot[site]._histogram
    return raw[512:]


def matrix(x: torch.Tensor) -> Array:
    wide = x.detach().double().numpy()
    return wide.reshape(-1, wide.shape[-1]) if wide.ndim > 1 else wide.reshape(1, -1)


def trained(name: str, run: Any = None, **arguments: Any) -> tuple[Snapshot, dict[Site, torch.Tensor]]:
    """A step, and what the sites met in it, as autograd and the optimizer have it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    arguments = {"every": 1, "tensors": ALL, **arguments}
    with hookstats.attach(net, histogram=BINS[name], **arguments) as mon:
        met: dict[Site, torch.Tensor] = {}
        x = batch().requires_grad_()
        hidden = x
        for number, layer in enumerate(net):
            met[Site(str(number), "output")] = hidden = layer(hidden) if run is None else hidden
        before = {key: value.detach().clone() for key, value in net.named_parameters()}
        output = hidden if run is None else run(net)(x)
        output.square().sum().backward()
        for key, value in net.named_parameters():
            # type: ignore[union-attr]
            met[Site(key, "param")], met[Site(key, "param_grad")] = before[key], value.grad.clone()
        optimizer.step()
        snapshot = mon.snapshot()
    return snapshot, met


@pytest.mark.parametrize("name", BINS)
def test_outputs_parameters_and_their_gradients_count_blocks(name: str) -> None:
    snapshot, met = trained(name)
    assert len(met) == 11
    for site, tensor in met.items():
        np.testing.assert_array_equal(blocks_of(snapshot, site), counted(matrix(tensor), name), str(site))
    kinds = {site.tensor for site in snapshot.order}
    assert kinds == {*ALL}
    assert all(blocks_of(snapshot, site)[320:].sum() > 0 for site in snapshot.order)


@pytest.mark.parametrize("name", BINS)
def test_a_compiled_model_counts_as_the_bare_one(name: str, only_monitors: None) -> None:
    torch._dynamo.reset()
    tensors = ("output", "grad_output", "param", "param_grad")
    eager, _ = trained(name, lambda net: net, tensors=tensors)
    compiled, _ = trained(name, lambda net: torch.compile(net, backend="aot_eager", fullgraph=True), tensors=tensors)
    assert set(eager.order) == set(compiled.order)
    for site in eager.order:
        np.testing.assert_array_equal(blocks_of(eager, site), blocks_of(compiled, site), str(site))


def test_rows_that_are_ignored_are_in_no_block() -> None:
    net, mask = nn.Sequential(nn.Linear(40, 70)), torch.rand(3, 11) < 0.5
    with hookstats.attach(net, every=1, histogram=BINS["blocks of 32"]) as mon:
        with mon.ignore(mask):
            output = net(batch())
        snapshot = mon.snapshot()
    expected = counted(matrix(output)[~mask.flatten().numpy()], "blocks of 32")
    np.testing.assert_array_equal(blocks_of(snapshot, Site("0", "output")), expected)


def test_measure_counts_them_too() -> None:
    found = hookstats.measure(batch(), histogram=BINS["blocks of 32"]).blocks
    assert found.distances.sum() + found.zeros == batch().numel()
    assert hookstats.measure(batch()).blocks is None
    assert hookstats.measure(batch(), histogram=ExponentBins(per_channel=True)).blocks is None


def _records(path: Path, bins: ExponentBins) -> tuple[list[Snapshot], hookstats.Run]:
    net, steps = model(), []
    with hookstats.attach(net, every=1, histogram=bins, sinks=[hookstats.record(path), steps.append]) as mon:
        for step in range(3):
            net(batch(step)).sum().backward()
            mon.step(loss=1.0)
    return steps, hookstats.load(path)


def test_a_record_keeps_blocks_and_its_page_shows_what_formats_lose(tmp_path: Path) -> None:
    steps, run = _records(tmp_path / "run", BINS["blocks of 32"])
    for snapshot in steps:
        kept = run[snapshot.step]
        assert kept.to_dict() == snapshot.to_dict()
        assert fit(kept, "mxfp4") == fit(snapshot, "mxfp4") != []
    record, _ = PageContents(Recorded.of(steps)).render_all()
    said = record["precision"]["blocks"]
    assert (said["size"], said["dim"], list(said["formats"])) == (32, -1, ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
    sites = [Site(*site) for site in record["sites"]]
    expected = {each.site: (*each.lost, each.standard_error) for each in fit(steps[-1], "mxfp4")}
    for row, shares in zip(record["precision"]["rows"], said["formats"]["mxfp4"], strict=True):
        assert shares == pytest.approx(expected[sites[row[0]]], rel=1e-2)
    without, _ = PageContents(Recorded.of(_records(tmp_path / "other", ExponentBins())[0])).render_all()
    assert without["precision"]["blocks"] is None


class Wide(nn.Module):
    """Values over many octaves, which float8 cannot hold with one scale, and blocks can: each row has its size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.exp2(torch.arange(len(x)).remainder(40) - 20.0)[:, None]


@pytest.mark.parametrize(
    ("bins", "told"),
    [
        (
            ExponentBins(block=32),
            r"for each block of 32 along the last dimension: 0 % in mxfp8_e4m3, 0 % in mxfp8_e5m2, ",
        ),
        (ExponentBins(block=16, block_dim=0), r"for each block of 16 along the other dimensions: .* to .* in nvfp4\."),
        (ExponentBins(), None),
    ],
    ids=str,
)
def test_low_precision_fit_tells_what_blocks_would_lose(bins: ExponentBins, told: str | None) -> None:
    net, steps = nn.Sequential(Wide()), []
    with hookstats.attach(net, every=1, modules="*", histogram=bins, sinks=[steps.append]) as mon:
        for _ in range(30):
            net(torch.randn(80, 64))
            mon.step()
    found = [each for each in judge(steps, [low_precision_fit]) if each.rule == "low-precision-fit"]
    assert found
    sentences = " ".join(each.sentence for each in found)
    assert "would turn values of " in sentences
    if told is None:
        assert "block of" not in sentences
    else:
        assert re.search(told, sentences), sentences


def test_bins_are_told_as_they_were_asked_for() -> None:
    assert repr(ExponentBins()) == "ExponentBins()"
    assert repr(ExponentBins(per_channel=True)) == "ExponentBins(per_channel=True)"
    assert repr(ExponentBins(block=16, block_dim=0)) == "ExponentBins(block=16, block_dim=0)"
    given = [None, ExponentBins(), ExponentBins(block=16), ExponentBins(block=32, block_dim=0)]
    assert [kernel_block(bins) for bins in given] == [0, 0, 16, -32]
