"""The tensors of a model that other ranks may hold, too, each with what identifies it."""

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
    """Return all tensors of a model and of the optimizers' state, a shared one under its first name."""
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
    """Return the place of a DTensor's part: its coordinates in the dimensions that cut the tensor."""
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
    """Return the reason why the bits cannot be read; None where they can."""
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
    """Return 64 bits that stand for those of each tensor, wherever it lies, in the order of its elements.

    Words of 8 bytes w_i become the sum of fmix64(w_i + (i + 1) * golden), modulo 2^64, where fmix64, the finalizer of
    MurmurHash3, is one to one: one flipped bit always makes another sum. By torch's operators, for many small tensors
    at once; one copy a device.
    """
    sums = np.zeros(len(tensors), np.int64)
    for device in {each.device for each in tensors}:
        here = [i for i, each in enumerate(tensors) if each.device == device]
        at_once = _WORDS if device.type == "cpu" else 64 * _WORDS  # what a cache holds; what makes up for a launch
        steps = torch.arange(1, at_once + 1, device=device) * _GOLDEN
        found = steps.new_zeros(len(here))
        for chunk in _chunks([tensors[i] for i in here], 8 * at_once):
            _add_sums(chunk, steps, found)
        sums[here] = found.cpu().numpy()
    return sums


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8 ``[bytes]``, in the order of the elements; a copy where these do not lie so."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class _Part(NamedTuple):
    number: int  # of the tensor
    begin: int  # word of it
    content: torch.Tensor


def _chunks(tensors: Sequence[torch.Tensor], at_once: int) -> Iterator[list[_Part]]:
    """Cut tensors into chunks of so many bytes at most, in order."""
    chunk: list[_Part] = []
    size = 0
    for number, tensor in enumerate(tensors):
        whole = bytes_of(tensor)
        parts = [whole] if whole.numel() <= at_once else whole.split(at_once)
        for n, content in enumerate(parts):
            if size + content.numel() > at_once:
                yield chunk
                chunk, size = [], 0
            if content.numel():
                chunk.append(_Part(number, n * at_once // 8, content))
                size += -(-content.numel() // 8) * 8
    if chunk:
        yield chunk


def _add_sums(chunk: list[_Part], steps: torch.Tensor, found: torch.Tensor) -> None:
    """Add the sums of a chunk to those of its tensors. steps: of words 0, 1, ... of a tensor."""
    content, zeros = chunk[0].content, steps.new_zeros(8, dtype=torch.uint8)
    if len(chunk) > 1 or content.numel() % 8 or content.storage_offset() % 8:  # the parts of large tensors stay there
        content = torch.cat([part for each in chunk for part in (each.content, zeros[: -each.content.numel() % 8])])
    mixed = content.view(torch.int64) + steps[: content.numel() // 8]
    if len(chunk) == 1:
        mixed += _signed(chunk[0].begin * _GOLDEN)
        found[chunk[0].number] += _mixed(mixed).sum()
        return
    lengths = np.array([-(-each.content.numel() // 8) for each in chunk])
    ends = np.cumsum(lengths)
    # By how many words each is farther on in its tensor than in the chunk.
    ahead = np.array([each.begin for each in chunk]) - (ends - lengths)
    table = np.stack([ahead * _GOLDEN, lengths, ends - 1, [each.number for each in chunk]])
    added, count, last, number = torch.from_numpy(table).to(found.device)
    mixed += torch.repeat_interleave(added, count, output_size=mixed.numel())
    found.index_add_(0, number, _mixed(mixed).cumsum(0)[last].diff(prepend=found.new_zeros(1)))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((33, _signed(0xFF51AFD7ED558CCD)), (33, _signed(0xC4CEB9FE1A85EC53)), (33, 1)):
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    return words


def _signed(bits: int) -> int:
    """Return the int64 of these bits, modulo 2^64."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)
