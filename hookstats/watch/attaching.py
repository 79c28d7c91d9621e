"""attach(): from a model to hooks on it and a Monitor; measure(), for one tensor."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map

from hookstats import _native
from hookstats.modules import order
from hookstats.modules.channels import channel_dim_of
from hookstats.modules.selection import Modules
from hookstats.numbers.fields import Bins, ExponentBins, Site
from hookstats.numbers.ranks import ALONE, Ranks
from hookstats.numbers.site_stats import SiteStats
from hookstats.watch.arguments import (
    DEFAULT_TENSORS,
    Sink,
    check_channels_every,
    check_compiled_programs,
    check_example,
    check_histogram,
    checked_every,
    checked_sinks,
    checked_tensors,
    refuse,
    refuse_device,
)
from hookstats.watch.binding import SiteBinder
from hookstats.watch.drain import Drain
from hookstats.watch.evaluation import TrainingOnly, check_training_only
from hookstats.watch.hooks import InputHook
from hookstats.watch.judging import OnFinding, Recorder, check_reaction
from hookstats.watch.memory import Store, accumulate
from hookstats.watch.monitor import Cadence, Monitor, Watching
from hookstats.watch.parameters import Parameters, watch_optimizers
from hookstats.watch.planning import Plan
from hookstats.watch.scalars import Kept, Scalars
from hookstats.watch.scaling import Scaling, check_scaler

if TYPE_CHECKING:
    from hookstats.cluster.joining import Joined

_log = logging.getLogger("hookstats")


def attach(
    model: nn.Module,
    modules: Modules = None,
    *,
    exclude: Modules = None,
    tensors: Iterable[str] = DEFAULT_TENSORS,
    channels: bool | str | Iterable[str] = True,
    channels_every: int = 1,
    channel_dim: int | Mapping[str, int] | None = None,
    histogram: Bins | None = ExponentBins(),
    every: int | Callable[[int], bool] = 10,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    sinks: Sink | Iterable[Sink] = (),
    on_finding: OnFinding = "log",
    escalate: int = 0,
    process_group: Any = None,
    placements: Mapping[str, Any] | None = None,
    rank_spread: bool = False,
    grad_scaler: Any = None,
    training_only: bool | None = None,
    compiled_programs: int = 2,
    memory_budget: int = 256 << 20,
    strict: bool = False,
) -> Monitor:
    """Watches a model: statistics of its modules' outputs and the gradients of those, of parameters and theirs.

    Args:
        model: any module, compiled ones included; attach before or after ``torch.compile``. What is in a tuple or dict
            output, and widths that no type tells, are learned from the first forward, or when that is traced. In
            evaluation, ``nn.TransformerEncoderLayer`` leaves its fused path for the ordinary one while hooks are on it
            or on what it holds.
        modules: globs over module names (``"layers.*.mlp"``), or a callable ``(name, module) -> bool``. None: the leaf
            modules that do something, and the direct children of every ModuleList. Parameters are those of the chosen
            modules (None: all), and those whose names the globs match (``"*.weight"``).
        exclude: globs over the names of modules and parameters, or a callable; what they choose is left out, with all
            that is inside it.
        tensors: of ``"output"``, ``"grad_output"``, ``"param_grad"`` (these by default), ``"input"``,
            ``"grad_input"``, ``"param"``, ``"param_update"``. An input is measured before the module runs; several, or
            some by name, are ``"input.0"``, ``"input.mask"``. Its gradient is the module's own share, whatever else the
            tensor is used for; a module that overwrites its input has none. Parameters and gradients are read when the
            parameter's optimizer steps: gradients are whole then, and clipped if they are clipped
            (`Monitor.measure_gradients` reads them before); without an optimizer of torch.optim in `Monitor.step`. An
            update is the new value minus the old one, of which a copy is kept while the optimizer steps, inside
            memory_budget. This process's part of a DTensor is read.
        channels: whether statistics are kept per channel: True, False, or globs.
        channels_every: channels and histograms leave the device at every n-th measured step, from the first on; in the
            snapshots between they are None, and ``total`` is all that travels.
        channel_dim: an int, or ``{glob: int}``, of outputs and inputs. None: by the type of a torch.nn module (Linear,
            Embedding, LayerNorm: last; convolutions, BatchNorm, pooling: the one before the spatial ones), else by
            evidence: the dimension that has the size of a vector among the module's parameters; for a leaf, that of the
            latest output of the same shape; a width found inside the module; a width of what ran before it.
            ``SiteStats.channel_dim`` says what was found. Where the width of a site alternates, it keeps totals. A
            parameter's channels are its outputs (dimension 0; of a transposed convolution, and of transformers' Conv1D,
            1); one of fewer than two dimensions has a total only.
        histogram: ``ExponentBins()``, ``LinearBins(lo, hi, n)``, either with ``per_channel=True``, or None.
        every: n, to measure every n-th step from step 0 on, or a callable ``step -> bool``. Step 0 is always measured.
        example: (args, kwargs) for the model. One forward on fake tensors then shows every width and what is in
            containers, which a compiled model cannot show; no value is computed, no buffer changes.
        sinks: a callable or several, called with each Snapshot when it arrives; or `hookstats.record`, which keeps and
            judges them.
        on_finding: what is done with what the rules of a recording find (``monitor.findings``), within two steps after
            it was found: "log" writes its sentence to the logger "hookstats"; "raise" does, too, and raises
            `FindingError` out of `Monitor.step` for what is critical; a callable is called with each Finding; None.
        escalate: so many steps after a finding (of severity warning or critical) are all measured, with channels and
            histograms. No program is compiled anew for it.
        process_group: a torch.distributed.ProcessGroup or DeviceMesh whose ranks measure together: their steps are
            merged, in a thread beside training and over connections of its own, and `Monitor.step` returns what all
            have, later than without. ``sinks`` get it on the group's lowest rank. A step that not all ranks bring in
            time, or with the same ``every``, is each rank's own (``Snapshot.ranks``). All ranks of the group attach, in
            the same order where there are several monitors. None: nothing is communicated.
        placements: ``{glob: placement}``, how plain tensors of modules and parameters lie on the ranks, where no
            DTensor says it: of torch.distributed.tensor, ``Shard(-1)`` for parts of the channels, ``Shard(0)`` for
            other rows, ``Replicate()`` for the same values; a tuple of them, one for each dimension, of a DeviceMesh.
        rank_spread: whether `Snapshot.rank_spread` tells how far the ranks lie apart.
        grad_scaler: the torch.amp.GradScaler that the loss goes through. The gradients of outputs and inputs are then
            reported without its scale (moments and norms are divided by it, as are the edges of histograms), and
            ``Snapshot.overflowed`` marks the steps in which it skipped one of its optimizers. Call `Monitor.step` after
            ``scaler.update()``, and load a saved scaler before attach.
        training_only: whether only forwards in training mode are measured, so that evaluation between steps is not. The
            model's own ``training`` decides, not that of its submodules. None: as soon as the model was in training
            mode, at attach or when a step ended.
        compiled_programs: how many programs torch.compile makes for training. 2: one that measures, and the bare one,
            compiled when the first step comes that is not measured. 1, where compiling takes too long: the one that
            measures runs in all steps, those of the other monitors, too, and costs something between measured steps.
        memory_budget: bytes per device, of state and of the copies for ``"param_update"``. Where channels would need
            more, all sites keep totals only; what is seen later (a container's tensors, a tap, a width) and does not
            fit keeps totals, or is skipped. Not in it is the copy of the state that leaves the device when a measured
            step is closed: for that long it takes as much again; on a CPU, for as long as the Snapshot is kept.
        strict: what cannot be measured raises; otherwise that tensor is left out, with one warning for each site and
            its reason in ``Snapshot.skipped``, and training goes on. A site is given up after three measured steps in a
            row in which none of its tensors could be measured.

    Raises:
        TypeError, ValueError: for arguments that are not as above: an unknown tensor kind, a glob that matches nothing,
            a channel_dim that the module cannot have, a process_group without this rank; for a DataParallel model;
            where even totals would not fit into memory_budget.
        RuntimeError: for a model on a GPU where hookstats was built without CUDA, or whose driver or GPU cannot run
            what was built; where the forward of `example` fails.
    """
    refuse(model)
    check_example(example)
    kinds = checked_tensors(tensors)
    due = checked_every(every)
    check_channels_every(channels_every)
    callables = checked_sinks(sinks)
    recorders = [sink for sink in callables if isinstance(sink, Recorder)]
    check_reaction(on_finding, escalate, recorders)
    check_histogram(histogram)
    check_scaler(grad_scaler)
    check_training_only(training_only)
    check_compiled_programs(compiled_programs)
    if not isinstance(memory_budget, int) or memory_budget < 0:
        raise ValueError(f"memory_budget: expected a number of bytes, got {memory_budget!r}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected True or False, got {strict!r}")
    plan = Plan(model, modules, exclude, kinds, channels, channel_dim)
    store = Store(histogram, memory_budget, strict)
    too_much = plan.reserve(store)
    binder = SiteBinder(store, TrainingOnly(model, training_only, store.flags, compiled_programs))
    scaling = None if grad_scaler is None else Scaling(grad_scaler, model)
    parameters = Parameters(store, plan.of_parameters, binder, plan.device, scaling)
    handles: list[Any] = []
    try:
        _hang_hooks(plan, binder, handles)
        for name, slot in plan.parameters.items():
            parameters.add(name, slot, name in plan.keeping)
        if example is not None:
            _learn(model, binder, *example)
        if plan.parameters or scaling is not None:
            handles.append(watch_optimizers(parameters))
        ranks, joined = _joined(model, process_group, placements, rank_spread, plan, memory_budget)
    except Exception:
        for handle in handles:
            handle.remove()
        binder.training.forget()
        raise
    keeps = channels is True and too_much is None
    cadence = Cadence(due, channels_every, escalate)
    watching = Watching(store, binder, parameters, scaling, handles, keeps, plan.trained, plan.device, ranks, joined)
    monitor = Monitor(watching, cadence, callables, on_finding)
    settings = _settings(model, monitor, plan, every, channels_every)
    for begun, recorder in enumerate(monitor.recorders):
        try:
            is_of_all = joined is not None and not recorder.every_rank
            recorder.begin(settings | ({"rank": 0, "world_size": ranks.world_size} if is_of_all else {}))
        except Exception:
            monitor.abandon(begun)
            raise
    _report(monitor, plan, None if example is None else binder.example_bytes, joined is not None)
    if too_much is not None:
        _report_totals(too_much, memory_budget)
    order.make_room_for_graphs()
    return monitor


def _hang_hooks(plan: Plan, binder: SiteBinder, handles: list[Any]) -> None:
    """All hooks are made before the first one hangs on a module; handles: to take them off."""
    hooks = [(module, binder.hook(spec, device, make)) for module, spec, make, device in plan.hooks()]
    for module, hook in hooks:
        on_inputs = isinstance(hook, InputHook)
        handles.append(order.register(module, hook, on_inputs=on_inputs, with_kwargs=on_inputs))


def _joined(
    model: nn.Module,
    process_group: Any,
    placements: Mapping[str, Any] | None,
    rank_spread: bool,
    plan: Plan,
    memory_budget: int,
) -> tuple[Ranks, Joined | None]:
    """This rank, and the others of the group."""
    if process_group is None:
        if placements is not None or rank_spread:
            raise ValueError("placements, rank_spread: expected a process_group, whose ranks are merged; got None")
        return Ranks((torch.distributed.get_rank(),)) if _is_distributed() else ALONE, None
    from hookstats.cluster import joining  # torch.distributed takes its time where nobody uses it

    names = [*plan.modules, *plan.parameters]
    joined = joining.Joined(model, process_group, placements, names, rank_spread, memory_budget)
    return joined.ranks, joined


def _settings(
    model: nn.Module, monitor: Monitor, plan: Plan, every: int | Callable[[int], bool], channels_every: int
) -> dict[str, Any]:
    """What a recording keeps of a run."""
    return {
        "rank": torch.distributed.get_rank() if _is_distributed() else 0,
        "world_size": torch.distributed.get_world_size() if _is_distributed() else 1,
        "model": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters() if not nn.parameter.is_lazy(each)),
        "sites": len(monitor.sites),
        "state_bytes": monitor.state_bytes,
        "device": str(plan.device),
        "every": every if isinstance(every, int) else repr(every),
        "channels_every": channels_every,
        "torch": torch.__version__,
    }


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _report(monitor: Monitor, plan: Plan, example_bytes: int | None, is_joined: bool) -> None:
    _log.info(
        "attached to %d sites of %d modules and %d parameters, state %.1f MB%s",
        len(monitor.sites),
        len(plan.modules),
        len(plan.parameters),
        monitor.state_bytes / 2**20,
        "" if example_bytes is None else f"; a step like the example reads {example_bytes / 2**20:.1f} MB",
    )
    if _is_distributed() and not is_joined and torch.distributed.get_world_size() > 1:
        _log.info(
            "the numbers are those of rank %d alone; attach(process_group=torch.distributed.group.WORLD) merges those "
            "of all %d ranks",
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
        )


def _report_totals(wanted: int, memory_budget: int) -> None:
    _log.warning(
        "per-channel state would take %.1f MB of memory_budget=%.1f MB on a device: all sites keep totals only. "
        "Choose fewer modules=, channels=[globs] or histogram=ExponentBins(), or raise memory_budget.",
        wanted / 2**20,
        memory_budget / 2**20,
    )


def measure(
    tensor: torch.Tensor,
    channel_dim: int | None = None,
    histogram: Bins | None = ExponentBins(),
    *,
    channels: bool = True,
) -> SiteStats:
    """The statistics of one tensor, now.

    Args:
        tensor: float32, float16, bfloat16, float64, float8_e4m3fn or float8_e5m2, any strides, on a CPU or (with a CUDA
            build) a GPU.
        channel_dim: the dimension whose entries are kept apart. None: 1 for 4-D and 5-D tensors, else the last. Not
            read for a 0-dim tensor.
        histogram: as in `attach`.
        channels: whether they are kept apart at all.

    Raises:
        TypeError: for another dtype, or what is not a dense tensor. IndexError: for a channel_dim out of range.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"measure: expected a torch.Tensor, got {type(tensor).__name__}")
    refuse_device(tensor.device)
    check_histogram(histogram)
    if tensor.layout != torch.strided or tensor.is_nested or _native.has_no_data(tensor):
        raise TypeError(f"measure: expected a dense strided tensor with data, got {tensor.layout} on {tensor.device}")
    dim = channel_dim_of(tensor, channel_dim)
    keep_channels = channels and tensor.dim() > 0
    if not keep_channels:
        width = 1
    elif not -tensor.dim() <= operator.index(dim) < tensor.dim():
        raise IndexError(f"measure: expected channel_dim from {-tensor.dim()} to {tensor.dim() - 1}, got {dim}")
    else:
        width = max(tensor.shape[dim], 1)
    store = Store(histogram, 0, strict=True)
    store.reserve(tensor.device, store.site_bytes(width) // 8)
    site = Site("", "tensor")
    state = store.add(site, tensor.device, width, dim, keep_channels).state
    store.flags.value = True
    accumulate(tensor.detach(), state)
    return Drain(store).begin(Kept.of(0, Scalars({})), clear=False).finish().snapshot()[site]


def _learn(model: nn.Module, binder: SiteBinder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One forward on fake tensors, which the hooks see."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    try:
        with binder.learning(), torch.no_grad(), torch.compiler.set_stance("force_eager"), mode:
            state = {name: fake(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
            functional_call(model, state, tree_map(fake, args), tree_map(fake, kwargs))
    except Exception as error:
        raise RuntimeError(f"example: the model's forward on fake tensors failed: {error}") from error
