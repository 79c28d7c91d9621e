"""calibrate(): any number of batches through a model, and what its layers were given."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hookstats.attaching import attach
from hookstats.calibration.experts import ShownRows, Stacked, find_stacked
from hookstats.calibration.inputs import InputStats, from_site, make_empty
from hookstats.calibration.results import Calibration
from hookstats.calibration.weights import LINEAR, Weight, find_weight
from hookstats.modules.selection import Modules, clean_names, find_modules_at
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.arguments import Options
from hookstats.watch.monitor import Monitor

# The input itself, whichever way it was given; what else a layer may be given is no input of its weight.
_INPUTS = ("input", "input.0", "input.input")


def call(model: nn.Module, batch: Any) -> Any:
    """A mapping is given to the model by name, a tuple or list as positional arguments, all else as the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    modules: Modules = None,
    *,
    forward: Callable[[nn.Module, Any], Any] = call,
) -> Calibration:
    """Gathers what the layers of a model are given, for quantisation and pruning after training.

        calibration = hookstats.calibrate(model, batches)
        calibration.save("calibration.safetensors")

    The model runs in evaluation mode and without gradients. Afterwards, also after an error in a batch, each module is
    in the mode that it was in, and no hook is left. Nothing of a batch is kept: memory does not grow with their number.

    Args:
        model: any module, on any device; a compiled one runs as it was before it was compiled.
        batches: any iterable, such as a DataLoader or a generator, or ``tqdm(loader)`` for a progress bar.
        modules: globs over module names, or a callable ``(name, module) -> bool``. None: all. Of these, ``nn.Linear``
            and ``nn.Conv1d``, ``2d`` and ``3d`` are measured, and modules that hold the weights of several experts in
            parameters ``[experts, ., .]``, each expert by itself, as far as products show which rows are whose.
        forward: how the model is called with a batch. By default a mapping is given by name, a tuple or list as
            positional arguments, and anything else as the only argument.

    Returns a `hookstats.results.Calibration`, with an entry for each layer, also for those that were never called.

    Raises:
        TypeError: for what is no model, no iterable, or no function.
        ValueError: without any batch; where nothing of what was chosen can be measured, or a glob matches nothing.
        RuntimeError: for inputs that cannot be measured, such as complex ones; and what the model or the batches raise.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"calibrate: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(batches, Iterable) or isinstance(batches, torch.Tensor | Mapping | str):
        raise TypeError(f"batches: expected an iterable of batches, such as [batch], got {type(batches).__name__}")
    if not callable(forward):
        raise TypeError(f"forward: expected a function (model, batch), got {forward!r}")
    chosen = clean_names(model) if modules is None else find_modules_at(model, modules, None)
    layers = {name: module for name, module in chosen.items() if isinstance(module, LINEAR)}
    experts = find_stacked(chosen)
    if not layers and not experts:
        raise ValueError(
            "modules: expected nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, or experts that are stacked in parameters; "
            f"found none among {len(chosen)} modules"
        )
    parameters = [each for of_module in experts.values() for each in of_module]
    with _evaluating(model), _attach_monitor(model, layers) as monitor:
        count = 0
        for batch in batches:
            with torch.no_grad(), ShownRows(monitor, parameters) if experts else contextlib.nullcontext():
                forward(model, batch)
            count += 1
        if not count:
            raise ValueError("batches: expected at least one batch, got none")
        snapshot = monitor.snapshot()
    inputs: dict[str, InputStats] = {}
    weights: dict[str, Weight] = {}
    for name, module in chosen.items():
        if name in layers:
            weights[name] = find_weight(module)
            inputs[name] = _collect_layer(snapshot, name, module)
        for parameter in experts.get(name, ()):
            weights |= parameter.weights()
            inputs |= _collect_experts(snapshot, parameter)
    return Calibration(inputs, weights, [each.name for each in parameters if each.input_dim is None])


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and run it eagerly; then put each module back into its mode."""
    flags = [(module, module.training) for module in model.modules()]
    with torch.compiler.set_stance("force_eager"):
        try:
            model.eval()
            yield
        finally:
            for module, flag in flags:
                module.training = flag


def _attach_monitor(model: nn.Module, layers: Mapping[str, nn.Module]) -> Monitor:
    return attach(
        model,
        (lambda name, module: name in layers) if layers else None,
        tensors=("input",) if layers else ("model_input",),  # of stacked experts alone: anything, to tap them
        every=1,
        options=Options(strict=True, memory_budget=sys.maxsize, training_only=False),
    )


def _collect_layer(snapshot: Snapshot, name: str, module: nn.Module) -> InputStats:
    found = [snapshot[name, tensor] for tensor in _INPUTS if (name, tensor) in snapshot]
    measured = [from_site(stats) for stats in found if stats.calls]
    if not measured:
        return make_empty(int(getattr(module, "in_features", 0) or getattr(module, "in_channels", 0)))
    first, *others = measured
    for other in others:
        first = first.merge(other)
    return first


def _collect_experts(snapshot: Snapshot, parameter: Stacked) -> dict[str, InputStats]:
    found = {}
    for name, weight in parameter.weights().items():
        site = (name, "output")  # of what was tapped
        seen = site in snapshot
        found[name] = from_site(snapshot[site]) if seen else make_empty(weight.get().shape[weight.input_dim])
    return found
