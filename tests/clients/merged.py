"""Comparison of merged ranks with one process that measures the same batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

import hookstats
from tests.conftest import ROOT
from tests.docs import test_pages

EXACT = ("count", "nans", "posinfs", "neginfs")
CLOSE = ("mean", "std", "rms", "min", "max", "abs_max")


def names_of_page(page: str) -> dict[str, Any]:
    """Run the code of docs/frameworks/PAGE.md and return its names."""
    known = test_pages.names()
    for block in test_pages.BLOCK.finditer((ROOT / "docs" / "frameworks" / f"{page}.md").read_text()):
        exec(compile(block["code"], page, "exec"), known)
    return known


def check_sites(
    found: hookstats.Snapshot,
    wanted: hookstats.Snapshot,
    *,
    more: Collection[Any] = (),
    but: Collection[Any] = (),
    times: float = 1,
    flat: bool = False,
) -> None:
    """All sites, none missing, to rounding; but the weights of tokens, which ranks of several dimensions do not have.

    more: sites that only the ranks have. but: sites that count once for each rank. times: by how much the ranks'
    gradients of outputs are larger. flat: their parameters have totals alone.
    """
    wanted_sites = {site for site in wanted if site.tensor.partition(".")[0] != "token_weights"}
    found_sites = {site for site in found if site.tensor.partition(".")[0] != "token_weights"}
    assert {str(site) for site in (found_sites ^ wanted_sites) - set(more)} == set()
    assert found.skipped == {}
    for site in wanted_sites - set(but):
        is_flat = flat and site.name.endswith((".weight", ".bias"))
        is_of_output = site.tensor.startswith("grad_output")
        _check(site, found[site], wanted[site], times if is_of_output else 1, is_flat)


def _check(site: Any, found: Any, wanted: Any, times: float, is_flat: bool) -> None:
    pairs = [(found.total, wanted.total)]
    assert (found.channels is None) == (wanted.channels is None or is_flat), site
    if found.channels is not None:
        pairs.append((found.channels, wanted.channels))
    for ours, theirs in pairs:
        for name in () if site.tensor.endswith("_sample") else EXACT:  # of other elements of each rank's part
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), (site, name)
        # A buffer counts once for each rank, so that n - 1 is another divisor.
        for name in [each for each in CLOSE if each != "std" or site.tensor != "buffer_sample"]:
            np.testing.assert_allclose(
                getattr(ours, name),
                getattr(theirs, name) * times,
                rtol=1e-4,
                atol=1e-4 * wanted.total.abs_max * times,
                err_msg=f"{site} {name}",
            )
