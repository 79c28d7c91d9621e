"""All kinds of tensors through all doors: whoever asks what a tensor is knows every one of them."""

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
from hookstats.numbers.kinds import KINDS, is_of_kind, kind_of
from hookstats.rules.formatting import tensor_of
from tests.language.test_routers import Plain

STEPS = 3
BINS = hookstats.ExponentBins()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, len(x), 3, 2, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), 16)


def trained(path: Path, first: int = 0, **options: Any) -> list[Snapshot]:
    """Steps in which all kinds are measured, recorded and judged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(16), Attention(), Plain(), nn.Linear(16, 3))
    sinks = [hookstats.record(path), *options.pop("sinks", [])]
    tensors = [*(name for name in KINDS if name != "identity"), "model_input"]
    found = hookstats.find_identities(model, lambda: model(torch.randn(12, 16)))
    chosen = hookstats.Options(identities=found)
    monitor = hookstats.attach(model, tensors=tensors, every=1, histogram=BINS, sinks=sinks, options=chosen, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    taken = []
    for step in range(first, first + STEPS):
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step), requires_grad=True)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(monitor.step(step, loss=1.0))
    monitor.detach()
    assert None not in taken
    return taken  # type: ignore[return-value]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Snapshot]]:
    folder = tmp_path_factory.mktemp("kinds") / "run"
    return folder, trained(folder)


def kinds_in(sites: Any) -> set[str]:
    return {kind_of(site.tensor).name for site in sites}


def test_every_kind_is_measured(run: tuple[Path, list[Snapshot]]) -> None:
    for snapshot in run[1][1:]:
        assert kinds_in(snapshot.order) == set(KINDS)
        assert {kind_of(site.tensor) for site in snapshot} == set(KINDS.values())  # none is taken for another


def test_every_kind_can_be_selected_is_told_in_words_and_comes_back_from_json(
    run: tuple[Path, list[Snapshot]],
) -> None:
    snapshot = run[1][-1]
    assert Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))).equals(snapshot)
    for name in KINDS:
        chosen = snapshot.select(tensors=name)
        assert chosen.order == [site for site in snapshot.order if kind_of(site.tensor).name == name]
        for site in chosen.order:
            assert is_of_kind(site.tensor, name)
            assert is_of_kind(f"{site.tensor}[tp=1]", name)
            assert kind_of(f"{site.tensor}[tp=1]") is kind_of(site.tensor)
    assert len(set(map(tensor_of, snapshot.order))) == len(snapshot.order)


def test_every_kind_is_recorded_judged_and_read(run: tuple[Path, list[Snapshot]]) -> None:
    loaded = hookstats.load(run[0])
    assert [each.equals(taken) for each, taken in zip(loaded, run[1], strict=True)] == [True] * STEPS
    for name in KINDS:
        some = hookstats.load(run[0], sites=[("*", name)])
        assert kinds_in(some[STEPS - 1].order) == {name}


def test_ranks_that_are_merged_count_replicas_once_and_all_else_together(
    run: tuple[Path, list[Snapshot]], tmp_path: Path
) -> None:
    for rank in (0, 1):
        trained(tmp_path / f"run{rank}")
        (tmp_path / f"run{rank}" / "rank=0").rename(tmp_path / f"rank={rank}")
    merged = hookstats.load(tmp_path, ranks="merged")[STEPS - 1]
    alone = run[1][-1]
    assert set(merged.order) == set(alone.order)
    for site in alone.order:
        times = 1 if kind_of(site.tensor).is_replicated else 2
        assert merged[site].total.count == times * alone[site].total.count, site
        assert merged[site].total.rms == pytest.approx(alone[site].total.rms, rel=1e-12), site


def test_equal_runs_are_equal_in_every_kind(run: tuple[Path, list[Snapshot]], tmp_path: Path) -> None:
    trained(tmp_path / "run")
    compared = hookstats.compare(hookstats.load(run[0]), hookstats.load(tmp_path / "run"))
    assert compared.is_equal
    assert kinds_in(compared.sites) == set(KINDS)


def test_a_page_and_the_sinks_show_every_kind(run: tuple[Path, list[Snapshot]], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hookstats.report.write(hookstats.load(run[0]), page)
    text = page.read_text()
    assert [site for site in run[1][-1].order if site.tensor not in text] == []
    lines = tmp_path / "lines.jsonl"
    trained(tmp_path / "again", sinks=[hookstats.sinks.JsonLines(lines, sites=["*"])])
    last = json.loads(lines.read_text().splitlines()[-1])
    assert {kind_of(key.split("/")[0]).name for key in last if "/rms/" in key} == set(KINDS)


def test_a_resumed_run_goes_on_in_every_kind(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.warns(UserWarning, match="no longer count"):
        trained(tmp_path / "run", first=2)
    loaded = hookstats.load(tmp_path / "run")
    assert loaded.steps == [0, 1, 2, 3, 4]
    assert kinds_in(loaded[4].order) == set(KINDS)
    assert np.isfinite(loaded[4]["3.weight", "update_sample"].total.rms)
