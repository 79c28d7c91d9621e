"""Choices that a seed decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

_T = TypeVar("_T")


class Chance:
    """A generator of choices, and one of tensors."""

    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.tensors = torch.Generator().manual_seed(seed)

    def of(self, choices: Sequence[_T]) -> _T:
        return choices[int(self.numbers.integers(len(choices)))]

    def upto(self, most: int) -> int:
        """Return an int from 0 to `most`."""
        return int(self.numbers.integers(most + 1))

    def comes(self, share: float) -> bool:
        return bool(self.numbers.random() < share)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return float64 values."""
        return torch.randn(shape, generator=self.tensors, dtype=torch.float64)

    def mask(self, shape: Sequence[int], share: float) -> torch.Tensor:
        return torch.rand(list(shape), generator=self.tensors) < share
