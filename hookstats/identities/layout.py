"""Both sides of many identities at once: one read of tensors and gradients, and what is added up to what."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hookstats import _native
from hookstats.identities.spreads import NO_ROWS, SpreadHook, find_owner
from hookstats.identities.terms import Identity


@dataclass
class LocalParameter:
    """This process's part of a parameter and of its gradient.

    Attributes:
        gradient: None: it is 0.
        begin: where the part begins in the whole, by dimension.
        times: by which its sums are multiplied.
    """

    weight: torch.Tensor
    gradient: torch.Tensor | None
    begin: list[int] = field(default_factory=list)
    times: float = 1.0


class Owner(NamedTuple):
    """A parameter on one side of an identity, and which values are its sums."""

    side: int
    parameter: str
    values: slice


class Compared(NamedTuple):
    """The numbers that identities are judged by, each in the order of the layout.

    Attributes:
        values: the sums of each owner.
        squares: of each sum of an identity the sum of (w g)^2 over both sides.
        spread: what terms of single tokens would add up to if their signs were random.
    """

    values: torch.Tensor
    squares: torch.Tensor
    spread: torch.Tensor


class _Adder:
    """Adds up rows of a matrix by their slot, always in one order."""

    def __init__(self, slots: torch.Tensor, count: int, rows: torch.Tensor | None = None) -> None:
        """slots: of each row, count of them. rows: which rows of the matrix; None: all."""
        order = slots.argsort(stable=True)
        self._rows = order if rows is None else rows[order]
        self._begins = torch.searchsorted(slots[order], torch.arange(count))

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        if self._rows.device != matrix.device:
            self._rows, self._begins = self._rows.to(matrix.device), self._begins.to(matrix.device)
        return F.embedding_bag(self._rows, matrix, self._begins, mode="sum")


class IdentityLayout:
    """The places of parameters that are read, and the sums of identities to which they belong.

    Attributes:
        identities: these.
        owners_of: of each identity those of the left side, then those of the right.
        groups: of each identity, which values of `Compared.squares` are its own.
        channels: by module and dimension, which channels of its output are asked for, ascending.
        readers: modules of which the output's gradient is asked for.
    """

    def __init__(self, identities: Sequence[Identity], dims: Callable[[str], int]) -> None:
        """dims: how many dimensions a parameter has."""
        self.identities = identities
        self.owners_of: list[list[Owner]] = []
        self.groups: list[slice] = []
        self.readers: list[str] = []
        self.channels: dict[str, dict[int, torch.Tensor]] = {}
        rows: list[list[int]] = []
        self._tensors: list[tuple[int, str]] = []  # the identity and parameter of each
        none = torch.zeros(0, dtype=torch.int64)
        places, place_values, lefts, left_channels = [none], [none], [none], [none]
        value_groups, value_readers, channel_groups = [none], [none], [none]
        place = value = group = channel = 0
        for number, each in enumerate(identities):
            self.groups.append(slice(group, group + each.groups))
            self.owners_of.append([])
            for side, terms in enumerate((each.left, each.right)):
                for name in dict.fromkeys(term.parameter for term in terms):
                    self.owners_of[-1].append(Owner(side, name, slice(value, value + each.groups)))
                    value_groups.append(torch.arange(group, group + each.groups))
                    reader = -1
                    if side == 1 and each.kind == "channels" and dims(name) > 1:
                        if find_owner(name) not in self.readers:
                            self.readers.append(find_owner(name))
                        reader = self.readers.index(find_owner(name))
                    value_readers.append(torch.full((each.groups,), reader))
                    for term in (term for term in terms if term.parameter == name):
                        end = place + len(term.places)
                        if (number, name) not in self._tensors:
                            self._tensors.append((number, name))
                        tensor = self._tensors.index((number, name))
                        rows.append([tensor, term.dim, 0, place, end, int(term.offset)])
                        places.append(term.places)
                        place_values.append(term.groups + value)
                        # A norm's weight multiplies what is normalised: its size is that of the output.
                        if side == 0 and dims(name) > 1 and len(term.places) == len(each.channels):
                            lefts.append(torch.arange(place, end))
                            left_channels.append(torch.arange(channel, channel + len(each.channels)))
                        place = end
                    value += each.groups
            channel_groups.append(each.channel_groups + group)
            group, channel = group + each.groups, channel + len(each.channels)
        self._rows = rows  # see csrc/joint.cpp
        self._places = {torch.device("cpu"): torch.cat(places)}
        self._by_owner = _Adder(torch.cat(place_values), value)
        self._value_groups, self._value_readers = torch.cat(value_groups), torch.cat(value_readers)
        self._by_group = _Adder(self._value_groups, group)
        self._of_left = _Adder(torch.cat(left_channels), channel, torch.cat(lefts))
        self._by_channel_group = _Adder(torch.cat(channel_groups), group)
        self._find_channels()

    def _find_channels(self) -> None:
        asked: dict[str, dict[int, list[torch.Tensor]]] = {}
        for each in self.identities:
            asked.setdefault(each.module, {}).setdefault(each.channel_dim, []).append(each.channels)
        self._slots: dict[tuple[str, int], torch.Tensor] = {}
        begin = 0
        for name, by_dim in asked.items():
            self.channels[name] = {dim: torch.cat(parts).unique() for dim, parts in by_dim.items()}
            for dim, some in self.channels[name].items():
                self._slots[name, dim] = torch.arange(begin, begin := begin + len(some))
        self._seen_channels = begin
        self._sources = torch.cat(
            [
                torch.zeros(0, dtype=torch.int64),
                *(
                    torch.searchsorted(self.channels[each.module][each.channel_dim], each.channels)
                    + self._slots[each.module, each.channel_dim][0]
                    for each in self.identities
                ),
            ]
        )

    def spreads(self, modules: Container[str], *how: Any) -> dict[str, SpreadHook]:
        """Return hooks of all modules whose parameters or outputs identities are of. how: more arguments of each."""
        return {
            name: SpreadHook(self.channels.get(name, {}), name in self.readers, *how)
            for name in self.list_modules(self.identities)
            if name in modules
        }

    @staticmethod
    def list_modules(identities: Iterable[Identity]) -> dict[str, None]:
        """Return the modules whose parameters or outputs these are of, each once."""
        return dict.fromkeys(name for i in identities for name in (*map(find_owner, i.parameters), i.module))

    def read(self, parts: Mapping[int, Mapping[str, LocalParameter]], home: torch.device) -> torch.Tensor:
        """Return the sums of w g, (w g)^2 and w^2 at each place of some identities, float64[places, 3], on `home`.

        parts: by the number of the identity, of its parameters. The sums of what is not there are 0.
        """
        given = [parts.get(number, {}).get(name) for number, name in self._tensors]
        devices = {each.weight.device for each in given if each is not None}
        found = torch.zeros((len(self._places[torch.device("cpu")]), 3), dtype=torch.float64, device=home)
        for device in devices:
            if device not in self._places:
                self._places[device] = self._places[torch.device("cpu")].to(device)
            weights, gradients, table = list[torch.Tensor](), list[torch.Tensor | None](), list[list[int]]()
            times = list[tuple[float, int, int]]()
            for tensor, dim, _, first, end, offset in self._rows:
                part = given[tensor]
                if part is not None and part.weight.device == device:
                    table.append([len(weights), dim, part.begin[dim] if part.begin else 0, first, end, offset])
                    weights.append(part.weight)
                    gradients.append(part.gradient)
                    times += [(part.times, first, end)] if part.times != 1 else []
            sums = _native.joint_sums(weights, gradients, torch.tensor(table), self._places[device])
            for factor, first, end in times:
                sums[first:end] *= factor
            found = sums if device == home and len(devices) == 1 else found + sums.to(home)
        return found

    def compare(self, read: torch.Tensor, spreads: Mapping[str, SpreadHook]) -> Compared:
        """Return both sides, and what bounds the rounding of their difference.

        By the output between both sides the spread is N rms(y)^2 rms(dy)^2. Where y is small because what makes it has
        cancelled, by the input and the weights of the left side; where dy is, by the weights and the output's gradient
        of the right.
        """
        home = read.device
        for name in ("_value_groups", "_value_readers", "_sources"):
            setattr(self, name, getattr(self, name).to(home))
        values = self._by_owner(read)
        squares = self._by_group(values[:, 1:2])[:, 0]
        both, of_x, of_y, of_readers = self._add_seen(spreads, home)
        per_channel = torch.stack([both + of_x * self._of_left(read[:, 2:])[:, 0], of_y], 1)
        summed, of_output = self._by_channel_group(per_channel).unbind(1)
        of_columns = values[:, 2] * of_readers[self._value_readers] * of_output[self._value_groups]
        return Compared(values[:, 0], squares, summed + self._by_group(of_columns[:, None])[:, 0])

    def _add_seen(self, spreads: Mapping[str, SpreadHook], home: torch.device) -> tuple[torch.Tensor, ...]:
        """Add up what hooks have seen, over calls: 0 where none came.

        Returns:
            N ms(y) ms(dy), ms(x) sum dy^2 and sum y^2 of each channel of `Identity.channels`, and ms(dy) of each
            reader, then 0. ms is a mean square over N tokens, y the output, x the input.
        """
        y, x, dy, slots, factors = *(list[torch.Tensor]() for _ in range(4)), list[list[float]]()
        for (name, dim), own in self._slots.items():
            for each in spreads[name].seen if name in spreads else []:
                part, whole = each.plan.channels.get(dim), each.plan.whole
                if part is not None:
                    of_gradient = each.gradient_plan.channels[dim]
                    y.append(each.sums[part.sums].to(home))
                    dy.append(each.gradient_sums[of_gradient.sums].to(home))
                    x.append((NO_ROWS if whole is None else each.sums[whole.sums]).to(home))
                    slots.append(own)
                    share, values = part.share * of_gradient.share, max(whole.values, 1) if whole else 1
                    factors.append(
                        [1 / share / max(each.tokens[dim], 1), 1 / of_gradient.share / values, 1 / part.share]
                    )
        sums = torch.zeros((3, self._seen_channels), dtype=torch.float64, device=home)
        if y:
            calls = torch.arange(len(y)).repeat_interleave(torch.tensor([len(each) for each in slots])).to(home)
            of_y, of_dy, of_x = torch.cat(y), torch.cat(dy), torch.stack(x).sum(1)[calls]
            times = torch.tensor(factors, dtype=torch.float64).to(home)[calls].T
            sums.index_add_(1, torch.cat(slots).to(home), torch.stack([of_y * of_dy, of_x * of_dy, of_y]) * times)
        readers = torch.zeros(len(self.readers) + 1, dtype=torch.float64, device=home)
        seen = [
            (number, each.gradient_sums[whole.sums].to(home), max(whole.values, 1))
            for number, name in enumerate(self.readers)
            for each in (spreads[name].seen if name in spreads else [])
            if (whole := each.gradient_plan.whole) is not None
        ]
        if seen:
            numbers, rows, counts = zip(*seen, strict=True)
            means = torch.stack(rows).sum(1) / torch.tensor(counts, dtype=torch.float64).to(home)
            readers.index_add_(0, torch.tensor(numbers).to(home), means)
        return (*sums[:, self._sources], readers)
