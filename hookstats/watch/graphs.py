"""What torch.compile traces in the place of the C function that hooks call: the same, in operators."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.modules.containers import REST, walk
from hookstats.modules.evidence import UNKNOWN, Seen
from hookstats.modules.sharding import Sharding, is_dtensor, sharding_of
from hookstats.watch.flags import MONITORS, InGraphs, flag_name
from hookstats.watch.ignoring import rows_on
from hookstats.watch.memory import Rows, SiteState, accumulate, channel_dim_for
from hookstats.watch.skipping import IN_A_GRAPH
from hookstats.watch.wrappers import part_here

_IN_PARTS = " in parts "  # within a hook's key
_warn_once = WarnOnce()


class Traced(NamedTuple):
    """What a graph needs of a SiteState whose histogram is none, or of exponents alone."""

    whole: torch.Tensor
    active: torch.Tensor
    channels: int
    per_channel: bool
    channel_dim: int


class TracedParts(NamedTuple):
    """What a graph needs of a SiteState of linear bins, or of one that counts blocks."""

    moments: torch.Tensor
    active: torch.Tensor
    channels: int
    counters: torch.Tensor
    histogram: torch.Tensor
    channel_dim: int
    low: float
    high: float
    block: int


Folding: TypeAlias = Traced | TracedParts


def key_of(output: SiteState | None, gradient: SiteState | None) -> str:
    """What the program of a graph takes from a hook's states, but for the tensors: one constant, so one guard.

    Numbers are read from it, and not from the states: where they differ from one block to the next, the compiler would
    take these for symbols.
    """
    return "|".join(map(_key_of_half, (output, gradient)))


def _key_of_half(state: SiteState | None) -> str:
    if state is None:
        return ""
    key = f"{flag_name(state.whole.device)} {state.channels} {state.channel_dim} {state.per_channel:d}"
    in_parts = state.low < state.high or state.block
    return f"{key}{_IN_PARTS}{state.low!r} {state.high!r} {state.block}" if in_parts else key


def _folding(half: str, memory: Any, active: torch.Tensor) -> Folding:
    """half: of a hook's key. memory: SiteState.whole; the SiteState itself where the half is _IN_PARTS."""
    key, _, bins = half.partition(_IN_PARTS)
    _, channels, channel_dim, per_channel = key.split(" ")
    if not bins:
        return Traced(memory, active, int(channels), bool(int(per_channel)), int(channel_dim))
    low, high, block = bins.split(" ")
    return TracedParts(
        memory.moments,
        active,
        int(channels),
        memory.counters,
        memory.histogram,
        int(channel_dim),
        float(low),
        float(high),
        int(block),
    )


def shared_in_graph(hook: Any) -> InGraphs | None:
    """What a hook's monitor shares with graphs; None where a graph is not to measure what runs now. Can be traced.

    It is to as soon as any monitor measures, whose forward it may be: which of them do, their flags on the device say.
    """
    if is_exporting() or not _native.now.measured:
        return None
    shared: InGraphs | None = getattr(MONITORS, hook.monitor, None)
    return None if shared is None or shared.part.left_out else shared


def observe_in_graph(output: object, hook: Any) -> None:
    """What `_native.observe` does, in operators; also for what is in a container.

    All states are made before one is read: what was read once is not looked at again in the same graph.
    hook: a `hookstats.watch.hooks.Hook`.
    """
    shared = shared_in_graph(hook)
    if shared is None:
        if _native.WITHOUT_GLUE:
            torch._dynamo.comptime.comptime(_leave_out)
        return
    for path, tensor in walk(output):  # noqa: B007  (read by _bind)
        torch._dynamo.comptime.comptime(_bind)
    for path, tensor in walk(output):
        part = hook.parts.get(path) if path else hook
        if part is None:
            part = hook.parts.get(REST)
        if part is not None:
            rows = rows_on(tensor.device, hook.monitor)
            if rows is not None and hook.is_table and tensor.shape[: rows[0].dim()] != rows[0].shape:
                rows = None
            _observe_tensor_in_graph(tensor, part, shared, rows)


def feed_in_graph(tensor: torch.Tensor, hook: Any, rows: Rows | None) -> None:
    """What `SiteBinder.feed` does, in operators. hook: a `hookstats.watch.hooks.FedHook`."""
    shared, path = shared_in_graph(hook), ""  # noqa: F841  (path is read by _bind)
    if shared is not None:
        torch._dynamo.comptime.comptime(_bind)
        _observe_tensor_in_graph(tensor, hook, shared, rows)


def _leave_out(context: Any) -> None:
    """Runs while a graph is traced in which nothing can be measured."""
    try:
        hook = context.get_local("hook")._i_will_not_complain_if_bc_breaks_VariableTracker().value
    except Exception as error:
        return _compiler_has_changed(f"what is inside graphs is not measured: {error!r}")
    hook.binder.leave_out(hook.spec.entries.values(), IN_A_GRAPH)


