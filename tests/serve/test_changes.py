"""What is sent of a blob to somebody who has an earlier one, when rows are told on another scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hookstats.report import planes
from hookstats.report.reducing import line
from hookstats.serve.changes import Told, changes
from tests.serve.served import restored

ROWS, BEFORE, NOW = 40, 200, 210


def values(rows: int = ROWS) -> np.ndarray:
    """``[rows, NOW]``: most leave their range at the end, by far or by little; one pauses, one is 0, one is 1."""
    rng = np.random.default_rng(0)
    made = np.exp(np.cumsum(0.1 * rng.normal(size=(rows, NOW)), axis=1))
    made[:, BEFORE:] *= 10.0 ** rng.uniform(0, 6, size=(rows, 1))
    made[3, 10:50] = np.nan
    made[4], made[5] = 0.0, 1.0
    made[6, ::7] = np.inf
    return made


def blob_of(name: str, made: np.ndarray) -> bytes:
    if name.startswith("line."):
        return planes.packed(line(made, name == "line.rms", grows=True))
    is_bad = np.zeros(made.shape, bool)
    is_bad[7, ::5] = True
    kind = planes.STATISTICS[name.partition(".")[0]][1]
    told = np.log2(made) if kind == "scale" else made
    return planes.scaled(planes.absolute(told, kind, is_bad, True))


def told(name: str, made: np.ndarray) -> Told:
    columns = list(range(made.shape[1]))
    return Told({"sites": [0] * len(made), "begin": columns, "line_begin": columns}, blob_of(name, made))


def mirrored(made: np.ndarray) -> np.ndarray:
    return made * np.where(np.arange(len(made)) % 2, 1, -1)[:, None]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("line.rms", lambda made: made),
        ("line.mean", mirrored),  # a scale from zero down, and one that is moved
        ("line.max", lambda made: made - 3e3),  # a scale far from zero
        ("rms.absolute", lambda made: np.where(np.isinf(made), np.nan, made)),
        ("zeros.absolute", lambda made: np.where(np.isinf(made), 1.0, made)),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_rows_on_another_scale_follow_from_what_they_were(name: str, change: Callable[..., np.ndarray]) -> None:
    made = change(values())
    old, new = told(name, made[:, :BEFORE]), told(name, made)
    scales = [np.frombuffer(each.blob[-16 * ROWS :], "<f8").reshape(2, ROWS) for each in (old, new)]
    assert (scales[0] != scales[1]).any(axis=0).sum() > ROWS / 3
    sent = changes(name, old, new)
    assert sent is not None
    assert restored(b"\1" + sent, old.blob, ROWS, (BEFORE, NOW), 2 if name.startswith("line.") else 1) == new.blob
    first, many, size = np.frombuffer(sent, "<u4", 3)
    assert (first, many) == (BEFORE - 1, 0)
    assert 0 < size < ROWS * BEFORE / 16  # less than a bit for every second code


def test_a_row_whose_range_has_shrunk_is_sent_whole() -> None:
    made = values()
    before = made[:, :BEFORE].copy()
    before[9, -1] = 1e9  # of the last column, in which others have come since
    old, new = told("line.rms", before), told("line.rms", made[:, : BEFORE + 1])
    sent = changes("line.rms", old, new)
    assert sent is not None
    assert np.frombuffer(sent, "<u4", 4).tolist()[1::2] == [1, 9]
    assert restored(b"\1" + sent, old.blob, ROWS, (BEFORE, BEFORE + 1), 2) == new.blob
