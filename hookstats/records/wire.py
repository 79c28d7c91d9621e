"""What goes through the ring: layouts, and steps that are read by them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.blocks import Drained, Given, Layout
from hookstats.numbers.fields import Counts, Site, Skipped
from hookstats.numbers.ranks import StepRanks
from hookstats.records.ring import RingError

LAYOUT, STEP, OVERHEAD, GIVEN = 1, 2, 3, 4  # kinds of records


@contextmanager
def _read_as(what: str) -> Iterator[None]:
    """Anything else makes a RingError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise RingError(f"expected {what}, got {error!r}") from None


def of_layout(number: int, layout: Layout) -> list[NDArray[Any]]:
    return [_text({"number": number, **layout.to_json()})]


def of_step(drained: Drained, layout: int) -> list[NDArray[Any]]:
    """Of a Drained: the pieces of a record, the blocks where they are. layout: the number of its layout."""
    told = {
        "layout": layout,
        "step": drained.step,
        "time": drained.time,
        "scalars": drained.scalars,
        "earlier_scalars": list(drained.earlier_scalars.items()),
        "sample_ids": _listed(drained.sample_ids),
        "grad_scale": drained.grad_scale,
        "overflowed": drained.overflowed,
        "ranks": drained.ranks.to_text(),
        "skipped": [[*site, *skipped] for site, skipped in drained.skipped.items()],
    }
    text = _text(told)
    blocks = [block[:size] for block, size in zip(drained.blocks, drained.layout.sizes, strict=True)]
    return [np.array([len(text)], np.int64), text, drained.hidden.astype(np.int64), drained.readings, *blocks]


def of_overhead(overhead: Mapping[str, float]) -> list[NDArray[Any]]:
    return [_text({name: value for name, value in overhead.items() if math.isfinite(value)})]


def of_given(given: Given, time: float) -> list[NDArray[Any]]:
    """Of steps that are not recorded. time: now, in seconds since the epoch."""
    told = {"time": time, "scalars": list(given.scalars.items()), "sample_ids": _listed(given.sample_ids)}
    return [_text(told)]


@_read_as("what was given with steps")
def given_from(text: bytes) -> tuple[Given, float]:
    """What `of_given` made. RingError for anything else."""
    told = json.loads(text)
    return Given(_by_step(told["scalars"]), _ids_by_step(told["sample_ids"])), float(told["time"])


def _by_step(told: Any) -> dict[int, dict[str, float]]:
    return {int(step): _numbers(scalars) for step, scalars in told}


def _listed(sample_ids: Mapping[int, Counts]) -> list[Any]:
    return [[step, ids.tolist()] for step, ids in sample_ids.items()]


def _ids_by_step(told: Any) -> dict[int, Counts]:
    return {int(step): np.array(ids, np.int64) for step, ids in told}


def _numbers(told: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in told.items()}


@_read_as("what hookstats took")
def overhead_from(text: bytes) -> dict[str, float]:
    """What `of_overhead` made. RingError for anything else."""
    return _numbers(json.loads(text))


@_read_as("a layout")
def layout_from(text: bytes) -> tuple[int, Layout]:
    """What `of_layout` made. RingError for anything else."""
    told = json.loads(text)
    return int(told["number"]), Layout.from_json(told)


@_read_as("a step")
def step_from(payload: NDArray[np.uint8], layouts: Mapping[int, Layout]) -> Drained:
    """What `of_step` made; the blocks stay where they are. RingError for anything else."""
    length = int(payload[:8].view(np.int64)[0])
    if not 0 <= length <= len(payload) - 8:
        raise ValueError(f"a text of {length} bytes in {len(payload)}")
    told = json.loads(payload[8 : 8 + length].tobytes())
    layout = layouts[told["layout"]]
    rows = len(layout.rows)
    numbers = payload[8 + length :].view(np.int64)
    ends = np.cumsum([rows, rows, *layout.sizes])
    if ends[-1] != len(numbers):
        raise ValueError(f"{len(numbers)} numbers behind the text, of {ends[-1]}")
    hidden, readings, *blocks = np.split(numbers, ends[:-1])
    scale, overflowed = told["grad_scale"], told["overflowed"]
    drained = Drained(
        layout,
        blocks,
        int(told["step"]),
        float(told["time"]),
        _numbers(told["scalars"]),
        None if scale is None else float(scale),
        None if overflowed is None else bool(overflowed),
        hidden,
        readings,
        StepRanks.from_text(told["ranks"]),
    )
    drained.earlier_scalars = _by_step(told["earlier_scalars"])
    drained.sample_ids = _ids_by_step(told["sample_ids"])
    drained.skipped = {Site(name, tensor): Skipped(reason, times) for name, tensor, reason, times in told["skipped"]}
    return drained


def _text(value: Any) -> NDArray[Any]:
    """JSON, with blanks behind it up to a multiple of 8 bytes."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return np.frombuffer(text + b" " * (-len(text) % 8), np.uint8)
