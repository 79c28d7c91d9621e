from typing import Any

from torch import Tensor

from hookstats.state import SiteState

FIELDS: tuple[str, ...]
DTYPES: tuple[str, ...]
COUNTERS: int
EXPONENT_BINS: int
OCTAVE_BINS: int
FIRST_OCTAVE: int
UNKNOWN_DIM: int
DIM_BY_RULE: int
HAS_CUDA: bool

def observed(output: SiteState | None, gradient: SiteState | None) -> object: ...
def observe(x: object, observed: object, /) -> Any: ...
def has_no_data(x: Tensor) -> bool: ...
def take_failures() -> dict[int, str]: ...
def part(memory: Tensor, offset: int, shape: tuple[int, ...], is_float64: bool) -> Tensor: ...
def reserve_scratch(device: str) -> None: ...
