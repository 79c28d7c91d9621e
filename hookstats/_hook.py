"""The hook in Python, for a torch that csrc/hook.cpp was not built for: over the same operators, in graphs, too.

It does what hook.cpp, now.h, times.h and slots.h do, whose comments say why. It is slower by some microseconds for each
tensor.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from hookstats._operators import MadeOn, Operators, SiteInPython, backward_is_running, has_no_data
from hookstats._warn import WarnOnce

_Found = TypeVar("_Found")
_PYTHON = torch._C.DispatchKey.Python
_THREAD = "hookstats.thread"  # where the identity of a thread that ignores rows is left for those of its backward
_warn_once = WarnOnce()
_ops: Operators  # of `load`


def name_thread(ident: int) -> None:
    """For the threads of this one's backward."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ident))  # torch 2.11 takes a reference that it was not given
    torch._C._stash_obj_in_tls(_THREAD, ident)


def _here(found: Callable[[int], _Found | None]) -> _Found | None:
    """What is found for this thread, or, in a backward, for the one that called it."""
    own = found(threading.get_ident())
    if own is not None or not backward_is_running():
        return own
    return found(torch._C._get_obj_in_tls(_THREAD)) if torch._C._is_key_in_tls(_THREAD) else None


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Times:
    """The host's time that hookstats itself takes of a step."""

    def __init__(self) -> None:
        self.calls = 0
        self._host_ns = 0
        self._lock = threading.Lock()

    @property
    def host_us(self) -> float:
        return self._host_ns / 1e3

    def span(self, calls: int = 0) -> Span:
        return Span(self, calls)


class Span:
    """Counts its own life; inside another span of the thread, that is already counted."""

    _depths = threading.local()

    def __init__(self, times: Times, calls: int) -> None:
        self._times, self._calls = times, calls

    def __enter__(self) -> None:
        self._depth = getattr(self._depths, "value", 0)
        self._depths.value = self._depth + 1
        self._begin = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        took = time.perf_counter_ns() - self._begin
        self._depths.value = self._depth
        if self._depth == 0:
            with self._times._lock:
                self._times._host_ns += took
                self._times.calls += self._calls


class Rows(NamedTuple):
    """What counts of the tensors that a mask is about: csrc/ops.h."""

    row_index: torch.Tensor
    kept: torch.Tensor
    made: MadeOn | None = None  # None: who launches has seen to it

    def used_here(self) -> None:
        if self.made is not None:
            self.made.used_here(self[:2])


def _written(rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Rows]:
    """Rows that were just written on the current streams."""
    found = []
    for row_index, kept in rows:
        made = MadeOn(_ops, row_index.device)
        made.written()
        found.append(Rows(row_index, kept, made))
    return found


