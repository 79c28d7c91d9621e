"""Bounds of rounding for an identity: by the arithmetic of its modules and the sizes of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hookstats import _native
from hookstats.identities.runs import tensors_in
from hookstats.identities.terms import COARSEST, UNIT, Identity
from hookstats.modules.order import ModuleHook

_ROWS = 64  # of a tensor, of which the mean square is taken
_TF32 = 2.0**-11


class SpreadHook(ModuleHook):
    """Measures of a module's output and of its gradient what bounds the rounding of sums over tokens.

    Attributes:
        dtypes: of the outputs that came, and of autocast.
        versions: of the module's own parameters when it ran last: which tensor, and how often that had been written to.
    """

    def __init__(
        self,
        channels: Mapping[int, torch.Tensor],
        is_reader: bool,
        is_on: Callable[[], bool] = lambda: True,
        fail: Callable[[Exception], None] | None = None,
    ) -> None:
        """channels: of the output, by their dimension, -1 or 1, those that are read. is_reader: of an identity.

        is_on: whether anything is measured. fail: is told what goes wrong; None: that is raised.
        """
        self._channels = channels
        self._last = {dim: int(some[-1]) for dim, some in channels.items()}
        self._places: dict[tuple[int, torch.device], torch.Tensor] = {}  # the same, where tensors were
        self._tables: dict[tuple[int, int], torch.Tensor] = {}  # by that dimension, and how many a tensor has
        self._is_reader = is_reader
        self._is_on = is_on
        self._fail = fail
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.dtypes = set[torch.dtype]()
        self.versions: dict[str, tuple[int, int]] = {}
        self.gradient: torch.Tensor | None = None  # the mean square of the output's gradient, added up over calls
        self._sums: dict[int, torch.Tensor] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Wait for the output's gradient."""
        if torch.compiler.is_compiling() or torch._C._is_tracing() or not self._is_on():
            return
        self._carefully(self._see, module, args, output)

    def _carefully(self, see: Callable[..., None], *what: Any) -> None:
        try:
            with torch.no_grad():
                see(*what)
        except Exception as error:
            if self._fail is None:
                raise
            self._fail(error)

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        if not outputs or not outputs[0].requires_grad or not outputs[0].dim():
            return
        self.versions = {
            key: (id(each), each._version)
            for key, each in module._parameters.items()
            if each is not None and not each.is_inference()
        }
        y = _local(outputs[0])
        self.dtypes.add(y.dtype)
        if torch.is_autocast_enabled(y.device.type):  # what lies between two modules, such as attention
            self.dtypes.add(torch.get_autocast_dtype(y.device.type))
        # Where a tensor has no channels beside its rows, both dimensions would be one; a rank's part may lack some.
        dims = [dim for dim in self._channels if (dim == -1 or y.dim() > 2) and self._has(y, dim)]
        if not dims and not self._is_reader:
            return
        squares = {dim: self._squares(y, dim) for dim in dims}
        inputs = tensors_in(args) if dims else []
        is_known = bool(inputs) and inputs[0].is_floating_point()
        size = _mean_square(_local(inputs[0])) if is_known else torch.zeros((), device=y.device)

        def add_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
            self._carefully(self._add, squares, size, _local(gradient))
            return gradient if torch.compiler.is_compiling() else None  # compiled autograd would replace it by None

        outputs[0].register_hook(add_gradient)

    def _has(self, y: torch.Tensor, dim: int) -> bool:
        return self._last[dim] < y.shape[dim]

    def _squares(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the sum of squares of each chosen channel."""
        key = dim, tensor.device
        if key not in self._places:
            self._places[key] = self._channels[dim].to(tensor.device)
        places, shape = self._places[key], (dim, tensor.dim())
        if shape not in self._tables:
            self._tables[shape] = torch.tensor([[0, dim % tensor.dim(), 0, 0, len(places), 0]])
        found: torch.Tensor = _native.joint_sums([tensor.detach()], [None], self._tables[shape], places)
        return found[:, 2]

    def _add(self, squares: dict[int, torch.Tensor], size: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._is_reader:
            mean = _mean_square(gradient)
            self.gradient = mean if self.gradient is None else self.gradient + mean
        for dim, square in squares.items():
            of_gradient = self._squares(gradient, dim)
            rows = max(gradient.numel() // gradient.shape[dim], 1)
            product = torch.stack([square * of_gradient / rows, size * of_gradient, square])
            self._sums[dim] = self._sums[dim] + product if dim in self._sums else product

    def sums_of(self, dim: int, device: torch.device) -> torch.Tensor:
        """Return N ms(y) ms(dy), ms(x) sum dy^2 and sum y^2 of each chosen channel, added up over calls; 0: none came.

        ms is a mean square over N tokens, y the output, x the input.
        """
        found = self._sums.get(dim)
        if found is None:
            return torch.zeros((3, len(self._channels[dim])), dtype=torch.float64, device=device)
        return found.to(device, torch.float64)


def unit_of(identity: Identity, spreads: Mapping[str, SpreadHook], parameters: Iterable[torch.Tensor]) -> float:
    """Return the relative rounding of the coarsest arithmetic of an identity's modules.

    Where none of them was seen to run, as in a compiled graph, it may be autocast's.
    """
    tensors = list(parameters)
    ran = [spreads[owner] for name in identity.parameters if (owner := owner_of(name)) in spreads]
    seen = set[torch.dtype]().union(*(each.dtypes for each in ran))
    dtypes = seen.union(each.dtype for each in tensors) if seen else {torch.bfloat16, *(t.dtype for t in tensors)}
    unit = max(UNIT.get(dtype, COARSEST) for dtype in dtypes)
    return max(unit, _TF32) if any(each.is_cuda for each in tensors) and _uses_tf32() else unit


def owner_of(parameter: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def _uses_tf32() -> bool:
    backends: Any = torch.backends
    try:
        return bool(backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32)
    except RuntimeError:  # some of it was set by newer names
        return True


def _mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """Return it of some rows along the longest dimension but the last."""
    some = tensor.detach()
    if not some.numel():
        return torch.zeros((), device=tensor.device)
    if some.dim() > 1:
        longest = max(range(some.dim() - 1), key=lambda dim: some.shape[dim])
        some = some.movedim(longest, 0)[:: max(some.shape[longest] // _ROWS, 1)]
    norm: torch.Tensor = torch.linalg.vector_norm(some, dtype=torch.float64)
    return norm.square() / some.numel()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, or the tensor."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor
