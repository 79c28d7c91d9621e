"""Bounds of rounding for an identity: by the arithmetic of its modules and the sizes of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hookstats import _native
from hookstats.identities.runs import list_tensors
from hookstats.identities.terms import COARSEST, UNIT, Identity
from hookstats.modules.order import ModuleHook
from hookstats.watch.memory import local_part

_ROWS = 64  # of a tensor, along one dimension, of which squares are taken
_TOKENS = 256  # at least, over all dimensions but that of channels
_MOST_ROWS = 2 * _ROWS
_MOST_PLANS = 16
NO_ROWS = torch.zeros(_MOST_ROWS, dtype=torch.float64)
_TF32 = 2.0**-11


class _Spread(NamedTuple):
    """Some tokens of a tensor, of which sums of squares are taken.

    Attributes:
        some: an index by which they are chosen; None: all.
        sums: which of a launch's sums are its own.
        share: which share of its values they are.
        values: how many.
    """

    some: Any
    sums: slice
    share: float
    values: int


class SpreadPlan(NamedTuple):
    """The sums of squares of tensors of certain shapes: of a tensor's channels, and of another one as a whole.

    Attributes:
        channels: by their dimension. whole: of the other tensor, in several sums; None: it is not asked for.
        table, places: see csrc/joint.cpp.
    """

    channels: dict[int, _Spread]
    whole: _Spread | None
    table: torch.Tensor
    places: torch.Tensor


class Seen(NamedTuple):
    """Sums of squares of a module's output and input, and of the output's gradient, of one call."""

    plan: SpreadPlan
    sums: torch.Tensor
    gradient_plan: SpreadPlan
    gradient_sums: torch.Tensor
    tokens: dict[int, int]  # of the output, by the dimension of its channels


class SpreadHook(ModuleHook):
    """Measures of a module's output and of its gradient what bounds the rounding of sums over tokens.

    Attributes:
        dtypes: of the outputs that came, and of autocast.
        versions: of the module's own parameters when it ran last: which tensor, and how often that had been written to.
        seen: of each call.
        is_due: whether the open step reads an identity of this module.
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
        self._plans: dict[Any, SpreadPlan] = {}
        self._is_reader = is_reader
        self._is_on = is_on
        self._fail = fail
        self.is_due = True
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.dtypes = set[torch.dtype]()
        self.versions: dict[str, tuple[int, int]] = {}
        self.seen: list[Seen] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Wait for the output's gradient."""
        if torch.compiler.is_compiling() or torch._C._is_tracing() or not (self.is_due and self._is_on()):
            return
        self._see_carefully(self._see, module, args, output)

    def _see_carefully(self, see: Callable[..., None], *what: Any) -> None:
        try:
            with torch.no_grad():
                see(*what)
        except Exception as error:
            if self._fail is None:
                raise
            self._fail(error)

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = [output] if isinstance(output, torch.Tensor) else list_tensors(output)
        if not outputs or not outputs[0].requires_grad or not outputs[0].dim():
            return
        self.versions = {
            key: (id(each), each._version)
            for key, each in module._parameters.items()
            if each is not None and not each.is_inference()
        }
        y = local_part(outputs[0])
        self.dtypes.add(y.dtype)
        if torch.is_autocast_enabled(y.device.type):  # what lies between two modules, such as attention
            self.dtypes.add(torch.get_autocast_dtype(y.device.type))
        # Where a tensor has no channels beside its rows, both dimensions would be one; a rank's part may lack some.
        dims = [dim for dim in self._channels if (dim == -1 or y.dim() > 2) and self._last[dim] < y.shape[dim]]
        if not dims and not self._is_reader:
            return
        x = next(map(local_part, args if args and isinstance(args[0], torch.Tensor) else list_tensors(args)), None)
        is_known = bool(dims) and x is not None and x.dim() and x.dtype in _native.DTYPES and x.device == y.device
        plan, sums = self._measure(y, dims, x if is_known else None)

        def add_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
            self._see_carefully(self._add, plan, sums, local_part(gradient))
            return gradient if torch.compiler.is_compiling() else None  # compiled autograd would replace it by None

        outputs[0].register_hook(add_gradient)

    def _add(self, plan: SpreadPlan, sums: torch.Tensor, gradient: torch.Tensor) -> None:
        own = self._measure(gradient, [*plan.channels], gradient if self._is_reader else None)
        tokens = {dim: gradient.numel() // max(gradient.shape[dim], 1) for dim in plan.channels}
        self.seen.append(Seen(plan, sums, *own, tokens))

    def _measure(
        self, tensor: torch.Tensor, dims: list[int], whole: torch.Tensor | None
    ) -> tuple[SpreadPlan, torch.Tensor]:
        """Return sums of squares of the tensor's channels, and of another one as a whole, by one launch."""
        key = tensor.device, tensor.shape, len(dims), None if whole is None else whole.shape
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > _MOST_PLANS:  # sequences have many lengths
                self._plans.clear()
            plan = self._plans[key] = _plan(tensor, {dim: self._channels[dim] for dim in dims}, whole)
        given = [tensor if part.some is None else tensor[part.some] for part in plan.channels.values()]
        if whole is not None and plan.whole is not None:
            given.append(whole if plan.whole.some is None else whole[plan.whole.some])
        if not given:
            return plan, NO_ROWS
        sums = _native.joint_sums(given, [None] * len(given), plan.table, plan.places)[:, 2]
        return plan, sums if len(self.seen) < _MOST_PLANS else sums.clone()  # alone: of many microbatches


def _plan(tensor: torch.Tensor, channels: dict[int, torch.Tensor], whole: torch.Tensor | None) -> SpreadPlan:
    parts, table, places = list[_Spread](), list[list[int]](), list[torch.Tensor]()

    def add(given: torch.Tensor, dim: int, some: Any, own: torch.Tensor, values: int) -> None:
        begin = sum(map(len, places))
        table.append([len(table), dim % given.dim(), 0, begin, begin + len(own), 0])
        parts.append(_Spread(some, slice(begin, begin + len(own)), max(values, 1) / max(given.numel(), 1), values))
        places.append(own)

    for dim, own in channels.items():
        some = _choose_tokens(tensor.shape, dim)
        add(tensor, dim, some, own, (tensor if some is None else tensor[some]).numel())
    if whole is not None:
        some = _choose_tokens(whole.shape, -1)
        chosen = whole if some is None else whole[some]
        sizes = chosen.shape[:-1] or chosen.shape
        # Rows of the first dimension that has enough of them are the longest.
        rows = next((dim for dim, size in enumerate(sizes) if 16 <= size <= _MOST_ROWS), sizes.index(max(sizes)))
        count = min(sizes[rows], _MOST_ROWS)
        add(whole, rows, some, torch.arange(_MOST_ROWS), chosen.numel() // max(sizes[rows], 1) * count)
    by_dim = dict(zip(channels, parts, strict=False))
    all_places = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
    return SpreadPlan(
        by_dim,
        parts[-1] if whole is not None else None,
        torch.tensor(table, dtype=torch.int64).view(-1, 6),
        all_places.to(tensor.device),
    )


def find_unit(identity: Identity, spreads: Mapping[str, SpreadHook], parameters: Iterable[torch.Tensor]) -> float:
    """Return the relative rounding of the coarsest arithmetic of an identity's modules.

    Where none of them was seen to run, as in a compiled graph, it may be autocast's.
    """
    tensors = list(parameters)
    ran = [spreads[owner] for name in identity.parameters if (owner := find_owner(name)) in spreads]
    seen = set[torch.dtype]().union(*(each.dtypes for each in ran))
    dtypes = seen.union(each.dtype for each in tensors) if seen else {torch.bfloat16, *(t.dtype for t in tensors)}
    unit = max(UNIT.get(dtype, COARSEST) for dtype in dtypes)
    return max(unit, _TF32) if any(each.is_cuda for each in tensors) and _uses_tf32() else unit


def find_owner(name: str) -> str:
    """Return the name of the module that has a parameter, or a module."""
    return name.rpartition(".")[0]


def _uses_tf32() -> bool:
    backends: Any = torch.backends
    try:
        return bool(backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32)
    except RuntimeError:  # some of it was set by newer names
        return True


def _choose_tokens(shape: torch.Size, but: int) -> Any:
    """Return an index of every n-th entry along the longest dimension but one, that of channels; None: of all."""
    others = [dim for dim in range(len(shape)) if dim != but % len(shape)]
    longest = max(others, key=shape.__getitem__, default=0)
    step = min(shape.numel() // max(shape[but], 1) // _TOKENS, shape[longest] // _ROWS) if others else 1
    return (slice(None),) * longest + (slice(None, None, step),) if step > 1 else None
