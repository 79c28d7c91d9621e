"""Loads the extension. The only file that names torch.ops and hookstats._C.

The kernels are one library, which names nothing of torch: _kernels.so. Between them and torch there is glue, for one
minor version of torch: _glue/torch2_13/_C.*.so. A wheel has the glue for several; the one that fits is loaded. Where
none does, hookstats.portable takes its place.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookstats._warn import warn
from hookstats.numbers import fields

_HERE = Path(__file__).parent
KERNELS = _HERE / "_kernels.so"
_REBUILD = "`pip install --no-build-isolation --force-reinstall --no-deps .`"


def _load() -> tuple[Any, str]:
    """The glue for the torch that is here, or what takes its place, and why that is needed."""
    wanted = os.environ.get("HOOKSTATS_GLUE", "")
    if wanted not in ("", "none"):
        raise ImportError(f"HOOKSTATS_GLUE: expected none, or that it is not set, got {wanted!r}")
    if not KERNELS.exists():
        raise ImportError(
            f"hookstats is not built: no extension in {_HERE}. In a checkout run "
            "`python setup.py build_ext --inplace`, or leave its folder if hookstats is installed; else "
            "`pip install --no-build-isolation .`"
        )
    if wanted == "none":
        return _portable(), "HOOKSTATS_GLUE=none"
    glues = glues_in(_HERE)
    path, here = (
        glues.get(_minor(torch.__version__)),
        f"torch {torch.__version__} and Python {platform.python_version()}",
    )
    if path is None:
        why = f"none for {here}" + (f", but for torch {', '.join(glues)}" if glues else "")
    else:
        try:
            return _glue(path), ""
        except ImportError as error:  # a torch between two releases, or one that was built in another way
            why = f"one for {here} that does not load ({(str(error).splitlines() or [''])[0]})"
    loaded = _portable()
    warn(
        f"there is {why}. hookstats measures without: slower, and nothing inside compiled graphs. A build beside this "
        f"torch has it: {_REBUILD} in a checkout"
    )
    return loaded, f"there is {why}"


def _portable() -> Any:
    from hookstats import portable

    return portable.load(KERNELS)


def _glue(path: Path) -> Any:
    spec = spec_from_file_location("hookstats._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["hookstats._C"] = module
    return module


def glues_in(package: Path) -> dict[str, Path]:
    """By the minor version of torch, ascending, those that this Python can load."""
    found = {}
    for suffix in EXTENSION_SUFFIXES:
        for path in package.glob(f"_glue/torch*/_C{suffix}"):
            found[path.parent.name.removeprefix("torch").replace("_", ".")] = path
    return {minor: found[minor] for minor in sorted(found, key=lambda each: [int(n) for n in each.split(".")])}


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


if TYPE_CHECKING:
    from hookstats import _C

    WITHOUT_GLUE = ""  # why hookstats.portable takes its place; else empty
else:
    _C, WITHOUT_GLUE = _load()

_NUMBERS = ("FIELDS", "EXPONENT_BINS", "OCTAVE_BINS", "FIRST_OCTAVE", "BLOCK_BINS", "DISTANCE_BINS")
if any(getattr(fields, name) != getattr(_C, name, None) for name in _NUMBERS):
    raise ImportError("hookstats: the built extension is older than the Python files beside it: rebuild it")

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _C.DTYPES)
COUNTERS: int = _C.COUNTERS
# A channel dimension that depends on the number of a tensor's dimensions: this, plus a table. See csrc/ops.h.
DIMS_BY_NDIM: int = _C.DIMS_BY_NDIM
HAS_CUDA: bool = _C.HAS_CUDA

_classes: Any = _C if WITHOUT_GLUE else torch.classes.hookstats
accumulate = torch.ops.hookstats.accumulate.default
# What graphs call for a tensor: (x, slot), with .rows also (rows, kept), with .part (x, slot, path, note, rows, kept).
# A slot stands for a hook: lay_slots(hook, output, gradient), int64 [1], of its output and of the gradient.
observe_slot: Any = getattr(torch.ops.hookstats, "observe", None)  # without glue nothing calls it
lay_slots = _C.lay_slots
set_part = _C.set_part  # set_part(hook, path, part): what graphs meet at a path of a hook's container is another hook's
# (counter, amount, skip_recomputation): adds to a counter, in graphs; gradient hooks may change nothing otherwise.
add = torch.ops.hookstats.add.default
# Batch(moments, counters, histograms, active, channel_dims, low, high, block), lists with an entry for each site; its
# .accumulate(list of Tensor | None) returns a list of (number, why it could not be measured).
Batch = _classes.Batch
Counted = _C.Counted
Enabled = _C.Enabled
# What compiled graphs look at before they run: now.measured, whether any monitor measures; now.rows, which rows count,
# by Flags.monitor. now.add(enabled, always) is a monitor's part: part.left_out, whether that is evaluation for it.
# In a recomputation all is as it was in the forward. always: as if the monitor measured all the time.
Now = _C.Now
Part = _C.Part
now = Now()
name_thread = _C.name_thread  # name_thread(threading.get_ident()): for the threads of this one's backward
Times = _C.Times
Hook = _C.Hook
bind = _C.bind
call_in_c = _C.call_in_c
# Totals(moments, counters), lists with an entry for each site, all on one device; its .take(blocks) returns their
# totals, int64 [sites, fields + counters], one behind the other as in a state of one channel, and clears the blocks.
Totals = _classes.Totals
# checksums(tensors) -> int64 [tensors] on their device, all on one: of their bits, in the order of the elements.
checksums = torch.ops.hookstats.checksums.default
# softmax_rows(logits, top_k=0) -> [5, ...] of logits [..., n], with a margin for top_k > 0 [6, ...]: csrc/softmax.h.
softmax_rows = torch.ops.hookstats.softmax_rows.default
# sample(tensors, values, active, differences): of each tensor the elements of csrc/sample.h as float32 (float64 of
# float64) into its values; by how much these change into its differences, unless that is []. All lie on one device.
sample = torch.ops.hookstats.sample.default
observe = _C.observe
take_failures = _C.take_failures
has_no_data = _C.has_no_data
# Copies(), those of one store: its .take(blocks, clear) returns copies of blocks of state, as they are between two
# kernels; then the blocks may be made zero. Memory of copies that nobody holds is used again; .give_up_spares() frees
# it.
Copies = _C.Copies
clear = _C.clear  # clear(blocks): makes them zero between two kernels
# set_flags(flags, value): launches so far find what they were, on any stream, and later ones this. Versions stay.
set_flags = _C.set_flags
# give_away(blocks), before blocks of state are freed: others get the memory behind the launches on all streams.
give_away = _C.give_away


def reserve_scratch(device: torch.device) -> int:
    """Allocates what the first launch on the current stream of a GPU needs, so that no hook has to; returns the bytes
    that all streams and CUDA graphs have there."""
    try:
        return _C.reserve_scratch(str(device))
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        torch.cuda.empty_cache()  # what torch keeps for later
        return _C.reserve_scratch(str(device))


def load_kernels(device: torch.device, dtypes: Iterable[torch.dtype], histogram: fields.Bins | None) -> None:
    """Loads what tensors of these dtypes need, where a driver would not do it while a CUDA graph is captured."""
    linear = isinstance(histogram, fields.LinearBins)
    kind = 0 if histogram is None else 3 if linear else 2 if histogram.per_channel else 1  # HistogramKind of csrc
    _C.load_kernels(str(device), [DTYPES.index(dtype) for dtype in dtypes if dtype in DTYPES], kind)


_library = torch.library.Library("hookstats", "FRAGMENT")


def operator(
    schema: str, run: Callable[..., Any], *tags: torch.Tag, shapes: Callable[..., Any] = lambda *arguments: None
) -> Callable[..., Any]:
    """An operator for graphs: `shapes` while they are traced, `run` when they run.

    Plain, because torch.library.custom_op raises the version of what it changes, and from torch 2.15 on a graph refuses
    that in a gradient hook.
    """
    name = _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, shapes, "Meta")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    made: Callable[..., Any] = getattr(torch.ops.hookstats, name).default
    return made


def part(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The words of an int64 tensor from `offset` on, as a tensor of its own (int64 or float64) over the same memory.

    Not a view, and nothing that torch could take for one: views share a version counter, so that a gradient arriving at
    one site would look like a change of what compiled graphs saved of all the others; and tensors that share a storage
    are taken apart and rebuilt by the compiler, wrongly so under dynamic=True (seen in torch 2.13).
    """
    return _C.part(memory, offset, shape, dtype == torch.float64)


def build_info() -> dict[str, Any]:
    """What was built: the torch of the glue that was loaded (None: none fits, and ``without_glue`` says why), and all
    that there is glue for; the CUDA toolkit's version (None: kernels for the CPU alone) and GPU architectures; dtypes,
    fields.
    """
    built = json.loads((_HERE / "_built.json").read_text())
    return {
        "torch": _C.TORCH,
        "glues": list(glues_in(_HERE)),
        "without_glue": WITHOUT_GLUE or None,
        "cuda": built["cuda"],
        "architectures": built["architectures"],
        "dtypes": list(_C.DTYPES),
        "fields": list(_C.FIELDS),
    }
