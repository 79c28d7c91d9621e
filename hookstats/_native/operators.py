"""The operators of _ops.so, which serve every torch, and what takes many tensors at once by them.

The library knows nothing of one torch's C++. What its ABI lacks is done here: keys of the dispatcher, shapes of mere
shapes, streams and events. Everything is made for a namespace, as tests have a library of their own.
"""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import _disable_current_modes

_PYTHON = torch._C.DispatchKey.Python
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# What Python asks a library for: its constants, and its operators.
_NEEDED = ["OPERATORS", "FIELDS", "DTYPES", "COUNTERS", "DIMS_BY_NDIM", "SOFTMAX_FIELDS", "MOST_KEPT", "HAS_CUDA"]
_NEEDED += ["sample", "softmax_rows", "joint_sums", "clear", "make_site", "fold", "merge", "let_go", "part"]
_NEEDED += ["make_batch", "accumulate_batch", "batch_tables", "make_totals", "totals_table", "take_totals"]
_NEEDED += ["make_copies", "take_copies", "capture_on", "begin_closing", "end_closing", "reserve_scratch"]


def has_no_data(x: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper without memory of its own: fake, meta, or made by functorch."""
    if x.is_meta or not torch._C._has_storage(x):
        return True
    return type(x) not in _PLAIN and torch._C._dispatch_keys(x).has(_PYTHON)


def backward_is_running() -> bool:
    """Return whether this thread is inside backward(): a forward seen there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def number_of(device: torch.device) -> int:
    """Return the number by which operators know a device."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


class Operators:
    """The operators of a library, by name (csrc/*.cpp describes them), and its ``constants``."""

    def __init__(self, namespace: str, library: Path | None = None) -> None:
        """library: loaded here, so that only who is linked with it sees its symbols; None: it is loaded."""
        if library is not None:
            try:
                ctypes.CDLL(str(library))
            except OSError as error:
                here = f"{library} does not load beside torch {torch.__version__}"
                raise ImportError(f"hookstats: {here}: {error}") from error
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._space = space = getattr(torch.ops, namespace)
        said = json.loads(space.describe.default()) if hasattr(space, "describe") else {}
        self.constants: dict[str, Any] = said
        missing = [name for name in _NEEDED if name not in said and name not in said.get("OPERATORS", ())]
        if missing:
            raise ImportError(f"hookstats: {library} is older than the Python files beside it, without {missing[0]}")
        for name in self.constants["OPERATORS"]:
            # No gradient flows through a statistic, and none is stopped: autograd does not look.
            self._library.impl(name, torch.library.fallthrough_kernel, "Autograd")
            overload = getattr(space, name).default
            setattr(self, name, getattr(overload, "_op", overload) if name == "fold" else overload)  # of each hook
        # A gradient of zeros that were never written has no data, for any hook.
        self._library.impl("fold", torch.library.fallthrough_kernel, "ZeroTensor")
        self._library.impl("softmax_rows", self._empty_for, "Meta")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"expected an operator of csrc, got {name!r}")

    def packet(self, name: str) -> Any:
        """An operator with its overloads."""
        return getattr(self._space, name)

    def define(
        self,
        schema: str,
        run: Callable[..., Any],
        *tags: torch.Tag,
        shapes: Callable[..., Any] = lambda *given: None,
        batched: bool = False,
    ) -> Any:
        """An operator for graphs in Python: `shapes` while they are traced, `run` when they run. batched: it does
        nothing in a vmap, where there is no one piece of data to read.

        Plain, because torch.library.custom_op raises the version of what it changes, and from torch 2.15 on a graph
        refuses that in a gradient hook.
        """
        self._library.define(schema, tags=tags)
        name = schema.split("(")[0]  # with its overload
        self._library.impl(name, run, "CompositeExplicitAutograd")
        self._library.impl(name, shapes, "Meta")
        self._library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        if batched:
            self._library.impl(name, lambda *given: None, "FuncTorchBatched")
        name, _, overload = name.partition(".")
        return getattr(getattr(self._space, name), overload or "default")

    def _empty_for(self, logits: torch.Tensor, top_k: int = 0) -> torch.Tensor:
        """[numbers, ...], each as large as the logits without their last dimension: csrc/softmax_rows.cpp."""
        if logits.dim() == 0 or not 0 <= top_k < self.constants["MOST_KEPT"]:
            raise RuntimeError(f"softmax_rows: expected logits [..., n], got {list(logits.shape)} and top_k={top_k}")
        numbers = self.constants["SOFTMAX_FIELDS"] + (top_k > 0)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return torch.empty((numbers, *logits.shape[:-1]), dtype=dtype, device=logits.device)


def call_untraced(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function from a finalizer. The garbage collector runs these while somebody's program is traced, too, and
    what they call is no part of it: inductor fails where a graph that it traces twice differs."""
    with _disable_current_modes():
        function(*arguments)


class _Held:
    """A number by which the library knows an object, as long as this is there."""

    def __init__(self, ops: Operators, number: int) -> None:
        self.number = number
        weakref.finalize(self, call_untraced, ops.let_go, number).atexit = False


class MadeOn:
    """The stream on which memory was allocated and written that may be used on other ones, too."""

    def __init__(self, ops: Operators, device: torch.device) -> None:
        self._ops, self._device = ops, device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._capture = 0  # in which it was written
        self._event: torch.cuda.Event | None = None

    def mark_written(self) -> None:
        """Note that all has been written. Waits for nothing."""
        if self._stream is not None:
            self._capture = self._ops.capture_on(number_of(self._device))
            self._event = torch.cuda.Event()
            self._event.record(self._stream)

    def prepare_use(self, memory: Iterable[torch.Tensor]) -> None:
        """Prepare a launch on the current stream that uses it: it comes after the writing, and the memory is not
        given to others before the launch has ended.

        What was made in a capture can be waited for there alone. Before a capture, torch has waited for all.
        """
        if self._stream is None or self._event is None:
            return
        here = torch.cuda.current_stream(self._device)
        if here == self._stream or self._ops.capture_on(number_of(self._device)) != self._capture:
            return
        self._event.wait(here)
        for each in () if self._capture else memory:
            each.record_stream(here)


class SiteInPython:
    """A site's state, checked once."""

    def __init__(self, ops: Operators, state: Any) -> None:
        """state: a `hookstats.watch.memory.SiteState`."""
        tensors = (state.moments, state.counters, state.histogram, state.active)
        self._held = _Held(ops, ops.make_site(*tensors, state.channel_dim, state.low, state.high, state.block))
        self.number = self._held.number
        self.device: torch.device = state.moments.device
        self._ops = ops

    def fold(self, x: torch.Tensor, *others: Any) -> None:
        """others: rows, kept, only_look, every, phase: csrc/ops.cpp."""
        self._ops.fold(x, self.number, *others)

    def merge(self, other: SiteInPython) -> None:
        """Take what another state has, or all of its channels into one."""
        self._ops.merge(self.number, other.number)


class Batch:
    """The sites whose tensors come together."""

    def __init__(self, ops: Operators, sites: Sequence[SiteInPython]) -> None:
        self._ops = ops
        self._held = _Held(ops, ops.make_batch([site.number for site in sites]))
        self._devices = {site.device for site in sites if site.device.type == "cuda"}
        self._streams: set[torch.cuda.Stream] = set()  # that have launched

    def accumulate(self, tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, str]]:
        """Folds each tensor into its site's state. What could not be folded, by number, and why."""
        given, failures = list(tensors), []
        for i, x in enumerate(tensors):
            if x is not None and type(x) not in _PLAIN and has_no_data(x):
                given[i] = None
                failures.append((i, "hookstats: expected a plain tensor with data, got a wrapper or a mere shape"))
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            said: torch.Tensor = self._ops.accumulate_batch(self._held.number, given)
            text = bytes(said.tolist()).decode() if len(said) else ""
        self._keep_tables()
        for each in text.split("\x1e")[:-1]:
            number, _, why = each.partition(" ")
            failures.append((int(number), why))
        return sorted(failures)

    def _keep_tables(self) -> None:
        """Keep tables that several streams read until all of their launches have ended."""
        for device in self._devices:
            self._streams.add(here := torch.cuda.current_stream(device))
            if len(self._streams) > len(self._devices) and not torch.cuda.is_current_stream_capturing():
                for table in self._ops.batch_tables(self._held.number):
                    if table.device == device:
                        table.record_stream(here)


class Totals:
    """The totals of many sites on one device, all channels of each together. Lists with an entry for each."""

    def __init__(self, ops: Operators, moments: list[torch.Tensor], counters: list[torch.Tensor]) -> None:
        self._ops = ops
        self._held = _Held(ops, ops.make_totals(moments, counters))
        device = moments[0].device
        self._table: torch.Tensor = ops.totals_table(self._held.number)
        self._made = MadeOn(ops, device)
        if device.type == "cuda":  # out of pinned memory: a step does not wait, not even for the first totals
            self._table = self._table.pin_memory().to(device, non_blocking=True)
        self._made.mark_written()

    def take(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """int64 [sites, fields + counters], one behind the other as in a state of one channel. Then the blocks, which
        are those of the states, or none, are zero; no kernel comes between."""
        self._made.prepare_use([self._table])
        taken: torch.Tensor = self._ops.take_totals(self._held.number, self._table, blocks)
        return taken


class Copies:
    """Copies of the blocks of one store. Memory of copies that nobody holds is used again."""

    def __init__(self, ops: Operators) -> None:
        self._ops = ops
        self.give_up_spares()

    def take(self, blocks: list[torch.Tensor], clear: bool) -> list[torch.Tensor]:
        """Begin a copy of blocks as they are between two kernels; `clear` sets them to zero afterwards."""
        with torch._C._DisableTorchDispatch():  # memory is to be real, whatever mode is active
            taken: list[torch.Tensor] = self._ops.take_copies(self._held.number, blocks, clear)
        return taken

    def give_up_spares(self) -> None:
        """Frees the memory that no copy uses, now or when nobody holds it any more."""
        self._held = _Held(self._ops, self._ops.make_copies())


def set_flags(ops: Operators, flags: Iterable[torch.Tensor], value: int) -> None:
    """Writes what says whether kernels measure: launches so far find what it was, on any stream, and later ones this.

    Versions stay: compiled graphs keep flags for their backward, which is not to refuse them for having changed.
    """
    for flag in flags:
        ops.begin_closing(number_of(flag.device))
        with _unsafe_preserve_version_counter(flag):
            flag.fill_(value)
        ops.end_closing(number_of(flag.device))


def give_away(ops: Operators, blocks: Sequence[torch.Tensor]) -> None:
    """Prepare blocks of state, all on one device, for being freed: others get the memory after all launches there."""
    if not blocks:
        return
    device = blocks[0].device
    ops.begin_closing(number_of(device))
    for block in blocks if device.type == "cuda" else ():
        block.record_stream(torch.cuda.current_stream(device))


def add(counter: torch.Tensor, amount: torch.Tensor, skip_recomputation: bool) -> None:
    """Asks when a graph runs, not when it is traced. The counter's version stays: changed in a gradient hook, it would
    be refused while the hook is traced."""
    if not (skip_recomputation and backward_is_running()):
        with torch._C._AutoDispatchBelowAutograd(), _unsafe_preserve_version_counter(counter):
            counter.add_(amount)