class Counted:
    """What counts of the tensors that a thread measures, where it has rows ignored: for each device."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.rows: list[Rows] = []
        self.met = 0, 0  # tensors that met these rows: those that they are about, and others

    def set_rows(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.rows = _written(rows)

    def on(self, device: torch.device) -> Rows | None:
        return next((rows for rows in self.rows if rows.row_index.device == device), None)

    def note(self, concerned: bool) -> None:
        self.met = self.met[0] + concerned, self.met[1] + (not concerned)


class Enabled:
    """What all hooks of a monitor share: whether and what they measure."""

    def __init__(self, open: torch.Tensor) -> None:
        """open: one int32 on the CPU, zero while nothing is to be measured."""
        if open.device.type != "cpu" or open.dtype != torch.int32 or open.numel() != 1:
            raise TypeError(
                "Enabled: expected one int32 on the CPU that says whether anything is measured, got "
                f"{open.dtype} {list(open.shape)} on {open.device}"
            )
        self.open = open
        self.is_open = ctypes.c_int32.from_address(open.data_ptr())
        self.is_paused = False
        self.times: Times | None = None
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._counted: Sequence[Counted] = ()

    def decide_by(self, root: torch.nn.Module | None) -> None:
        """Its `training` decides; None: nothing does."""
        self._root = None if root is None else weakref.ref(root)

    def count(self, all: Sequence[Counted]) -> None:
        """Of all threads; the innermost last."""
        self._counted = tuple(all)

    @property
    def leaves_out(self) -> bool:
        """Whether a forward that runs now is evaluation, which is not measured."""
        root = None if self._root is None else self._root()
        return root is not None and vars(root).get("training") is False

    def counts_now(self) -> bool:
        """Whether a forward that runs now counts. A recomputation belongs to a forward that did."""
        return not self.leaves_out or backward_is_running()

    def is_open_here(self) -> bool:
        """What a CUDA graph captures is in every step: in each replay the flag on the device decides."""
        return bool(self.is_open.value) or (not self.is_paused and _is_capturing())

    def counted_here(self) -> Counted | None:
        """The innermost of this thread; in a backward that another thread called, of that one. None: all counts."""
        if not self._counted:
            return None
        return _here(lambda thread: next((each for each in self._counted[::-1] if each.thread == thread), None))

    def span(self, calls: int = 0) -> Any:
        times = self.times  # another thread may close the step
        return nullcontext() if times is None else times.span(calls)


def _as_in_c(get: Callable[[Any], Any]) -> Any:
    """A property that dynamo does not look into: it guards what is returned, as of one that is C."""
    opaque = ctypes.pythonapi.PyInstanceMethod_New
    opaque.restype, opaque.argtypes = ctypes.py_object, [ctypes.py_object]
    return property(opaque(get))


class _AllRows(NamedTuple):
    """Never changed, as answers hold it. By monitor: for graphs, and with the streams on which they were written."""

    told: dict[str, tuple[tuple[torch.Tensor, torch.Tensor], ...]]
    made: dict[str, list[Rows]]


class _Answer(NamedTuple):
    thread: int
    node: int  # the number of the next node of the graph when it was given
    measured: bool
    left_out: tuple[Enabled, ...]
    rows: _AllRows

    def is_like(self, other: _Answer) -> bool:
        return self[2:4] == other[2:4] and self.rows is other.rows


class Now:
    """What compiled graphs look at before they run, in guards: csrc/now.h.

    A node of the graph does not tell Python its thread: where a thread has given no answer, that of any counts.
    """

    def __init__(self) -> None:
        self._monitors: list[tuple[Enabled, bool]] = []
        self._rows: dict[int, _AllRows] = {}  # by thread
        self._none = _AllRows({}, {})
        self._answers: deque[_Answer] = deque(maxlen=32)

    def add(self, enabled: Enabled, always: bool) -> Part:
        self._monitors.append((enabled, always))
        return Part(self, enabled)

    def remove(self, enabled: Enabled) -> None:
        self._monitors = [each for each in self._monitors if each[0] is not enabled]
        if not self._monitors:
            self._answers.clear()

    def set_rows(self, thread: int, monitor: str, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The rows that count of what a thread measures for a monitor, just written; none: all."""
        before = self._rows.pop(thread, self._none)
        told, made = before.told | {monitor: ()}, before.made | {monitor: []}
        del told[monitor], made[monitor]
        if rows:
            told[monitor], made[monitor] = tuple(rows), _written(rows)
        if told:
            self._rows[thread] = _AllRows(told, made)

    monitors = property(lambda self: len(self._monitors))
    measured = _as_in_c(lambda self: self._answer().measured)

    @_as_in_c
    def rows(self) -> dict[str, tuple[tuple[torch.Tensor, torch.Tensor], ...]]:
        """By monitor. Whoever asks goes on to use them on the current stream."""
        all = self._answer().rows
        for made in all.made.values():
            for each in made:
                each.used_here()
        return all.told

    def leaves_out(self, enabled: Enabled) -> bool:
        return any(each is enabled for each in self._answer().left_out)

    def _answer(self) -> _Answer:
        node = torch._C._current_autograd_node() if backward_is_running() else None
        thread = threading.get_ident()
        if node is not None:
            # A reentrant checkpoint's node comes just before what its forward asks.
            given = [each for each in reversed(self._answers) if each.node <= node._sequence_nr() + 1]
            for each in [*(each for each in given if each.thread == thread), *given]:
                return each
        counting = [each for each, always in self._monitors if always or each.is_open.value]
        left_out = tuple(each for each in counting if each.leaves_out)
        measured = len(left_out) < len(counting)
        rows = self._rows.get(thread, self._none) if measured else self._none
        now = _Answer(thread, torch._C._autograd._get_sequence_nr(), measured, left_out if measured else (), rows)
        if node is None:
            before = next((each for each in reversed(self._answers) if each.thread == thread), None)
            if before is not None and before.is_like(now):
                return before
            self._answers.append(now)
        return now


class Part:
    """One monitor's part of it, as an object of its own, because guards look at attributes."""

    def __init__(self, now: Now, enabled: Enabled) -> None:
        self._now, self._enabled = now, enabled

    left_out = _as_in_c(lambda self: self._now.leaves_out(self._enabled))

    def remove(self) -> None:
        self._now.remove(self._enabled)


_failures: dict[int, tuple[str, int]] = {}  # inside backward, by number: the first reason, and how often
_failing = threading.Lock()


def take_failures() -> dict[int, tuple[str, int]]:
    """What went wrong inside backward since it was asked last."""
    with _failing:
        found = dict(_failures)
        _failures.clear()
    return found


