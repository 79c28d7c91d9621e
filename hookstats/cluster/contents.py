"""The tensors of a model that other ranks may hold, too, each with what identifies it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hookstats import _native
from hookstats.modules.selection import clean_names
from hookstats.modules.sharding import explain_unreduced, find_flattened, is_dtensor

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


def list_contents(
    model: nn.Module, optimizers: Sequence[Any], buffers: bool, gradients: bool
) -> tuple[list[Replica], dict[str, str]]:
    """Return all tensors of a model and of the optimizers' state, and why some are skipped, by name and kind."""
    held, skipped = list[Replica](), dict[str, str]()
    flat = {id(each) for module in find_flattened(model) for each in module._parameters.values()}
    for name, kind, tensor, is_flat in _list_tensors(model, optimizers, buffers, gradients, flat):
        piece, local = (_name_piece(tensor), tensor._local_tensor) if is_dtensor(tensor) else ("", tensor)
        problem = (
            "a part cut by FullyShardedDataParallel" if is_flat and not piece else _explain_unreadable(tensor, local)
        )
        if problem:
            skipped[f"{name} ({kind})"] = problem
        else:
            form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            held.append(Replica(name, kind, form, piece, local.detach()))
    return held, skipped


def _list_tensors(
    model: nn.Module, optimizers: Sequence[Any], buffers: bool, gradients: bool, flat: set[int]
) -> Iterator[tuple[str, str, Any, bool]]:
    """Yield name, kind and tensor, a shared one under its first name, and whether it is flat."""
    names: dict[int, str] = {}
    for path, module in clean_names(model).items():
        for kind, tensors in (("param", module._parameters), ("buffer", module._buffers if buffers else {})):
            for key, tensor in tensors.items():
                if tensor is None or id(tensor) in names:
                    continue
                name = names[id(tensor)] = f"{path}.{key}".lstrip(".")
                yield name, kind, tensor, id(tensor) in flat
                if kind == "param" and gradients and tensor.grad is not None:
                    yield name, "param_grad", tensor.grad, id(tensor) in flat
    for number, optimizer in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"param_groups.{g}.params.{i}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield name, f"{prefix}.{key}", value, id(parameter) in flat


def _name_piece(tensor: Any) -> str:
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


def _explain_unreadable(tensor: torch.Tensor, local: torch.Tensor) -> str | None:
    """Return the reason why the bits cannot be read; None where they can."""
    if nn.parameter.is_lazy(tensor):
        return "not initialised yet"
    if problem := explain_unreduced(tensor):
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
    MurmurHash3, is one to one: one flipped bit always makes another sum. Tensors of one size are read together.
    """
    found, alike = np.zeros(len(tensors), np.int64), defaultdict[tuple[torch.device, int], list[int]](list)
    for i, each in enumerate(tensors):
        if each.nbytes:
            alike[each.device, each.nbytes].append(i)
    for (device, size), here in alike.items():
        at_once = _WORDS if device.type == "cpu" else 64 * _WORDS  # what a cache holds; what makes up for a launch
        many = max(1, 8 * at_once // size)
        for chunk in (here[first : first + many] for first in range(0, len(here), many)):
            found[chunk] = _sum_words([tensors[i] for i in chunk], at_once).cpu().numpy()
    return found


def _sum_words(tensors: list[torch.Tensor], at_once: int) -> torch.Tensor:
    """Return the sums ``[tensors]`` of tensors of one size, which is read in parts of so many words."""
    contents = [read_bytes(each) for each in tensors]
    found = torch.zeros(len(contents), dtype=torch.int64, device=contents[0].device)
    for n, parts in enumerate(zip(*(each.split(8 * at_once) for each in contents), strict=True)):
        words = nn.functional.pad(torch.stack(parts), (0, -len(parts[0]) % 8)).view(torch.int64)
        place = torch.arange(1 + n * at_once, 1 + n * at_once + words.shape[1], device=words.device)
        found += _mix_bits(words + place * _GOLDEN).sum(1)
    return found


def read_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8 ``[bytes]``, in the order of the elements; a copy where these do not lie so."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _mix_bits(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((33, _to_signed(0xFF51AFD7ED558CCD)), (33, _to_signed(0xC4CEB9FE1A85EC53)), (33, 1)):
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    return words


def _to_signed(bits: int) -> int:
    """Return the int64 of these bits, modulo 2^64."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)
