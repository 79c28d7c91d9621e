"""The page of a run in which attention and routers were measured speaks of heads and experts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from hookstats import Site, report
from hookstats.report import Recorded
from tests.language.trainings import Language, mixture, train
from tests.report.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.mark.parametrize("unit", ["Head", "Expert"])
def test_a_channel_is_called_what_it_is(unit: str, tmp_path: Path) -> None:
    if unit == "Head":
        snapshots, site = train(Language(), 12), Site("blocks.1.attention", "attention.entropy")
    else:
        snapshots, site = mixture(12, 0.1), Site("model.layers.1.mlp.router", "router.load")
    recorded = Recorded.of(snapshots, "a run", [])
    report.write(recorded, tmp_path / "page.html")
    with Browser(1200, 1000) as browser:
        browser.open(f"{(tmp_path / 'page.html').as_uri()}#site={recorded.sites.index(site)}&step=5")
        browser.wait("document.querySelector('#site .top') !== null")
        fits = browser.run("document.querySelector('#precision')?.innerText ?? ''")
        captions = browser.run("[...document.querySelectorAll('#site figcaption')].map((each) => each.innerText)")
    assert "weight" in fits or "output" in fits.lower()
    assert " attention." not in fits
    assert " router." not in fits
    assert any(f"{unit}s over time" in caption for caption in captions)
    assert any(f"Top {unit.lower()}s" in caption for caption in captions)
