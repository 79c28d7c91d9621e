"""What torch.compile traces in the place of the C function that hooks call: the same, in operators."""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from hookstats import _native
from hookstats._warn import warn
from hookstats.modules.containers import REST, walk
from hookstats.modules.evidence import UNKNOWN, Seen
from hookstats.modules.sharding import sharding_of, unreduced
from hookstats.watch.ignoring import rows_on
from hookstats.watch.memory import MONITORS, Entry, InGraphs, Rows, SiteState, accumulate, channel_dim_for, flag_name

_LINEAR = "linear"


class Traced(NamedTuple):
    """What a graph needs of a SiteState whose histogram is none, or of exponents."""

    whole: torch.Tensor
    active: torch.Tensor
    channels: int
    per_channel: bool
    channel_dim: int


# Of linear bins a graph needs all of it.
Folding: TypeAlias = Traced | SiteState


def key_of(output: SiteState | None, gradient: SiteState | None) -> str:
    """What the program of a graph takes from a hook's states, but for the tensors: one constant, so one guard."""
    return "|".join(map(_key_of_half, (output, gradient)))


def _key_of_half(state: SiteState | None) -> str:
    if state is None:
        return ""
    if state.low < state.high:
        return _LINEAR
    flag = flag_name(state.whole.device)
    return f"{flag} {state.channels} {state.per_channel:d} {state.channel_dim}"


def _traced(half: str, whole: torch.Tensor, shared: InGraphs) -> Traced:
    flag, channels, per_channel, channel_dim = half.split(" ")
    return Traced(whole, getattr(shared, flag), int(channels), bool(int(per_channel)), int(channel_dim))


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
        return
    for path, tensor in walk(output):  # noqa: B007  (read by _bind)
        torch._dynamo.comptime.comptime(_bind)
    for path, tensor in walk(output):
        part = hook.parts.get(path) if path else hook
        if part is None:
            part = hook.parts.get(REST)
        if part is not None:
            _observe_tensor_in_graph(tensor, part, shared, rows_on(tensor.device, hook.monitor))


def _bind(context: Any) -> None:
    """Runs while the first pass of `observe_in_graph` is traced: makes the states, whose widths are known now."""
    try:
        hook = context.get_local("hook")._i_will_not_complain_if_bc_breaks_VariableTracker().value
        path = context.get_local("path").as_python_constant()
        fake = context.get_local("tensor").as_fake()
    except Exception:  # something else than a hook and a tensor as they are known: states stay as they are
        return
    try:
        with unset_fake_temporarily():
            again = hook.binder.bind_traced(hook, path, fake)
    except Exception as error:
        part = hook.parts.get(path, hook)
        hook.binder.give_up(part.spec.entries.values(), f"{type(error).__name__}: {error}")
        again = True
    if again:
        from torch._dynamo.exc import UnspecializeRestartAnalysis

        raise UnspecializeRestartAnalysis(restart_reason="hookstats: a module that ran twice has other states now")


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
    local: torch.Tensor = x.to_local() if hasattr(x, "device_mesh") else x  # type: ignore[attr-defined]
    of_output, of_gradient = hook.key.split("|")
    if of_output:
        output: Folding = hook.output if of_output == _LINEAR else _traced(of_output, hook.whole_output, shared)
        if _fits(local, output):
            _fold(_native.fold_output, local, output, rows)
    if of_gradient and x.requires_grad and not x.is_leaf:
        linear = of_gradient == _LINEAR
        gradient: Folding = hook.gradient if linear else _traced(of_gradient, hook.whole_gradient, shared)
        state = hook.gradient if local is not x else None
        if _fits(local, gradient):
            # A closure: of a partial, all that a state holds would be guarded, and each site have a graph of its own.
            x.register_hook(lambda g: _observe_gradient(state, gradient, g, rows))
            torch._dynamo.comptime.comptime(_inputs_first)


def observe_gradient_in_graph(
    state: SiteState | None, gradient: torch.Tensor | None, rows: Rows | None = None
) -> torch.Tensor | None:
    """What compiled autograd traces, from a hook that ran outside of graphs."""
    if state is None:
        return gradient
    if state.low < state.high:
        return _observe_gradient(state, state, gradient, rows)
    traced = Traced(state.whole, state.active, state.channels, state.per_channel, state.channel_dim)
    return _observe_gradient(state, traced, gradient, rows)


def _observe_gradient(
    state: SiteState | None, folding: Folding, gradient: torch.Tensor | None, rows: Rows | None
) -> torch.Tensor | None:
    """Returns the gradient: inside of a graph, compiled autograd takes None for what is to replace it.

    state: not read where the gradient is a plain tensor.
    """
    if gradient is not None:  # None: of a graph's unused output
        local = gradient
        if hasattr(gradient, "device_mesh"):
            if state is None:  # as of a plain tensor outside of graphs
                return gradient
            dim = channel_dim_for(folding.channel_dim, gradient.dim()) or 0
            local = _part_of_gradient(gradient, state.site, folding.channels, dim)
        if _fits(local, folding):
            _fold(_native.fold_gradient, local, folding, rows)
    return gradient


def _part_of_gradient(gradient: Any, site: int, channels: int, dim: int) -> torch.Tensor:
    """This process's part of a DTensor; nothing of one that cannot be measured.

    The tracer takes it for one call: where the gradient lies is known only when the graph's backward is made, from the
    forward that the tracer has seen. Then it runs, and the site remembers that. site: Entry.index.
    """
    local: torch.Tensor = gradient.to_local()
    entry, problem = Entry.known.get(site), unreduced(gradient)
    here = local.shape[dim] if local.dim() else 1
    if problem is None and channels not in (1, here):
        problem = f"expected a DTensor of {channels} channels here, got {here}"
    if problem is not None:
        if entry is not None:
            entry.left_out = True
            warn(f"not measured: {entry.site}, in a compiled graph: {problem}")
        return local.new_empty(_no_elements(local.dim(), channels, dim))
    if entry is not None:
        entry.sharding = sharding_of(gradient, dim)
    return local


def _no_elements(ndim: int, channels: int, dim: int) -> list[int]:
    """The sizes of a tensor without elements that operators take for one of so many channels in this dimension."""
    if channels == 1:
        return [0]
    if ndim > 1:
        sizes = [0] * ndim
        sizes[dim] = channels
        return sizes
    # The channels' dimension is 0, or -1, or known for vectors alone: then the last of eight, see csrc/ops.h.
    return [channels, *([0] * 6), channels]


def _fold(operator: Any, x: torch.Tensor, state: Folding, rows: Rows | None) -> None:
    """By an operator of few arguments, as Python calls it for each site; linear bins by the one that takes all."""
    if isinstance(state, SiteState):
        accumulate(x, state, skip_recomputation=operator is _native.fold_output, rows=rows)
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

    torch._dynamo.allow_in_graph(_part_of_gradient)
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
    tracer = context.get_local("x").as_proxy().tracer
    nodes = list(tracer.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    if inputs != nodes[: len(inputs)]:
        for proxy in reversed(tracer.input_name_to_proxy.values()):
            next(iter(tracer.graph.nodes)).prepend(proxy.node)


def _fits(x: torch.Tensor, state: Folding) -> bool:
    """Whether a traced tensor can be measured. What cannot is left out: nothing can be mended inside a graph."""
    if x.dtype not in _native.DTYPES or x.device != state.whole.device:
        return False
    if state.channels == 1:
        return True
    dim = channel_dim_for(state.channel_dim, x.dim())
    return dim is not None and -x.dim() <= dim < x.dim() and x.shape[dim] == state.channels
