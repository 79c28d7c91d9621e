"""The arguments of attach: their own classes, what is accepted, and what is said of anything else."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from hookstats import _native
from hookstats.modules.selection import Slot
from hookstats.numbers.fields import ExponentBins, LinearBins
from hookstats.numbers.identities import KIND as IDENTITY
from hookstats.numbers.kinds import KINDS
from hookstats.numbers.selection import as_globs, matches
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.judging import Recorder
from hookstats.watch.laws import NEEDS

DEFAULT_TENSORS = (
    "output", "grad_output", "model_input", "param_sample", "param_grad", "update_sample", "buffer_sample"
)  # fmt: skip
OF_PARAMETERS = tuple(kind.name for kind in KINDS.values() if kind.of != "module" and kind.name != IDENTITY)
OF_LANGUAGE = tuple(kind.name for kind in KINDS.values() if kind.is_about)
TENSORS = (*(name for name in KINDS if name != IDENTITY), "model_input")
DEFAULT_EVERY = 10
_MOST_ROWS = 1 << 16
Sink: TypeAlias = Callable[[Snapshot], object] | Recorder


@dataclass(frozen=True)
class Channels:
    """Argument of ``attach(channels=...)``: what is kept per channel, how often, and along which dimension.

    Args:
        which: True: of all modules and parameters. False: of none. Globs over their names: of these.
        every: channels and histograms leave the device at every n-th measured step, from the first on. In the snapshots
            between they are None, and ``total`` is all that travels.
        dim: the dimension of outputs and inputs along which channels lie, or ``{glob: dimension}``. None: by the type
            of a torch.nn module (Linear, Embedding, LayerNorm: last; convolutions, BatchNorm, pooling: the one before
            the spatial ones), else by evidence: the dimension that has the size of a vector among the module's
            parameters; for a leaf, that of the latest output of the same shape; a width found inside the module; a
            width of what ran before it. ``SiteStats.channel_dim`` says what was found. ``{"": 0}`` keeps the samples
            of the model's own input apart.
        group_size: ``{glob: channels}``, how many channels in a row belong together, of outputs and parameters;
            `SiteStats.groups` are the statistics of each group. Where nothing is given, the heads of attention are
            found by evidence: the names of its projections, and the number of heads in it or in its configuration.

    A step in which the width of a site changes has its totals, and where it changes several times, the site keeps
    totals. A parameter's channels are its outputs (dimension 0; of a
    transposed convolution, and of transformers' Conv1D, 1), those of a vector its entries, of one value each.

    Raises:
        TypeError, ValueError: for arguments that are not as above. `attach` raises ValueError for a glob that matches
            nothing, for a dimension that a module cannot have, and for a group_size that does not divide its channels.
    """

    which: bool | str | Iterable[str] = True
    _: KW_ONLY
    every: int = 1
    dim: int | Mapping[str, int] | None = None
    group_size: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.which, bool | str):
            if not isinstance(self.which, Iterable):
                raise TypeError(f"channels: expected True, False or globs over names, got {self.which!r}")
            object.__setattr__(self, "which", tuple(self.which))
        if not _is_int(self.every) or self.every < 1:
            raise ValueError(f"Channels.every: expected an int from 1, got {self.every!r}")
        dims = self.dim if isinstance(self.dim, Mapping) else {"*": self.dim}
        if self.dim is not None and not all(isinstance(glob, str) and _is_int(dim) for glob, dim in dims.items()):
            raise TypeError(f"Channels.dim: expected an int or {{glob: int}}, got {self.dim!r}")
        sizes = {} if self.group_size is None else self.group_size
        if not isinstance(sizes, Mapping) or not all(isinstance(glob, str) and _is_int(n) for glob, n in sizes.items()):
            raise TypeError(f"Channels.group_size: expected {{glob: int}}, got {sizes!r}")
        if min(sizes.values(), default=1) < 1:
            raise ValueError(f"Channels.group_size: expected numbers from 1, got {sizes!r}")


@dataclass(frozen=True)
class Ranks:
    """The ranks that measure together, for ``attach(process_group=...)``, and how tensors lie on them.

    Args:
        group: a torch.distributed.ProcessGroup or DeviceMesh.
        placements: ``{glob: placement}``, how plain tensors of modules and parameters lie on the ranks, where no
            DTensor says it: of torch.distributed.tensor, ``Shard(-1)`` for parts of the channels, ``Shard(0)`` for
            other rows, ``Replicate()`` for the same values; a tuple of them, one for each dimension, of a DeviceMesh.
        spread: whether `Snapshot.rank_spread` tells how far the ranks lie apart.
        timeout: how long a rank that is late is waited for (it loads, or writes a checkpoint), beside training. Then,
            or where a rank is gone, each rank is alone for good, which is said once.

    The ranks' steps are merged, in a thread beside training and over connections of its own, and `Monitor.step` returns
    what all have, later than without. Sinks get it on the group's lowest rank. A step that not all ranks measure, with
    the same ``every``, is each rank's own (``Snapshot.ranks``). All ranks of the group attach, in the same order where
    there are several monitors. Replicas of parameters, and of their gradients, are compared in each of these steps
    (``Snapshot.drifts``).

    Raises:
        TypeError, ValueError: for arguments that are not as above. `attach` raises them for a group without this rank,
            and for placements that do not fit the group or match nothing.
    """

    group: Any
    _: KW_ONLY
    placements: Mapping[str, Any] | None = None
    spread: bool = False
    timeout: timedelta = timedelta(minutes=30)

    def __post_init__(self) -> None:
        if self.group is None:
            raise ValueError("Ranks: expected a process_group, whose ranks are merged; got None")
        if self.placements is not None and not isinstance(self.placements, Mapping):
            got = type(self.placements).__name__
            raise TypeError(f"Ranks.placements: expected {{glob: placement or tuple of them}}, got {got}")
        if not isinstance(self.spread, bool):
            raise TypeError(f"Ranks.spread: expected True or False, got {self.spread!r}")
        if not isinstance(self.timeout, timedelta):
            raise TypeError(f"Ranks.timeout: expected a datetime.timedelta, got {self.timeout!r}")
        if self.timeout <= timedelta(0):
            raise ValueError(f"Ranks.timeout: expected more than 0 seconds, got {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that are rarely changed, for ``attach(options=...)``.

    Args:
        strict: what cannot be measured raises. Otherwise that tensor is left out, with one warning for each site and
            its reason in ``Snapshot.skipped``, and training goes on.
        memory_budget: bytes per device, of state, samples, the copies for ``"param_update"`` and, on a GPU, scratch.
            Where channels would need more, vectors (biases, the weights of norms) keep totals only, and if that is not
            enough all sites; what is seen later (a container's tensors, a tap, a width) and does not fit keeps totals,
            or is skipped. Not in it is the copy of the state that leaves the device when a measured step is closed: for
            that long it takes as much again; on a CPU, for as long as the Snapshot is kept.
        training_only: whether only forwards in training mode are measured, so that evaluation between steps is not.
            None: as soon as the model was in training mode, at attach or when a step ended.
        laws: ``{name: False}``, laws that are broken by design, of `Monitor.laws`: recordings leave
            their rules out. "bias", "cross_entropy", "optimizer", "step", "replica", "reduction", "identity",
            "adjoint".
        identities: what `hookstats.find_identities` has found of this model: both sides of each are summed up
            before the optimizer steps, and recordings compare them. The first eight measured steps, and those
            after a finding, sum up all identities; of 16 or more, others take turns where ranks are not merged.
        attention_rows: of each head, how many queries' logits ``"attention"`` computes, others at each measured step;
            None: all.

    Raises:
        TypeError, ValueError: for arguments that are not as above.
    """

    strict: bool = False
    memory_budget: int = 256 << 20
    training_only: bool | None = None
    attention_rows: int | None = 64
    laws: Mapping[str, bool] = field(default_factory=dict, hash=False)
    identities: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.strict, bool):
            raise TypeError(f"Options.strict: expected True or False, got {self.strict!r}")
        if not isinstance(self.memory_budget, int) or self.memory_budget < 0:
            raise ValueError(f"Options.memory_budget: expected a number of bytes, got {self.memory_budget!r}")
        if self.training_only is not None and not isinstance(self.training_only, bool):
            raise TypeError(f"Options.training_only: expected True, False or None, got {self.training_only!r}")
        if self.attention_rows is not None and (not _is_int(self.attention_rows) or self.attention_rows < 1):
            raise ValueError(f"Options.attention_rows: expected an int from 1, or None, got {self.attention_rows!r}")
        if not isinstance(self.laws, Mapping) or not all(isinstance(each, bool) for each in self.laws.values()):
            raise TypeError(f"Options.laws: expected {{name: False}}, got {self.laws!r}")
        if not set(self.laws) <= set(NEEDS):
            raise ValueError(f"Options.laws: expected some of {', '.join(NEEDS)}; got {', '.join(map(str, self.laws))}")
        object.__setattr__(self, "laws", dict(self.laws))
        if self.identities is not None and not isinstance(getattr(self.identities, "identities", None), list):
            got = type(self.identities).__name__
            raise TypeError(f"Options.identities: expected what hookstats.find_identities returns, or None; got {got}")

    def to_json(self) -> dict[str, Any]:
        """Return what a recording keeps: of identities, their names."""
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        found = None if self.identities is None else [str(each) for each in self.identities.identities]
        return kept | {"identities": found}

    def __str__(self) -> str:
        kept = self.to_json() | {"identities": None if self.identities is None else len(self.identities)}
        return f"Options({', '.join(f'{name}={value}' for name, value in kept.items())})"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def check_tensors(tensors: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(tensors, Iterable):
        raise TypeError(f"tensors: expected some of {', '.join(TENSORS)}; got {tensors!r}")
    kinds = (tensors,) if isinstance(tensors, str) else tuple(tensors)
    for kind in kinds:
        if kind not in TENSORS:
            raise ValueError(f"tensors: expected some of {', '.join(TENSORS)}; got {kind!r}")
    if not kinds:
        raise ValueError(f"tensors: expected some of {', '.join(TENSORS)}; got none")
    return tuple(kind for kind in TENSORS if kind in kinds)


def check_every(every: object) -> None:
    if not callable(every) and (not _is_int(every) or every < 1):  # type: ignore[operator]
        raise ValueError(f"every: expected an int from 1, or a callable step -> bool; got {every!r}")


def check_rows(rows: object) -> None:
    if not _is_int(rows) or not 1 <= rows <= _MOST_ROWS:  # type: ignore[operator]
        raise ValueError(f"rows: expected an int from 1 to {_MOST_ROWS}, to read every so-many-th row; got {rows!r}")


def check_budget(budget: object, every: object, rows: object) -> None:
    if budget is None:
        return
    if not isinstance(budget, Real) or isinstance(budget, bool) or not 0 < float(budget) < 1:
        raise ValueError(f"budget: expected a share of the time of a step, such as 0.01, or None; got {budget!r}")
    if every != DEFAULT_EVERY or rows != 1:
        raise ValueError(f"budget: expected neither every= nor rows=, which it chooses; got {every=} and {rows=}")


def check_sinks(sinks: Sink | Iterable[Sink]) -> tuple[Sink, ...]:
    is_one = callable(sinks) or isinstance(sinks, Recorder | str | Path | Mapping) or not isinstance(sinks, Iterable)
    listed: tuple[Any, ...] = (sinks,) if is_one else tuple(sinks)  # type: ignore[arg-type]
    for sink in listed:
        got = _no_sink(sink)
        if got is not None:
            raise TypeError(f"sinks: expected callables Snapshot -> None, or hookstats.record(...); got {got}")
    return listed


def _no_sink(sink: Any) -> str | None:
    """Describe an object that is no sink; None: it is one."""
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


def check_number(step: Any) -> int:
    """The number of a step. A tensor is a scalar that was given without its name."""
    if not isinstance(step, (bool, torch.Tensor)):
        with suppress(TypeError):
            return operator.index(step)
    got = f"a {type(step).__name__}" if isinstance(step, torch.Tensor) else repr(step)
    raise TypeError(f"step: expected an int, the number of the step, got {got}; scalars go by name: loss=loss")


def check_seconds(where: str, timeout: float) -> float:
    if not isinstance(timeout, Real):
        raise TypeError(f"{where}: timeout: expected a number of seconds, got {timeout!r}")
    return float(timeout)
