"""Columns to which steps are added, against those of the whole run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hookstats.numbers.fields import Site
from hookstats.report import Recorded, planes
from hookstats.report.reducing import Past
from hookstats.report.writing import contents
from hookstats.serve.columns import Columns

ROWS = 6


def planes_of(steps: int) -> dict[str, np.ndarray]:
    """As of a run in which one site begins late, one pauses, and one holds NaN now and then."""
    rng = np.random.default_rng(0)
    wander = np.exp(np.cumsum(0.1 * rng.normal(size=(ROWS, steps)), axis=1))
    made = {"rms": wander, "abs_max": 4 * wander * np.exp(0.1 * rng.normal(size=wander.shape))}
    made |= {"mean": wander * rng.normal(size=wander.shape), "std": wander, "min": -3 * wander, "max": 3 * wander}
    made |= {"count": np.full_like(wander, 512.0), "zeros": np.round(wander % 100)}
    made |= {name: np.zeros_like(wander) for name in ("nans", "posinfs", "neginfs")}
    made["nans"][2, ::37] = 3
    for plane in made.values():
        plane[0, : steps // 3] = np.nan
        plane[1, steps // 4 : steps // 4 + 300] = np.nan
        plane[5] = np.nan
    return made


def whole(given: dict[str, np.ndarray]) -> tuple[dict[str, object], dict[str, bytes]]:
    steps = given["rms"].shape[1]
    sites = [Site(f"layers.{i}", "output") for i in range(ROWS)]
    made = Recorded("run", sites, np.arange(steps), lambda name: given[name].copy(), lambda *_: [], np.empty(0, int))
    return contents(replace(made, grows=True))


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 16, 1, 500, 3], [999, 1, 1, 30, 969, 1, 700], [2500]])
def test_what_is_added_step_by_step_is_what_the_whole_run_gives(chunks: list[int]) -> None:
    given = planes_of(sum(chunks))
    columns, at = Columns(ROWS, chunks[0]), 0
    for chunk in chunks:
        new = {name: plane[:, at : at + chunk] for name, plane in given.items()}
        columns.begin(new)
        columns.complete(new)
        columns.heatmaps(planes.STATISTICS)  # codes are kept from one look to the next
        columns.lines()
        at += chunk
    record, blobs = whole(given)
    assert columns.fired.tolist() == record["fired"]
    assert columns.measured == pytest.approx(record["values"])
    for name, blob in (columns.heatmaps(planes.STATISTICS) | columns.lines()).items():
        if name in ("line.rms", "line.mean", "line.std"):  # averages: the order of adding rounds in another way
            cells = (len(blob) - 16 * ROWS) // 2
            got, want = (
                np.frombuffer(each[:cells], np.uint8) * 256.0 + np.frombuffer(each[cells : 2 * cells], np.uint8)
                for each in (blob, blobs[name])
            )
            assert np.abs(got - want).max() <= 1, name
            assert blob[2 * cells :] == blobs[name][2 * cells :]
        else:
            assert blob == blobs[name], name


def test_the_first_picture_can_come_before_the_rest() -> None:
    given = planes_of(1500)
    columns = Columns(ROWS, 1500)
    blocks = [{name: plane[:, at : at + 400] for name, plane in given.items()} for at in range(0, 1500, 400)]
    for block in blocks:
        columns.begin({name: block[name] for name in Columns.FIRST})
    expected = whole(given)[1]
    assert columns.heatmaps(["rms"])["rms.relative"] == expected["rms.relative"]
    for block in blocks:
        columns.complete(block)
    assert columns.heatmaps(["peak"]) == {name: blob for name, blob in expected.items() if name.startswith("peak.")}


def test_the_past_is_the_median_of_what_came_before_in_whatever_parts_it_is_given() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(3, 700))
    past, parts = Past(3), []
    for begin, end in ((0, 1), (1, 5), (5, 120), (120, 121), (121, 600), (600, 700)):
        parts.append(past.of(values[:, begin:end]))
    told = np.concatenate(parts, axis=1)
    at, every = 0, 1
    while at < 700:
        every *= 1 + (-(-at // every) > 256)
        after = at + max(1, at // 8)  # where it is taken anew
        before = np.median(values[:, :at:every], axis=1) if at else values[:, 0]
        np.testing.assert_array_equal(told[:, at:after], np.repeat(before[:, None], min(after, 700) - at, axis=1))
        at = after


def test_scales_of_a_run_that_grows_seldom_change_and_tell_nearly_as_much() -> None:
    given = planes_of(1000)
    changes, before = np.zeros(ROWS), np.zeros((2, ROWS))
    ranges, range_before = np.zeros(ROWS), np.zeros((2, ROWS))
    for steps in range(300, 1000, 10):
        _, blobs = whole({name: plane[:, :steps] for name, plane in given.items()})
        scales = np.frombuffer(blobs["line.rms"][-16 * ROWS :], "<f8").reshape(2, ROWS)
        changes += (scales != before).any(axis=0)
        before = scales
        known = np.nan_to_num(given["rms"][:5, :steps], nan=1.0)
        ends = np.stack([np.nanmin(known, axis=1), np.nanmax(known, axis=1)])
        ranges[:5] += (ends != range_before[:, :5]).any(axis=0)
        range_before[:, :5] = ends
    assert changes[:5].sum() < ranges.sum() / 3
    low, step = before
    known = np.log2(given["rms"][1:5])
    told = (np.nanmax(known, axis=1) - np.nanmin(known, axis=1)) / step[1:5]
    assert (told > 4094 / 4 - 1).all()
    assert (low[1:5] <= np.nanmin(known, axis=1)).all()
    assert (low[1:5] + 4093 * step[1:5] >= np.nanmax(known, axis=1)).all()
