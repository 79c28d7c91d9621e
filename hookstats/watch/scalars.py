"""Scalars of steps: what was given to `Monitor.step`, of measured steps and of those between them, and its way out.

What lies on a device is copied there, in the order of the stream, because a static buffer of a CUDA graph has another
number in the next step; it travels with the next measured step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hookstats import _native
from hookstats.watch.memory import local_part

_SLOTS = 256  # numbers that are kept in one piece of device memory
_MOST = 4096  # steps that are kept; more leave without a measured step


class Scalars:
    """What travels with a step: numbers, and one-element tensors by device. TypeError, ValueError for anything else.

    Those that the user named, and apart from them, under no name that could be the user's, what a GradScaler gives.
    """

    def __init__(self, named: dict[str, Any], of_scaler: tuple[Any, Any] | None = None) -> None:
        """of_scaler: grad_scale and overflowed; None: there is no GradScaler."""
        self.names = list(named)
        self.numbers: list[float] = []  # then those of the scaler; NaN stands in for tensors
        self.tensors: list[tuple[int, torch.Tensor]] = []  # not on the CPU, without dimensions, by place in `numbers`
        for name, value in [*named.items(), *zip(("grad_scale", "overflowed"), of_scaler or (), strict=False)]:
            number = value
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(f"step: {name}: expected a number, got a tensor of shape {tuple(value.shape)}")
                plain = _plain(value.detach())
                if _native.has_no_data(plain):
                    raise TypeError(f"step: {name}: expected a number or a tensor with data, got {plain}")
                if plain.is_cpu:
                    number = plain.item()
                else:
                    self.tensors.append((len(self.numbers), plain.reshape(())))
                    number = float("nan")
            try:
                self.numbers.append(float(number))
            except (TypeError, ValueError):
                raise TypeError(f"step: {name}: expected a number or one-element tensor, got {value!r}") from None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor; what an asynchronous collective brings."""
    part = local_part(tensor)
    return part.double() if _native.has_no_data(part) and not part.is_meta else part


class Row(NamedTuple):
    """The scalars of a closed step."""

    step: int
    names: list[str]
    numbers: list[float]  # as `Scalars` has them; complete when what lay on a device has come

    @property
    def named(self) -> dict[str, float]:
        return dict(zip(self.names, self.numbers, strict=False))


class Slots:
    """Device memory of so many numbers, float64, and where on the host each of them belongs."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._memory = torch.empty(_SLOTS, dtype=torch.float64, device=device)
        self._places: list[tuple[list[float], int]] = []

    @property
    def is_full(self) -> bool:
        return len(self._places) == _SLOTS

    def copy(self, tensor: torch.Tensor, numbers: list[float], place: int) -> None:
        """Launches a copy of a tensor without dimensions."""
        self._memory.select(0, len(self._places)).copy_(tensor, non_blocking=True)
        self._places.append((numbers, place))

    @property
    def filled(self) -> torch.Tensor:
        return self._memory[: len(self._places)].view(torch.int64)

    def put_back(self, values: list[float]) -> None:
        """What has come of `filled`."""
        for (numbers, place), value in zip(self._places, values, strict=True):
            numbers[place] = value


class Kept:
    """The scalars of steps in the order of their closing, until they are sent. Waits for nothing."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.slots: dict[torch.device, list[Slots]] = {}

    @classmethod
    def of(cls, step: int, scalars: Scalars) -> Kept:
        """Those of one step alone."""
        kept = cls()
        kept.add(step, scalars)
        return kept

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= _MOST

    def add(self, step: int, scalars: Scalars) -> None:
        self.rows.append(Row(step, scalars.names, scalars.numbers))
        for place, tensor in scalars.tensors:
            here = self.slots.setdefault(tensor.device, [])
            if not here or here[-1].is_full:
                here.append(Slots(tensor.device))
            here[-1].copy(tensor, scalars.numbers, place)


def by_step(rows: list[Row]) -> dict[int, dict[str, float]]:
    """Ascending; of a number that came twice, the later one."""
    found = {row.step: row.named for row in rows}
    return dict(sorted(found.items()))
