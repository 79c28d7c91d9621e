"""attach(): from a model to hooks on it and a Monitor; measure(), for one tensor."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map

from hookstats import _native
from hookstats.modules import order
from hookstats.modules.channels import channels_of, input_channels, wanted_channel_dims
from hookstats.modules.selection import Modules, select
from hookstats.numbers.fields import Bins, ExponentBins, Site
from hookstats.numbers.site_stats import SiteStats
from hookstats.watch.arguments import (
    DEFAULT_TENSORS,
    OF_PARAMETERS,
    Sink,
    channel_names,
    check_channels_every,
    check_example,
    check_histogram,
    checked_every,
    checked_sinks,
    checked_tensors,
    device_of,
    refuse,
    refuse_device,
)
from hookstats.watch.binding import SiteBinder
from hookstats.watch.drain import Drain, Scalars
from hookstats.watch.evaluation import TrainingOnly, check_training_only
from hookstats.watch.hooks import Hook, InputHook, Kinds, SiteSpec
from hookstats.watch.memory import Store, accumulate
from hookstats.watch.monitor import Monitor
from hookstats.watch.parameters import Parameters, kinds_of, placing, watch_optimizers
from hookstats.watch.scaling import Scaling, check_scaler

_log = logging.getLogger("hookstats")


def attach(
    model: nn.Module,
    modules: Modules = None,
    *,
    tensors: Iterable[str] = DEFAULT_TENSORS,
    channels: bool | str | Iterable[str] = True,
    channels_every: int = 1,
    channel_dim: int | Mapping[str, int] | None = None,
    histogram: Bins | None = ExponentBins(),
    every: int | Callable[[int], bool] = 10,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    sinks: Sink | Iterable[Sink] = (),
    grad_scaler: Any = None,
    training_only: bool | None = None,
    memory_budget: int = 256 << 20,
    strict: bool = False,
) -> Monitor:
    """Watches a model: statistics of its modules' outputs and the gradients of those, of parameters and theirs.

    Args:
        model: any module, compiled ones included; attach before or after ``torch.compile``. What is in a tuple or dict
            output is learned from an eager forward. In evaluation, ``nn.TransformerEncoderLayer`` leaves its fused
            path for the ordinary one while hooks are on it or on what it holds.
        modules: globs over module names (``"layers.*.mlp"``), or a callable ``(name, module) -> bool``. None: the leaf
            modules that do something, and the direct children of every ModuleList. Parameters are those of the chosen
            modules (None: all), and those whose names the globs match (``"*.weight"``).
        tensors: of ``"output"``, ``"grad_output"``, ``"param_grad"`` (these by default), ``"input"``,
            ``"grad_input"``, ``"param"``, ``"param_update"``. An input is measured before the module runs; several, or
            some by name, are ``"input.0"``, ``"input.mask"``. Its gradient is the module's own share, whatever else the
            tensor is used for; a module that overwrites its input has none. Parameters and gradients are read when the
            parameter's optimizer steps: gradients are whole then, and clipped if they are clipped
            (`Monitor.measure_gradients` reads them before); without an optimizer of torch.optim in `Monitor.step`. An
            update is the new value minus the old one, of which a copy is kept while the optimizer steps, inside
            memory_budget. Of a DTensor, this process's part is read.
        channels: whether statistics are kept per channel: True, False, or globs.
        channels_every: channels and histograms leave the device at every how many measured steps, from the first on; in
            the snapshots between they are None, and ``total`` is all that travels.
        channel_dim: an int, or ``{glob: int}``, of outputs and inputs. None: by the module's type (Linear, Embedding,
            LayerNorm: last; convolutions, BatchNorm, pooling: the one before the spatial ones), else 1 for 4-D and 5-D
            tensors, else the last. A parameter's channels are its outputs (dimension 0; of a transposed convolution 1);
            one of fewer than two dimensions has a total only.
        histogram: ``ExponentBins()``, ``LinearBins(lo, hi, n)``, either with ``per_channel=True``, or None.
        every: every how many steps one is measured, or a callable ``step -> bool``. Step 0 always is.
        example: (args, kwargs) for the model. One forward on fake tensors then shows every width and what is in
            containers, which a compiled model cannot show; no value is computed, no buffer changes.
        sinks: a callable or several, called with each Snapshot when it arrives.
        grad_scaler: the torch.amp.GradScaler that the loss goes through. The gradients of outputs and inputs are then
            reported without its scale (moments and norms are divided by it, as are the edges of histograms), and
            ``Snapshot.overflowed`` marks the steps in which it skipped one of its optimizers. Call `Monitor.step` after
            ``scaler.update()``, and load a saved scaler before attach.
        training_only: whether only forwards in training mode are measured, so that evaluation between steps is not. The
            model's own ``training`` decides, not that of its submodules. None: as soon as the model was in training
            mode, at attach or when a step ended.
        memory_budget: bytes per device, of state and of the copies for ``"param_update"``. Where channels would need
            more, all sites keep totals only; what is seen later (a container's tensors, a tap, a width) and does not
            fit keeps totals, or is skipped. Not in it is the copy of the state that leaves the device when a measured
            step is closed: for that long it takes as much again; on a CPU, for as long as the Snapshot is kept.
        strict: what cannot be measured raises; otherwise that tensor is left out, with one warning for each site and
            its reason in ``Snapshot.skipped``, and training goes on. A site is given up after three measured steps in a
            row in which none of its tensors could be measured.

    Raises:
        TypeError, ValueError: for arguments that are not as above: an unknown tensor kind, a glob that matches nothing,
            a channel_dim that the module cannot have; for a DataParallel model; where even totals would not fit into
            memory_budget.
        RuntimeError: for a model on a GPU where hookstats was built without CUDA; where the forward of `example` fails.
    """
    refuse(model)
    check_example(example)
    kinds = checked_tensors(tensors)
    due = checked_every(every)
    check_channels_every(channels_every)
    callables = checked_sinks(sinks)
    check_histogram(histogram)
    check_scaler(grad_scaler)
    check_training_only(training_only)
    if not isinstance(memory_budget, int) or memory_budget < 0:
        raise ValueError(f"memory_budget: expected a number of bytes, got {memory_budget!r}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected True or False, got {strict!r}")
    of_outputs: Kinds = ("output" if "output" in kinds else None, "grad_output" if "grad_output" in kinds else None)
    of_inputs: Kinds = ("input" if "input" in kinds else None, "grad_input" if "grad_input" in kinds else None)
    of_parameters = tuple(kind for kind in kinds if kind in OF_PARAMETERS)
    chosen, slots = select(model, modules, bool(of_parameters))
    if not any(of_outputs + of_inputs):
        chosen = {}
    dims = wanted_channel_dims(channel_dim, chosen)
    found = {name: channels_of(name, module, dims.get(name)) for name, module in chosen.items()}
    keep = channel_names(channels, chosen, slots)
    default = device_of(model) or torch.device("cpu")
    devices = {name: device_of(module) or default for name, module in chosen.items()}

    def planned() -> Iterator[tuple[nn.Module, SiteSpec, type[Hook]]]:
        for name, module in chosen.items():
            inputs = input_channels(module, dims.get(name))
            if any(of_outputs):
                yield module, SiteSpec(name, "", found[name], name in keep, of_outputs), Hook
            if any(of_inputs) and inputs is not None:
                yield module, SiteSpec(name, "", inputs, name in keep, of_inputs), InputHook

    def sizes() -> dict[torch.device, int]:
        total = dict.fromkeys(devices.values(), 0)
        for _, spec, _ in planned():
            width = (spec.channels.width or 1) if spec.keep_channels else 1
            total[devices[spec.name]] += len(spec.sites) * store.site_bytes(width)
        for name, slot in slots.items():
            tensor = slot.get()
            assert tensor is not None
            device, width, _ = placing(slot, tensor, name in keep, default)
            total[device] = total.get(device, 0) + len(kinds_of(tensor, of_parameters)) * store.site_bytes(width)
        return total

    if not chosen and not slots:
        raise ValueError(f"modules: expected to select something that has {' or '.join(kinds)}, selected nothing")
    store = Store(histogram, memory_budget, strict)
    wanted = max(sizes().values())
    if wanted > memory_budget:
        keep = set()
    for device, size in sizes().items():
        if size > memory_budget:
            raise ValueError(
                f"memory_budget: expected at least {size} bytes on {device}, for the totals alone with histogram="
                f"{histogram}, got {memory_budget}: raise it, choose fewer modules= or tensors=, or a histogram= of "
                "fewer bins, or None"
            )
        store.reserve(device, size // 8)
    training = TrainingOnly(model, training_only, store.flags)
    binder = SiteBinder(store, training)
    scaling = None if grad_scaler is None else Scaling(grad_scaler, model)
    parameters = Parameters(store, of_parameters, binder, default, scaling)
    handles: list[Any] = []
    try:
        hooks = [(module, binder.hook(w, devices[w.name], make)) for module, w, make in planned()]
        for module, hook in hooks:
            on_inputs = isinstance(hook, InputHook)
            handles.append(order.register(module, hook, on_inputs=on_inputs, with_kwargs=on_inputs))
        for name, slot in slots.items():
            parameters.add(name, slot, name in keep)
        if example is not None:
            _learn(model, binder, *example)
        if slots or scaling is not None:
            handles += watch_optimizers(parameters)
    except Exception:
        for handle in handles:
            handle.remove()
        raise
    monitor = Monitor(
        store,
        binder,
        parameters,
        handles,
        due=due,
        channels_every=channels_every,
        sinks=callables,
        scaling=scaling,
        tap_channels=channels is True and wanted <= memory_budget,
        trained=frozenset(name for name, module in chosen.items() if any(p.requires_grad for p in module.parameters())),
        device=default,
    )
    late = sum(1 for _, hook in hooks if not hook.spec.bound)
    _log.info(
        "attached to %d sites of %d modules and %d parameters, state %.1f MB%s%s",
        len(monitor.sites),
        len(chosen),
        len(slots),
        store.bytes / 2**20,
        "" if example is None else f"; a step like the example reads {binder.example_bytes / 2**20:.1f} MB",
        f"; {late} tensors show their width at their first eager forward (or example=), compiled before that they keep "
        "totals only"
        if late
        else "",
    )
    if wanted > memory_budget:
        _log.warning(
            "per-channel state would take %.1f MB of memory_budget=%.1f MB on a device: all sites keep totals only. "
            "Choose fewer modules=, channels=[globs] or histogram=ExponentBins(), or raise memory_budget.",
            wanted / 2**20,
            memory_budget / 2**20,
        )
    order.make_room_for_graphs()
    return monitor


def measure(tensor: torch.Tensor, channel_dim: int | None = -1, histogram: Bins | None = ExponentBins()) -> SiteStats:
    """The statistics of one tensor, now.

    Args:
        tensor: float32, float16, bfloat16, float64, float8_e4m3fn or float8_e5m2, any strides, on a CPU or (with a CUDA
            build) a GPU.
        channel_dim: the dimension whose entries are kept apart; None: none is. Not read for a 0-dim tensor.
        histogram: as in `attach`.

    Raises:
        TypeError: for another dtype, or what is not a dense tensor. IndexError: for a channel_dim out of range.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"measure: expected a torch.Tensor, got {type(tensor).__name__}")
    refuse_device(tensor.device)
    check_histogram(histogram)
    if tensor.layout != torch.strided or tensor.is_nested or _native.has_no_data(tensor):
        raise TypeError(f"measure: expected a dense strided tensor with data, got {tensor.layout} on {tensor.device}")
    if channel_dim is None or tensor.dim() == 0:
        width = 1
    elif not -tensor.dim() <= operator.index(channel_dim) < tensor.dim():
        raise IndexError(f"measure: expected channel_dim from {-tensor.dim()} to {tensor.dim() - 1}, got {channel_dim}")
    else:
        width = max(tensor.shape[channel_dim], 1)
    store = Store(histogram, 0, strict=True)
    store.reserve(tensor.device, store.site_bytes(width) // 8)
    site = Site("", "tensor")
    keep_channels = channel_dim is not None and tensor.dim() > 0
    state = store.add(site, tensor.device, width, channel_dim or 0, keep_channels).state
    store.flags.value = True
    accumulate(tensor.detach(), state)
    return Drain(store).begin(0, Scalars({}), clear=False).finish()[site]


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
