"""What a rank holds that other ranks may hold, too: a model's tensors, each with what tells it from others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hookstats import _native
from hookstats.modules.selection import clean_names
from hookstats.modules.sharding import flattened, is_dtensor, unreduced

_WORDS = 1 << 15  # that are read at a time, on a CPU
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_OUTSIDE = "outside"  # the piece of a rank that is not in the DTensor's mesh


class Replica(NamedTuple):
    """A tensor, or this rank's part of one."""

    name: str  # of the parameter or buffer
    kind: str  # param, param_grad, buffer, optimizer.exp_avg
    form: str  # dtype and shape, of the whole
    piece: str  # which part of it: ranks that name the same one hold the same values
    local: torch.Tensor


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


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """64 bits that stand for those of each tensor, wherever it lies, in the order of its elements.

    Words of 8 bytes w_i become the sum of fmix64(w_i + (i + 1) * golden), modulo 2^64, where fmix64, the finalizer of
    MurmurHash3, is one to one: one flipped bit always makes another sum. By torch's operators; one copy a device.
    """
    sums = np.zeros(len(tensors), np.int64)
    for device in {each.device for each in tensors}:
        here = [i for i, each in enumerate(tensors) if each.device == device]
        at_once = _WORDS if device.type == "cpu" else 64 * _WORDS  # what a cache holds; what makes up for a launch
        steps = torch.arange(1, at_once + 1, device=device) * _GOLDEN
        sums[here] = torch.stack([_sum_of(_words(tensors[i]), steps) for i in here]).cpu().numpy()
    return sums


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 ``[bytes]``, in the order of the elements; a copy where these do not lie so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """int64; zeros fill the last one."""
    content = bytes_of(tensor)
    if len(content) % 8 or content.storage_offset() % 8:
        content = torch.nn.functional.pad(content, (0, -len(content) % 8)).clone()
    return content.view(torch.int64)


def _sum_of(words: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    total = steps.new_zeros(())
    for number, part in enumerate(words.split(len(steps))):
        mixed = part + steps[: len(part)]
        mixed += _signed(number * len(steps) * _GOLDEN)
        for shift, factor in ((33, _signed(0xFF51AFD7ED558CCD)), (33, _signed(0xC4CEB9FE1A85EC53)), (33, 1)):
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
        total += mixed.sum()
    return total


def _signed(bits: int) -> int:
    """The int64 of these bits, modulo 2^64."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)
