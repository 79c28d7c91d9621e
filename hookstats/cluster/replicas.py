"""check_replicas: a comparison of the tensors that ranks should hold alike, to the last bit."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hookstats._warn import WarnOnce
from hookstats.cluster.contents import Replica, checksums, list_contents, read_bytes
from hookstats.cluster.drifts import vote
from hookstats.cluster.exchange import Exchange
from hookstats.cluster.groups import find_group
from hookstats.cluster.union import some
from hookstats.numbers.kinds import kind_of

_TIMEOUT = 600.0  # seconds
_AT_ONCE = 4 << 20  # bytes of a tensor that are compared at a time
_LOCATED = 16  # tensors at most whose first element is looked for
_FAILED = b"null"  # in place of a text

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
    """The ranks that differ from the reference, ascending, as `torch.distributed.get_rank` numbers them."""
    reference_rank: int
    """The lowest of the ranks that agree with each other, where these are more than half; else the lowest rank."""
    agree: int
    """The number of ranks that have what the reference has, the reference included."""
    has_majority: bool
    """True: they are more than half of those compared; else nobody knows which are wrong."""
    index: tuple[int, ...] | None = None
    """With ``locate=True``: the first element, in the order of indices, in which the reference and the first of `ranks`
    differ; in the local part of a DTensor. None: it was not looked for."""
    values: tuple[Any, Any] | None = None
    """The values of the reference and the first of `ranks`. Of ``values``, with ``locate=True``: that element, as
    Python numbers. Else dtype and shape, for example ``"float32 [3, 4]"``, None where it is missing."""
    bits: tuple[str, str] | None = None
    """The bits of that element, in hexadecimal: NaNs have several, and 0.0 is not -0.0."""

    @property
    def sentence(self) -> str:
        """A line that says who differs from whom, and in what."""
        several = len(self.ranks) > 1
        named = f"{'ranks' if several else 'rank'} {', '.join(map(str, self.ranks))}"
        reference = f"rank {self.reference_rank}"
        if not self.has_majority:
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
    """Return the tensors of a model that are not the same, bit for bit, on all ranks that should hold the same.

    Every rank of the group calls it, at the same point of its training, and gets the same list; then
    ``for each in hookstats.check_replicas(model, optimizer=optimizer): print(each.sentence)``. A good place is behind
    ``optimizer.step()``, before the gradients are zeroed; not inside ``no_sync()``, where gradients differ by design.
    It changes nothing of the training: no value, no random number, none of its process groups.

    The bits of each tensor are read where they lie, by torch's operators, and become a checksum of 64 bits in which
    every bit and its place count: one flipped bit is always seen, anything else is missed with a chance of 2^-64 for
    each tensor. Where all agree, three numbers per rank are exchanged, over gloo groups of hookstats' own. On a GPU it
    waits for what was launched before. ``attach(process_group=...)`` compares a sample of each parameter in every
    measured step, for nothing; this compares all bits, when it is called.

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
        locate: also find the first element that differs, of 16 tensors at most, which are sent from one rank to another
            up to it. Where one rank asks, all do it.

    Raises:
        ValueError: where torch.distributed does not run, or this rank is not in the group. TypeError: for arguments of
            another type.
        RuntimeError: where a rank of the group does not call it within 10 minutes, ends, or raises itself.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    optimizers = optimizer if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    for each in optimizers:
        if not (hasattr(each, "state") and hasattr(each, "param_groups")):
            raise TypeError(f"optimizer: expected an Optimizer or a sequence of them, got {type(each).__name__}")
    ranks = tuple(sorted(find_group(dist.group.WORLD if process_group is None else process_group).ranks))
    held, skipped, text, failure, found = list[Replica](), dict[str, str](), _FAILED, None, []
    try:
        held, skipped = list_contents(model, optimizers, buffers, gradients)
        sums = checksums([each.local for each in held]).tolist()
        rows = [[*each[:-1], list(each.local.shape), sum_] for each, sum_ in zip(held, sums, strict=True)]
        text = json.dumps([locate, rows]).encode()
    except Exception as error:  # nobody waits for this rank
        failure = error
    with _exchange_among(ranks) as exchange:
        texts = exchange.gather_texts(text)
        failed = [rank for rank, told in zip(ranks, texts, strict=True) if told == _FAILED]
        if not failed and len(set(texts)) > 1:
            told = {each: json.loads(each) for each in set(texts)}
            tables = [{(name, kind): _Row(*row) for name, kind, *row in told[each][1]} for each in texts]
            found = list(_find_disagreements(ranks, tables))
            local = {(each.name, each.kind): each.local for each in held}
            of_values = [i for i, each in enumerate(found) if each.differs == "values"]
            for i in of_values[:_LOCATED] if any(wants for wants, _ in told.values()) else ():
                key = found[i].tensor, found[i].kind
                row = tables[ranks.index(found[i].reference_rank)][key]
                found[i] = _locate_difference(exchange, found[i], row, local.get(key))
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(
            f"hookstats: expected the tensors of all ranks {list(ranks)}, but these could not tell: {failed}"
        )
    if skipped:
        listed = some([f"{name}: {why}" for name, why in skipped.items()])
        _warn_once(frozenset(skipped), f"check_replicas leaves out what it cannot read: {listed}")
    return found


