"""The glue in Python, for a torch that none was built for: over the kernels' C interface and what torch offers Python.

It is slower by some microseconds for each tensor, and measures nothing inside graphs of torch.compile. `_native` takes
it where nothing else fits, or where HOOKSTATS_GLUE=none asks for it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hookstats.portable import hooks, measuring, operators, sites
from hookstats.portable.devices import Devices
from hookstats.portable.library import Library


def load(kernels: Path, namespace: str = "hookstats", imitates_cuda: bool = False) -> Any:
    """Registers the operators, and returns what the extension would offer, by the same names (_C.pyi).

    kernels: the library. imitates_cuda: as `Library` has it. ImportError where the library is another than expected.
    """
    library = Library(kernels, imitates_cuda)
    devices = Devices(library)
    constants = library.constants
    names = ["FIELDS", "DTYPES", "COUNTERS", "EXPONENT_BINS", "OCTAVE_BINS", "FIRST_OCTAVE"]
    names += ["BLOCK_BINS", "DISTANCE_BINS"]
    return SimpleNamespace(
        **{name: tuple(value) if isinstance(value := constants[name], list) else value for name in names},
        TORCH=None,
        operators=operators.Operators(devices, namespace),  # they are there for as long as this is
        DIMS_BY_NDIM=sites.DIMS_BY_NDIM,
        HAS_CUDA=library.cuda is not None and not imitates_cuda,
        Batch=functools.partial(operators.Batch, devices),
        Totals=functools.partial(operators.Totals, devices),
        Copies=functools.partial(operators.Copies, devices),
        clear=functools.partial(operators.clear, devices),
        part=operators.part,
        has_no_data=sites.has_no_data,
        set_flags=functools.partial(operators.set_flags, devices),
        give_away=devices.give_away,
        load_kernels=lambda device, dtypes, kind: devices.load(torch.device(device), dtypes, kind),
        reserve_scratch=lambda device: devices.reserve_scratch(torch.device(device)),
        Hook=hooks.Hook,
        bind=functools.partial(hooks.bind, devices),
        lay_slots=lambda hook, output, gradient: None,
        set_part=lambda hook, path, part: None,
        observe=hooks.observe,
        call_in_c=hooks.call_in_c,
        take_failures=hooks.take_failures,
        Times=measuring.Times,
        Counted=functools.partial(measuring.Counted, devices),
        Enabled=measuring.Enabled,
        Now=measuring.Now,
        Part=measuring.Part,
        name_thread=measuring.name_thread,
    )
