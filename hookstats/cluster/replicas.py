"""Whether the ranks that should hold the same tensors do: to the last bit."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hookstats._warn import WarnOnce
from hookstats.cluster.contents import Replica, bytes_of, checksums, contents_of
from hookstats.cluster.drifts import Vote, vote
from hookstats.cluster.exchange import Exchange, some
from hookstats.cluster.groups import group_of
from hookstats.cluster.union import checksum_of as digest_of
from hookstats.numbers.kinds import kind_of

_TIMEOUT = 600.0  # seconds
_AT_ONCE = 4 << 20  # bytes of a tensor that are compared at a time
_LOCATED = 16  # tensors at most whose first element is looked for
_FAILED = -1  # in place of the length of a text

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
    ranks = sorted(group_of(dist.group.WORLD if process_group is None else process_group).ranks)
    held, skipped, text, failure, found = list[Replica](), dict[str, str](), b"", None, []
    try:
        held, skipped = contents_of(model, optimizers, buffers, gradients)
        sums = checksums([each.local for each in held]).tolist()
        text = json.dumps([[*each[:-1], checksum] for each, checksum in zip(held, sums, strict=True)]).encode()
    except Exception as error:  # nobody waits for this rank
        failure = error
    with _exchange_among(ranks) as exchange:
        size = len(text) if failure is None else _FAILED
        heads = exchange.gather(np.array([size, digest_of(text), locate]))
        failed = [rank for rank, (told, *_) in zip(ranks, heads, strict=True) if told == _FAILED]
        if not failed and not (heads[:, :2] == heads[0, :2]).all():
            found = list(_disagreements(ranks, [json.loads(each) for each in exchange.gather_texts(text)]))
            if heads[:, 2].any():
                found = _located(exchange, found, {(each.name, each.kind): each.local for each in held})
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"hookstats: expected the tensors of all ranks {ranks}, but these could not tell: {failed}")
    if skipped:
        listed = ", ".join(f"{name}: {why}" for name, why in list(skipped.items())[:8])
        more = f", and {len(skipped) - 8} more" if len(skipped) > 8 else ""
        _warn_once(frozenset(skipped), f"check_replicas leaves out what it cannot read: {listed}{more}")
    return found


@contextmanager
def _exchange_among(ranks: Sequence[int]) -> Iterator[Exchange]:
    """That of these ranks, kept from call to call. One that has failed is not used again, nor is that of another job.

    RuntimeError where a rank did not come in time, or is gone.
    """
    known = _exchanges.get(tuple(ranks))
    if known is None or known.world() is not dist.group.WORLD:
        known = _Kept(weakref.ref(dist.group.WORLD), 0, None)
    number = known.number + (known.exchange is None)
    exchange = known.exchange or Exchange(f"replicas/{number}", ranks, _TIMEOUT)
    _exchanges[tuple(ranks)] = known._replace(number=number, exchange=None)
    try:
        yield exchange
    except (RuntimeError, TimeoutError) as error:
        expected = f"the ranks {some(ranks)} to come within {_TIMEOUT:g} s"
        raise RuntimeError(f"hookstats: expected {expected}, got: {error}") from error
    _exchanges[tuple(ranks)] = known._replace(number=number, exchange=exchange)


class _Kept(NamedTuple):
    """The exchange among some ranks."""

    world: Any  # a weak reference to the group of all ranks
    number: int  # one more after each that has failed
    exchange: Exchange | None  # None while it is used, and when it has failed


_exchanges: dict[tuple[int, ...], _Kept] = {}


def _disagreements(ranks: Sequence[int], tables: Sequence[Any]) -> Iterator[Disagreement]:
    """tables: of each rank, what it holds: name, kind, form, piece and checksum. Every rank finds the same."""
    by_name: dict[tuple[str, str], dict[int, tuple[str, str, int]]] = {}  # of what is held, by place
    for place, table in enumerate(tables):
        for name, kind, *row in table:
            by_name.setdefault((name, kind), {})[place] = tuple(row)
    for (name, kind), rows in by_name.items():

        def differs(how: str, decided: Vote, of: tuple[str, str] = (name, kind), **fields: Any) -> Disagreement:
            others = tuple(ranks[place] for place in decided.others)
            return Disagreement(
                *of, how, others, ranks[decided.agree[0]], len(decided.agree), decided.majority, **fields
            )

        forms: dict[int, str | None] = {place: form for place, (form, _, _) in rows.items()}
        if not kind_of(kind).is_update:  # of an optimizer's state a rank may have nothing: some cut it
            forms = {place: forms.get(place) for place in range(len(ranks))}
        decided = vote(forms)
        if decided is not None:
            reference = forms[decided.agree[0]]
            missing = [place for place in decided.others if forms[place] is None or reference is None]
            for how, places in (
                ("missing", missing),
                ("form", [each for each in decided.others if each not in missing]),
            ):
                if places:
                    yield differs(how, decided._replace(others=places), values=(reference, forms[places[0]]))
        for same in dict.fromkeys(row[:2] for row in rows.values()):
            decided = vote({place: checksum for place, (*of, checksum) in rows.items() if tuple(of) == same})
            if decided is not None:
                yield differs("values", decided)


def _located(
    exchange: Exchange, found: list[Disagreement], held: Mapping[tuple[str, str], torch.Tensor]
) -> list[Disagreement]:
    """The same; the first of those in values say at which element they begin. held: by this rank."""
    for i in [i for i, each in enumerate(found) if each.differs == "values"][:_LOCATED]:
        pair = exchange.ranks.index(found[i].reference_rank), exchange.ranks.index(found[i].ranks[0])
        local = held[found[i].tensor, found[i].kind] if exchange.place in pair else None
        at, values, bits = _first_difference(exchange, pair, local)
        found[i] = replace(found[i], index=at, values=values, bits=bits)
    return found


def _first_difference(
    exchange: Exchange, pair: tuple[int, int], local: torch.Tensor | None
) -> tuple[tuple[int, ...], tuple[Any, Any], tuple[str, str]]:
    """The first element in which the tensors of two ranks differ, by their places: its indices, values, and bits.

    local: what this rank has, if it is one of them. All ranks take part: what the first has is shown to all, a few MB
    at a time.
    """
    content = None if local is None else bytes_of(local).cpu().numpy()
    size = int(exchange.max(np.array(0 if content is None else len(content))))
    for begin in range(0, size, _AT_ONCE):
        shown = np.zeros(min(_AT_ONCE, size - begin), np.uint8)
        mine = shown if content is None else content[begin : begin + _AT_ONCE]
        reference = exchange.max(mine if exchange.place == pair[0] else shown)
        differs = np.flatnonzero(mine != reference) if exchange.place == pair[1] else np.zeros(0, np.int64)
        first = int(exchange.max(np.array(begin + differs[0] if differs.size else -1)))
        if first >= 0:
            break
    told = b"null"
    if content is not None and local is not None:
        element = first // local.itemsize
        at = [int(i) for i in np.unravel_index(element, tuple(local.shape))]
        bits = content[element * local.itemsize : (element + 1) * local.itemsize].tobytes()
        told = json.dumps([at, str(local.dtype), bits.hex()]).encode()
    texts = exchange.gather_texts(told)
    (index, dtype, ours), (_, _, theirs) = (json.loads(texts[place]) for place in pair)
    numbers = [_number(bytes.fromhex(each), getattr(torch, dtype.removeprefix("torch."))) for each in (ours, theirs)]
    in_hex = [bytes.fromhex(each)[::-1].hex() for each in (ours, theirs)]
    return tuple(index), (numbers[0], numbers[1]), (in_hex[0], in_hex[1])


def _number(content: bytes, dtype: torch.dtype) -> Any:
    """One element as a Python number; None for a dtype whose elements are none."""
    one = torch.frombuffer(bytearray(content), dtype=dtype)[0]
    try:
        return (one.float() if dtype.is_floating_point and dtype.itemsize == 1 else one).item()
    except (RuntimeError, NotImplementedError):
        return None
