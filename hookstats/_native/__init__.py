"""Loads the extension. The only file that names _C.

The kernels are one library, which names nothing of torch: _kernels.so. The operators over them are another one, over
torch's stable ABI, for every torch: _ops.so. Of C++ for one minor version of torch there is the hook alone, the glue:
_glue/torch2_13/_C.*.so. A wheel has it for several; the one that fits is loaded. Where none does, hook.py takes its
place.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookstats._native import hook, operators
from hookstats._warn import warn
from hookstats.numbers import fields

_HERE = Path(__file__).parents[1]
LIBRARY = _HERE / "_ops.so"
_REBUILD = "`pip install --no-build-isolation --force-reinstall --no-deps .` in a checkout"


def _load_operators() -> operators.Operators:
    if not LIBRARY.exists():
        raise ImportError(
            f"hookstats is not built: no extension in {_HERE}. In a checkout run "
            "`python setup.py build_ext --inplace`, or leave its folder if hookstats is installed; else "
            "`pip install --no-build-isolation .`"
        )
    return operators.Operators("hookstats", LIBRARY)


def _load() -> tuple[Any, str]:
    """The hook for the torch that is here, or the one in Python, and why that is needed."""
    wanted = os.environ.get("HOOKSTATS_GLUE", "")
    if wanted not in ("", "none"):
        raise ImportError(f"HOOKSTATS_GLUE: expected none, or that it is not set, got {wanted!r}")
    if wanted == "none":
        return _in_python(), "HOOKSTATS_GLUE=none"
    glues = glues_in(_HERE)
    path, here = (
        glues.get(_minor(torch.__version__)),
        f"torch {torch.__version__} and Python {platform.python_version()}",
    )
    if path is None:
        why = f"no compiled hook for {here}" + (f", only for torch {', '.join(glues)}" if glues else "")
    else:
        try:
            return _glue(path), ""
        except ImportError as error:  # a torch between two releases, or one that was built in another way
            why = f"a compiled hook for {here} that does not load ({(str(error).splitlines() or [''])[0]})"
    loaded = _in_python()
    warn(f"there is {why}. hookstats measures the same without it, but more slowly. To build it: {_REBUILD}")
    return loaded, f"there is {why}"


def _in_python() -> Any:
    hook.load(OPS)
    return hook


def _glue(path: Path) -> Any:
    spec = spec_from_file_location("hookstats._native._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["hookstats._native._C"] = module
    return module


def glues_in(package: Path) -> dict[str, Path]:
    """Return the glues that this Python can load, by the minor version of torch, ascending."""
    found = {}
    for suffix in EXTENSION_SUFFIXES:
        for path in package.glob(f"_glue/torch*/_C{suffix}"):
            found[path.parent.name.removeprefix("torch").replace("_", ".")] = path
    return {minor: found[minor] for minor in sorted(found, key=lambda each: [int(n) for n in each.split(".")])}


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


if TYPE_CHECKING:
    from hookstats._native import _C

    OPS: operators.Operators
    WITHOUT_GLUE = ""  # why hook.py takes its place; else empty
else:
    OPS = _load_operators()
    _C, WITHOUT_GLUE = _load()

_SAID = OPS.constants
_NUMBERS = ("FIELDS", "EXPONENT_BINS", "OCTAVE_BINS", "FIRST_OCTAVE", "BLOCK_BINS", "DISTANCE_BINS")
FIELDS, DTYPE_NAMES = tuple(_SAID["FIELDS"]), tuple(_SAID["DTYPES"])
if any(getattr(fields, name) != {**_SAID, "FIELDS": FIELDS}.get(name) for name in _NUMBERS):
    raise ImportError("hookstats: the built extension is older than the Python files beside it: rebuild it")

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in DTYPE_NAMES)
COUNTERS: int = _SAID["COUNTERS"]
# A channel dimension that depends on the number of a tensor's dimensions: this, plus a table. See csrc/ops.h.
DIMS_BY_NDIM: int = _SAID["DIMS_BY_NDIM"]
HAS_CUDA: bool = _SAID["HAS_CUDA"]

Site = functools.partial(operators.SiteInPython, OPS)
# softmax_rows(logits, top_k=0) -> [5, ...] of logits [..., n], with a margin for top_k > 0 [6, ...]: csrc/softmax.h.
softmax_rows = OPS.softmax_rows
# sample(tensors, values, active, differences): of each tensor the elements of csrc/sample.h as float32 (float64 of
# float64) into its values; by how much these change into its differences, unless that is []. All lie on one device.
sample = OPS.sample
# joint_sums(weights, gradients, terms, places): csrc/joint.cpp.
joint_sums = OPS.joint_sums
clear = OPS.clear  # clear(blocks): makes them zero between two kernels
operator = OPS.define
# (counter, amount, skip_recomputation): adds to a counter, in graphs; gradient hooks may change nothing otherwise.
add = operator("add(Tensor(a!) counter, Tensor amount, bool skip_recomputation) -> ()", operators.add)
Batch: Any = functools.partial(operators.Batch, OPS)
Totals: Any = functools.partial(operators.Totals, OPS)
MadeOn: Any = functools.partial(operators.MadeOn, OPS)
Copies = functools.partial(operators.Copies, OPS)
set_flags = functools.partial(operators.set_flags, OPS)
give_away = functools.partial(operators.give_away, OPS)
backward_is_running = operators.backward_is_running
untraced = operators.call_untraced

# Of the hook, for this torch or in Python.
# What graphs call for a tensor: (x, slot), with .rows also (rows, kept), with .part (x, slot, path, note, rows, kept).
# A slot stands for a hook: lay_slots(hook, output, gradient), int64 [1], of its output and of the gradient.
observe_slot: Any = OPS.packet("observe")
lay_slots = _C.lay_slots
set_part = _C.set_part  # set_part(hook, path, part): what graphs meet at a path of a hook's container is another hook's
Enabled = _C.Enabled
name_thread = _C.name_thread  # name_thread(threading.get_ident()): for the threads of this one's backward
Times = _C.Times
Hook = _C.Hook
call_in_c = _C.call_in_c
observe = _C.observe
take_failures = _C.take_failures
has_no_data = _C.has_no_data
# place_in_autograd(): the thread, by a number that no other has had; that of the forward whose backward runs here (0:
# not known) and its node's number (-1: none runs); and the number that the next node will have.
place_in_autograd = _C.place_in_autograd
Counted = _C.Counted
bind = _C.bind


def reserve_scratch(device: torch.device) -> int:
    """Allocates what the first launch on the current stream of a GPU needs, so that no hook has to; returns the bytes
    that all streams and CUDA graphs have there."""
    number = operators.number_of(device)
    try:
        reserved: int = OPS.reserve_scratch(number)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        torch.cuda.empty_cache()  # what torch keeps for later
        reserved = OPS.reserve_scratch(number)
    if reserved and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # for what was cleared on it, and is used on others
    return reserved


def part(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The words of an int64 tensor from `offset` on, as a tensor of its own (int64 or float64) over the same memory.

    Not a view, and nothing that torch could take for one: views share a version counter, so that a gradient arriving at
    one site would look like a change of what compiled graphs saved of all the others; and tensors that share a storage
    are taken apart and rebuilt by the compiler, wrongly so under dynamic=True (seen in torch 2.13).
    """
    made: torch.Tensor = OPS.part(memory, offset, shape, dtype == torch.float64)
    return made


def build_info() -> dict[str, Any]:
    """Describe the build: the torch of the loaded glue (None: none fits, and ``without_glue`` says why), and all
    that there is glue for; the CUDA toolkit's version (None: kernels for the CPU alone) and GPU architectures; dtypes,
    fields.
    """
    built = json.loads((_HERE / "_built.json").read_text())
    return {
        "torch": None if WITHOUT_GLUE else _C.TORCH,
        "glues": list(glues_in(_HERE)),
        "without_glue": WITHOUT_GLUE or None,
        "cuda": built["cuda"],
        "architectures": built["architectures"],
        "dtypes": list(DTYPE_NAMES),
        "fields": list(FIELDS),
    }
