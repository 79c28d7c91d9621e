"""What torch.compile traces in the place of the C function that hooks call: the same, in operators."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from hookstats import _native
from hookstats._warn import warn
from hookstats.modules.containers import REST, walk
from hookstats.modules.evidence import UNKNOWN, Seen
from hookstats.modules.sharding import sharding_of, unreduced
from hookstats.watch.ignoring import rows_on
from hookstats.watch.memory import Entry, Rows, SiteState, accumulate, channel_dim_for


def observe_in_graph(output: object, hook: Any) -> None:
    """What `_native.observe` does, in operators; also for what is in a container.

    All states are made before one is read: what was read once is not looked at again in the same graph.
    hook: a `hookstats.watch.hooks.Hook`.
    """
    if is_exporting() or not hook.binder.training.is_measured_in_graphs():
        return
    for path, tensor in walk(output):  # noqa: B007  (read by _bind)
        torch._dynamo.comptime.comptime(_bind)
    for path, tensor in walk(output):
        part = hook.parts.get(path) if path else hook
        if part is None:
            part = hook.parts.get(REST)
        if part is not None:
            _observe_tensor_in_graph(
                tensor, part.output, part.gradient, rows_on(tensor.device, hook.binder.ignoring.number)
            )


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


def _observe_tensor_in_graph(
    x: torch.Tensor, output: SiteState | None, gradient: SiteState | None, rows: Rows | None
) -> None:
    local: torch.Tensor = x.to_local() if hasattr(x, "device_mesh") else x  # type: ignore[attr-defined]
    if output is not None and _fits(local, output):
        _fold(_native.fold_output, local, output, rows)
    if gradient is not None and x.requires_grad and not x.is_leaf and _fits(local, gradient):
        # A closure: of a partial, all that the state holds would be guarded, and every site have a graph of its own.
        x.register_hook(lambda g: observe_gradient_in_graph(gradient, g, rows))
        torch._dynamo.comptime.comptime(_inputs_first)


def observe_gradient_in_graph(
    state: SiteState | None, gradient: torch.Tensor | None, rows: Rows | None = None
) -> torch.Tensor | None:
    """Returns the gradient: inside of a graph, compiled autograd takes None for what is to replace it."""
    if state is not None and gradient is not None:  # None: of a graph's unused output
        local = gradient
        if hasattr(gradient, "device_mesh"):
            dim = channel_dim_for(state.channel_dim, gradient.dim()) or 0
            local = _part_of_gradient(gradient, state.site, state.channels, dim)
        if _fits(local, state):
            _fold(_native.fold_gradient, local, state, rows)
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


def _fold(operator: Any, x: torch.Tensor, state: SiteState, rows: Rows | None) -> None:
    """By an operator of few arguments, as Python calls it for each site; linear bins by the one that takes all."""
    if state.low < state.high:
        accumulate(x, state, skip_recomputation=operator is _native.fold_output, rows=rows)
    elif rows is None:
        operator.default(x, state.whole, state.active, state.channels, state.per_channel, state.channel_dim)
    else:
        operator.rows(x, state.whole, state.active, state.channels, state.per_channel, state.channel_dim, *rows)


def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which graphs of torch 2.11 take for true, whatever is traced."""
    return torch.compiler._is_exporting_flag


def teach_the_compiler(*hooks: Any) -> None:
    """Imports the compiler, the first time. hooks: the functions that call `_native.observe`."""
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


def _fits(x: torch.Tensor, state: SiteState) -> bool:
    """Whether a traced tensor can be measured. What cannot is left out: nothing can be mended inside a graph."""
    if x.dtype not in _native.DTYPES or x.device != state.whole.device:
        return False
    if state.channels == 1:
        return True
    dim = channel_dim_for(state.channel_dim, x.dim())
    return dim is not None and -x.dim() <= dim < x.dim() and x.shape[dim] == state.channels
