"""find_identities(): which sums of weight times gradient a model's symmetries make equal, proved by powers of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hookstats.identities.checking import Identities
from hookstats.identities.inside import find_identities_inside
from hookstats.identities.runs import (
    ChannelPart,
    Reading,
    RepeatableModel,
    Scaled,
    draw_powers_of_two,
    is_same,
    join_name,
    list_tensors,
    place_of,
    scale_output,
    scale_terms,
    spreads,
)
from hookstats.identities.spreads import find_owner
from hookstats.identities.terms import Identity, Term
from hookstats.modules.heads import KEY_HEADS, SIZES_OF_HEADS, find_heads, read_number

_RUNS = ("channel", "rotated pair", "adjacent pair", "head", "all")


def find_identities(model: nn.Module, forward: Callable[[], Any]) -> Identities:
    """Find the equations that a model's gradients must fulfil in every step, for any loss and batch, by proof.

        found = hookstats.find_identities(model, lambda: model(batch))
        print(found)
        print(found.check(lambda: loss_of(model(batch)).backward()))

    Scaling a channel by a and its readers' columns by 1 / a changes nothing. So the sum of weight times gradient over
    that channel's row equals the same sum over its readers' columns (Kunin et al., arXiv 2012.04728): between a norm
    and its readers, values and the projection of attention's output, queries and keys, the two matrices of a gated or
    ReLU MLP, convolutions. That a scale changes nothing is proved and not taken from names. Outputs are scaled by
    powers of two, which do not round; each reader is given what it had before; the model's output must be the old one
    bit for bit.

    The model runs some ten to some hundred times without gradients, in the mode that it is in. A forward hook scales
    outputs; no parameter is changed. Afterwards random numbers, buffers, modes and attributes are as before. What every
    module that has parameters was given and has returned is kept meanwhile, so take a small batch.

    Args:
        model: of plain parameters, not sharded: find them before `fully_shard`; the names hold afterwards.
        forward: runs the model on a batch, under autocast if training does, and returns its outputs.

    Returns:
        `Identities`: prints as a list; `check(run)` compares the gradients of a forward and backward.

    Raises:
        TypeError: for a model that is no module or has DTensors, or a forward that cannot be called.
        ValueError: for a forward that returns no floating tensor, or is another one in a second run with the same
            random numbers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"find_identities: expected a torch.nn.Module, got {type(model).__name__}")
    if not callable(forward):
        raise TypeError(f"find_identities: expected a function that runs the model, got {type(forward).__name__}")
    sharded = [name for name, each in model.named_parameters() if hasattr(each, "placements")]
    if sharded:
        raise TypeError(
            f"find_identities: expected plain parameters, got a DTensor for {sharded[0]}; call it before sharding"
        )
    runs = RepeatableModel(model, forward)
    return Identities(model, _Finding(runs).find_all(), runs.list_unused())


