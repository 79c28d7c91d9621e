"""Whether the ranks that should hold the same tensors do: to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import nn

from hookstats._warn import WarnOnce
from hookstats.cluster.groups import group_of
from hookstats.replicas.contents import COLUMNS, Replica, contents_of, digest_of, table_of
from hookstats.replicas.exchange import Exchange, exchange_among
from hookstats.replicas.locating import Pair, find_first

_TIMEOUT = timedelta(minutes=10)
_LOCATED = 16  # tensors at most whose first element is looked for
_FAILED = -1  # in place of the number of tensors

Table = npt.NDArray[np.int64]

_warn_once = WarnOnce()


@dataclass(frozen=True)
class Disagreement:
    """A tensor that is not the same on all ranks that should hold it."""

    tensor: str
    """The clean name of the parameter or buffer."""
    kind: str
    """``param``, ``param_grad``, ``buffer``; of an optimizer's state ``optimizer.`` and its key, ``optimizer.exp_avg``
    (``optimizer[1].exp_avg`` for the second of several)."""
    differs: str
    """``values``: some bits, -0.0 is not 0.0. ``form``: dtype or shape. ``missing``: not all of the ranks have it."""
    ranks: tuple[int, ...]
    """Those that differ from the reference, ascending, as `torch.distributed.get_rank` numbers them."""
    reference_rank: int
    """The lowest of the ranks that agree with each other, where these are more than half; else the lowest rank."""
    agree: int
    """How many ranks have what the reference has, the reference included."""
    majority: bool
    """Whether they are more than half of those compared; else nobody knows which are wrong."""
    index: tuple[int, ...] | None = None
    """With ``locate=True``: the first element, in the order of indices, in which the reference and the first of `ranks`
    differ; in the local part of a DTensor. None: it was not looked for."""
    values: tuple[Any, Any] | None = None
    """What the reference and the first of `ranks` have. Of ``values``, with ``locate=True``: that element, as Python
    numbers. Else dtype and shape, for example ``"float32 [3, 4]"``, None where it is missing."""
    bits: tuple[str, str] | None = None
    """The bits of that element, in hexadecimal: NaNs have several, and 0.0 is not -0.0."""

    @property
    def sentence(self) -> str:
        """Who differs from whom, and in what."""
        several = len(self.ranks) > 1
        named = f"{'ranks' if several else 'rank'} {', '.join(map(str, self.ranks))}"
        reference = f"rank {self.reference_rank}"
        if not self.majority:
            against = f"{reference}, the lowest; no majority agrees"
        elif self.agree > 1:
            against = f"the majority, {reference} and {self.agree - 1} more"
        else:
            against = reference
        text = f"{self.tensor} ({self.kind}): {named} {'differ' if several else 'differs'} from {against}"
        if self.index is not None:
            text += f"; first at {list(self.index)}"
        if self.values is None:
            return text
        said = ["missing" if value is None else str(value) for value in self.values]
        if self.bits is not None:
            said = [f"{value} (0x{bits})" for value, bits in zip(said, self.bits, strict=True)]
        return f"{text}: {said[0]} on {reference}, {said[1]} on rank {self.ranks[0]}"


def check_replicas(
    model: nn.Module,
    process_group: Any = None,
    *,
    optimizer: Any = None,
    buffers: bool = True,
    gradients: bool = True,
    locate: bool = False,
) -> list[Disagreement]:
    """Which tensors of a model are not the same, bit for bit, on all ranks that should hold the same; [] if none.

    Every rank of the group calls it, at the same point of its training, and gets the same list; then
    ``for each in hookstats.check_replicas(model, optimizer=optimizer): print(each.sentence)``. A good place is behind
    ``optimizer.step()``, before the gradients are zeroed; not inside ``no_sync()``, where gradients differ by design.
    It changes nothing of the training: no value, no random number, none of its process groups.

    The bits of each tensor are read where they lie, on a GPU by one launch for all of them, and become a checksum of 64
    bits (csrc/checksum.h) in which every bit and its place count: one flipped bit is always seen, anything else is
    missed with a chance of 2^-64 for each tensor. Where all agree, three numbers per rank are exchanged, over a gloo
    group of hookstats' own. The first use connects every rank with every other one: beyond some hundred ranks name
    fewer of them, such as those along the replicated dimension of a mesh. On a GPU it waits for what was launched
    before.

    Compared are a tensor's values among the ranks that hold the same part of it. DTensors say which part that is: what
    is sharded by FSDP2 has no replicas, but for HSDP's; what tensor parallelism replicates is compared. Plain tensors
    count as whole, so `process_group` names the ranks that should hold the same: with pipeline stages, or with layers
    that are cut without DTensors, those of one place in the pipeline, of one shard. What another rank has under a name,
    in dtype and shape, is compared, too. Part of an optimizer's state that a rank does not have is not missed there:
    optimizers that shard it keep it on one rank.

    Tensors that cannot be read are left out, and named in one warning: sparse and nested ones, ones without data (meta,
    not initialised yet), wrappers other than DTensors, DTensors that are yet to be reduced, what
    FullyShardedDataParallel has flattened.

    Args:
        model: the module, wrapped (DistributedDataParallel, torch.compile) or not.
        process_group: the ranks, by a ProcessGroup or a DeviceMesh; None: all.
        optimizer: also its state; one, or several in a sequence.
        buffers: also buffers. BatchNorm's running statistics differ between ranks under DistributedDataParallel, which
            sends those of the first rank to the others only when the next forward begins.
        gradients: also gradients, of parameters that have one.
        locate: also find the first element that differs, of 16 tensors at most: 6 small collectives more, and for a
            tensor that is not contiguous a copy of it. Where one rank asks, all do it.

    Raises:
        ValueError: where torch.distributed does not run, or this rank is not in the group. TypeError: for arguments of
            another type.
        RuntimeError: where a rank of the group does not call it within 10 minutes, ends, or raises itself; for tensors
            on a device that hookstats was built without.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    optimizers = optimizer if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    for each in optimizers:
        if not (hasattr(each, "state") and hasattr(each, "param_groups")):
            raise TypeError(f"optimizer: expected an Optimizer or a sequence of them, got {type(each).__name__}")
    ranks = sorted(group_of(dist.group.WORLD if process_group is None else process_group).ranks)
    exchange = exchange_among("replicas", ranks, _TIMEOUT)
    try:
        held, skipped = contents_of(model, optimizers, buffers, gradients)
        table = table_of(held)
    except Exception:
        exchange.gather(np.array([_FAILED, 0, 0]))  # nobody waits for this rank
        raise
    if skipped:
        listed = ", ".join(f"{name}: {why}" for name, why in list(skipped.items())[:8])
        more = f", and {len(skipped) - 8} more" if len(skipped) > 8 else ""
        _warn_once(frozenset(skipped), f"check_replicas leaves out what it cannot read: {listed}{more}")
    heads = exchange.gather(np.array([len(table), digest_of(table.tobytes()), locate]))
    if failed := [rank for rank, (tensors, *_) in zip(ranks, heads, strict=True) if tensors == _FAILED]:
        raise RuntimeError(f"hookstats: expected the tensors of all ranks {ranks}, but these could not tell: {failed}")
    if (heads[:, :2] == heads[0, :2]).all():
        return []
    comparison = _Comparison(exchange, held, table, heads[:, 0])
    return comparison.located() if heads[:, 2].any() else comparison.disagreements


