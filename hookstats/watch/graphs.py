"""The operator that torch.compile traces in place of the hooks' C function: it finds its site when it runs.

A slot, a tensor that is an input of the graph, tells the operator which hook it stands for. So nothing is bound while a
graph is traced, equal modules share their graphs, and a site is made when its first tensor comes, as in eager mode.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from hookstats import _native
from hookstats._warn import WarnOnce
from hookstats.modules.containers import walk
from hookstats.modules.order import on_compiler_import
from hookstats.modules.sharding import Sharding, find_sharding, is_dtensor
from hookstats.watch import guards
from hookstats.watch.flags import MONITORS
from hookstats.watch.guards import Rows
from hookstats.watch.ignoring import rows_on
from hookstats.watch.wrappers import part_here

_warn_once = WarnOnce()


def is_measured(hook: Any) -> bool:
    """Return whether a graph is to measure what runs now for a hook's monitor. Can be traced.

    It is as soon as any monitor measures, whose forward it may be: which of them do is seen when the graph runs.
    """
    if is_exporting() or not guards.now.measured:
        return False
    part = getattr(MONITORS, hook.monitor, None)
    return part is not None and not part.left_out


def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which graphs of torch 2.11 take for true, whatever is traced."""
    return torch.compiler._is_exporting_flag


def observe_in_graph(output: object, hook: Any) -> None:
    """Observe in operators as `_native.observe` does; also what is in a container.

    hook: a `hookstats.watch.hooks.SiteHook`.
    """
    if hook.slot is None or not is_measured(hook):
        return
    for path, tensor in walk(output):
        if not path or tensor.is_floating_point():
            observe_tensor(tensor, hook, path)


def observe_tensor(tensor: torch.Tensor, hook: Any, path: str = "") -> None:
    """Observe a tensor and its gradient in operators. Can be traced."""
    rows = rows_on(tensor.device, hook.monitor, hook.is_sampled)
    if rows is not None and hook.is_table and tensor.shape[: rows[0].dim()] != rows[0].shape:
        rows = None
    observe(tensor, hook.slot, path, rows)
    slot = hook.gradient_slot
    if slot is not None and tensor.requires_grad and not tensor.is_leaf and hook.watches_gradient(path):
        _register_gradient_hook(tensor, slot, path, rows)


def _register_gradient_hook(x: torch.Tensor, slot: torch.Tensor, path: str, rows: Rows | None) -> None:
    # A closure: of a partial, all that it holds would be guarded, and each site have a graph of its own.
    x.register_hook(lambda gradient: observe_gradient(slot, gradient, path, rows))
    if _MOVES_INPUTS and torch.compiler.is_compiling():
        torch._dynamo.comptime.comptime(_inputs_first)


def observe_gradient(
    slot: torch.Tensor, gradient: torch.Tensor | None, path: str = "", rows: Rows | None = None
) -> torch.Tensor | None:
    """Returns the gradient: inside of a graph, compiled autograd takes None for what is to replace it."""
    if gradient is not None:  # None: of a graph's unused output
        observe(gradient, slot, path, rows)
    return gradient


def observe(x: torch.Tensor, slot: torch.Tensor, path: str = "", rows: Rows | None = None) -> None:
    """Folds a tensor into the site that a slot stands for; by the operator of fewest arguments."""
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        _observe_wrapper(x, slot, path, *(rows or (None, None)))
    elif path:
        _native.observe_slot.part(x, slot, path, "", *(rows or (None, None)))
    elif rows is None:
        _native.observe_slot.default(x, slot)
    else:
        _native.observe_slot.rows(x, slot, *rows)


def _observe_wrapper(
    x: Any, slot: torch.Tensor, path: str, row_index: torch.Tensor | None, kept: torch.Tensor | None
) -> None:
    """Hands over what this process has of a tensor that holds its data in others, such as a DTensor.

    The tracer takes it for one call, and runs it again when the graph's forward and backward are made. Only then is it
    known where a gradient lies. Nothing is raised: what cannot be measured is told when the operator runs.
    """
    try:
        part = part_here(x)
        note = _name_of(x) if is_dtensor(x) else ""
        _native.observe_slot.part(part, slot, path, note, row_index, kept)
    except Exception as error:
        problem = f"{_PROBLEM}{type(error).__name__}: {error}"
        _native.observe_slot.part(slot.new_empty(0), slot, path, problem, row_index, kept)


class _Placed(NamedTuple):
    """The placement of a DTensor."""

    device_mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[Any, ...]

    def dim(self) -> int:
        return len(self.shape)


# The DTensors of graphs, by the name that the graphs have for where they lie: it is written down whenever one is
# traced, also where the rest of what is compiled is then found on disk.
_placed: dict[str, _Placed] = {}
_meshes: list[Any] = []
_PROBLEM = "problem: "


def _name_of(x: Any) -> str:
    mesh = getattr(x.device_mesh, "real_obj", x.device_mesh)  # the tracer puts another object in its place
    if mesh not in _meshes:
        _meshes.append(mesh)
    shape = tuple(size.node.hint or 0 if isinstance(size, torch.SymInt) else size for size in x.shape)
    name = f"{', '.join(map(str, x.placements))} of {shape} on {_meshes.index(mesh)}"
    _placed[name] = _Placed(mesh, tuple(x.placements), shape)
    return name


def read_sharding_note(note: str, dim: int) -> Sharding | None:
    """Return how the tensor lies of which an operator got a part, channels in this dimension. TypeError: why not."""
    if note.startswith(_PROBLEM):
        raise TypeError(note.removeprefix(_PROBLEM).removeprefix("TypeError: "))
    return find_sharding(_placed[note], dim) if note else None


@functools.cache
def teach_the_compiler(*hooks: Any) -> None:
    """Tell the compiler, once it is imported, by which functions hooks enter Python."""
    on_compiler_import(lambda: _register_with_dynamo(*hooks))


def _register_with_dynamo(*hooks: Any) -> None:
    import torch._dynamo
    from torch._C._dynamo import eval_frame

    torch._dynamo.allow_in_graph(_observe_wrapper)
    for hook in hooks:
        # Where a module is compiled apart, its hooks run outside of its graph. As frames of their own they would be one
        # operator each, and dynamo gives those up for good that it first sees while nothing is measured.
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(hook.__code__, eval_frame._FrameExecStrategy(skip, skip))


def mark_static_address(tensor: torch.Tensor) -> None:
    """Do what torch._dynamo's function of this name does, without importing it.

    Else mode="reduce-overhead" gives up, because the tensor seems to change.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


_MOVES_INPUTS = torch.__version__ < "2.13"


def _inputs_first(context: Any) -> None:
    """Runs while `_register_gradient_hook` is traced: puts the inputs of the graph back in front, in their order.

    torch 2.11 and 2.12 move what a gradient hook refers to (slot and rows, which are inputs) to the tensor that it is
    registered on, and so behind earlier nodes that use it. Where nothing was moved, nothing is done.
    """
    try:
        tracer = context.get_local("x").as_proxy().tracer
        nodes = list(tracer.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if inputs != nodes[: len(inputs)]:
            for proxy in reversed(tracer.input_name_to_proxy.values()):
                next(iter(tracer.graph.nodes)).prepend(proxy.node)
    except Exception as error:
        _warn_once("compiler", f"torch {torch.__version__}: the inputs of a graph may be out of order: {error!r}")
