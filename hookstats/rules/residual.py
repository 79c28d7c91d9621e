"""The residual stream of a stack of blocks: how it grows from one to the next."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number
from hookstats.rules.history import Streak
from hookstats.rules.step import Step
from hookstats.rules.thresholds import rule

_BLOCK = re.compile(r"(?P<path>.*?)\.?(?P<number>\d+)")


@rule
class ResidualDrift:
    """The stream grows, or shrinks, from block to block (warning): the rms behind the last over that behind the first.

    A stream is ill at ``ratio`` = 100 times, or one 100th, in ``consecutive_steps`` = 5 measured steps in a row; the
    block that adds most is named. A stream of blocks of equal size grows as the square root of their number; no figure
    is agreed on, and this one is ours, ten times beyond what healthy small models show (see docs/rules.md).

    What else looks like it: blocks that are meant to amplify, as of a decoder that widens. What to do: scale the last
    projection of each block by 1 / sqrt(2 blocks), normalise before each block, or begin with a small gain.

    So that a healthy run is silent: it begins behind the first block, because embeddings are small at first; from
    ``blocks`` = 4 on; blocks are modules with a number as their name that hold others which are watched, not experts,
    and run in the order of these numbers.
    """

    ratio: float = 100.0
    consecutive_steps: int = 5
    blocks: int = 4

    def __post_init__(self) -> None:
        self._stacks: dict[str, Counts] = {}
        self._known = 0  # sites
        self._streak = Streak(self.consecutive_steps)

    def __call__(self, step: Step) -> list[Finding] | None:
        if self._known < len(step.sites):
            self._stacks, self._known = self._find_stacks(step), len(step.sites)
        return list(self._drifted(step)) if self._stacks else None

    def _drifted(self, step: Step) -> Iterator[Finding]:
        ratios = np.ones(len(step.sites))
        gains = {}
        places = np.zeros(len(step.sites), np.int64)
        places[step.order] = np.arange(1, len(step.order) + 1)
        for path, stack in self._stacks.items():
            rms = step.totals.rms[stack]
            in_order = (np.diff(places[stack]) > 0).all() and places[stack[0]] > 0
            if in_order and (rms > 0).all():
                ratios[stack[-1]] = rms[-1] / rms[0]
                gains[path] = rms[1:] / rms[:-1]
        ill = self._streak.push(step.number, (ratios > self.ratio) | (ratios < 1 / self.ratio))
        for path, gain in gains.items():
            stack = self._stacks[path]
            last = int(stack[-1])
            if not ill[last]:
                continue
            most = int(np.abs(np.log(gain)).argmax())
            grows = ratios[last] > 1
            factor = ratios[last] if grows else 1 / ratios[last]
            gain_there = gain[most] if grows else 1 / gain[most]
            sentence = (
                f"the stream through {path or 'the model'} {'grows' if grows else 'shrinks'} {number(factor)} times "
                f"from its first block to the last, most of all in {step.sites[int(stack[most + 1])].name}, "
                f"{number(gain_there)} times. Scale down what a block adds (initial weights by the root of the depth, "
                "a norm behind the block), or look for a missing norm."
            )
            ratio, since = self.ratio if grows else 1 / self.ratio, self._streak.since[last]
            yield step.finding("residual-drift", last, ratios[last], ratio, "warning", sentence, since=since)

    def _find_stacks(self, step: Step) -> dict[str, Counts]:
        """Of each stack, the ids of its blocks' outputs."""
        outputs = [step.sites[i] for i in np.flatnonzero(step.is_kind("output")).tolist()]
        inner = {prefix for site in outputs for prefix in _prefixes(site.name)}
        found: dict[str, dict[int, int]] = {}
        for i, (name, tensor) in enumerate(step.sites):
            match = _BLOCK.fullmatch(name)
            if match and tensor in ("output", "output.0") and name in inner and not match["path"].endswith("experts"):
                found.setdefault(match["path"], {})[int(match["number"])] = i
        return {
            path: np.array([stack[number] for number in sorted(stack)])
            for path, stack in found.items()
            if len(stack) >= self.blocks
        }


def _prefixes(name: str) -> Iterator[str]:
    """Of "a.0.b": "a" and "a.0"."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
