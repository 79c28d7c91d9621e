"""attach(): from a model to hooks on it and a Monitor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hookstats.language.attention import Attentions
from hookstats.language.finding import Router, attentions, routers
from hookstats.language.routers import Routers
from hookstats.language.token_weights import KIND as TOKEN_WEIGHTS
from hookstats.language.token_weights import TokenWeightsHook
from hookstats.modules import order
from hookstats.modules.facts import facts, find_hidden
from hookstats.modules.selection import Modules, find_root, list_modules
from hookstats.modules.sharding import is_dtensor
from hookstats.numbers.fields import Bins, ExponentBins
from hookstats.numbers.ranks import ALONE, StepRanks
from hookstats.watch.arguments import (
    DEFAULT_EVERY,
    DEFAULT_TENSORS,
    Channels,
    Options,
    Ranks,
    Sink,
    check_budget,
    check_every,
    check_histogram,
    check_rows,
    check_sinks,
    check_tensors,
    device_of,
    refuse,
)
from hookstats.watch.binding import SiteBinder
from hookstats.watch.delivery import Delivery
from hookstats.watch.flags import TrainingOnly
from hookstats.watch.hooks import InputHook
from hookstats.watch.judging import Recorder
from hookstats.watch.memory import StateStore
from hookstats.watch.monitor import Monitor
from hookstats.watch.optimizers import watch_optimizers
from hookstats.watch.parameters import Parameters
from hookstats.watch.planning import Plan, TooMuch
from hookstats.watch.scaling import LookingForScaler, Scaling

if TYPE_CHECKING:
    from hookstats.cluster.joining import Joined

_log = logging.getLogger("hookstats")


def attach(
    model: nn.Module,
    modules: Modules = None,
    *,
    exclude: Modules = None,
    tensors: Iterable[str] = DEFAULT_TENSORS,
    channels: bool | str | Iterable[str] | Channels = True,
    histogram: Bins | None = ExponentBins(),
    every: int | Callable[[int], bool] = DEFAULT_EVERY,
    rows: int = 1,
    budget: float | None = None,
    sinks: Sink | Iterable[Sink] = (),
    process_group: Any = None,
    options: Options = Options(),
) -> Monitor:
    """Watches a model: takes statistics of its modules' outputs, of its parameters, and of the gradients of both.

    Args:
        model: any module, compiled ones included; attach before or after ``torch.compile``.
        modules: globs over module names (``"layers.*.mlp"``), or a callable ``(name, module) -> bool``. None: the leaf
            modules that do something, and the direct children of every ModuleList, and of a ModuleDict whose keys are
            numbers. Parameters are those of the chosen modules (None: all), and those whose names the globs match
            (``"*.weight"``).
        exclude: globs over the names of modules and parameters, or a callable; what they choose is left out, with
            everything inside it.
        tensors: by default ``"output"``, ``"grad_output"``, ``"param_grad"``; ``"model_input"``, the floating inputs of
            the model; ``"param_sample"``, ``"update_sample"`` and ``"buffer_sample"``, up to 4,096 elements of a
            parameter, what a step changes in them, and those of a floating buffer. On request ``"input"``,
            ``"grad_input"``, ``"param"``, ``"param_update"``, ``"buffer"``;
            ``"param_grad_local"``, a rank's own gradients, of each backward, before DistributedDataParallel reduces
            them; ``"reduction"``, 64 elements of these and of the reduced ones; ``"optimizer"``, what an optimizer
            keeps of each parameter; ``"attention"``, the logits of each head; ``"router"``, the routers of mixtures
            of experts; ``"outside_update"``, what of a parameter's sample is another one when the next
            step of an optimizer begins, measured or not, than it was after a measured step;
            ``"token_weights"``, what a cross entropy divides its tokens by;
            ``"adjoint"``, of one module in each measured step, whether its backward is that of its forward;
            ``"optimizer_law"``, what a step of SGD, Adam or AdamW did to a parameter's sample over its formula.
        channels: whether statistics are kept per channel: True, False, globs over names, or `Channels`, which also says
            how often they are sent and along which dimension they lie.
        histogram: ``ExponentBins()``, ``LinearBins(lo, hi, n)``, either with ``per_channel=True``, or None.
            ``ExponentBins(block=32)`` or 16 also counts what formats with a scale for each block would lose.
        every: n, to measure every n-th step from step 0 on, or a callable ``step -> bool``. Step 0 is always measured.
        rows: n, to read every n-th row of activations and of their gradients, others in each measured step; 1: all. A
            row is a run of at least 64 bytes in memory: a token, a line of a plane, or a small plane. Of the rows that
            `Monitor.ignore` leaves it is every n-th; fewer than n rows are read whole, channels are never cut, and
            what is of parameters, the model's input, attentions and routers are read in full. Counts, extremes and
            histograms are then of the rows read, means, rms and shares are estimates (`Stats.standard_error`), and a
            NaN in another row is not seen (``Snapshot.rows``). Ten measured steps of each 500 are read in full,
            from the first on, and ten after a finding of a warning or worse, for rules that need the sums of all rows.
        budget: in place of every and rows, the share of the time of a step that may be added on average, such as 0.01.
            The first 28 steps are timed, in full, in part and without; then every and rows are chosen, for good: every
            step where that fits, with as many rows as fit, at least one of 8. It is logged, and is in
            `Monitor.overhead`. Ranks of a process_group choose alike: in step 28 they wait for each other, once.
        sinks: a callable or several, called with each Snapshot when it arrives; or `hookstats.record`, which keeps and
            judges them.
        process_group: the torch.distributed.ProcessGroup or DeviceMesh whose ranks measure together, or `Ranks`, which
            also says how tensors lie on them. None: nothing is communicated.
        options: `Options`: ``strict``, ``memory_budget``, ``training_only``, ``attention_rows``,
            ``laws``, ``identities``.

    Raises:
        TypeError, ValueError: for arguments that are not as above: an unknown tensor kind, a glob that matches nothing,
            a dimension that the module cannot have, a process_group without this rank; for a DataParallel model; for
            ``"attention"`` or ``"router"`` where the model has none; where even totals would not fit into the
            memory_budget.
        RuntimeError: for a model on a GPU where hookstats was built without CUDA, or whose driver or GPU cannot run
            what was built.
    """
    refuse(model)
    kinds = check_tensors(tensors)
    check_every(every)
    check_rows(rows)
    check_budget(budget, every, rows)
    kept = channels if isinstance(channels, Channels) else Channels(channels)
    callables = check_sinks(sinks)
    check_histogram(histogram)
    if not isinstance(options, Options):
        raise TypeError(f"options: expected hookstats.Options(...), got {options!r}")
    plan = Plan(model, modules, exclude, kinds, kept)
    store = StateStore(histogram, options.memory_budget, options.strict, may_sample=rows > 1 or budget is not None)
    too_much = plan.reserve(store)
    binder = SiteBinder(store, TrainingOnly(model, options.training_only, store.flags))
    handles: list[Any] = []
    joined = monitor = None
    begun = 0
    try:
        scaling = Scaling(model, options.strict, binder.warn_once)
        parts = _MonitorParts(
            binder,
            Parameters(model, store, plan.of_parameters, binder, plan.device),
            Attentions(binder, options.attention_rows, kept.which is not False),
            Routers(binder, kept.which is not False),
            scaling,
        )
        parts.parameters.given_loss.no_weights = apart = _explain_tokens_apart(model, process_group)
        if options.identities is not None:
            parts.parameters.identities = _make_joint_sums(model, options, binder, scaling, process_group)
            handles += parts.parameters.identities.register_hooks()
        names = _register_hooks(parts, handles, model, plan, exclude, bool(apart))
        ranks, joined = _join_ranks(model, process_group, names, options.memory_budget)
        delivery = Delivery(store, binder, callables, plan.trained, ranks, joined)
        monitor = Monitor(
            binder,
            parts.parameters,
            delivery,
            scaling,
            handles,
            plan.device,
            every=every,
            rows=rows,
            budget=budget,
            agree=list if joined is None else joined.largest,
            channels_every=kept.every,
            tap_channels=kept.which is True and (too_much is None or bool(plan.keeping)),
            attention=parts.attentions,
            routing=parts.routers,
            is_judged=any(isinstance(sink, Recorder) for sink in callables),
            declared=options.laws,
        )
        settings = _collect_settings(model, monitor, plan, every, rows, budget, kept.every, options)
        of_all = settings if joined is None else settings | {"rank": 0, "world_size": ranks.world_size}
        for recorder in delivery.recorders:
            recorder.begin(settings if recorder.every_rank else of_all)
            begun += 1
        _report(model, monitor, plan, options, joined is not None)
        if too_much is not None:
            _report_totals(too_much, options.memory_budget)
        order.make_room_for_graphs()
    except BaseException:
        if monitor is not None:
            monitor._abandon(begun)
        else:
            _let_go(handles, binder, joined)
        raise
    return monitor


def _let_go(handles: list[Any], binder: SiteBinder, joined: Joined | None) -> None:
    for handle in handles:
        handle.remove()
    binder.training.forget()
    if joined is not None:
        joined.close()


class _MonitorParts(NamedTuple):
    """The parts of a monitor that measure."""

    binder: SiteBinder
    parameters: Parameters
    attentions: Attentions
    routers: Routers
    scaling: Scaling


def _register_hooks(
    parts: _MonitorParts, handles: list[Any], model: nn.Module, plan: Plan, exclude: Modules, is_part: bool
) -> list[str]:
    """Hangs all hooks. Returns the names of modules and parameters on which they are.

    handles: gets those of the hooks, also where it raises. is_part: other ranks have something of this one's loss.
    """
    hooks = [(module, parts.binder.hook(spec, device, make)) for module, spec, make, device in plan.hooks()]
    for module, hook in hooks:  # all are made before the first one hangs on a module
        on_inputs = isinstance(hook, InputHook)
        handles.append(order.register(module, hook, on_inputs=on_inputs, with_kwargs=on_inputs))
    for name, slot in plan.parameters.items():
        parts.parameters.add(name, slot, name in plan.keeping, plan.group_size_of(name))
    handles.append(parts.parameters.local_gradients)
    handles.append(LookingForScaler(parts.scaling))
    if plan.parameters or parts.parameters.identities is not None:
        handles.append(watch_optimizers(parts.parameters))
    names = [*plan.modules, *plan.parameters]
    if "attention" in plan.kinds:
        attending = _find_attentions(model, exclude)
        names += attending
        handles += parts.attentions.watch(
            attending, {name: device_of(m) or plan.device for name, m in attending.items()}
        )
    if "adjoint" in plan.kinds:
        from hookstats.identities.adjoint import AdjointTests  # of which not everybody makes use

        parts.parameters.adjoint = AdjointTests(parts.binder, plan.modules)
        handles += parts.parameters.adjoint.register_hooks(plan.modules)
    root = find_root(model, exclude) if TOKEN_WEIGHTS in plan.kinds and not is_part else None
    if root is not None:
        handles.append(order.register(root, TokenWeightsHook(parts.binder, root, device_of(root) or plan.device)))
    if "router" in plan.kinds:
        choosing = _find_routers(model, exclude)
        names += choosing
        devices = {name: device_of(each.module) or plan.device for name, each in choosing.items()}
        handles += parts.routers.watch(choosing, devices)
    return names


def _explain_tokens_apart(model: nn.Module, process_group: Any) -> str:
    """Return why the tokens of a loss are not those of the ranks that measure together, each its own; empty: they are.

    A part of a vocabulary, of a pipeline, or replicas of the same logits have no weights of tokens that add up.
    """
    if not _is_distributed() or torch.distributed.get_world_size() == 1:
        return ""
    if process_group is None:
        return "other ranks have tokens, too, which are not measured together with these: attach(process_group=...)"
    ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group)
    if getattr(ranks.group, "ndim", 1) > 1 or ranks.placements is not None:
        return "ranks of several dimensions may have parts of the same logits"
    sharded = any(hasattr(each, "set_requires_gradient_sync") for each in model.modules())
    if not sharded and any(is_dtensor(each) for each in model.parameters()):
        return "parameters are cut by tensor parallelism, and logits may be"
    return ""


def _make_joint_sums(
    model: nn.Module, options: Options, binder: SiteBinder, scaling: Scaling, process_group: Any
) -> Any:
    from hookstats.identities.measuring import JointSums  # of which not everybody makes use

    group = process_group.group if isinstance(process_group, Ranks) else process_group
    if group is None:
        merged: list[int] = []
    elif hasattr(group, "mesh_dim_names"):
        merged = group.mesh.flatten().tolist()
    else:
        merged = torch.distributed.get_process_group_ranks(group)
    return JointSums(model, options.identities, binder.store, binder, scaling, merged)


def _find_attentions(model: nn.Module, exclude: Modules) -> dict[str, nn.Module]:
    found = attentions(list_modules(model, exclude))
    if not found:
        raise ValueError(
            "tensors: expected modules that compute attention for 'attention', found none: neither a class named so, "
            "nor a forward that calls scaled_dot_product_attention; Monitor.attention measures q and k by hand"
        )
    return found


def _find_routers(model: nn.Module, exclude: Modules) -> dict[str, Router]:
    found = routers(list_modules(model, exclude))
    if not found:
        raise ValueError(
            "tensors: expected routers for 'router', found none: no module that stands beside one named experts and "
            "has a weight with a row for each of these"
        )
    return found


def _join_ranks(
    model: nn.Module, process_group: Any, names: list[str], memory_budget: int
) -> tuple[StepRanks, Joined | None]:
    """Join this rank with the others of the group. names: of what is watched, of modules and parameters."""
    if process_group is None:
        return StepRanks((torch.distributed.get_rank(),)) if _is_distributed() else ALONE, None
    from hookstats.cluster import joining  # torch.distributed takes its time where nobody uses it

    ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group)
    joined = joining.Joined(
        model, ranks.group, ranks.placements, names, ranks.spread, memory_budget, ranks.timeout.total_seconds()
    )
    return joined.ranks, joined


def _collect_settings(
    model: nn.Module,
    monitor: Monitor,
    plan: Plan,
    every: int | Callable[[int], bool],
    rows: int,
    budget: float | None,
    channels_every: int,
    options: Options,
) -> dict[str, Any]:
    """Return the settings of a run that a recording keeps."""
    return {
        "rank": torch.distributed.get_rank() if _is_distributed() else 0,
        "world_size": torch.distributed.get_world_size() if _is_distributed() else 1,
        "model": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters() if not nn.parameter.is_lazy(each)),
        "sites": len(monitor.sites),
        "state_bytes": monitor.state_bytes,
        "device": str(plan.device),
        "every": every if isinstance(every, int) and budget is None else repr(every if budget is None else None),
        "rows": rows,
        "budget": budget,
        "channels_every": channels_every,
        "options": options.to_json(),
        "torch": torch.__version__,
    }


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _report(model: nn.Module, monitor: Monitor, plan: Plan, options: Options, is_joined: bool) -> None:
    _log.info(
        "attached to %d sites of %d modules, %d parameters and %d buffers, state %.1f MB; %s",
        len(monitor.sites),
        len(plan.modules),
        sum(not slot.is_buffer for slot in plan.parameters.values()),
        sum(slot.is_buffer for slot in plan.parameters.values()),
        monitor.state_bytes / 2**20,
        options,
    )
    _report_model(model)
    if _is_distributed() and not is_joined and torch.distributed.get_world_size() > 1:
        _log.info(
            "the numbers are those of rank %d alone; attach(process_group=torch.distributed.group.WORLD) merges those "
            "of all %d ranks",
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
        )


def _report_model(model: nn.Module) -> None:
    try:
        known, lost = facts(model), find_hidden(model)
    except Exception as error:  # of whoever wrote the model: what only informs ends no attach
        return _log.info("the model could not be looked at: %r", error)
    if known:
        _log.info("the model: %s", "; ".join(known))
    for each in lost:
        _log.warning(
            "%s: model.parameters() leaves them out, and so does hookstats. If they are to learn, hold them in an "
            "nn.ModuleList, nn.ModuleDict or nn.ParameterList",
            each,
        )


def _report_totals(too_much: TooMuch, memory_budget: int) -> None:
    _log.warning(
        "per-channel state would take %.1f MB of memory_budget=%.1f MB on a device: %s keep totals only. "
        "Choose fewer modules=, channels=[globs] or histogram=ExponentBins(), or raise memory_budget.",
        too_much.size / 2**20,
        memory_budget / 2**20,
        too_much.which,
    )