def _bind(context: Any) -> None:
    """Runs while the first pass of `observe_in_graph` is traced: makes the states, whose widths are known now."""
    try:
        hook = context.get_local("hook")._i_will_not_complain_if_bc_breaks_VariableTracker().value
        path = context.get_local("path").as_python_constant()
        fake = context.get_local("tensor").as_fake()
    except Exception as error:
        return _compiler_has_changed(f"widths that only a graph meets are measured as totals: {error!r}")
    try:
        with unset_fake_temporarily():
            again = hook.binder.bind_traced(hook, path, fake)
    except Exception as error:
        part = hook.parts.get(path, hook)
        hook.binder.give_up(part.spec.entries.values(), error)
        again = True
    if again:
        try:
            from torch._dynamo.exc import UnspecializeRestartAnalysis
        except ImportError as error:
            return _compiler_has_changed(f"a module that runs twice in a graph may be measured twice: {error!r}")
        raise UnspecializeRestartAnalysis(restart_reason="hookstats: a module that ran twice has other states now")


def _compiler_has_changed(consequence: str) -> None:
    """Parts of torch's compiler that are not public were not as expected: told once, RuntimeError under strict."""
    text = f"torch {torch.__version__} compiles in another way than expected: {consequence}"
    if any(shared.strict for shared in vars(MONITORS).values()):
        raise RuntimeError(f"hookstats: {text}")
    _warn_once("compiler", text)


def traced(tensor: torch.Tensor) -> Seen | None:
    """The sizes that a fake tensor is traced with, without a guard on them. None for what is more than a tensor."""
    if type(tensor) is not FakeTensor or tensor.layout != torch.strided:
        return None
    return Seen(tuple(map(_hint, tensor.shape)), tuple(map(_hint, tensor.stride())))


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return UNKNOWN if hint is None else int(hint)
    return size


def _observe_tensor_in_graph(x: torch.Tensor, hook: Any, shared: InGraphs, rows: Rows | None) -> None:
    of_output, of_gradient = hook.key.split("|")
    is_wrapper = _may_be_a_wrapper(x)
    if of_output:
        memory = hook.output if _IN_PARTS in of_output else hook.whole_output
        output = _folding(of_output, memory, getattr(shared, of_output.split(" ")[0]))
        if is_wrapper:
            _fold_wrapper(x, hook.number_output, True, len(output), *output, *(rows or ()))
        elif _fits(x, output):
            _fold(_native.fold_output, x, output, rows)
    if of_gradient and x.requires_grad and not x.is_leaf:
        memory = hook.gradient if _IN_PARTS in of_gradient else hook.whole_gradient
        gradient = _folding(of_gradient, memory, getattr(shared, of_gradient.split(" ")[0]))
        number = hook.number_gradient if is_wrapper else None
        if is_wrapper or _fits(x, gradient):
            # A closure: of a partial, all that a state holds would be guarded, and each site have a graph of its own.
            x.register_hook(lambda g: _observe_gradient(number, gradient, g, rows))
            torch._dynamo.comptime.comptime(_inputs_first)


def _may_be_a_wrapper(x: torch.Tensor) -> bool:
    """Whether it may hold its data in other tensors, in words that the tracer knows."""
    return type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter


def gradient_in_graph(state: SiteState, number: torch.Tensor | None) -> Callable[..., torch.Tensor | None]:
    """What compiled autograd traces, from a hook that ran outside of graphs. number: as `hooks.Hook` has it."""
    half = _key_of_half(state)
    memory = state if _IN_PARTS in half else state.whole
    return functools.partial(_observe_gradient_of, half, memory, state.active, number)


def _observe_gradient_of(
    half: str,
    memory: Any,
    active: torch.Tensor,
    number: torch.Tensor | None,
    gradient: torch.Tensor | None,
    rows: Rows | None = None,
) -> torch.Tensor | None:
    return _observe_gradient(number, _folding(half, memory, active), gradient, rows)


def _observe_gradient(
    number: torch.Tensor | None, folding: Folding, gradient: torch.Tensor | None, rows: Rows | None
) -> torch.Tensor | None:
    """Returns the gradient: inside of a graph, compiled autograd takes None for what is to replace it.

    number: not read where the gradient is a plain tensor; None: of a plain tensor, whose gradient is one, too.
    """
    if gradient is None:  # of a graph's unused output
        return None
    if not _may_be_a_wrapper(gradient):
        if _fits(gradient, folding):
            _fold(_native.fold_gradient, gradient, folding, rows)
    elif number is not None:
        _fold_wrapper(gradient, number, False, len(folding), *folding, *(rows or ()))
    return gradient