class _Vote(NamedTuple):
    """The places in the group that have what most have, and those that have something else."""

    agree: list[int]
    others: list[int]
    majority: bool


def _vote(have: Mapping[int, Hashable]) -> _Vote | None:
    """What each place in the group has; None: all the same."""
    value, count = Counter(have.values()).most_common(1)[0]
    if count == len(have):
        return None
    majority = 2 * count > len(have)
    if not majority:
        value = have[min(have)]
    agree = sorted(place for place, mine in have.items() if mine == value)
    return _Vote(agree, sorted(have.keys() - agree), majority)


class _Row(NamedTuple):
    """What a place in the group has of a tensor, in hashes."""

    form: int
    piece: int
    checksum: int


class _Texts(NamedTuple):
    """What a tensor is called, and what its forms are, by their hashes."""

    name: str
    kind: str
    forms: dict[int, str]


class _Comparison:
    """Compares the tables of all ranks. Every rank comes to the same conclusions."""

    def __init__(self, exchange: Exchange, held: list[Replica], table: Table, sizes: Table) -> None:
        """table: of what this rank holds. sizes: of the tables of all ranks."""
        self._exchange = exchange
        self._held = {int(number): each for number, each in zip(table[:, 0], held, strict=True)}
        padded = np.zeros((max(sizes), COLUMNS), np.int64)
        padded[: len(table)] = table
        tables = [each[:size] for each, size in zip(exchange.gather(padded), sizes, strict=True)]
        self._rows: dict[int, dict[int, _Row]] = {}  # of tensors that are not the same everywhere; by number and place
        numbers = _conspicuous(tables)
        for place, each in enumerate(tables):
            for number, *row in each[np.isin(each[:, 0], numbers)].tolist():
                self._rows.setdefault(number, {})[place] = _Row(*row)
        self._texts = self._told()
        self._found = [
            (number, each)
            for number, rows in self._rows.items()
            for each in (*self._form_disagreements(number, rows), *self._value_disagreements(number, rows))
        ]

    @property
    def disagreements(self) -> list[Disagreement]:
        return [each for _, each in self._found]

    def located(self) -> list[Disagreement]:
        """The same disagreements; the first of those in values say at which element they begin."""
        found, ranks = self.disagreements, self._exchange.ranks
        wanted = [i for i, each in enumerate(found) if each.differs == "values"][:_LOCATED]
        pairs = [
            Pair(self._found[i][0], ranks.index(found[i].reference_rank), ranks.index(found[i].ranks[0]))
            for i in wanted
        ]
        local = {number: each.local for number, each in self._held.items()}
        for i, element in zip(wanted, find_first(self._exchange, pairs, local), strict=True):
            found[i] = replace(found[i], index=element.at, values=element.values, bits=element.bits)
        return found

    def _told(self) -> dict[int, _Texts]:
        """By number. Told by the first place that has each form."""
        mine, here = [], self._exchange.place
        for number, rows in self._rows.items():
            row = rows.get(here)
            if row is not None and here == min(place for place, each in rows.items() if each.form == row.form):
                held = self._held[number]
                mine.append([number, held.name, held.kind, row.form, held.form])
        texts: dict[int, _Texts] = {}
        for said in self._exchange.gather_json(mine):
            for number, name, kind, form, text in said:
                texts.setdefault(number, _Texts(name, kind, {})).forms[form] = text
        return texts

    def _form_disagreements(self, number: int, rows: Mapping[int, _Row]) -> Iterator[Disagreement]:
        forms: dict[int, int | None] = {place: row.form for place, row in rows.items()}
        if not number & 1:  # which no rank may do without
            forms = {place: forms.get(place) for place in range(len(self._exchange.ranks))}
        vote = _vote(forms)
        if vote is None:
            return
        reference = forms[vote.agree[0]]
        missing = [place for place in vote.others if forms[place] is None or reference is None]
        other = [place for place in vote.others if place not in missing]
        for differs, places in (("missing", missing), ("form", other)):
            if places:
                each = self._disagreement(number, differs, vote._replace(others=places))
                yield replace(each, values=(self._form(number, reference), self._form(number, forms[places[0]])))

    def _form(self, number: int, form: int | None) -> str | None:
        return None if form is None else self._texts[number].forms[form]

    def _value_disagreements(self, number: int, rows: Mapping[int, _Row]) -> Iterator[Disagreement]:
        for same in dict.fromkeys((row.form, row.piece) for row in rows.values()):
            vote = _vote({place: row.checksum for place, row in rows.items() if (row.form, row.piece) == same})
            if vote is not None:
                yield self._disagreement(number, "values", vote)

    def _disagreement(self, number: int, differs: str, vote: _Vote) -> Disagreement:
        name, kind, _ = self._texts[number]
        ranks = self._exchange.ranks
        others, reference = tuple(ranks[place] for place in vote.others), ranks[vote.agree[0]]
        return Disagreement(name, kind, differs, others, reference, len(vote.agree), vote.majority)


def _conspicuous(tables: Sequence[Table]) -> Table:
    """The numbers of tensors that differ in form, or in checksum where the piece is the same, or that a rank lacks."""
    rows = np.concatenate(tables)
    rows = rows[np.lexsort(rows.T[::-1])]
    same = rows[1:] == rows[:-1]  # number, form, piece, checksum
    differs = same[:, 0] & (~same[:, 1] | same[:, 2] & ~same[:, 3])
    numbers, holders = np.unique(rows[:, 0], return_counts=True)
    lacking = numbers[(holders < len(tables)) & (numbers & 1 == 0)]
    return np.union1d(rows[1:, 0][differs], lacking)
