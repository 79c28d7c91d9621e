"""The records in the ring: steps, the first one of each sites with these, and what was given without a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Counts, Site, Skipped
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.numbers.given import Given
from hookstats.numbers.ranks import StepRanks, drifts_from_json, drifts_to_json
from hookstats.records.ring import RingError

STEP, OVERHEAD, GIVEN, EARLY = 1, 2, 3, 4  # kinds of records; EARLY: what a later one is to bring again


@contextmanager
def _read_as(what: str) -> Iterator[None]:
    """Raise a RingError for anything else."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise RingError(f"expected {what}, got {type(error).__name__}: {str(error)[:300]}") from None


def about(frame: StepFrame) -> dict[str, Any]:
    """Describe a step beside its numbers, for JSON."""
    return {
        "grad_scale": frame.grad_scale,
        "overflowed": frame.overflowed,
        "ranks": frame.ranks.to_text(),
        "rows": frame.rows,
        "drifts": drifts_to_json(frame.drifts),
        "skipped": [[*site, *skipped] for site, skipped in frame.skipped.items()],
    }


def about_from(told: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `about` made, as a StepFrame has it."""
    scale, overflowed = told["grad_scale"], told["overflowed"]
    return {
        "grad_scale": None if scale is None else float(scale),
        "overflowed": None if overflowed is None else bool(overflowed),
        "ranks": StepRanks.from_text(told["ranks"]),
        "rows": int(told["rows"]),
        "drifts": drifts_from_json(told["drifts"]),
        "skipped": {Site(name, tensor): Skipped(reason, times) for name, tensor, reason, times in told["skipped"]},
    }


def encode_step(frame: StepFrame, number: int, is_first: bool) -> list[NDArray[Any]]:
    """Return the pieces of a record, the blocks where they are. number: of its sites; is_first: of these sites."""
    told = {
        "number": number,
        "sites": frame.sites.to_json() if is_first else None,
        "step": frame.step,
        "time": frame.time,
        "scalars": frame.scalars,
        "earlier_scalars": list(frame.earlier_scalars.items()),
        "sample_ids": _count_ids(frame.sample_ids),
        "fired": len(frame.order),
        **about(frame),
    }
    blocks = [frame.memory[number][:size] for number, size in enumerate(frame.sites.sizes)]
    ids = frame.sample_ids.values()
    return [*_text_before(told), *ids, frame.calls, frame.order, *blocks]


def encode_overhead(overhead: Mapping[str, float]) -> list[NDArray[Any]]:
    return [_text({name: value for name, value in overhead.items() if math.isfinite(value)})]


def encode_given(given: Given, time: float) -> list[NDArray[Any]]:
    """Return the pieces for steps that are not recorded. time: now, in seconds since the epoch."""
    told = {"time": time, "scalars": list(given.scalars.items()), "sample_ids": _count_ids(given.sample_ids)}
    return [*_text_before(told), *given.sample_ids.values()]


@_read_as("what was given with steps")
def decode_given(payload: NDArray[np.uint8]) -> tuple[Given, float]:
    """Read what `encode_given` made. RingError for anything else."""
    told, numbers = _text_and_numbers(payload)
    ids, left = _ids_by_step(told["sample_ids"], numbers)
    if left.size:
        raise ValueError(f"{len(left)} numbers behind those of samples")
    return Given(_by_step(told["scalars"]), ids), float(told["time"])


def _by_step(told: Any) -> dict[int, dict[str, float]]:
    return {int(step): _numbers(scalars) for step, scalars in told}


def _count_ids(sample_ids: Mapping[int, Counts]) -> list[Any]:
    """Count the ids of each step; they themselves come after the text, because JSON of so many takes its time."""
    return [[step, len(ids)] for step, ids in sample_ids.items()]


def _ids_by_step(told: Any, numbers: Counts) -> tuple[dict[int, Counts], Counts]:
    """Split off ids from the numbers after them. Copies: the memory is the ring's."""
    found = {}
    for step, count in told:
        if not 0 <= count <= len(numbers):
            raise ValueError(f"{count} ids of samples in {len(numbers)} numbers")
        found[int(step)], numbers = numbers[:count].copy(), numbers[count:]
    return found, numbers


def _numbers(told: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in told.items()}


@_read_as("what hookstats took")
def decode_overhead(text: bytes) -> dict[str, float]:
    """Read what `encode_overhead` made. RingError for anything else."""
    return _numbers(json.loads(text))


@_read_as("a step")
def decode_step(payload: NDArray[np.uint8], known: dict[int, Sites]) -> StepFrame:
    """Read what `encode_step` made; the blocks stay where they are. RingError for anything else.

    known: sites by their number; those that come with the step are added.
    """
    told, numbers = _text_and_numbers(payload)
    if told["sites"] is not None:
        known[int(told["number"])] = Sites.from_json(told["sites"])
    sites, fired = known[told["number"]], int(told["fired"])
    sample_ids, numbers = _ids_by_step(told["sample_ids"], numbers)
    ends = np.cumsum([len(sites), fired, *sites.sizes])
    if ends[-1] != len(numbers) or not 0 <= fired <= len(sites):
        raise ValueError(f"{len(numbers)} numbers behind the text, of {ends[-1]}")
    calls, order, *blocks = np.split(numbers, ends[:-1])
    if order.min(initial=0) < 0 or order.max(initial=-1) >= len(sites):
        raise ValueError(f"expected places of {len(sites)} sites, got {order}")
    said = about_from(told)
    return StepFrame(
        sites,
        blocks,
        calls,
        order,
        sites.scales(said["grad_scale"]),
        int(told["step"]),
        float(told["time"]),
        _numbers(told["scalars"]),
        _by_step(told["earlier_scalars"]),
        sample_ids,
        **said,
    )


def _text_before(value: Any) -> list[NDArray[Any]]:
    """JSON that numbers come behind."""
    text = _text(value)
    return [np.array([len(text)], np.int64), text]


def _text_and_numbers(payload: NDArray[np.uint8]) -> tuple[Any, Counts]:
    length = int(payload[:8].view(np.int64)[0])
    if not 0 <= length <= len(payload) - 8:
        raise ValueError(f"a text of {length} bytes in {len(payload)}")
    return json.loads(payload[8 : 8 + length].tobytes()), payload[8 + length :].view(np.int64)


def _text(value: Any) -> NDArray[Any]:
    """JSON, with blanks behind it up to a multiple of 8 bytes."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return np.frombuffer(text + b" " * (-len(text) % 8), np.uint8)