def _fold_wrapper(x: Any, number: torch.Tensor, is_output: bool, length: int, *folding_and_rows: Any) -> None:
    """Folds what this process has of a tensor that holds its data in others, such as a DTensor.

    The tracer takes it for one call, and runs it again when the graph's forward and backward are made. Only then is it
    known where a gradient lies. Nothing is raised: what cannot be measured is told when the graph runs.

    number: Entry.index, as a tensor: as a number it would be a constant, or a symbol, of each graph.
    length: of the `Folding` that comes first; then come the `Rows`, if there are any.
    """
    values, rows = folding_and_rows[:length], folding_and_rows[length:]
    folding: Folding = Traced(*values) if length == len(Traced._fields) else TracedParts(*values)
    try:
        part = part_here(x)
        if not _fits(part, folding):
            raise TypeError(
                f"expected a tensor of {folding.channels} channels on {folding.active.device}, got one of shape "
                f"{tuple(part.shape)} and {part.dtype} on {part.device}"
            )
        note = ""
        if is_dtensor(x):
            note = _name_of(sharding_of(x, channel_dim_for(folding.channel_dim, x.dim()) or 0))
        _fold(
            _native.fold_output if is_output else _native.fold_gradient,
            part,
            folding,
            (rows[0], rows[1]) if rows else None,
        )
    except Exception as error:
        note = f"{_PROBLEM}{type(error).__name__}: {error}"
    if note:
        _note(number, note, is_output)


# Where DTensors in graphs lie, by the name that the graphs have for it: it is written down whenever one is traced, also
# where the rest of what is compiled is then found on disk.
_shardings: dict[str, Sharding] = {}
_meshes: list[Any] = []
_PROBLEM = "problem: "

HOOKS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by Entry.index, of all monitors; models own them


def _name_of(sharding: Sharding) -> str:
    mesh = getattr(sharding.mesh, "real_obj", sharding.mesh)  # the tracer puts another object in its place
    if mesh not in _meshes:
        _meshes.append(mesh)
    name = f"{sharding} {sharding.dim} {sharding.channels} {_meshes.index(mesh)}"
    _shardings[name] = sharding._replace(mesh=mesh)
    return name


def _noted(number: torch.Tensor, note: str, is_output: bool) -> None:
    """Runs in a graph beside the measuring of a wrapper."""
    index = int(number)
    hook = HOOKS.get(index)
    if hook is not None:
        found: str | Sharding = note.removeprefix(_PROBLEM) if note.startswith(_PROBLEM) else _shardings[note]
        hook.binder.note_in_graph(hook, index, found, is_output)


# Said to change the number: what changes nothing and returns nothing is left out of graphs.
_note = _native.operator("note_wrapper(Tensor(a!) number, str note, bool is_output) -> ()", _noted)


def _fold(operator: Any, x: torch.Tensor, state: Folding, rows: Rows | None) -> None:
    """By an operator of few arguments, as Python calls it for each site; linear bins and blocks by one of all."""
    if isinstance(state, TracedParts):
        accumulate(x, state, operator is _native.fold_output, rows)
    elif rows is None:
        operator.default(x, state.whole, state.active, state.channels, state.per_channel, state.channel_dim)
    else:
        operator.rows(x, state.whole, state.active, state.channels, state.per_channel, state.channel_dim, *rows)


def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which graphs of torch 2.11 take for true, whatever is traced."""
    return torch.compiler._is_exporting_flag


def teach_the_compiler(*hooks: Any) -> None:
    """Imports the compiler, the first time. hooks: the functions by which hooks enter Python."""
    with _teaching:
        _teach(*hooks)


_teaching = threading.Lock()


@functools.cache
def _teach(*hooks: Any) -> None:
    from torch._C._dynamo import eval_frame

    torch._dynamo.allow_in_graph(_fold_wrapper)
    torch.compiler.substitute_in_graph(_native.observe, skip_signature_check=True)(observe_in_graph)
    for hook in hooks:
        # Where a module is compiled apart, its hooks run outside of its graph. As frames of their own they would be one
        # operator each, and dynamo gives those up for good that it first sees while nothing is measured.
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(hook.__code__, eval_frame._FrameExecStrategy(skip, skip))


def _inputs_first(context: Any) -> None:
    """Runs while `_observe_tensor_in_graph` is traced: puts the inputs of the graph back in front, in their order.

    For torch 2.11 and 2.12. They move all that a hook refers to (state and sizes, which are inputs) to the tensor that
    the hook is registered on, and so behind earlier nodes that use it. Where nothing was moved, nothing is done.
    """
    try:
        tracer = context.get_local("x").as_proxy().tracer
        nodes = list(tracer.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if inputs != nodes[: len(inputs)]:
            for proxy in reversed(tracer.input_name_to_proxy.values()):
                next(iter(tracer.graph.nodes)).prepend(proxy.node)
    except Exception as error:
        _compiler_has_changed(f"the inputs of a graph may be out of order: {error!r}")


def _fits(x: torch.Tensor, state: Folding) -> bool:
    """Whether a traced tensor can be measured. What cannot is left out: nothing can be mended inside a graph."""
    if x.dtype not in _native.DTYPES or x.device != state.active.device:
        return False
    if state.channels == 1:
        return True
    dim = channel_dim_for(state.channel_dim, x.dim())
    return dim is not None and -x.dim() <= dim < x.dim() and x.shape[dim] == state.channels