class _Finding:
    def __init__(self, runs: RepeatableModel) -> None:
        self._runs = runs
        self._model = runs.model
        self._generator = torch.Generator().manual_seed(0)
        self._carriers: dict[str, list[Term]] = {}  # of a producer, by its own names of parameters, all channels
        self._inside: list[Identity] = []
        self._shared = _find_shared(runs.model)

    def find_all(self) -> list[Identity]:
        self._runs.visit(self._find_carriers)
        self._runs.visit(lambda name: self._inside.extend(find_identities_inside(self._runs, name, self._generator)))
        alone: dict[str, list[ChannelPart]] = {}  # parts that no reader undoes, by the parent of their module
        found: list[Identity] = []
        for names in _group_alike(self._model, self._carriers):
            first, *others = names
            proved, failed = self._cut_parts(first)
            found += [identity for _, identity in proved]
            for part in failed:
                alone.setdefault(find_owner(first), []).append(part)
            found += self._repeat([part for part, _ in proved], others)
            for name in others:
                alone.setdefault(find_owner(name), []).extend(ChannelPart(name, each.channels) for each in failed)
        found += self._find_pairs(alone)
        return self._filter_proved(
            [each for each in (*found, *self._inside) if not self._shared.intersection(each.parameters)]
        )

    def _filter_proved(self, identities: list[Identity]) -> list[Identity]:
        """Return those that hold for the whole model with its parameters scaled, all at once or each by itself.

        So a parameter that is also used elsewhere is found, and what saturates: these powers are larger. What is 0 has
        other values meanwhile, as a branch that begins at 0 hides what it adds to.
        """
        filled = self._runs.fill_zeros()
        output = self._runs.run_with(filled) if filled else self._runs.output
        if not identities or self._is_same(identities, filled, output):
            return identities
        return [each for each in identities if self._is_same([each], filled, output)]

    def _is_same(self, identities: list[Identity], filled: dict[str, torch.Tensor], expected: Any) -> bool:
        own = {**dict(self._model.named_parameters()), **filled}
        largest = 2 if any(each.dtype == torch.float16 for each in own.values()) else 7
        sides = []
        for each in identities:
            powers = draw_powers_of_two(max(each.groups, 2), self._generator, largest)[: each.groups]
            sides += [(each.left, powers), (each.right, 1 / powers)]
        output = self._runs.run_with(filled | scale_terms(own, *sides))
        if not any(term.offset for each in identities for term in each.left):
            return is_same(output, expected)
        pairs = zip(list_tensors(output), list_tensors(expected), strict=True)
        return all(bool((a - b).norm() <= 0.02 * b.norm()) for a, b in pairs)  # 1 + w is rounded

    # Producers

    def _find_carriers(self, name: str) -> None:
        """Find which parameters scale a module's output, channel by channel."""
        outputs = list_tensors(self._runs.calls[name][0].output)
        if not outputs or not outputs[0].dim():
            return
        if not is_same(self._runs.call(name, {}), self._runs.calls[name][0].output):
            return  # it keeps something from call to call
        own = self._runs.fill_zero_vectors(name)
        plain = self._runs.call(name, own)
        for dim in (-1, 1) if outputs[0].dim() > 2 else (-1,):
            powers = draw_powers_of_two(outputs[0].shape[dim], self._generator) if outputs[0].shape[dim] > 1 else None
            if powers is None:
                continue
            wanted = scale_output(plain, dim, powers)
            if is_same(wanted, plain):
                return  # it is 0
            for carriers in _list_candidates(own, len(powers)):
                got = self._runs.call(name, own | scale_terms(own, (carriers, powers)))
                offset = any(each.offset for each in carriers)
                if is_same(got, wanted) or (offset and _is_close(got, wanted)):
                    self._carriers[name] = carriers
                    self._runs.dims[name] = dim
                    return

    def _cut_parts(self, name: str) -> tuple[list[tuple[ChannelPart, Identity]], list[ChannelPart]]:
        """Prove what can be of a module's channels. Returns it, and the parts that nothing undoes."""
        proved: list[tuple[ChannelPart, Identity]] = []
        failed: list[ChannelPart] = []
        taken = torch.zeros(self._runs.width(name), dtype=torch.bool)
        for channels in self._list_divisions(name):
            if taken[channels].any():
                continue
            part = ChannelPart(name, channels)
            found = self._prove([part])
            if found:
                proved += [(part, each) for each in found]
                taken[channels] = True
            else:
                failed.append(part)
        return proved, [each for each in failed if not taken[each.channels].any()]

    def _list_divisions(self, name: str) -> Iterator[torch.Tensor]:
        """Yield parts of an output: all of it, halves, thirds, the queries, keys and values of its heads."""
        width = self._runs.width(name)
        every = torch.arange(width)
        yield every
        seen = {tuple(every.tolist())}
        for part in self._split_fused(name, every):
            if tuple(part.tolist()) not in seen:
                seen.add(tuple(part.tolist()))
                yield part

    def _split_fused(self, name: str, every: torch.Tensor) -> Iterator[torch.Tensor]:
        width = len(every)
        parent = self._model.get_submodule(find_owner(name))
        heads = find_heads(parent)
        if heads and width % (3 * heads) == 0:
            yield from (each.reshape(-1) for each in every.view(heads, 3, -1).unbind(1))
        of_keys = read_number((parent,), KEY_HEADS) or heads
        if heads and of_keys and width % (heads + 2 * of_keys) == 0:
            size = width // (heads + 2 * of_keys)
            yield from every.split([heads * size, of_keys * size, of_keys * size])
        for count in (2, 3):
            if width % count == 0 and width > count:
                yield from every.chunk(count)

    def _prove(self, parts: list[ChannelPart]) -> list[Identity] | None:
        """Prove at once that the scale of each part is undone by what reads it."""
        readings = self._read(parts)
        if readings is None or readings != self._read(parts):  # other powers: two channels may have had the same
            return None
        if {each.producer for each in readings} != set(range(len(parts))):
            return None
        return [
            self._find_junction(part, [each for each in readings if each.producer == number])
            for number, part in enumerate(parts)
        ]

    def _read(self, parts: list[ChannelPart]) -> list[Reading] | None:
        scaled = [Scaled(each, draw_powers_of_two(len(each.channels), self._generator)) for each in parts]
        return self._runs.readers(scaled)

    def _repeat(self, parts: list[ChannelPart], others: list[str]) -> list[Identity]:
        """Prove in the same modules of other layers what was proved in the first: all at once, or one by one."""
        found: list[Identity] = []
        for part in parts:
            alike = [ChannelPart(name, part.channels) for name in others]
            if not alike:
                continue
            at_once = self._prove(alike)
            if at_once is not None:
                found += at_once
                continue
            for each in alike:
                found += self._prove([each]) or []
        return found

    def _find_junction(self, part: ChannelPart, readings: list[Reading]) -> Identity:
        count = len(part.channels)
        right = []
        for each in readings:
            numbers = torch.arange(count, dtype=torch.float64)
            (groups,) = [places for places, repeats, run in spreads(numbers, count * each.repeats) if run == each.run]
            right.append(
                Term(join_name(each.module, each.parameter), each.dim, torch.arange(len(groups)), groups.long())
            )
        groups = torch.arange(count)
        return Identity(
            "channels",
            self._make_terms(part, groups),
            tuple(right),
            count,
            part.module,
            self._runs.dims[part.module],
            part.channels,
            groups,
        )

    def _make_terms(self, part: ChannelPart, groups: torch.Tensor) -> tuple[Term, ...]:
        return tuple(
            Term(join_name(part.module, each.parameter), each.dim, part.channels, groups, each.offset)
            for each in self._carriers[part.module]
        )

    # Pairs

    def _find_pairs(self, alone: dict[str, list[ChannelPart]]) -> list[Identity]:
        found: list[Identity] = []
        for parent, parts in alone.items():
            taken: list[ChannelPart] = []
            for few in parts:
                for many in parts:
                    if len(many.channels) < len(few.channels) or not self._may_pair(many, few):
                        continue
                    if any(_is_overlapping(each, other) for each in (many, few) for other in taken):
                        continue
                    pair = self._prove_pair(parent, many, few)
                    if pair is not None:
                        found.append(pair)
                        taken += [many, few]
        return found

    def _may_pair(self, many: ChannelPart, few: ChannelPart) -> bool:
        """Return whether both are parts of one output, or outputs as a whole."""
        if many.module == few.module:
            return not _is_overlapping(many, few)
        return all(len(each.channels) == self._runs.width(each.module) for each in (many, few))

    def _prove_pair(self, parent: str, many: ChannelPart, few: ChannelPart) -> Identity | None:
        """Prove that two outputs may be scaled against each other, in the finest groups that hold."""
        count, width = len(few.channels), len(many.channels)
        if width % count:
            return None
        whole = torch.zeros(count, dtype=torch.long)
        run = self._is_invariant(many, few, whole, torch.zeros(width, dtype=torch.long), 1)
        if not run:
            return None
        for groups in self._list_groupings(parent, count):
            number = int(groups.max()) + 1
            if number < 2:
                continue
            for spread, _, _ in spreads(groups.double(), width):
                if self._is_invariant(many, few, groups, spread.long(), number):
                    return self._make_pair(many, few, groups, spread.long(), number)
        return self._make_pair(many, few, whole, torch.zeros(width, dtype=torch.long), 1)

    def _make_pair(
        self, many: ChannelPart, few: ChannelPart, groups: torch.Tensor, spread: torch.Tensor, number: int
    ) -> Identity:
        left, right = self._make_terms(many, spread), self._make_terms(few, groups)
        return Identity("pair", left, right, number, many.module, self._runs.dims[many.module], many.channels, spread)

    def _is_invariant(
        self, many: ChannelPart, few: ChannelPart, groups: torch.Tensor, spread: torch.Tensor, number: int
    ) -> bool:
        for _ in range(3):  # two groups that must not be apart may have had the same power
            powers = draw_powers_of_two(max(number, 2), self._generator)[:number]
            sides = [Scaled(many, powers[spread]), Scaled(few, 1 / powers[groups])]
            if self._runs.readers(sides) != [] or any(self._runs.readers([each]) == [] for each in sides):
                return False  # it changes something, or one side alone does not
        return True

    def _list_groupings(self, parent: str, count: int) -> Iterator[torch.Tensor]:
        """Yield groups of channels, the finest first: channels, pairs that are rotated together, heads."""
        every = torch.arange(count)
        yield every
        said = read_number((self._model.get_submodule(parent),), SIZES_OF_HEADS)
        heads = find_heads(self._model.get_submodule(parent))
        sizes = [
            size for size in dict.fromkeys((said, count // heads if heads else None, count, 64, 128, 32, 16, 8)) if size
        ]
        sizes = [size for size in sizes if count % size == 0]
        for size in sizes:
            if size % 2 == 0:
                yield every // size * (size // 2) + every % (size // 2)
        if count % 2 == 0:
            yield every // 2
        for size in sizes:
            yield every // size


def _list_candidates(own: dict[str, torch.Tensor], width: int) -> Iterator[list[Term]]:
    """Yield which of a module's parameters may carry the channels of its output."""
    every = torch.arange(width)
    vectors = [Term(key, 0, every, every) for key, each in own.items() if each.dim() == 1 and len(each) == width]
    for key, each in own.items():
        for dim in range(each.dim() if each.dim() > 1 else 0):
            if each.shape[dim] == width:
                yield [Term(key, dim, every, every), *vectors]
    if vectors:
        yield vectors
    if len(vectors) == 1:
        yield [replace(vectors[0], offset=1.0)]


def _group_alike(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Group modules that are the same part of other layers: one name but for numbers, one class, the same sizes."""
    found: dict[Any, list[str]] = {}
    for name in names:
        module = model.get_submodule(name)
        sizes = tuple(each.shape for each in module.parameters())
        found.setdefault((place_of(name), type(module), sizes), []).append(name)
    return list(found.values())


def _is_overlapping(left: ChannelPart, right: ChannelPart) -> bool:
    return left.module == right.module and bool(torch.isin(left.channels, right.channels).any())


def _is_close(left: Any, right: Any) -> bool:
    (a, *_), (b, *_) = list_tensors(left), list_tensors(right)
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=torch.finfo(a.dtype).eps * 16, atol=0)


def _find_shared(model: nn.Module) -> set[str]:
    """Return the names of parameters that stand in several places: their gradient is not of one of them."""
    places: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(each), []).append(name)
    return {name for names in places.values() if len(names) > 1 for name in names}