class _Observed:
    """What a hook measures into: the SiteStates of an output and of its gradient, either may be None."""

    def __init__(self, output: Any, gradient: Any, in_graph: Callable[..., Any], is_table: bool) -> None:
        self.output, self.gradient = output, gradient
        self.site = SiteInPython(_ops, gradient if output is None else output)  # that an output is to fit
        self.gradient_site = None if gradient is None else SiteInPython(_ops, gradient)
        self.channel_dim: int = (gradient if output is None else output).channel_dim
        self.knows_all = self.channel_dim < _ops.constants["DIMS_BY_NDIM"]
        self.enabled: Enabled = (gradient if output is None else output).enabled
        self.in_graph, self.is_table = in_graph, is_table

    def knows(self, ndim: int) -> bool:
        """Whether it is known where the channels of such a tensor lie: csrc/ops.h."""
        return self.knows_all or ndim > 7 or bool(self.channel_dim >> 4 * ndim & 15)

    def measure(self, x: torch.Tensor, is_output: bool, rows: Rows | None) -> bool:
        """Folds it where there is a site for it; else it is only looked at, as the site is to fit."""
        only_look = (self.output if is_output else self.gradient) is None
        site = self.site if is_output or self.gradient_site is None else self.gradient_site
        if rows is not None:
            rows.used_here()
        concerned: bool = _ops.fold(x, site.number, *(rows or (None, None))[:2], only_look)
        return concerned


_hooks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by number, from 1
_slot_at: dict[int, int] = {}  # on GPUs, by address


class Hook:
    """What `hookstats.watch.hooks.Hook` has of the extension: the sites that it measures into."""

    __slots__ = ("number", "observed", "parts_in_graphs", "slots")
    number: int
    observed: _Observed | None
    parts_in_graphs: dict[str, Hook]  # of a container, by path
    slots: list[torch.Tensor]  # on GPUs
    _numbers = itertools.count(1)

    def __new__(cls, *args: Any, **kwargs: Any) -> Hook:
        made = super().__new__(cls)
        made.number, made.observed, made.parts_in_graphs, made.slots = next(cls._numbers), None, {}, []
        with suppress(TypeError):  # of a class without room for a weak reference: its hooks are not found
            _hooks[made.number] = made
        return made


def _checked(hook: Any) -> Any:
    if not isinstance(hook, Hook):
        raise TypeError(f"hookstats: expected a hook, got {type(hook).__name__}")
    return hook


def bind(hook: Any, output: Any, gradient: Any, in_graph: Callable[..., Any], is_table: bool) -> None:
    """From now on `observe` folds into these SiteStates: csrc/hook.cpp."""
    nothing = output is None and gradient is None
    _checked(hook).observed = None if nothing else _Observed(output, gradient, in_graph, is_table)


def lay_slots(hook: Any, output: torch.Tensor, gradient: torch.Tensor) -> None:
    """From now on these tensors, int64 [1], are what a graph gives to the operator `observe` in the hook's place."""
    for number, slot in enumerate((output, gradient), 2 * _checked(hook).number):
        slot.fill_(number)
        if not slot.is_cpu:
            hook.slots.append(slot)  # so that nothing else comes to its address
            _slot_at[slot.data_ptr()] = number


def set_part(hook: Any, path: str, part: Any) -> None:
    """What graphs meet at a path of a hook's container is another hook's."""
    _checked(hook).parts_in_graphs[path] = _checked(part)


def observe(x: Any, hook: Any) -> Any:
    """Folds the tensor x into the site of the output, unless it is a recomputation, and its gradient, when it comes,
    into the gradient's. Returns None, or why x was not measured; NotImplemented for a container or a wrapper.
    """
    observed: _Observed | None = hook.observed
    if observed is None:
        return None
    enabled = observed.enabled
    if not (enabled.is_open.value or enabled.is_open_here()) or not enabled.counts_now():
        return None
    if type(x) is torch.Tensor and _is_unwatched():
        return _observe(x, observed)
    if not isinstance(x, torch.Tensor) or torch._C._dispatch_keys(x).has(_PYTHON):
        return NotImplemented
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return _observe(x, observed)


def _is_unwatched() -> bool:
    """Whether no mode is active, which is not to see what is done here; as subclasses are not."""
    return not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def _observe(x: torch.Tensor, observed: _Observed) -> str | None:
    try:
        if x.layout is not torch.strided or x.is_nested:
            return "expected a dense strided tensor"
        if has_no_data(x) or torch._C._is_tracing():
            return None
        if not observed.knows(x.dim()):
            return "the channel dimension of such a tensor is not known yet"
        times = observed.enabled.times
        if times is None:
            _measure(x, observed)
        else:
            with times.span(1):
                _measure(x, observed)
    except Exception as error:
        return str(error)
    return None


