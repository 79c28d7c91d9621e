"""Contenders timed in turns, so that what else the machine does falls on all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int, after: Callable[[Any], None] = lambda times: None
) -> dict[str, list[float]]:
    """The seconds that each contender says it took, round by round; every round has its own order.

    after: is given those so far at the end of each round.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            times[name].append(contenders[name]())
        after(times)
    return times


def figures(times: Mapping[str, list[float]], base: str) -> list[dict[str, Any]]:
    """A figure for each contender. What it adds to `base` is the median of the differences inside a round."""
    found = []
    for name, mine in times.items():
        added = [a - b for a, b in zip(mine, times[base], strict=True)]
        found.append(
            {
                "name": name,
                "median_ms": 1e3 * median(mine),
                "min_ms": 1e3 * min(mine),
                "rounds": len(mine),
                "compared_with": base,
                "added_ms": 1e3 * median(added),
            }
        )
    return found
