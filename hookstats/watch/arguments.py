"""The arguments of attach: what is accepted, and what is said of anything else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from hookstats import _native
from hookstats.modules.selection import Slot, as_globs, matches
from hookstats.numbers.fields import ExponentBins, LinearBins
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.judging import Recorder

DEFAULT_TENSORS = ("output", "grad_output", "param_grad")
OF_PARAMETERS = ("param", "param_grad", "param_update")
TENSORS = ("output", "grad_output", "input", "grad_input", *OF_PARAMETERS)
Sink: TypeAlias = Callable[[Snapshot], object] | Recorder


def device_of(module: nn.Module) -> torch.device | None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type in ("cpu", "cuda"):
            return tensor.device
    return None


def refuse_device(device: torch.device) -> None:
    if device.type == "cuda" and not _native.HAS_CUDA:
        raise RuntimeError(
            f"expected a CPU tensor or model, got one on {device}: this hookstats was built without CUDA "
            "kernels. Rebuild it where the CUDA toolkit is installed: "
            "HOOKSTATS_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps ."
        )


def refuse(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach: expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise TypeError(
                "attach: expected a model without DataParallel, whose replicas would share hooks across devices; use "
                "DistributedDataParallel"
            )
    for tensor in (*model.parameters(), *model.buffers()):
        refuse_device(tensor.device)


def checked_tensors(tensors: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(tensors, Iterable):
        raise TypeError(f"tensors: expected some of {', '.join(TENSORS)}; got {tensors!r}")
    kinds = (tensors,) if isinstance(tensors, str) else tuple(tensors)
    for kind in kinds:
        if kind not in TENSORS:
            raise ValueError(f"tensors: expected some of {', '.join(TENSORS)}; got {kind!r}")
    if not kinds:
        raise ValueError(f"tensors: expected some of {', '.join(TENSORS)}; got none")
    return tuple(kind for kind in TENSORS if kind in kinds)


def checked_every(every: int | Callable[[int], bool]) -> Callable[[int], bool]:
    if callable(every):
        return every
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every: expected an int from 1, or a callable step -> bool; got {every!r}")
    return lambda step: step % every == 0


def check_channels_every(every: object) -> None:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"channels_every: expected an int from 1, got {every!r}")


def check_compiled_programs(compiled_programs: object) -> None:
    if isinstance(compiled_programs, bool) or compiled_programs not in (1, 2):
        raise ValueError(f"compiled_programs: expected 1 or 2, got {compiled_programs!r}")


def checked_sinks(sinks: Sink | Iterable[Sink]) -> tuple[Sink, ...]:
    is_one = callable(sinks) or isinstance(sinks, Recorder | str | Path | Mapping) or not isinstance(sinks, Iterable)
    listed: tuple[Any, ...] = (sinks,) if is_one else tuple(sinks)  # type: ignore[arg-type]
    for sink in listed:
        got = _no_sink(sink)
        if got is not None:
            raise TypeError(f"sinks: expected callables Snapshot -> None, or hookstats.record(...); got {got}")
    return listed


def _no_sink(sink: Any) -> str | None:
    """What it is, if it is no sink."""
    if isinstance(sink, type):
        return f"the class {sink.__name__}: give an instance of it, {sink.__name__}(...)"
    if inspect.isfunction(sink) and sink.__module__.split(".")[0] == "hookstats":
        return f"the function {sink.__name__}: give what it returns, {sink.__name__}(...)"
    if isinstance(sink, str | Path):
        return f"{sink!r}: a directory is recorded into by hookstats.record({str(sink)!r})"
    if sink is None:
        return "None: where a function is to be called with each Snapshot, give the function, not what it returned"
    if inspect.iscoroutinefunction(sink) or inspect.isgeneratorfunction(sink) or inspect.isasyncgenfunction(sink):
        return f"{sink!r}, whose call alone does nothing: it is a coroutine function or a generator function"
    if isinstance(sink, Recorder):
        return None
    if not callable(sink):
        return repr(sink)
    try:
        signature = inspect.signature(sink)
    except (TypeError, ValueError):  # some of C's say nothing of their arguments
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        return f"{sink!r}, which cannot be called with one argument: {error}"
    return None


def check_example(example: Any) -> None:
    if example is None:
        return
    is_pair = isinstance(example, tuple) and len(example) == 2
    if not is_pair or not isinstance(example[0], tuple) or not isinstance(example[1], dict):
        raise TypeError(f"example: expected (args, kwargs), a tuple and a dict, got {type(example).__name__}")


def channel_names(
    channels: bool | str | Iterable[str], chosen: Mapping[str, nn.Module], slots: Mapping[str, Slot]
) -> set[str]:
    """The modules and parameters that keep channels; a parameter goes with its module, too."""
    names = [*chosen, *slots]
    if isinstance(channels, bool):
        return set(names) if channels else set()
    globs = as_globs("channels", channels, names)
    inside = {id(module) for name, module in chosen.items() if matches(name, globs)}
    return {n for n in names if matches(n, globs) or (n in slots and id(slots[n].module) in inside)}


def check_histogram(histogram: object) -> None:
    if histogram is not None and not isinstance(histogram, (ExponentBins, LinearBins)):
        raise TypeError(f"histogram: expected ExponentBins(...), LinearBins(...) or None, got {histogram!r}")
