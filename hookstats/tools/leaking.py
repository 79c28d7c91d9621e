"""Runs a model with the batches of a probe's questions, and judges what each module makes of them. Over torch alone.

A forward is run again with a batch in which something is another one. What each module is given and returns is compared
with that of before. Where it differs though it must not, the module whose code made it is named, and the values of
before are put into the tensor: so what comes after it is judged by itself. One forward finds all modules that leak.

What is independent by construction is equal to the last bit, if sums are added in the same order. An order changes
where a kernel is chosen by the data (experts that get another number of tokens), or a row lies elsewhere in a matrix.
With u the unit roundoff of the coarsest dtype around a module and u32 that of float32, in which sums are taken, this
explains 8 (u + 64 u32) of the largest magnitude: 64 is the square root of 4,096 terms (Higham & Mary 2019), 8 is the
headroom that `hookstats.compare` has. In bfloat16 that is 3 %, more than one of many tokens weighs. So there a second
bound holds, for modules in which an exchanged sample changed no bit of the others: they take sums in one order whatever
the values of other rows are. Should an order change inside a sample, it changes a written value only if that lies
within 64 u32 of where rounding turns: a share of 64 u32 / u. Eight times that, and three more, are allowed of the
entries of a token.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hookstats.modules.containers import rebuild, walk
from hookstats.modules.selection import clean_names
from hookstats.modules.sharding import is_dtensor
from hookstats.tools.leaks import WAYS, Leak, Probe
from hookstats.tools.places import SampleLayout, places
from hookstats.tools.questions import ModelBatch, Question, questions
from hookstats.tools.undo import ModuleState, RandomState

_HEADROOM = 8.0
_SUM = 64 * 2.0**-24
_FEW = 3  # where less than one is expected
_ROWS = 32  # that are looked for elsewhere
_CAUSES = {
    "samples": "look for a reduction, a softmax, a recurrence or a reshape over the batch dimension",
    "places in the batch": "look for positions, or anything else that is counted, over the batch dimension",
    "later tokens": "look for a causal mask that is missing, or a norm or convolution over tokens; where both ways are "
    "meant, say causal=False",
    "documents": "look for a mask of documents that is missing or not handed on",
    "padding": "look for a mask of padding that is missing or inverted, or a mean that counts padding",
    "positions": "give position_ids that count from the first token, or pad on the right",
}


class Probing:
    """A call of `probe`."""

    def __init__(
        self,
        model: nn.Module,
        batch: ModelBatch,
        causal: bool | None,
        state: ModuleState,
        randomness: RandomState,
        was_training: bool,
    ) -> None:
        self._model, self._batch, self._causal = model, batch, causal
        self._state, self._randomness, self._was_training = state, randomness, was_training
        self._names = {id(module): name for name, module in clean_names(model).items()}
        self._left_out = set[str]()  # modules that are not compared
        self._sizes = set[str]()  # modules whose rows are as many as the data say, as those of an expert
        self._mode = ""
        self._base: dict[tuple[str, int, str], torch.Tensor] = {}
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        self._running: list[tuple[nn.Module, int]] = []  # modules, the innermost last, and which of their calls
        self._calls: Counter[str] = Counter()
        self._question: Question | None = None  # None: outputs are kept
        self._same = set[str]()  # modules in which an exchanged sample changed no bit of the others
        self._sorted_rows: set[tuple[str, int, str]] = set()  # tensors, by what they hold, as for experts
        self._embedded: list[torch.Tensor] = []  # indices that a module without children makes vectors of
        self._exchanged: Question | None = None  # of the embeddings of padding
        self._forget()

    def _forget(self) -> None:
        self._leaks: dict[tuple[str, str], Leak] = {}
        self._read, self._unread, self._moving = set[str](), set[str](), set[str]()
        self._rounded: dict[str, float] = {}  # by module: the largest difference over its bound
        self._asked: dict[str, tuple[str, ...]] = {}
        self._why_not: dict[str, str] = {}

    def run(self) -> Probe:
        handles = []
        for module in self._model.modules():
            if id(module) in self._names and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            self._shorten()
            known = set[str]()
            compared = self._ask_all(known)
            while {leak.seen_at for leak in self._leaks.values()} & (self._sizes - known):
                known = set(self._sizes)  # such a module's rows may be as many as before, and yet be others
                self._forget()
                compared = self._ask_all(known)
        finally:
            for handle in handles:
                handle.remove()
        why_not = {kind: reason for kind, reason in self._why_not.items() if kind not in self._asked}
        return Probe(*self._sort_leaks(), self._asked, why_not, compared, self._list_notes())

    def _ask_all(self, left_out: set[str]) -> int:
        """Asks all questions in both modes; of how many modules. left_out: names of those that are not compared."""
        self._left_out = left_out
        compared = set[str]()
        for mode in ("eval", "train"):
            self._begin(mode)
            compared |= {name for name, *_ in self._base}
            for question in questions(self._batch, self._causal, self._why_not):
                if question.is_asked_in_training or mode == "eval":
                    modes = self._asked.get(question.kind, ())
                    if self._ask(question) and mode not in modes:
                        self._asked[question.kind] = (*modes, mode)
        return len(compared)

    def _shorten(self) -> None:
        """Leaves out the last samples and tokens if their number is a width, too, which is no row of them."""
        widths = {size for each in self._model.parameters() for size in each.shape}
        for is_rows in (True, False):
            name = None if is_rows else self._batch.name_token(of_floats=True)
            if not is_rows and name is None:
                return
            count = self._batch.size if name is None else self._batch.length(name)
            fewer = next((each for each in range(count, max(1, count // 2), -1) if each not in widths), count)
            if fewer < count:
                cut = self._batch.shorten(self._model, name, fewer)
                with contextlib.suppress(Exception):  # of a model of one size
                    self._run(cut.given, "eval")
                    self._batch = cut

    def _begin(self, mode: str) -> None:
        """The batch as it is, twice."""
        self._mode, self._same, self._moving, self._sorted_rows = mode, set(), set(), set()
        self._keep(self._batch.given)
        self._draws = self._randomness.has_moved()
        nothing = torch.zeros(self._batch.size, dtype=torch.bool)
        self._question = Question("", self._batch.given, nothing)
        self._run(self._batch.given, mode)
        self._same = {name for name, *_ in self._base} - self._moving

    def _keep(self, batch: Any) -> None:
        self._question, self._base, self._embedded = None, {}, []
        self._run(batch, self._mode)

    def _ask(self, question: Question) -> bool:
        """Ask a question, and return whether it was answered."""
        if question.kind == "places in the batch" and self._draws:
            self._why_not[question.kind] = "the model draws random numbers in eval()"
            return False
        if question.base is not None:
            self._keep(question.base)
        self._question, batch = question, question.batch
        if question.padding is not None and any(_is_equal(question.padding[0], ids) for ids in self._embedded):
            self._exchanged, batch = question, self._batch.given if question.base is None else question.base
        try:
            self._run(batch, self._mode)
        except Exception as error:
            self._why_not[question.kind] = f"{type(error).__name__} in the model: {error}"
            return False
        finally:
            self._exchanged = None
        return True

    def _run(self, batch: Any, mode: str) -> None:
        self._state.put_back()
        self._randomness.put_back()
        if mode == "eval" or not self._was_training:  # else as the modules are: some may be frozen
            self._state.set_mode(mode == "train")
        self._calls.clear()
        self._running.clear()
        self._copies.clear()
        batch = rebuild(batch, lambda _, x: x.detach().clone())
        self._model(**batch) if isinstance(batch, dict) else self._model(*batch)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a module's inputs, which its caller has made."""
        name = self._names[id(module)]
        call, self._calls[name] = self._calls[name], self._calls[name] + 1
        if self._running:
            self._look(self._running[-1][0], (name, call, "input"), (args, kwargs))
        self._running.append((module, call))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a module's output."""
        call = 0
        while self._running:  # one that has raised did not leave
            last, call = self._running.pop()
            if last is module:
                break
        self._look_for_embedding(module, (*args, *kwargs.values()), output)
        self._look(module, (self._names[id(module)], call, ""), output)

    def _look(self, owner: nn.Module, key: tuple[str, int, str], value: Any) -> None:
        """owner: whose code has made it."""
        name, number, way = key
        for path, x in walk(value):
            if x.is_floating_point() and not (x.is_meta or x.layout != torch.strided or is_dtensor(x) or x.is_nested):
                at = name, number, way + path
                if name in self._left_out:
                    self._unread.add(name)
                elif self._question is None:
                    self._base[at] = self._copy(x)
                else:
                    self._judge(self._question, owner, at, x)

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        """A copy, once for each tensor, of what it holds now."""
        version = -1 if x.is_inference() else x._version
        known = self._copies.get(id(x))
        if known is not None and known[0]() is x and known[1] == version >= 0:
            return known[2]
        copy = x.detach().clone()
        self._copies[id(x)] = weakref.ref(x), version, copy
        return copy

    def _look_for_embedding(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Notes which indices have vectors, and exchanges those of padding: a model may read padding off its index."""
        if not isinstance(output, torch.Tensor) or output.dim() != 3 or not output.is_floating_point():
            return
        indices = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape == output.shape[:2]]
        if next(module.children(), None) is not None or not indices or indices[0].is_floating_point():
            return
        if self._question is None:
            self._embedded.append(indices[0].clone())
        elif self._exchanged is not None and self._exchanged.padding is not None:
            ids, padding = self._exchanged.padding
            if _is_equal(ids, indices[0]):
                padding = padding.to(output.device)
                output[padding] = output.flip(0, 1)[padding] + output.std()

    def _judge(self, question: Question, module: nn.Module, at: tuple[str, int, str], x: torch.Tensor) -> None:
        name, seen_at, before = self._names[id(module)], at[0], self._base.get(at)
        if at in self._sorted_rows:
            return
        if before is None or before.shape != x.shape or before.dtype != x.dtype:
            self._unread.add(name)
            self._sizes.add(seen_at)
            self._same.discard(name)
            return
        if torch.equal(x, before) or not bool(_differ(x, before).any()):
            return
        if question.kind == "":
            readings: list[_Reading] = [_Reading(None, before, _differ(x, before), question.free)]
        else:
            found = self._list_readings(question, name, before, x)
            if found is None:
                return
            readings = found
        if not readings:
            self._unread.add(name)
            self._same.discard(name)
            return
        scale = float(before.float().abs().nan_to_num(posinf=0, neginf=0).max()) or 1.0
        bound = _HEADROOM * (_find_unit(module, x) + _SUM)
        if isinstance(module, nn.RNNBase) and x.dim():  # it rounds its state once a step
            bound *= max(x.shape) ** 0.5
        worst = [each.worst(x) / scale for each in readings]
        least = min(range(len(readings)), key=worst.__getitem__)
        if question.kind in ("", "samples"):
            self._same.discard(name)
        if name in self._moving and question.kind:
            least = 0
        elif question.kind == "":
            if worst[0] > bound:
                self._moving.add(name)  # does not repeat: nothing can be said of it
            else:
                self._rounded[name] = max(self._rounded.get(name, 0.0), worst[0] / bound)
        elif worst[least] > bound or (
            name in self._same and question.move is None and readings[0].is_dense(_compute_share(x))
        ):
            if readings[0].is_of_rows(x, bound * scale):
                self._sorted_rows.add(at)
                self._unread.add(name)
                return
            self._add(question, module, seen_at, readings[0], worst[0], bound)
            least = 0
        else:
            self._rounded[name] = max(self._rounded.get(name, 0.0), worst[least] / bound)
        with contextlib.suppress(RuntimeError):  # of entries that share memory; those of later modules differ, too
            x.copy_(torch.where(readings[least].outside, readings[least].expected, x))

    def _list_readings(
        self, question: Question, name: str, before: torch.Tensor, x: torch.Tensor
    ) -> list[_Reading] | None:
        """Return what differs and must not, in all ways in which the output can be read. None: one way explains it."""
        size, tokens = self._batch.size, question.free.shape[1] if question.free.dim() == 2 else None
        free, ways = question.free, list(places(x.shape, size, tokens, self._batch.batch_dim))
        if tokens is not None and x.dim() == 2 and x.shape[0] == size and question.kind == "later tokens":
            return None  # [samples, features], perhaps of the last token
        if not ways and question.is_pooled_judged and x.dim() <= 2:
            ways = [each for each in places(x.shape, size, None, self._batch.batch_dim) if each.samples[0].is_exact]
            free = torch.zeros(size, dtype=torch.bool)
        found = []
        for way in ways:
            expected = before if question.move is None else question.move(before, way)
            if expected is None:
                continue
            self._read.add(name)
            outside = _differ(x, expected) & ~way.spread(free, x.shape).to(x.device)
            if not bool(outside.any()):
                return None
            found.append(_Reading(way, expected, outside, free))
        return found

    def _add(
        self, question: Question, module: nn.Module, seen_at: str, reading: _Reading, difference: float, bound: float
    ) -> None:
        name = self._names[id(module)]
        assert reading.place is not None
        places_changed = reading.place.gather(reading.outside.cpu(), tuple(reading.free.shape)) & ~reading.free
        at = places_changed.nonzero()
        first = tuple(at[0].tolist()) if len(at) else (0,) * reading.free.dim()
        cause, is_by_design = self._find_cause(question.kind, module, places_changed, reading.free)
        key = question.kind, name
        judged = int((~reading.free).sum())
        kind = type(module).__name__
        new = Leak(*key, kind, seen_at, (self._mode,), first, len(at), judged, difference, bound, cause, is_by_design)
        known = self._leaks.get(key)
        if known is not None and known.is_by_design == is_by_design:
            modes = known.modes if self._mode in known.modes else (*known.modes, self._mode)
            new = replace(new if new.changed > known.changed else known, modes=modes)
        self._leaks[key] = known if known is not None and is_by_design and not known.is_by_design else new

    def _find_cause(self, kind: str, module: nn.Module, changed: torch.Tensor, free: torch.Tensor) -> tuple[str, bool]:
        if "BatchNorm" in type(module).__name__ or isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "BatchNorm takes its mean and variance over the batch", module.training
        if kind == "later tokens" and getattr(module, "bidirectional", False) is True:
            return "it is bidirectional", False
        first = getattr(module, "batch_first", None)
        if kind == "samples" and isinstance(first, bool) and first != (self._batch.batch_dim == 0):
            ways = "recurs" if isinstance(module, nn.RNNBase) else "attends"
            return (
                f"it {ways} over the batch: batch_first={first}, but samples lie along {self._batch.batch_dim}",
                False,
            )
        if kind == "later tokens" and changed.shape == free.shape and free.dim() == 2:
            before = torch.zeros_like(free)
            before[:, :-1] = free[:, 1:]  # the one before
            if not (changed & ~before).any():
                return "each token sees the one after it, as with a causal mask that is off by one", False
        return _CAUSES[kind], False

    def _sort_leaks(self) -> tuple[tuple[Leak, ...], tuple[Leak, ...]]:
        samples = {name for kind, name in self._leaks if kind == "samples"}
        leaks = [
            each for (kind, name), each in self._leaks.items() if kind != "places in the batch" or name not in samples
        ]
        order = list(WAYS)
        leaks.sort(key=lambda each: order.index(each.kind))
        by_design = tuple(each for each in leaks if each.is_by_design)
        return tuple(each for each in leaks if not each.is_by_design), by_design

    def _list_notes(self) -> tuple[str, ...]:
        notes = []
        if self._rounded:
            name = max(self._rounded, key=self._rounded.__getitem__)
            share = self._rounded[name]
            notes.append(
                f"modules that differed by what rounding explains: {len(self._rounded)}, up to {share:.1g} of its "
                f"bound in {name or 'the model itself'}"
            )
        if self._moving:
            notes.append(f"not judged, as two equal runs differ: {', '.join(sorted(self._moving)[:8])}")
        written = self._state.find_written()
        if written:
            notes.append(f"forwards of the model write parameters, which are not as before: {', '.join(written[:8])}")
        unread = sorted(self._unread - self._read)
        if unread:
            names = ", ".join(name or "the model itself" for name in unread[:8]) + ", ..." * (len(unread) > 8)
            notes.append(f"not judged, as neither samples nor tokens are seen in their outputs: {names}")
        return tuple(notes)


@dataclass(frozen=True)
class _Reading:
    """The entries of an output that differ and must not, if it is read in one way."""

    place: SampleLayout | None
    expected: torch.Tensor
    outside: torch.Tensor
    free: torch.Tensor

    def worst(self, x: torch.Tensor) -> float:
        apart = (x.double() if x.dtype == torch.float64 else x.float()) - self.expected
        return float(apart.abs()[self.outside].nan_to_num(nan=torch.inf).max())

    def is_of_rows(self, x: torch.Tensor, bound: float) -> bool:
        """Return whether it is ``[rows, features]`` with rows sorted by their content: some are there, only elsewhere.

        So it is where rows are no multiple of the samples, and only a part of the features is.
        """
        assert self.place is not None
        axis = self.place.samples[0]
        if axis.is_exact or axis.dim != 0:
            return not axis.is_exact
        rows = self.outside.flatten(1).any(1).nonzero()[:_ROWS, 0]
        now, before = x[rows].flatten(1).float(), self.expected.flatten(1).float()
        found = sum(bool(((before - row).abs().amax(1) <= bound).any()) for row in now)
        return 4 * found > len(rows)  # of a leak, none is

    def is_dense(self, share: float) -> bool:
        """Return whether more than this share of the entries of some sample or token differs."""
        assert self.place is not None
        if share >= 1:
            return False
        axes = {self.place.samples[0].dim, *(axis.dim for axis in self.place.tokens[:1])}
        rest = [dim for dim in range(self.outside.dim()) if dim not in axes]
        entries = math.prod(self.outside.shape[dim] for dim in rest)
        differing = self.outside.sum(rest) if rest else self.outside
        return bool((differing > share * entries + _FEW).any())


def _is_equal(ids: torch.Tensor, others: torch.Tensor) -> bool:
    return ids.shape == others.shape and ids.device == others.device and bool((ids == others).all())


def _differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return where they differ; NaN is equal to NaN."""
    if x.element_size() == 1:
        x, y = x.float(), y.float()
    return (x != y) & ~((x != x) & (y != y))


def _find_unit(module: nn.Module, x: torch.Tensor) -> float:
    """The unit roundoff of the coarsest dtype around a module."""
    dtypes = {x.dtype, *(each.dtype for each in module.parameters() if each.is_floating_point())}
    if torch.is_autocast_enabled(x.device.type):
        dtypes.add(torch.get_autocast_dtype(x.device.type))
    return max(torch.finfo(dtype).eps / 2 for dtype in dtypes)


def _compute_share(x: torch.Tensor) -> float:
    return _HEADROOM * _SUM / (torch.finfo(x.dtype).eps / 2)
