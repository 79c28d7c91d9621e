"""The table of fields and that of statistics: merging, scaling, types."""

from __future__ import annotations

import re

import numpy as np
import torch

import hookstats
from hookstats.numbers import fields
from tests import reference
from tests.conftest import ROOT, compare


def test_the_statistics_are_listed_and_each_has_a_reference() -> None:
    total = hookstats.measure(torch.randn(6, 2)).total
    assert set(fields.STATISTICS) == {*reference.STATISTICS, *reference.COUNTED} <= set(dir(total))
    assert all(isinstance(getattr(total, name), float) for name in fields.STATISTICS)


def sites(widths: list[int]) -> tuple[list[torch.Tensor], np.ndarray, np.ndarray]:
    """Data of each site, one row a channel; their states side by side; where each begins."""
    data = [torch.randn(9, width, dtype=torch.float64) * 3 + 100 * i for i, width in enumerate(widths)]
    data[0][2:, 0] = float("nan")
    data[1][:, 0] = float("inf")
    states = [hookstats.measure(x, histogram=None)._moments for x in data]
    return data, np.concatenate(states, axis=1), np.cumsum([0, *widths[:-1]])


def test_states_of_many_sites_fold_as_each_does_alone() -> None:
    data, states, starts = sites([5, 2, 1, 1, 300, 3])
    together = fields.fold_channels(states, starts)
    assert together.shape == (len(fields.FIELDS), 6)
    for x, state, whole in zip(data, np.split(states, starts[1:], axis=1), together.T, strict=True):
        assert whole.tobytes() == fields.fold_channels(state).tobytes()
        stats = hookstats.results.Stats[float](whole)
        compare({name: getattr(stats, name) for name in fields.STATISTICS}, x.flatten().numpy(), f"{x.shape}", 1e-12)


def test_equal_values_have_no_variance_whatever_their_mean_was_rounded_to() -> None:
    parts = [hookstats.measure(torch.full((n, 1), 10000.7379, dtype=torch.float64))._moments for n in (3, 5, 7)]
    state = fields.fold_channels(np.concatenate(parts, axis=1))
    state[fields.FIELDS.index("m2")] = 1e-16  # what merging about another pivot may leave
    whole = hookstats.results.Stats[float](state)
    assert whole.var == whole.std == 0


def test_each_of_many_states_is_divided_by_its_own_number() -> None:
    data, states, _ = sites([1, 1, 1])
    numbers = np.array([7.0, 1.0, 1024.0])
    together = fields.unscale(states, numbers)
    for i, (x, by) in enumerate(zip(data, numbers, strict=True)):
        stats = hookstats.results.Stats[float](together[:, i])
        wanted = (x / by).flatten().numpy()
        got = {name: getattr(stats, name) for name in fields.STATISTICS}
        np.testing.assert_allclose(
            list(got.values()), [reference.statistics(wanted)[name].item() for name in got], rtol=1e-12
        )


def test_the_page_of_numbers_explains_every_statistic() -> None:
    page = (ROOT / "docs" / "numbers.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(fields.STATISTICS) <= explained
    assert set(fields.STATISTICS) <= set(re.findall(r"``(\w+)``", fields.Stats.__doc__ or ""))
