"""Both sides of identities in each measured step: after the last backward, before an optimizer or clipping changes it.

Of each identity at most 64 sums are read, the same in all steps and on all ranks, so that they can be compared and
merged: runs of four adjacent channels, which lie in one sector of memory, spread over all of them. What is measured
goes to sites of its own: "identity.3.left" and "identity.3.right" of each parameter of an identity, by its number, and
beside them "identity.3.rounding", the variance of their difference.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hookstats.identities.checking import Identities, place_of
from hookstats.identities.spreads import Spread, owners_of, spread_of, unit_of
from hookstats.identities.terms import UNIT, Identity, Term
from hookstats.modules import order
from hookstats.modules.selection import Slot, clean_names
from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.fields import Site
from hookstats.numbers.identities import ROUNDING, SIDES, tensor_of
from hookstats.tools.undo import bare
from hookstats.watch.batches import Batches, Owner, Parameter
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.memory import Store, local_part
from hookstats.watch.scaling import Scaling

MOST = 64  # sums of an identity
_RUN = 4  # of which so many are adjacent


@dataclass
class _Watched:
    """An identity of whose sums some are measured."""

    number: int
    identity: Identity  # with these sums alone
    owners: list[tuple[int, Parameter, Owner, list[Term]]]  # the side, and whose sums go to which site
    rounding: Owner
    names: list[str]
    rare: list[str] = field(default_factory=list)  # parameters that did not run when identities were found, and may now


class _Problem(Exception):
    """Why an identity is not measured."""


class JointSums:
    """Measures sums of weight times gradient, for `Parameters`."""

    def __init__(
        self,
        model: nn.Module,
        identities: Identities,
        store: Store,
        binder: SiteBinder,
        scaling: Scaling | None,
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
        self._modules = dict(bare(model).named_modules()) | clean_names(model)
        parallel = nn.parallel.DistributedDataParallel
        self._reducing = [weakref.ref(each) for each in model.modules() if isinstance(each, parallel)]
        self._parameters: dict[str, Parameter] = {}
        self.watched = [self._watch(number, each) for number, each in enumerate(identities.identities)]
        places: dict[str, list[str]] = {}
        for name in identities.unseen:
            places.setdefault(place_of(name), []).append(name)
        for each in self.watched:
            each.rare = [name for place in {place_of(name) for name in each.names} for name in places.get(place, [])]
            for name in each.rare:
                self._parameter(name)
        chosen = [each.identity for each in self.watched]
        channels: dict[str, dict[int, list[torch.Tensor]]] = {}
        for identity in chosen:
            channels.setdefault(identity.module, {}).setdefault(identity.channel_dim, []).append(identity.channels)
        self._spreads = {
            name: Spread(
                {dim: torch.cat(parts).unique() for dim, parts in channels.get(name, {}).items()},
                self._is_measuring,
                partial(self._fail, name),
            )
            for name in owners_of(chosen)
            if name in self._modules
        }
        self._terms: dict[tuple[int, torch.device], Term] = {}  # by their ids
        self._step = store.clears  # the open one
        self._done = set[int]()  # numbers, in this step
        self.left_out: dict[int, str] = {}  # of which at their latest step, with the reason

    def hang(self) -> list[Any]:
        """Hang the hooks that see what rounding may do. Returns their handles."""
        found = [order.register(self._modules[name], spread) for name, spread in self._spreads.items()]
        self._modules = {}  # it does not keep the model alive
        return found

    def _fail(self, name: str, error: Exception) -> None:
        if self._store.strict:
            raise error
        problem = f"what rounding explains of identities could not be measured at {name!r}: {error!r}"
        self._binder.warn_once(("identity", name), problem)

    def _parameter(self, name: str) -> Parameter:
        if name not in self._parameters:
            owner, _, key = name.rpartition(".")
            module = self._modules.get(owner)
            tensor = None if module is None else module._parameters.get(key)
            if module is None or tensor is None:
                raise ValueError(f"Options.identities: expected those of this model, which has no parameter {name!r}")
            self._parameters[name] = Parameter(len(self._parameters), name, Slot(module, key), True, None)
        return self._parameters[name]

    def _watch(self, number: int, identity: Identity) -> _Watched:
        some = sampled(identity)
        owners = []
        for side, terms in enumerate((some.left, some.right)):
            for name in dict.fromkeys(term.parameter for term in terms):
                parameter = self._parameter(name)
                of_it = [term for term in terms if term.parameter == name]
                owners.append((side, parameter, self._add(parameter, number, SIDES[side], some.groups), of_it))
        first = owners[0][1]
        names = list(dict.fromkeys(some.parameters))
        return _Watched(number, some, owners, self._add(first, number, ROUNDING, some.groups), names)

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
        groups = [] if optimizer is None else optimizer.param_groups
        stepping = None if optimizer is None else {id(each) for group in groups for each in group["params"]}
        owners, values = self._measure(stepping, getattr(optimizer, "grad_scale", None))
        self._batches.accumulate(owners, values)

    def _measure(
        self, stepping: set[int] | None, grad_scale: torch.Tensor | None
    ) -> tuple[list[Owner], list[torch.Tensor | None]]:
        owners: list[Owner] = []
        values: list[torch.Tensor | None] = []
        for each in self.watched:
            if each.number in self._done:
                continue
            own = [parameter.get() for _, parameter, *_ in each.owners]
            if stepping is not None and not any(id(tensor) in stepping for tensor in own):
                continue
            is_all = stepping is None or all(id(tensor) in stepping for tensor in own)
            try:
                found = self._sums(each, is_all, grad_scale)
            except _Problem as problem:
                self.left_out[each.number] = str(problem)
                continue
            except Exception as error:
                if self._store.strict:
                    raise
                self._binder.leave_out([each.rounding[0].entries[each.rounding[1]]], error)
                self.left_out[each.number] = repr(error)
                continue
            self._done.add(each.number)
            self.left_out.pop(each.number, None)
            fed = [owner for _, _, owner, _ in each.owners] + [each.rounding]
            owners += fed
            devices = [owner.entries[kind].place.device for owner, kind in fed]
            values += [sums[None].to(device) for sums, device in zip(found, devices, strict=True)]
        return owners, values

    @property
    def reasons(self) -> Counter[str]:
        """Count the identities that were left out at their latest step, by the reason."""
        return Counter(self.left_out.values())

    def _sums(self, each: _Watched, is_all: bool, grad_scale: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the sums of each owner, and the variance of the difference of both sides."""
        tensors = {parameter.name: parameter.get() for _, parameter, *_ in each.owners}
        self._check(each, tensors, is_all)
        identity = each.identity
        parts = {name: _Part(tensor) for name, tensor in tensors.items() if tensor is not None}
        device = parts[each.owners[0][1].name].weight.device
        self._check_ranks(identity, parts)
        sums: list[torch.Tensor] = []
        of_squares = torch.zeros(identity.groups, dtype=torch.float64, device=device)
        weights: dict[int, torch.Tensor | None] = {}
        for _, parameter, _, terms in each.owners:
            part, own = parts[parameter.name], torch.zeros_like(of_squares)
            for term in terms:
                here = self._term_on(term, part.weight.device)
                read = part.read(term, here).to(device)
                own += here.grouped(read[0], identity.groups)
                of_squares += here.grouped(read[1], identity.groups)
                weights[id(term)] = read[2] if part.weight.dim() > 1 else None
            sums.append(own)
        of_left, of_right = ([weights[id(term)] for term in side] for side in (identity.left, identity.right))
        spread = spread_of(identity, self._spreads, of_left, of_right, device)
        if spread is not None and grad_scale is None and self._scaling is not None:
            of_backward = 1.0 if self._scaling.scale is None else self._scaling.scale
            spread = spread / torch.as_tensor(of_backward, device=device, dtype=torch.float64) ** 2
        unit = unit_of(identity, self._spreads, [part.weight for part in parts.values()])
        if any(_is_reduced_coarsely(each()) for each in self._reducing):
            unit = max(unit, UNIT[torch.bfloat16])
        variance = (of_squares if spread is None else of_squares + spread) * unit**2
        if grad_scale is not None:
            scale = grad_scale.to(device, torch.float64)
            sums, variance = [own / scale for own in sums], variance / scale**2
        if each.rare:
            came = [t.grad for name in each.rare if (t := self._parameters[name].get()) is not None]
            for gradient in came:  # what has no part in the proof has come: NaN is not judged
                if gradient is not None:
                    moves = local_part(gradient).any().to(device)
                    variance = torch.where(moves, torch.nan, variance)
        return [*sums, variance]

    def _term_on(self, term: Term, device: torch.device) -> Term:
        """Return a term whose numbers of channels lie on a device, to which they are copied once."""
        key = id(term), device
        if key not in self._terms:
            self._terms[key] = replace(term, places=term.places.to(device), groups=term.groups.to(device))
        return self._terms[key]

    def _check(self, each: _Watched, tensors: dict[str, torch.Tensor | None], is_all: bool) -> None:
        """Raise a _Problem where sums would say nothing."""
        gradients = {name: None if tensor is None else tensor.grad for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if tensor is None or isinstance(tensor, nn.parameter.UninitializedParameter):
                raise _Problem(f"{name} is not there")
            if not tensor.requires_grad:
                raise _Problem(f"{name} is frozen")
            if not is_all and gradients[name] is None:
                raise _Problem("its parameters are of several optimizers, and have not all got a gradient")
            gradient = gradients[name]
            if gradient is not None and local_part(gradient).layout != torch.strided:
                raise _Problem("a gradient is sparse")
            owner, _, key = name.rpartition(".")
            known = self._spreads[owner].versions.get(key) if owner in self._spreads else None
            if known is not None and known[0] == id(tensor) and known[1] != tensor._version:
                raise _Problem("a parameter was changed between its forward and the optimizer's step")
        if not any(gradient is not None for gradient in gradients.values()):
            raise _Problem("no gradient came")

    def _check_ranks(self, identity: Identity, parts: dict[str, _Part]) -> None:
        """Raise a _Problem where this rank has parts of sums, and the others' are not added."""
        ranks = frozenset[int]().union(*(part.ranks for part in parts.values()))
        if not ranks or ranks <= self._merged:
            return
        whole = None
        for term in (*identity.left, *identity.right):
            held = parts[term.parameter].held(term)
            here = set[int]() if held is None else set(term.groups[held].tolist())
            is_cut = held is None or here & set(term.groups[~held].tolist())
            if is_cut or (whole is not None and here != whole):
                raise _Problem("its parts lie on several ranks, which attach(process_group=...) puts together")
            whole = here
        for part in parts.values():
            part.times = 1.0


class _Part:
    """This process's part of a parameter and of its gradient."""

    def __init__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        self.weight = local_part(parameter.detach())
        self.gradient = torch.zeros_like(self.weight) if gradient is None else local_part(gradient.detach())
        if self.gradient.shape != self.weight.shape:
            raise _Problem("a gradient lies on the ranks in another way than its parameter")
        self.begin, self.cuts = [0] * self.weight.dim(), set[int]()
        self.is_partial = False
        self.ranks = frozenset[int]()
        self.times = 1.0  # by which sums are multiplied, so that their mean over the ranks is the whole's
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

    def held(self, term: Term) -> torch.Tensor | None:
        """Return which of a term's places are here as a whole, a mask; None: other ranks have parts of these."""
        if self.is_partial or self.cuts - {term.dim}:
            return None
        begin = self.begin[term.dim]
        return (term.places >= begin) & (term.places < begin + self.weight.shape[term.dim])

    def read(self, term: Term, on_device: Term) -> torch.Tensor:
        """Return `Term.per_place`, with zeros for what is not here. on_device: the same term."""
        if term.dim not in self.cuts:
            return on_device.per_place(self.weight, self.gradient, on_device.places) * self.times
        begin = self.begin[term.dim]
        here = (term.places >= begin) & (term.places < begin + self.weight.shape[term.dim])
        some = term.per_place(self.weight, self.gradient, term.places[here] - begin)
        found = some.new_zeros((3, len(here)))
        found[:, here.nonzero()[:, 0].to(found.device)] = some
        return found * self.times


def _is_reduced_coarsely(model: Any) -> bool:
    """Return whether something else than a sum reduces its gradients, such as a sum in bfloat16."""
    return any(getattr(hook, "__name__", "") != "allreduce_hook" for hook, _ in getattr(model, "_comm_hooks", ()))


def sampled(identity: Identity, most: int = MOST) -> Identity:
    """Return an identity with at most so many of its sums: runs of adjacent ones, spread over all."""
    if identity.groups <= most:
        return identity
    runs = most // _RUN
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
