from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from hookstats.watch.memory import SiteState

FIELDS: tuple[str, ...]
DTYPES: tuple[str, ...]
COUNTERS: int
EXPONENT_BINS: int
OCTAVE_BINS: int
FIRST_OCTAVE: int
UNKNOWN_DIM: int
DIM_BY_RULE: int
HAS_CUDA: bool

class Hook: ...

class Times:
    calls: int
    host_us: float
    device_us: float | None
    def span(self, device: str, calls: int) -> AbstractContextManager[None]: ...

class Gate:
    times: Times | None
    def __init__(self, open: Tensor) -> None: ...
    met: tuple[int, int]
    def set_rows(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None: ...

def bind(hook: Hook, output: SiteState | None, gradient: SiteState | None, in_graph: Callable[..., Any]) -> None: ...
def observe(x: object, hook: Any, /) -> Any: ...
def has_no_data(x: Tensor) -> bool: ...
def take_failures() -> dict[int, str]: ...
def part(memory: Tensor, offset: int, shape: tuple[int, ...], is_float64: bool) -> Tensor: ...
def take(blocks: Sequence[Tensor], clear: bool) -> list[Tensor]: ...
def clear(blocks: Sequence[Tensor]) -> None: ...
def reserve_scratch(device: str) -> None: ...
