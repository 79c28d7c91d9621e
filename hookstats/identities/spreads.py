"""Bounds of rounding for an identity: by the arithmetic of its modules and the sizes of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hookstats.identities.runs import tensors_in
from hookstats.identities.terms import COARSEST, UNIT, Identity
from hookstats.modules.order import ModuleHook

_ROWS = 64  # of an input, of which the mean square is taken where channels are chosen
_TF32 = 2.0**-11
Squares = list[torch.Tensor | None]  # of each term of a side the sums of w^2 of its places; None: of a vector


class Spread(ModuleHook):
    """Measures of a module's output and of its gradient what bounds the rounding of sums over tokens.

    Attributes:
        dtypes: of the outputs that came.
        versions: of the module's own parameters when it ran last: which tensor, and how often that had been written to.
    """

    def __init__(
        self,
        channels: Mapping[int, torch.Tensor] | None = None,
        is_on: Callable[[], bool] | None = None,
        fail: Callable[[Exception], None] | None = None,
    ) -> None:
        """channels: by their dimension, -1 or 1, those that are read; None: all, along both.

        is_on: whether anything is measured. fail: is told what goes wrong; None: that is raised.
        """
        self._channels = channels
        self._on: dict[tuple[int, torch.device], torch.Tensor] = {}  # the same, where tensors were
        self._is_on = is_on
        self._fail = fail
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.dtypes = set[torch.dtype]()
        self.versions: dict[str, tuple[int, int]] = {}
        self.gradient: torch.Tensor | None = None  # the mean square of the output's gradient, added up over calls
        # By the dimension of channels, added up over calls: N ms(y) ms(dy), ms(x) sum dy^2, sum y^2.
        self._sums: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Wait for the output's gradient."""
        if torch.compiler.is_compiling() or torch._C._is_tracing() or (self._is_on is not None and not self._is_on()):
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
        outputs, inputs = tensors_in(output), tensors_in(args)
        if not outputs or not outputs[0].requires_grad or not outputs[0].dim():
            return
        self.versions = {
            key: (id(each), each._version)
            for key, each in module._parameters.items()
            if each is not None and not each.is_inference()
        }
        y = _local(outputs[0])
        self.dtypes.add(y.dtype)
        dims = [dim for dim in ((-1, 1) if y.dim() > 2 else (-1,)) if self._channels is None or dim in self._channels]
        squares = {dim: _squares(self._chosen(y, dim), dim) for dim in dims if self._has(y, dim)}
        size = self._mean_square(_local(inputs[0])) if inputs else torch.zeros((), device=y.device)

        def arrived(gradient: torch.Tensor) -> torch.Tensor | None:
            self._carefully(self._add, squares, size, _local(gradient))
            return gradient if torch.compiler.is_compiling() else None  # compiled autograd would replace it by None

        outputs[0].register_hook(arrived)

    def _has(self, y: torch.Tensor, dim: int) -> bool:
        """Return whether a tensor has the chosen channels: a rank's part of it may not."""
        return self._channels is None or int(self._channels[dim].max()) < y.shape[dim]

    def _chosen(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if self._channels is None:
            return tensor.detach()
        key = dim, tensor.device
        if key not in self._on:
            self._on[key] = self._channels[dim].to(tensor.device)
        return tensor.detach().index_select(dim, self._on[key])

    def _mean_square(self, tensor: torch.Tensor) -> torch.Tensor:
        some = tensor.detach()
        if self._channels is not None and some.dim() > 1:
            longest = max(range(some.dim() - 1), key=lambda dim: some.shape[dim])
            some = some.movedim(longest, 0)[:: max(some.shape[longest] // _ROWS, 1)]
        return some.double().square().mean() if some.numel() else torch.zeros((), device=tensor.device)

    def _add(self, squares: dict[int, torch.Tensor], size: torch.Tensor, gradient: torch.Tensor) -> None:
        mean = self._mean_square(gradient)
        self.gradient = mean if self.gradient is None else self.gradient + mean
        for dim, square in squares.items():
            chosen = self._chosen(gradient, dim)
            of_gradient = _squares(chosen, dim)
            rows = max(chosen.numel() // max(len(square), 1), 1)
            for what, product in (("both", square * of_gradient / rows), ("x", size * of_gradient), ("y", square)):
                known = self._sums.get((what, dim))
                self._sums[what, dim] = product if known is None or known.shape != product.shape else known + product

    def channels(self, what: str, identity: Identity) -> torch.Tensor | None:
        """Return a sum for each of an identity's channels; None where no gradient arrived."""
        found = self._sums.get((what, identity.channel_dim))
        places = identity.channels
        if self._channels is not None and found is not None:
            places = torch.searchsorted(self._channels[identity.channel_dim], places)
        if found is None or len(found) <= int(places.max()):
            return None
        return found[places.to(found.device)]


def spread_of(
    identity: Identity, spreads: Mapping[str, Spread], left: Squares, right: Squares, device: torch.device
) -> torch.Tensor | None:
    """Return what terms of single tokens would add up to if their signs were random, for each group; None: not known.

    By the output between both sides it is N rms(y)^2 rms(dy)^2. Where y is small because what makes it has cancelled,
    by the input and the weights of the left side; where dy is, by the weights and the output's gradient of the right.
    """
    own = spreads.get(identity.module)
    found = [None if own is None else own.channels(what, identity) for what in ("both", "x", "y")]
    if any(each is None for each in found):
        return None
    both, of_x, of_y = (each.to(device, torch.float64) for each in found if each is not None)
    for squares in left:
        if squares is not None and len(squares) == len(both):  # a norm's weight multiplies what is normalised
            both = both + of_x * squares.to(device)

    def grouped(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(identity.groups).index_add_(0, groups.to(device), values)

    summed = grouped(both, identity.channel_groups)
    if identity.kind == "channels":
        for term, squares in zip(identity.right, right, strict=True):
            reader = spreads.get(owner_of(term.parameter))
            if reader is not None and reader.gradient is not None and squares is not None:
                of_columns = grouped(squares.to(device), term.groups)
                summed = summed + grouped(of_y, identity.channel_groups) * of_columns * reader.gradient.to(device)
    return summed


def unit_of(identity: Identity, spreads: Mapping[str, Spread], parameters: Iterable[torch.Tensor]) -> float:
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


def owners_of(identities: Iterable[Identity]) -> set[str]:
    """Return the names of all modules whose parameters or outputs identities are of."""
    found = list(identities)
    return {owner_of(name) for each in found for name in each.parameters} | {each.module for each in found}


def _uses_tf32() -> bool:
    backends: Any = torch.backends
    try:
        return bool(backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32)
    except RuntimeError:  # some of it was set by newer names
        return True


def _squares(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    others = [each for each in range(tensor.dim()) if each != dim % tensor.dim()]
    squares = tensor.double().square()
    return squares.sum(others) if others else squares


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, or the tensor."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor
