"""Both sides of identities in each measured step: after the last backward, before an optimizer or clipping changes it.

Of each identity at most 64 sums are read, the same in all steps and on all ranks, so that they can be compared and
merged: runs of four adjacent channels, which lie in one sector of memory, spread over all. What is measured
goes to sites of its own: "identity.3.left" and "identity.3.right" of each parameter of an identity, by its number, and
beside them "identity.3.rounding", the variance of their difference.

Most wrong gradients are wrong from the first step on, so the first measured steps read all identities, and so do those
after a finding. Others read a part of them each, in turns, and the hooks of other modules do nothing. Where ranks bring
parts of one identity, each measured step reads all: ranks need not count the same steps.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hookstats import _native
from hookstats.identities.checking import Identities
from hookstats.identities.layout import Compared, IdentityLayout, LocalParameter
from hookstats.identities.spreads import find_unit
from hookstats.identities.terms import UNIT, Identity, Term
from hookstats.modules import order
from hookstats.modules.selection import Slot, clean_names
from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.fields import Site
from hookstats.numbers.identities import MANY, ROUNDING, SIDES, tensor_of
from hookstats.tools.undo import unwrap_parallel
from hookstats.watch.batches import Batches, Owner, Parameter
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.memory import StateStore, local_part
from hookstats.watch.scaling import Scaling

MOST = 64  # sums of an identity
_RUN = 4  # of which so many are adjacent
WHOLE_STEPS = 8  # measured steps that read all identities: the first, and those after a finding
_MOST_PARTS = 4  # of the identities, which take turns then, each of at least 2 * MANY: a rule looks for many at once
_GOLDEN = (5**0.5 - 1) / 2
_NUMBER = re.compile(r"(?<=\.)\d+")  # of a layer


class _Watched(NamedTuple):
    """An identity of whose sums some are measured.

    Attributes:
        owners: of the sites of both sides, in the layout's order, then of what rounding may do.
        rare: parameters that did not run when identities were found, and may now.
    """

    number: int
    identity: Identity  # with these sums alone
    names: list[str]
    owners: list[Owner]
    rare: list[str]


class _Problem(Exception):
    """The reason why an identity is not measured."""


class JointSums:
    """Measures sums of weight times gradient, for `Parameters`."""

    def __init__(
        self,
        model: nn.Module,
        identities: Identities,
        store: StateStore,
        binder: SiteBinder,
        scaling: Scaling,
        merged: Iterable[int],
    ) -> None:
        """scaling: of the loss. merged: the ranks whose numbers are put together.

        ValueError where the model lacks a parameter.
        """
        self._store = store
        self._binder = binder
        self._batches = Batches(store, binder)
        self._scaling = scaling
        self._merged = frozenset(merged)
        self._modules = dict(unwrap_parallel(model).named_modules()) | clean_names(model)
        parallel = nn.parallel.DistributedDataParallel
        self._reducing = [weakref.ref(each) for each in model.modules() if isinstance(each, parallel)]
        self._parameters: dict[str, Parameter] = {}
        chosen = [sample_sums(each) for each in identities.identities]
        self._layout = IdentityLayout(chosen, lambda name: _find_dims(self._parameter(name).get()))
        self.watched = [self._watch(n, each, identities.list_rivals(each)) for n, each in enumerate(chosen)]
        self._spreads = self._layout.spreads(self._modules, self._is_measuring, self._fail)
        is_merged = len(self._merged) > 1
        self._parts = 1 if is_merged else max(1, min(_MOST_PARTS, len(chosen) // (2 * MANY)))
        self._part_of = divide(chosen, self._parts)
        self._part: int | None = None  # that the open step reads; None: all
        self._closed = 0  # measured steps
        self._whole_until = WHOLE_STEPS  # of these
        self._step = store.clears  # the open one
        self._done = set[int]()  # numbers, in this step
        self.left_out: dict[int, str] = {}  # of which at their latest step, with the reason

    def register_hooks(self) -> list[Any]:
        """Hang the hooks that see what rounding may do. Returns their handles."""
        found = [order.register(self._modules[name], spread) for name, spread in self._spreads.items()]
        self._modules = {}  # it does not keep the model alive
        return found

    def close_step(self) -> None:
        """Choose what the next measured step reads."""
        self._closed += 1
        self._choose()

    def read_whole(self) -> None:
        """Read all identities in the next measured steps: something was found."""
        self._whole_until = self._closed + WHOLE_STEPS
        self._choose()

    def _choose(self) -> None:
        turn = self._closed - self._whole_until
        # By the golden ratio, and not one after another: optimizers that alternate get all parts, too.
        part = None if turn < 0 or self._parts == 1 else int(turn * _GOLDEN % 1 * self._parts)
        if part == self._part:
            return
        self._part = part
        due = (each.identity for each in self.watched if part in (None, self._part_of[each.number]))
        names = self._layout.list_modules(due)
        for name, spread in self._spreads.items():
            spread.is_due = name in names

    def _fail(self, error: Exception) -> None:
        if self._store.strict:
            raise error
        self._binder.warn_once("spread", f"what rounding explains of identities could not be measured: {error!r}")

    def _parameter(self, name: str) -> Parameter:
        if name not in self._parameters:
            owner, _, key = name.rpartition(".")
            module = self._modules.get(owner)
            tensor = None if module is None else module._parameters.get(key)
            if module is None or tensor is None:
                raise ValueError(f"Options.identities: expected those of this model, which has no parameter {name!r}")
            self._parameters[name] = Parameter(len(self._parameters), name, Slot(module, key), True, None)
        return self._parameters[name]

    def _watch(self, number: int, identity: Identity, rare: list[str]) -> _Watched:
        owners = [
            self._add(self._parameter(each.parameter), number, SIDES[each.side], identity.groups)
            for each in self._layout.owners_of[number]
        ]
        owners.append(self._add(owners[0][0], number, ROUNDING, identity.groups))
        names = list(dict.fromkeys(identity.parameters))
        for name in rare:
            self._parameter(name)
        return _Watched(number, identity, names, owners, rare)

    def _add(self, parameter: Parameter, number: int, part: str, groups: int) -> Owner:
        tensor, kind = parameter.get(), tensor_of(number, part)
        device = torch.device("cpu") if tensor is None else tensor.device
        keeps = groups > 1 and self._store.make_room(device, groups, 1, has_bins=False)
        width = groups if keeps else 1
        entry = self._store.add(Site(parameter.name, kind), device, width, 1, keeps, has_bins=False)
        entry.channel_dim = -1
        parameter.entries[kind] = entry
        return parameter, kind

    def _is_measuring(self) -> bool:
        """Return whether anything is measured now; in a step that has begun since, nothing was."""
        if not self._store.flags.is_open() or is_capturing():
            return False
        if self._step != self._store.clears:
            self._step = self._store.clears
            self._done.clear()
            for spread in self._spreads.values():
                spread.clear()
        return True

    def measure(self, optimizer: Any) -> None:
        """Fold the sums of this step into their sites, once. optimizer: which is about to step; None: all have come."""
        if not self._is_measuring():
            return
        try:
            with self._store.flags.span(), self._store.lock, torch.no_grad():
                self._fold(optimizer)
        except Exception as error:
            if self._store.strict:
                raise
            self._binder.warn_once("identities", f"identities could not be measured: {error!r}")

    def _fold(self, optimizer: Any) -> None:
        due, parts = self._is_due(optimizer)
        if not due:
            return
        home = parts[due[0].number][due[0].names[0]].weight.device
        read = self._layout.read(parts, home)
        found = self._layout.compare(read, self._spreads)
        scale = getattr(optimizer, "grad_scale", None)
        variances = self._estimate_variances(due, parts, found, scale)
        values = found.values if scale is None else found.values / scale.to(home, torch.float64)
        # A row for each owner: the sums of both sides, then the variances.
        sides = iter(values[None].split([w.identity.groups for w in self.watched for _ in w.owners[:-1]], 1))
        rows = [[*itertools.islice(sides, len(w.owners) - 1), variances[w.number]] for w in self.watched]
        owners = [owner for each in due for owner in each.owners]
        sums = [row for each in due for row in rows[each.number]]
        places = (owner[0].entries[owner[1]].place.device for owner in owners)
        tensors = [row.to(place) for row, place in zip(sums, places, strict=True)]
        self._batches.accumulate(owners, tensors)

    def _is_due(self, optimizer: Any) -> tuple[list[_Watched], dict[int, dict[str, _LocalParameter]]]:
        """Return the identities that are measured now, and this process's parts of their parameters."""
        groups = [] if optimizer is None else optimizer.param_groups
        stepping = None if optimizer is None else {id(each) for group in groups for each in group["params"]}
        due: list[_Watched] = []
        parts: dict[int, dict[str, _LocalParameter]] = {}
        for each in self.watched:
            if each.number in self._done or self._part not in (None, self._part_of[each.number]):
                continue
            own = {name: self._parameters[name].get() for name in each.names}
            if stepping is not None and not any(id(tensor) in stepping for tensor in own.values()):
                continue
            is_all = stepping is None or all(id(tensor) in stepping for tensor in own.values())
            try:
                self._check(each, own, is_all)
                found = {name: _LocalParameter(tensor) for name, tensor in own.items() if tensor is not None}
                self._check_ranks(each.identity, found)
            except Exception as error:
                if self._store.strict and not isinstance(error, _Problem):
                    raise
                self.left_out[each.number] = str(error)
                continue
            self._done.add(each.number)
            self.left_out.pop(each.number, None)
            due.append(each)
            parts[each.number] = found
        return due, parts

    def _estimate_variances(
        self,
        due: list[_Watched],
        parts: dict[int, dict[str, _LocalParameter]],
        found: Compared,
        grad_scale: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Return the variance of the difference of both sides of each identity, [1, sums]."""
        home, spread = found.spread.device, found.spread
        if grad_scale is None:
            of_backward = 1.0 if self._scaling.scale is None else self._scaling.scale
            spread = spread / torch.as_tensor(of_backward, device=home, dtype=torch.float64) ** 2
        variance = found.squares + spread
        if grad_scale is not None:
            variance = variance / grad_scale.to(home, torch.float64) ** 2
        least = UNIT[torch.bfloat16] if any(_is_reduced_coarsely(each()) for each in self._reducing) else 0.0
        units = [0.0] * len(self.watched)
        for each in due:
            own = find_unit(each.identity, self._spreads, [part.weight for part in parts[each.number].values()])
            units[each.number] = max(own, least) ** 2
        sizes = [each.identity.groups for each in self.watched]
        by_sum = torch.tensor(units, dtype=torch.float64).repeat_interleave(torch.tensor(sizes)).to(home)
        variances = [*(variance * by_sum)[None].split(sizes, 1)]
        for each in due:
            for name in each.rare:  # what has no part in the proof has come: NaN is not judged
                tensor = self._parameters[name].get()
                if tensor is not None and tensor.grad is not None:
                    has_come = local_part(tensor.grad).any().to(home)
                    variances[each.number] = torch.where(has_come, torch.nan, variances[each.number])
        return variances

    def _check(self, each: _Watched, tensors: dict[str, torch.Tensor | None], is_all: bool) -> None:
        """Raise a _Problem where sums would say nothing."""
        gradients = {name: None if tensor is None else tensor.grad for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if tensor is None or isinstance(tensor, nn.parameter.UninitializedParameter):
                raise _Problem(f"{name} is not there")
            slot = self._parameters[name].slot()
            own = None if slot is None else slot.get()  # an optimizer may step a copy of it: see Parameter.get
            if own is None or not own.requires_grad:
                raise _Problem(f"{name} is frozen")
            if own.shape != tensor.shape:
                raise _Problem(f"of {name} its optimizer steps a part, in another shape")
            if not is_all and gradients[name] is None:
                raise _Problem("its parameters are of several optimizers, and have not all got a gradient")
            gradient = gradients[name]
            if gradient is not None and local_part(gradient).layout != torch.strided:
                raise _Problem("a gradient is sparse")
            if not {tensor.dtype, tensor.dtype if gradient is None else gradient.dtype} <= {*_native.DTYPES}:
                raise _Problem(f"it is of {tensor.dtype}")
            owner, _, key = name.rpartition(".")
            known = self._spreads[owner].versions.get(key) if owner in self._spreads else None
            if known is not None and known[0] == id(tensor) and known[1] != tensor._version:
                raise _Problem("a parameter was changed between its forward and the optimizer's step")
        if not any(gradient is not None for gradient in gradients.values()):
            raise _Problem("no gradient came")

    def _check_ranks(self, identity: Identity, parts: dict[str, _LocalParameter]) -> None:
        """Raise a _Problem where this rank has parts of sums, and the others' are not added."""
        ranks = frozenset[int]().union(*(part.ranks for part in parts.values()))
        if not ranks or ranks <= self._merged:
            return
        whole = None
        for term in (*identity.left, *identity.right):
            held = parts[term.parameter].find_held(term)
            here = set[int]() if held is None else set(term.groups[held].tolist())
            is_cut = held is None or here & set(term.groups[~held].tolist())
            if is_cut or (whole is not None and here != whole):
                raise _Problem("its parts lie on several ranks, which attach(process_group=...) puts together")
            whole = here
        for part in parts.values():
            part.times = 1.0


class _LocalParameter(LocalParameter):
    """This process's part of a DTensor.

    Attributes:
        cuts: dimensions of which other ranks have parts.
        is_partial: the gradient is yet to be summed over ranks.
        ranks: those that have the other parts.
        times: by which sums are multiplied, so that their mean over the ranks is the whole's.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        super().__init__(local_part(parameter.detach()), None if gradient is None else local_part(gradient.detach()))
        if self.gradient is not None and self.gradient.shape != self.weight.shape:
            raise _Problem("a gradient lies on the ranks in another way than its parameter")
        self.cuts = set[int]()
        self.is_partial = False
        self.ranks = frozenset[int]()
        if is_dtensor(parameter):
            self._place(parameter, gradient)

    def _place(self, parameter: Any, gradient: Any) -> None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh = parameter.device_mesh
        shape, begin = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        if tuple(shape) != tuple(self.weight.shape):
            raise _Problem("a parameter's part is not as its placements say")
        self.begin = list(begin)
        if gradient is not None and not is_dtensor(gradient):
            raise _Problem("a parameter is a DTensor, and its gradient is none")
        others = parameter.placements if gradient is None else gradient.placements
        for size, own, of_gradient in zip(mesh.shape, parameter.placements, others, strict=True):
            if hasattr(own, "dim") and not own.is_partial():
                self.cuts.add(own.dim % parameter.dim())
                self.times *= size
            elif of_gradient.is_partial():
                self.is_partial = True
                self.times *= 1 if of_gradient.reduce_op == "avg" else size
            else:
                continue
            self.ranks = frozenset(mesh.mesh.flatten().tolist())

    def find_held(self, term: Term) -> torch.Tensor | None:
        """Return which of a term's places are here as a whole, a mask; None: other ranks have parts of these."""
        if self.is_partial or self.cuts - {term.dim}:
            return None
        begin = self.begin[term.dim] if self.begin else 0
        return (term.places >= begin) & (term.places < begin + self.weight.shape[term.dim])


def _find_dims(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or isinstance(tensor, nn.parameter.UninitializedParameter) else tensor.dim()


def _is_reduced_coarsely(model: Any) -> bool:
    """Return whether something else than a sum reduces its gradients, such as a sum in bfloat16."""
    return any(getattr(hook, "__name__", "") != "allreduce_hook" for hook, _ in getattr(model, "_comm_hooks", ()))


def divide(identities: Sequence[Identity], parts: int) -> list[int]:
    """Return a part for each: layers of one name but for their number are dealt out, and so each part has all kinds."""
    names = [_NUMBER.sub("*", f"{i.kind} {i.module} {i.left[0].parameter}") for i in identities]
    counts, seen, alone = Counter(names), Counter[str](), itertools.count()
    part_of = list[int]()
    for name in names:
        part_of.append((next(alone) if counts[name] == 1 else seen[name]) % parts)
        seen[name] += 1
    return part_of


def sample_sums(identity: Identity) -> Identity:
    """Return an identity with at most `MOST` of its sums: runs of adjacent ones, spread over all."""
    if identity.groups <= MOST:
        return identity
    runs = MOST // _RUN
    starts = torch.arange(runs, dtype=torch.float64) * (identity.groups - _RUN) / (runs - 1)
    groups = (starts.long()[:, None] + torch.arange(_RUN)).flatten().unique()
    number = torch.full((identity.groups,), -1)
    number[groups] = torch.arange(len(groups))

    def some(terms: Sequence[Term]) -> tuple[Term, ...]:
        kept = [(term, number[term.groups] >= 0) for term in terms]
        return tuple(replace(t, places=t.places[mask], groups=number[t.groups[mask]]) for t, mask in kept)

    mask = number[identity.channel_groups] >= 0
    return replace(
        identity,
        left=some(identity.left),
        right=some(identity.right),
        groups=len(groups),
        channels=identity.channels[mask],
        channel_groups=number[identity.channel_groups[mask]],
    )
