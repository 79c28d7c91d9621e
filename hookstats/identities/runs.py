"""Runs of a model with outputs that are scaled, compared bit for bit with a run of it as it is. Over torch alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from hookstats.identities.terms import Term
from hookstats.tools.undo import ModuleState, RandomState, clear_autocast_cache, eager, pause_statistics


class Call(NamedTuple):
    """Inputs and output of a module in a run; tensors are copies."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class ChannelPart(NamedTuple):
    """Some channels of a module's output: all, or those of the queries in a fused projection."""

    module: str
    channels: torch.Tensor


class Scaled(NamedTuple):
    """Powers of two for channels of one module's output."""

    part: ChannelPart
    powers: torch.Tensor  # float64, one for each channel of the part


class Reading(NamedTuple):
    """A module whose columns undo a scale."""

    producer: int  # which of the scaled parts
    module: str
    parameter: str
    dim: int
    repeats: int  # how often each channel, or run of channels, stands in the input
    run: int  # how many adjacent channels are repeated together


class _Touched(Exception):
    """The scale has reached what does not undo it."""


def draw_powers_of_two(count: int, generator: torch.Generator, largest: int = 2) -> torch.Tensor:
    """Return float64[count], not all the same: 2 to the power of at most `largest`, or over it."""
    exponents = torch.randint(-largest, largest + 1, (count,), generator=generator)
    exponents[0], exponents[-1] = 1, exponents[-1] if count > 1 and exponents[-1] != 1 else -1
    return torch.exp2(exponents.double())


def list_tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating tensors of what a module was given or has returned."""
    leaves = tree_flatten(value)[0]
    return [
        each for each in leaves if isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex())
    ]


def is_same(left: Any, right: Any) -> bool:
    """Return whether all tensors are equal, bit for bit (NaN equals NaN)."""
    pairs = [list_tensors(value) for value in (left, right)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(*pairs, strict=True)
    )


def scale(tensor: torch.Tensor, dim: int, powers: torch.Tensor) -> torch.Tensor:
    """Return a tensor times powers of two along one dimension, in its own dtype."""
    shape = [1] * tensor.dim()
    shape[dim] = -1
    return tensor * powers.to(tensor.device, tensor.dtype).view(shape)


def scale_terms(
    tensors: Mapping[str, torch.Tensor], *sides: tuple[Iterable[Term], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors that terms are of, with their entries times powers of two, one for each group."""
    changed: dict[str, torch.Tensor] = {}
    for terms, powers in sides:
        for term in terms:
            before = changed.get(term.parameter, tensors[term.parameter].detach())
            every = torch.ones(before.shape[term.dim], dtype=torch.float64)
            every[term.places] = powers[term.groups]
            if term.offset:
                before = before + term.offset
            after = scale(before, term.dim, every)
            changed[term.parameter] = after - term.offset if term.offset else after
    return changed


def scale_output(output: Any, dim: int, powers: torch.Tensor) -> Any:
    """Return a module's output with its first floating tensor scaled."""
    leaves, spec = tree_flatten(output)
    for number, each in enumerate(leaves):
        if isinstance(each, torch.Tensor) and each.is_floating_point():
            leaves[number] = scale(each, dim, powers)
            break
    return tree_unflatten(leaves, spec)


