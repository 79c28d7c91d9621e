"""Scalars and ids of samples: what was given to `Monitor.step`, of measured steps and those between, and its way out.

What lies on a device is copied there, in the order of the stream, because a static buffer of a CUDA graph has another
number in the next step; it travels with the next measured step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hookstats import _native
from hookstats.numbers.fields import Counts
from hookstats.watch.memory import local_part

_MOST = 4096  # steps that are kept; more leave without a measured step


class Scalars:
    """Scalars of a step: numbers, and one-element tensors by device. TypeError, ValueError for anything else.

    Those that the user named, and apart from them, under no name that could be the user's, what a GradScaler gives.
    ``sample_ids``: of the samples of the step, or None.
    """

    def __init__(self, named: dict[str, Any], of_scaler: tuple[Any, Any] | None = None, sample_ids: Any = None) -> None:
        """of_scaler: grad_scale and overflowed; None: there is no GradScaler. sample_ids: see `Monitor.step`."""
        self.names = list(named)
        self.sample_ids = None if sample_ids is None else _integers(sample_ids)
        self.numbers: list[float] = []  # then those of the scaler; NaN stands in for tensors
        self.tensors: list[tuple[int, torch.Tensor]] = []  # not on the CPU, without dimensions, by place in `numbers`
        for name, value in [*named.items(), *zip(("grad_scale", "overflowed"), of_scaler or (), strict=False)]:
            number = value
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(f"step: {name}: expected a number, got a tensor of shape {tuple(value.shape)}")
                plain = _to_local(value.detach())
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


def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor; what an asynchronous collective brings."""
    part = local_part(tensor)
    return part.double() if _native.has_no_data(part) and not part.is_meta else part


def _integers(given: Any) -> Counts:
    """A copy, because the caller may fill the same buffer with the next batch."""
    wanted = "step: sample_ids: expected integers [samples], as a list, an array or a tensor on the CPU"
    values = given
    if isinstance(given, torch.Tensor):
        if not given.is_cpu or _native.has_no_data(given):
            why = ", for which the step would have to wait" if given.is_cuda else ""
            raise TypeError(f"{wanted}; got a tensor on {given.device}{why}")
        values = given.numpy(force=True)
    try:
        ids = np.asarray(values)
    except (TypeError, ValueError):  # rows of other lengths, say
        raise TypeError(f"{wanted}; got {given!r:.200}") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"{wanted}; got {ids.dtype} of shape {ids.shape}: {given!r:.200}")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{wanted} below 2 ** 63, got {ids.max()}")
    return ids.astype(np.int64)  # which copies in any case


class Row(NamedTuple):
    """The scalars and ids of a closed step."""

    step: int
    names: list[str]
    numbers: list[float]  # as `Scalars` has them; complete when what lay on a device has come
    sample_ids: Counts | None

    @property
    def named(self) -> dict[str, float]:
        return dict(zip(self.names, self.numbers, strict=False))


class Copy(NamedTuple):
    """A number that lies on a device, as it was, and where on the host it belongs."""

    number: torch.Tensor  # float64, without dimensions
    numbers: list[float]
    place: int


class Kept:
    """The scalars and ids of steps, in the order of their closing, until they are sent. Waits for nothing."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.copies: dict[torch.device, list[Copy]] = {}

    @classmethod
    def of(cls, step: int, scalars: Scalars) -> Kept:
        """Return those of one step alone."""
        kept = cls()
        kept.add(step, scalars)
        return kept

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= _MOST

    def add(self, step: int, scalars: Scalars) -> None:
        self.rows.append(Row(step, scalars.names, scalars.numbers, scalars.sample_ids))
        for place, tensor in scalars.tensors:
            copy = Copy(tensor.to(torch.float64, copy=True), scalars.numbers, place)
            self.copies.setdefault(tensor.device, []).append(copy)


def by_step(rows: list[Row]) -> dict[int, dict[str, float]]:
    """The scalars, ascending, of steps that were given some; of a number that came twice, the later one."""
    found = {row.step: row.named for row in rows}
    return {step: named for step, named in sorted(found.items()) if named}


def sample_ids_by_step(rows: list[Row]) -> dict[int, Counts]:
    """The same of the ids of samples; only steps that were given some."""
    found = {row.step: row.sample_ids for row in rows}
    return {step: ids for step, ids in sorted(found.items()) if ids is not None}