class _Row(NamedTuple):
    """A tensor as a rank tells of it. Ranks hold the same of one form and piece."""

    form: str
    piece: str
    shape: list[int]  # of its part
    checksum: int


_Table: TypeAlias = dict[tuple[str, str], _Row]  # by name and kind


@contextmanager
def _exchange_among(ranks: tuple[int, ...]) -> Iterator[Exchange]:
    """Lend the exchange of these ranks, kept from call to call. One that has failed is not used again.

    RuntimeError where a rank did not come in time, or is gone.
    """
    kept = _exchanges.setdefault(dist.group.WORLD, {})
    exchange = kept.pop(ranks, None) or Exchange("replicas", ranks, _TIMEOUT)
    try:
        yield exchange
    except (RuntimeError, TimeoutError) as error:
        expected = f"the ranks {some(ranks)} to come within {_TIMEOUT:g} s"
        raise RuntimeError(f"hookstats: expected {expected}, got: {error}") from error
    kept[ranks] = exchange


# By the group of all ranks. None of a job that was ended and begun anew is used again.
_exchanges: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Exchange]] = weakref.WeakKeyDictionary()


def _find_disagreements(ranks: Sequence[int], tables: Sequence[_Table]) -> Iterator[Disagreement]:
    """Compare the tables of all ranks; every rank finds the same."""
    for name, kind in dict.fromkeys(key for table in tables for key in table):
        rows = {place: table[name, kind] for place, table in enumerate(tables) if (name, kind) in table}
        forms = {place: row.form for place, row in rows.items()}
        # Of an optimizer's state a rank may have nothing: some cut it.
        everybodys = forms if kind_of(kind).is_update else {place: forms.get(place) for place in range(len(ranks))}
        compared: list[tuple[str, dict[int, Any]]] = [("form", everybodys)]
        for same in dict.fromkeys(row[:2] for row in rows.values()):
            compared.append(("values", {place: row.checksum for place, row in rows.items() if row[:2] == same}))
        for differs, have in compared:
            decided = vote(have)
            if decided is None:
                continue
            agree, others, has_majority = decided
            missing = [place for place in others if have[place] is None or have[agree[0]] is None]
            for how, places in (("missing", missing), (differs, [each for each in others if each not in missing])):
                if places:
                    values = None if how == "values" else (have[agree[0]], have[places[0]])
                    those = tuple(ranks[place] for place in places)
                    yield Disagreement(name, kind, how, those, ranks[agree[0]], len(agree), has_majority, values=values)


def _locate_difference(exchange: Exchange, found: Disagreement, row: _Row, local: torch.Tensor | None) -> Disagreement:
    """Find the first element in which the reference and the first of the others differ.

    row: of the reference. local: of this rank, if it has it. All ranks take part: the tensors of both are shown to all,
    a few MB at a time.
    """
    dtype = getattr(torch, row.form.split()[0])
    pair, size = (found.reference_rank, found.ranks[0]), math.prod(row.shape) * dtype.itemsize
    content = read_bytes(local).cpu().numpy() if local is not None and exchange.rank in pair else None
    for begin in range(0, size, _AT_ONCE):
        mine = np.zeros((2, min(_AT_ONCE, size - begin)), np.uint8)
        if content is not None:
            mine[pair.index(exchange.rank)] = content[begin : begin + _AT_ONCE]
        shown = exchange.max(mine)
        differs = np.flatnonzero(shown[0] != shown[1])
        if differs.size:
            element = int(differs[0]) // dtype.itemsize
            ours, theirs = (each.tobytes() for each in shown.reshape(2, -1, dtype.itemsize)[:, element])
            at = np.unravel_index(begin // dtype.itemsize + element, row.shape)
            return replace(
                found,
                index=tuple(map(int, at)),
                values=(_read_number(ours, dtype), _read_number(theirs, dtype)),
                bits=(ours[::-1].hex(), theirs[::-1].hex()),
            )
    return found


def _read_number(content: bytes, dtype: torch.dtype) -> Any:
    """Return one element as a Python number; None for a dtype whose elements are none."""
    one = torch.frombuffer(bytearray(content), dtype=dtype)[0]
    try:
        return (one.float() if dtype.is_floating_point and dtype.itemsize == 1 else one).item()
    except (RuntimeError, NotImplementedError):
        return None
