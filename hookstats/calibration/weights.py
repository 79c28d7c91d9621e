"""The weights that inputs are multiplied with, and what is computed of both: scales, masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from hookstats.calibration.inputs import InputStats

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SMALLEST = 1e-5  # of a weight's maximum and of a scale, as in the code of SmoothQuant's authors


class Weight(NamedTuple):
    """The place of a weight, which is read when it is needed, so that it is what the model has then."""

    module: nn.Module
    key: str = "weight"
    expert: int | None = None  # of several whose weights are one parameter, stacked along dimension 0
    input_dim: int = 1  # of this weight
    groups: int = 1  # of a convolution

    def get(self) -> torch.Tensor:
        """``[outputs, inputs / groups, ...]``; for `input_dim` 0, ``[inputs, outputs]``."""
        weight: torch.Tensor = getattr(self.module, self.key).detach()
        return weight if self.expert is None else weight[self.expert]

    def rows(self) -> torch.Tensor:
        """``[outputs, inputs / groups, taps]``, a tap for each place of a kernel; of a Linear, one."""
        weight = self.get() if self.input_dim == 1 else self.get().T
        return weight.reshape(*weight.shape[:2], -1)

    def per_row(self, channels: torch.Tensor) -> torch.Tensor:
        """``[C]`` as it is seen by each row: ``[outputs or 1, inputs / groups, 1]``."""
        if self.groups == 1:
            return channels[None, :, None]
        of_groups = channels.view(self.groups, -1)
        return of_groups.repeat_interleave(len(self.get()) // self.groups, dim=0)[..., None]

    def largest(self) -> torch.Tensor:
        """float64 ``[C]``: the largest |w| that each input channel is multiplied with."""
        rows = self.rows().abs().amax(2)  # [outputs, inputs / groups]
        return rows.view(self.groups, -1, rows.shape[1]).amax(1).flatten().double()


def find_weight(module: nn.Module) -> Weight:
    """The weight of a Linear or a convolution."""
    return Weight(module, groups=getattr(module, "groups", 1))


def compute_smoothing(inputs: InputStats, weights: Sequence[Weight], alpha: float) -> torch.Tensor:
    """float32 ``[C]``: SmoothQuant's scales of weights that are given the same inputs, arXiv 2211.10438, equation 4."""
    largest = torch.stack([weight.largest() for weight in weights]).amax(0).clamp(min=_SMALLEST)
    came = torch.from_numpy(inputs.abs_max).to(largest.device)
    return (came**alpha / largest ** (1 - alpha)).clamp(min=_SMALLEST).float()


def choose_pruned(inputs: InputStats, weight: Weight, sparsity: float) -> torch.Tensor:
    """bool, of the weight's shape: True where Wanda prunes, arXiv 2306.11695, equation 1; in each row as many."""
    rows = weight.rows()
    norms = torch.from_numpy(inputs.l2_norm).to(rows.device)
    importance = (rows.abs().double() * weight.per_row(norms)).flatten(1)
    least = importance.sort(dim=1, stable=True).indices[:, : int(importance.shape[1] * sparsity)]
    mask = torch.zeros_like(importance, dtype=torch.bool).scatter_(1, least, True)
    shape = weight.get().shape
    return mask.view(shape) if weight.input_dim == 1 else mask.view(shape[::-1]).T.contiguous()