class RepeatableModel:
    """A model and a forward that can be repeated bit for bit.

    After each run random numbers, modes, buffers and attributes are as they were before the first one.
    """

    def __init__(self, model: nn.Module, forward: Callable[[], Any]) -> None:
        self.model = model
        self._forward = forward
        self._state = ModuleState(model)
        devices = {each.device for each in (*model.parameters(), *model.buffers())}
        self._random = RandomState(model, devices)
        self._devices = devices
        self._busy = False  # a module is tried by itself
        self.modules = {
            name: module
            for name, module in model.named_modules()
            if any(each is not None for each in module._parameters.values())  # its parameters() may be a user's own
        }
        self.calls: dict[str, list[Call]] = {}
        self._inputs: dict[str, list[Any]] = {}  # of calls that have not returned
        self.dims: dict[str, int] = {}  # along which a producer's channels lie: -1, or 1
        self.output = _copy_tensors(
            self._run(dict.fromkeys(self.modules, self._keep_inputs), dict.fromkeys(self.modules, self._keep))
        )
        if not list_tensors(self.output):
            raise ValueError(
                f"forward: expected the model's outputs, got {type(self.output).__name__} without a floating tensor"
            )
        if not is_same(self._run({}, {}), self.output):
            raise ValueError(
                "forward: expected the same output, bit for bit, from a second run with the same random numbers"
            )

    def list_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return a module's own parameters, and those of modules inside it that are never called themselves."""
        module = self.modules[name]
        found = dict(module.named_parameters(recurse=False))
        for path, inner in module.named_modules():
            full = f"{name}.{path}" if name else path
            if path and full not in self.calls:
                found |= {f"{path}.{key}": each for key, each in inner.named_parameters(recurse=False)}
        return found

    def list_unused(self) -> list[str]:
        """Return the names of parameters that have no part in a run: of experts that got no token.

        Those of a module that is never called itself may be used by another one, as nn.MultiheadAttention does.
        """
        silent = {name for name in self.modules if name not in self.calls}
        by_place: dict[str, dict[str, torch.Tensor]] = {}
        for name, each in self.model.named_parameters():
            if name.rpartition(".")[0] in silent:
                by_place.setdefault(place_of(name), {})[name] = 2 * each.detach() + 1
        unused = [names for names in by_place.values() if is_same(self.run_with(names), self.output)]
        return [name for names in unused for name in names]

    def fill_zero_vectors(self, name: str) -> dict[str, torch.Tensor]:
        """Return a module's parameters with vectors that are 0 as others, so that a scale of them shows."""
        found = {key: each.detach() for key, each in self.list_parameters(name).items()}
        widest = max((each.dim() for each in found.values()), default=0)
        generator = torch.Generator().manual_seed(0)
        for key, each in found.items():
            if (each.dim() < widest or widest == 1) and not each.any():
                values = 0.25 + torch.rand(each.shape, generator=generator) / 2
                found[key] = values.to(each.device, each.dtype)
        return found

    def fill_zeros(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the model that are 0 as others: what they hide is there after some steps."""
        generator = torch.Generator().manual_seed(0)
        found = dict[str, torch.Tensor]()
        for name, each in self.model.named_parameters():
            if each.is_floating_point() and not each.any():
                size = each.shape[-1] if each.dim() > 1 else 1
                values = (0.25 + torch.rand(each.shape, generator=generator) / 2) / size
                found[name] = values.to(each.device, each.dtype)
        return found

    def call(self, name: str, changed: Mapping[str, torch.Tensor], args: Any = None, kwargs: Any = None) -> Any:
        """Return what a module makes of its first call's arguments, or of others, with some parameters changed."""
        module, first = self.modules[name], self.calls[name][0]
        given = (first.args, first.kwargs) if args is None else (args, kwargs)
        self._busy = True
        random = RandomState(self.model, self._devices)
        try:
            own = dict(module.named_parameters())
            # Whether a weight wants a gradient decides how a product of strided inputs is computed.
            same_kind = {key: each.requires_grad_(own[key].requires_grad) for key, each in changed.items()}
            return functional_call(module, same_kind, *_copy_value(given))
        except Exception:
            return None  # of a module that cannot do without what it was given in that run: it proves nothing
        finally:
            random.put_back()
            self._busy = False

    def visit(self, function: Callable[[str], None]) -> None:
        """Run the model, and call a function while each module that was called runs, below its autocast."""
        seen = set[str]()

        def once(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name not in seen and not self._busy:
                seen.add(name)
                function(name)

        self._run({}, dict.fromkeys(self.calls, once))

    def readers(self, scaled: list[Scaled]) -> list[Reading] | None:
        """Scale outputs, let readers have what they had before, and return them; None if anything else has changed."""
        found: dict[tuple[int, str], Reading] = {}
        count, undone = dict.fromkeys(self.calls, 0), dict[str, int]()
        by_module: dict[str, list[Scaled]] = {}
        for each in scaled:
            by_module.setdefault(each.part.module, []).append(each)

        def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._busy:
                return None
            old = self.calls[name][count[name]] if count[name] < len(self.calls[name]) else None
            if old is None:
                raise _Touched
            if is_same((args, kwargs), (old.args, old.kwargs)):
                return None
            reading = self._reading(name, (args, kwargs), old, scaled)
            if reading is None:
                raise _Touched
            if found.setdefault((reading.producer, name), reading) != reading:
                raise _Touched
            undone[name] = undone.get(name, 0) + 1
            return _restore_inputs((args, kwargs), (old.args, old.kwargs))

        def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if self._busy:
                return None
            count[name] += 1
            for each in by_module.get(name, ()):
                powers = torch.ones(self.width(name), dtype=torch.float64)
                powers[each.part.channels] = each.powers
                output = scale_output(output, self.dims[name], powers)
            return output

        try:
            output = self._run(dict.fromkeys(self.calls, before), dict.fromkeys(self.calls, after))
        except _Touched:
            return None
        except (IndexError, RuntimeError):  # of a module whose outputs have other sizes from call to call
            return None
        if any(undone[name] != len(self.calls[name]) for name in undone):  # its columns are read by another call, too
            return None
        return list(found.values()) if is_same(output, self.output) else None

    def run_with(self, changed: Mapping[str, torch.Tensor]) -> Any:
        """Return the model's output with other tensors in the place of some parameters, which are not written."""
        before: list[tuple[nn.Module, str, Any]] = []
        try:
            for name, value in changed.items():
                path, _, key = name.rpartition(".")
                module = self.model.get_submodule(path)
                before.append((module, key, module._parameters[key]))
                own = module._parameters[key]
                assert own is not None
                module._parameters[key] = nn.Parameter(value, own.requires_grad)
            return self._run({}, {})
        finally:
            for module, key, own in before:
                module._parameters[key] = own

    def width(self, name: str) -> int:
        """Return how many channels a producer has."""
        return int(list_tensors(self.calls[name][0].output)[0].shape[self.dims[name]])

    def _reading(self, name: str, given: Any, old: Call, scaled: list[Scaled]) -> Reading | None:
        leaves = [list_tensors(each) for each in (given, (old.args, old.kwargs))]
        if len(leaves[0]) != len(leaves[1]):
            return None
        changed = [pair for pair in zip(*leaves, strict=True) if not is_same(*pair)]
        if len(changed) != 1:
            return None
        new, before = changed[0]
        for dim in dict.fromkeys((new.dim() - 1, min(1, new.dim() - 1))):
            for producer, each in enumerate(scaled):
                for powers, repeats, run in spreads(each.powers, new.shape[dim]):
                    if new.shape == before.shape and is_same(new, scale(before, dim, powers)):
                        found = self._find_undoing(name, given, old, powers)
                        return None if found is None else Reading(producer, name, *found, repeats, run)
        return None

    def _find_undoing(self, name: str, given: Any, old: Call, powers: torch.Tensor) -> tuple[str, int] | None:
        """Find the parameter whose columns, divided by the powers, make the module's output what it was."""
        if is_same(self.call(name, {}, *given), old.output):
            return None  # nothing of it is seen, as with weights of 0: that proves nothing
        for key, parameter in self.list_parameters(name).items():
            for dim in range(parameter.dim()):
                if parameter.shape[dim] == len(powers) and parameter.dim() > 1:
                    divided = scale(parameter.detach(), dim, 1 / powers)
                    if is_same(self.call(name, {key: divided}, *given), old.output):
                        return key, dim
        return None

    def _keep_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.setdefault(name, []).append(_copy_value((args, kwargs)))

    def _keep(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, named = self._inputs[name].pop()
        self.calls.setdefault(name, []).append(Call(given, named, _copy_tensors(output)))

    def _run(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
        handles: list[Any] = []
        with torch.no_grad(), pause_statistics(self.model), eager(), clear_autocast_cache():
            for name, function in before.items():
                handles.append(self.modules[name].register_forward_pre_hook(partial(function, name), with_kwargs=True))
            for name, function in after.items():
                handles.append(self.modules[name].register_forward_hook(partial(function, name), with_kwargs=True))
            is_fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)  # it is taken or not by what hooks are there
            try:
                self._random.put_back()
                return self._forward()
            finally:
                torch.backends.mha.set_fastpath_enabled(is_fast)
                for handle in handles:
                    handle.remove()
                self._state.put_back()
                self._random.put_back()


def spreads(powers: torch.Tensor, width: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield how channels may lie in an input of some width: each, or each run of some, repeated (flattened, GQA)."""
    count = len(powers)
    if width % count:
        return
    repeats = width // count
    for run in range(1, count + 1):
        if count % run == 0:
            yield powers.view(-1, 1, run).expand(-1, repeats, run).reshape(-1), repeats, run
            if repeats == 1:
                return


def place_of(name: str) -> str:
    """Return a parameter's name without its numbers: experts of all layers have one place."""
    return re.sub(r"\b\d+\b", "*", name)


def join_name(module: str, parameter: str) -> str:
    """Return a parameter's name in the model."""
    return f"{module}.{parameter}" if module else parameter


def _copy_tensors(value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([each.detach().clone() if isinstance(each, torch.Tensor) else each for each in leaves], spec)


def _copy_value(value: Any) -> Any:
    """Return a copy that nobody else writes; of what cannot be copied, its tensors alone."""
    value = _copy_tensors(value)
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _restore_inputs(given: Any, old: Any) -> Any:
    """Return what a module is given, with the tensors of before where they are others."""
    leaves, spec = tree_flatten(given)
    before = iter(list_tensors(old))
    for number, each in enumerate(leaves):
        if isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()):
            earlier = next(before)
            leaves[number] = each if is_same(each, earlier) else earlier.clone()
    return tree_unflatten(leaves, spec)