def _measure(x: torch.Tensor, observed: _Observed) -> None:
    counted, rows = observed.enabled.counted_here(), None
    if counted is not None:
        rows = counted.on(x.device)
        if rows is not None and observed.is_table and x.shape[: rows.row_index.dim()] != rows.row_index.shape:
            rows = None
    if observed.output is not None and rows is None:
        if not backward_is_running():
            _ops.fold(x, observed.site.number)
    elif observed.output is None or not backward_is_running():
        concerned = observed.measure(x, True, rows)
        if rows is not None and counted is not None:
            counted.note(concerned)
    # A leaf's gradient is its owner's, and a hook on it would outlive the step.
    if observed.gradient is not None and x.requires_grad and x.grad_fn is not None:
        _hang(x, functools.partial(_observe_gradient, observed, rows))


def _hang(x: torch.Tensor, hook: Callable[..., Any]) -> None:
    """What x.register_hook does, without a handle, which takes three times as long."""
    hooks: Any = x._backward_hooks
    if hooks is None:
        x._backward_hooks = hooks = OrderedDict()  # of which handles have weak references
        x.grad_fn._register_hook_dict(x)  # type: ignore[union-attr]
    hooks[hook] = hook


def _observe_gradient(observed: _Observed, rows: Rows | None, gradient: torch.Tensor | None) -> Any:
    """rows: those that counted in the forward."""
    if torch.compiler.is_compiling():  # compiled autograd traces it
        return observed.in_graph(gradient, rows=None if rows is None else rows[:2])
    try:
        if gradient is None or not observed.enabled.is_open_here() or has_no_data(gradient):
            return None
        if rows is None and type(gradient) is torch.Tensor and _is_unwatched() and observed.enabled.times is None:
            _ops.fold(gradient, observed.gradient_site.number)  # type: ignore[union-attr]
            return None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), observed.enabled.span():
            observed.measure(gradient, False, rows)
    except Exception as error:
        if observed.gradient.strict:
            raise
        with _failing:
            first, before = _failures.get(observed.gradient.site, (str(error), 0))
            _failures[observed.gradient.site] = first, before + 1
    return None


def _observe_in_graph(
    x: torch.Tensor,
    slot: torch.Tensor,
    path: str = "",
    note: str = "",
    row_index: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> None:
    """What a compiled graph calls for a tensor: csrc/hook.cpp."""
    if has_no_data(x) or has_no_data(slot):
        return
    if slot.dtype != torch.int64 or slot.numel() != 1:
        raise TypeError(f"observe: slot: expected one int64, got {slot.dtype} {list(slot.shape)}")
    if slot.is_cpu:
        number = ctypes.c_int64.from_address(slot.data_ptr()).value
    else:
        number = _slot_at.get(slot.data_ptr(), 0)
        if not number:
            _warn_once(
                "slots",
                "not measured: a compiled graph copies its inputs on a GPU, and so does not tell which module it runs; "
                'backend="inductor" copies none',
            )
    hook, is_output = _hooks.get(number >> 1), number % 2 == 0
    is_new = hook is not None and bool(path) and path not in hook.parts_in_graphs
    owner = hook.parts_in_graphs[path] if hook is not None and path and not is_new else hook
    observed = None if owner is None else owner.observed
    if hook is None or observed is None or (is_output and backward_is_running()):
        return
    if not observed.enabled.is_open_here():
        return
    rows = None if row_index is None or kept is None else Rows(row_index, kept)
    if not is_new and not note and observed.knows(x.dim()):
        with suppress(Exception):  # it may fit a site that is made anew; else the same is met there
            observed.measure(x, is_output, rows)
            return
    refused = hook.binder.measure_by_slot(hook, x, is_output, path, note, None if rows is None else rows[:2])
    if refused is not None:
        raise RuntimeError(refused)


def load(ops: Operators) -> None:
    """Measures by these operators, and defines those that graphs call."""
    global _ops
    _ops, run = ops, _observe_in_graph
    ops.define("observe(Tensor x, Tensor(a!) slot) -> ()", run, batched=True)
    ops.define(
        "observe.rows(Tensor x, Tensor(a!) slot, Tensor rows, Tensor kept) -> ()",
        lambda x, slot, rows, kept: run(x, slot, "", "", rows, kept),
        batched=True,
    )
    schema = "observe.part(Tensor x, Tensor(a!) slot, str path, str note, Tensor? rows, Tensor? kept) -> ()"
    ops.define(schema, run, batched=True)


def call_in_c(kind: type[Hook]) -> None:
    """Calls go through __call__ here."""
