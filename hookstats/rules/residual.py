"""The residual stream of a stack of blocks: how it grows from one to the next."""

from __future__ import annotations

import re

import numpy as np

from hookstats.numbers.fields import Counts
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.step import Step

_BLOCK = re.compile(r"(?P<path>.*?)\.?(?P<number>\d+)")


@rule(depth=3)
def residual_drift(step: Step, ratio: float = 100.0, consecutive_steps: int = 5, blocks: int = 4) -> list[Ill] | None:
    """The residual stream grows or shrinks, by the rms after the last block over that after the first (warning).

    A stream is ill at ``ratio`` = 100 times, or one 100th, in ``consecutive_steps`` = 5 measured steps in a row; the
    block that adds most is named. A stream of blocks of equal size grows as the square root of their number; no figure
    is agreed on, and this one is ours, ten times beyond what healthy small models show (see docs/rules.md).

    What else looks like it: blocks that are meant to amplify, as of a decoder that widens. What to do: scale the last
    projection of each block by 1 / sqrt(2 blocks), normalise before each block, or begin with a small gain.

    False-positive guards: it begins behind the first block, because embeddings are small at first; from
    ``blocks`` = 4 on; blocks are modules with a number as their name that hold others which are watched, not experts,
    and run in the order of these numbers.
    """
    stacks = step.make_for_sites(_find_stacks, blocks)
    if not stacks:
        return None
    ratios, paths = np.ones(len(step.sites)), dict[int, str]()
    places = np.zeros(len(step.sites), np.int64)
    places[step.order] = np.arange(1, len(step.order) + 1)
    for path, stack in stacks.items():
        rms = step.totals.rms[stack]
        if places[stack[0]] > 0 and (np.diff(places[stack]) > 0).all() and (rms > 0).all():
            ratios[stack[-1]], paths[int(stack[-1])] = rms[-1] / rms[0], path

    def most(site: int) -> str:
        stack, sign = stacks[paths[site]], 1 if ratios[site] > 1 else -1
        gains = step.totals.rms[stack[1:]] / step.totals.rms[stack[:-1]]
        block = int(np.abs(np.log(gains)).argmax())
        return f"{step.sites[int(stack[block + 1])].name}, {number(gains[block] ** sign)} times"

    text = (
        "the stream through {path} {changes} {times} times from its first block to the last, most of all in {most}. "
        "Scale down what a block adds (initial weights divided by the root of the depth, a norm after the block), or "
        "look for a missing norm."
    )
    words = {
        "path": lambda site: paths[site] or "the model",
        "changes": np.where(ratios > 1, "grows", "shrinks"),
        "times": np.maximum(ratios, 1 / ratios),
        "most": most,
    }
    drifted, limits = (ratios > ratio) | (ratios < 1 / ratio), np.where(ratios > 1, ratio, 1 / ratio)
    return [Ill(drifted, text, ratios, limits, steps=consecutive_steps, words=words)]


def _find_stacks(step: Step, blocks: int) -> dict[str, Counts]:
    """Return the ids of the outputs of each stack's blocks."""
    outputs = [step.sites[i].name for i in np.flatnonzero(step.is_kind("output")).tolist()]
    parts = [name.split(".") for name in outputs]
    inner = {".".join(each[:end]) for each in parts for end in range(1, len(each))}  # "a" and "a.0" of "a.0.b"
    found: dict[str, dict[int, int]] = {}
    for i, (name, tensor) in enumerate(step.sites):
        match = _BLOCK.fullmatch(name)
        if match and tensor in ("output", "output.0") and name in inner and not match["path"].endswith("experts"):
            found.setdefault(match["path"], {})[int(match["number"])] = i
    stacks = {path: np.array([stack[number] for number in sorted(stack)]) for path, stack in found.items()}
    return {path: stack for path, stack in stacks.items() if len(stack) >= blocks}
