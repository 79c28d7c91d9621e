"""The page of a run in which attention and routers were measured speaks of heads and experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from hookstats import Site, Snapshot, report
from hookstats.report import Recorded
from tests.language.trainings import Language, mixture, train
from tests.report.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def show(browser: Browser, snapshots: list[Snapshot], site: Site, folder: Path) -> None:
    """Opens the page of a run at a site, and waits for the last that is drawn of it."""
    recorded = Recorded.of(snapshots, "a run", [])
    report.write(recorded, folder / "page.html")
    browser.open(f"{(folder / 'page.html').as_uri()}#site={recorded.sites.index(site)}&step=5")
    browser.wait("document.querySelector('#site .tensor:last-child .top:last-child') !== null")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(1200, 1000) as browser:
        yield browser


@pytest.fixture(scope="module")
def language() -> list[Snapshot]:
    return train(Language(), 12)


@pytest.mark.parametrize("unit", ["Head", "Expert"])
def test_a_channel_is_called_what_it_is(unit: str, browser: Browser, language: list[Snapshot], tmp_path: Path) -> None:
    if unit == "Head":
        snapshots, site = language, Site("blocks.1.attention", "attention.entropy")
    else:
        snapshots, site = mixture(12, 0.1), Site("model.layers.1.mlp.router", "router.load")
    show(browser, snapshots, site, tmp_path)
    fits = browser.run("document.querySelector('#precision')?.textContent ?? ''")
    captions = browser.run("[...document.querySelectorAll('#site figcaption')].map((each) => each.innerText)")
    assert "weight" in fits or "output" in fits.lower()
    assert " attention." not in fits
    assert " router." not in fits
    assert any(f"{unit}s over time" in caption for caption in captions)
    assert any(f"Top {unit.lower()}s" in caption for caption in captions)


def test_heads_of_a_projection_stand_beside_its_channels(
    browser: Browser, language: list[Snapshot], tmp_path: Path
) -> None:
    show(browser, language, Site("blocks.1.attention.qkv", "output"), tmp_path)
    captions = browser.run("[...document.querySelectorAll('#site figcaption')].map((each) => each.innerText)")
    page = browser.run("document.querySelector('#site').innerText")
    heads, channels = (
        next(i for i, text in enumerate(captions) if f"{unit}s over time" in text) for unit in ("Head", "Channel")
    )
    assert heads < channels
    assert "A row for each head of 8 channels." in page
    assert any("Top heads at step 11" in caption for caption in captions)
    assert any("Top channels at step 11" in caption for caption in captions)
