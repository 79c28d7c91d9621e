"""Numbers between the blocks of a layout, where those of a site lie by themselves, and a section, where they lie beside
those of all others. A few calls of numpy, however many sites there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hookstats.cluster.flat import Section
from hookstats.numbers.fields import Counts

_FEW = 1 << 13  # numbers of a site that are moved one by one, by index, together with those of other sites


class Moves:
    """Moves the numbers of some sites, ``[height, width]`` of each one behind another in its block."""

    def __init__(self, height: int, length: int, block: Counts, offset: Counts, begin: Counts, width: Counts) -> None:
        """``[sites]``: in which block, and where in it; from which element of the section, and how many of them.

        length: elements of the section, ``[height, length]``.
        """
        self._height = height
        self._indices: list[tuple[int, Counts, Counts]] = []  # block, where in it, where in the section
        is_small = height * width < _FEW
        for number in np.unique(block).tolist():
            here = np.flatnonzero(is_small & (block == number))
            widths = width[here]
            along = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
            rows = np.arange(height)[:, None]
            inside = np.repeat(offset[here], widths) + along + rows * np.repeat(widths, widths)
            self._indices.append((number, inside, np.repeat(begin[here], widths) + along + rows * length))
        self._slices = [
            (number, slice(at, at + height * n), slice(to, to + n))
            for number, at, to, n in np.stack([block, offset, begin, width], 1)[~is_small].tolist()
        ]

    def gather(self, blocks: Sequence[Counts], section: Section) -> None:
        """From the blocks."""
        flat = section.view(np.int64).reshape(-1)
        for number, inside, outside in self._indices:
            flat[outside] = blocks[number].take(inside)
        for number, here, there in self._slices:
            section.view(np.int64)[:, there] = blocks[number][here].reshape(self._height, -1)

    def scatter(self, section: Section, blocks: Sequence[Any]) -> None:
        """To the blocks."""
        flat = section.view(np.int64).reshape(-1)
        for number, inside, outside in self._indices:
            blocks[number][inside] = flat.take(outside)
        for number, here, there in self._slices:
            blocks[number][here].reshape(self._height, -1)[...] = section.view(np.int64)[:, there]
