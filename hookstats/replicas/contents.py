"""What a rank holds that other ranks may hold, too: a model's tensors, each with what tells it from others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hookstats import _native
from hookstats.modules.selection import clean_names
from hookstats.modules.sharding import flattened, is_dtensor, unreduced
from hookstats.numbers.kinds import kind_of

_OUTSIDE = "outside"  # the piece of a rank that is not in the DTensor's mesh


class Replica(NamedTuple):
    """A tensor, or this rank's part of one."""

    name: str  # of the parameter or buffer
    kind: str  # param, param_grad, buffer, optimizer.exp_avg
    form: str  # dtype and shape, of the whole
    piece: str  # which part of it: ranks that name the same one hold the same values
    local: torch.Tensor

    @property
    def is_of_optimizer(self) -> bool:
        return kind_of(self.kind).is_update


class Contents(NamedTuple):
    held: list[Replica]
    skipped: dict[str, str]  # why not, by name and kind


def contents_of(model: nn.Module, optimizers: Sequence[Any], buffers: bool, gradients: bool) -> Contents:
    """All tensors of a model and of the optimizers' state, a shared one under its first name."""
    contents = Contents([], {})
    flat = {id(each) for module in flattened(model) for each in module._parameters.values()}
    names: dict[int, str] = {}  # of parameters
    for name, tensor, kind in _of_modules(model, buffers):
        if kind == "param":
            names[id(tensor)] = name
        _add(contents, name, kind, tensor, id(tensor) in flat)
        if kind == "param" and gradients and tensor.grad is not None:
            _add(contents, name, "param_grad", tensor.grad, id(tensor) in flat)
    for number, optimizer in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
        for name, parameter in _stepped(optimizer, names):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    _add(contents, name, f"{prefix}.{key}", value, id(parameter) in flat)
    return contents


def _of_modules(model: nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor, str]]:
    found: list[tuple[str, str, torch.Tensor | None]]
    seen: set[int] = set()
    for path, module in clean_names(model).items():
        found = [("param", key, tensor) for key, tensor in module._parameters.items()]
        found += [("buffer", key, tensor) for key, tensor in module._buffers.items() if buffers]
        for kind, key, tensor in found:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{key}".lstrip("."), tensor, kind


def _stepped(optimizer: Any, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"param_groups.{g}.params.{i}"), parameter


def _add(contents: Contents, name: str, kind: str, tensor: torch.Tensor, is_flat: bool) -> None:
    piece, local = "", tensor
    if is_dtensor(tensor):
        piece, local = _piece(tensor), tensor._local_tensor  # type: ignore[attr-defined]
    problem = "a part cut by FullyShardedDataParallel" if is_flat and not piece else _unreadable(tensor, local)
    if problem:
        contents.skipped[f"{name} ({kind})"] = problem
    else:
        form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        contents.held.append(Replica(name, kind, form, piece, local.detach()))


def _piece(tensor: Any) -> str:
    """Where a DTensor's part lies, but for its copies: its coordinates in the dimensions that cut the tensor."""
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return _OUTSIDE
    cut = [
        f"{placement} {at} of {mesh.size(dim)}"
        for dim, (placement, at) in enumerate(zip(tensor.placements, coordinates, strict=True))
        if not placement.is_replicate()
    ]
    return ", ".join(cut)


def _unreadable(tensor: torch.Tensor, local: torch.Tensor) -> str | None:
    """Why the bits cannot be read; None where they can."""
    if nn.parameter.is_lazy(tensor):
        return "not initialised yet"
    if problem := unreduced(tensor):
        return problem
    if local.is_nested:
        return "a nested tensor"
    if local.layout != torch.strided:
        return f"of layout {str(local.layout).removeprefix('torch.')}"
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(local).__name__}, which holds its values in other tensors"
    if _native.has_no_data(local) or (local.numel() > 0 and local.untyped_storage().nbytes() == 0):
        return f"on {local.device}, without data"
    return None


COLUMNS = 4  # of a table: the tensor, its form, its piece, its checksum


def table_of(held: Sequence[Replica]) -> npt.NDArray[np.int64]:
    """[tensors, COLUMNS]. The number of a tensor is odd where a rank may do without it: a part of an optimizer's
    state, which optimizers that cut it keep on one rank."""
    table = np.empty((len(held), COLUMNS), np.int64)
    for row, each in zip(table, held, strict=True):
        number = hash_of(f"{each.name} {each.kind}")
        row[:3] = number & ~1 | each.is_of_optimizer, hash_of(each.form), hash_of(each.piece)
    table[:, 3] = checksums([each.local for each in held])
    return table


def checksums(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """64 bits that stand for those of each tensor, wherever it lies; one kernel on each device.

    RuntimeError for a device that this build has no kernels for: left out, all of a model would seem to agree.
    """
    sums = np.empty(len(tensors), np.int64)
    launched = []
    for device in {each.device for each in tensors}:
        if device.type != "cpu" and not (device.type == "cuda" and _native.HAS_CUDA):
            raise RuntimeError(
                f"hookstats: expected tensors on a device that this build has kernels for, got {device}: "
                "`python -m hookstats doctor` says how to build them"
            )
        here = [i for i, each in enumerate(tensors) if each.device == device]
        launched.append((here, _native.checksums([tensors[i] for i in here])))
    for here, found in launched:
        sums[here] = found.cpu().numpy()
    return sums


@lru_cache(1 << 16)  # the same tensors come again at every check
def hash_of(text: str) -> int:
    return digest_of(text.encode())


def digest_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
