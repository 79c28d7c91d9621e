"""JSON of a run's files as the types that it stands for: the one place where damaged text becomes a RunError.

A type says what is accepted. A dataclass is an object with its fields and no others; a range bounds an int, and a
pattern a string, inside ``Annotated``. An error names the file and the field: ``manifest.json: parts.totals[2].rows``.
"""

from __future__ import annotations

import json
import re
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from hookstats.records.errors import RunError

_LARGEST = 256 << 20  # bytes of a file: more are not read
Int64: TypeAlias = Annotated[int, range(-(2**63), 2**63)]
Count: TypeAlias = Annotated[int, range(2**63)]
AttemptNumber: TypeAlias = Annotated[int, range(2**31)]

_T = TypeVar("_T")


def content(path: Path) -> bytes:
    """FileNotFoundError where there is no file; RunError where it is larger than any that is written."""
    size = path.stat().st_size
    if size > _LARGEST:
        raise RunError(f"{path}: expected at most {_LARGEST} bytes, got {size}")
    return path.read_bytes()


def load(path: Path) -> Any:
    """What JSON a file holds, of whatever type."""
    try:
        return json.loads(content(path), parse_constant=_no_constant)
    except RecursionError:
        raise RunError(f"{path}: expected JSON, got one that is nested too deeply") from None
    except RunError:  # a ValueError, too
        raise
    except ValueError as error:
        raise RunError(f"{path}: expected JSON, got {str(error)[:200]}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"expected a number, got {name}")


def decode(kind: type[_T], value: Any, path: Path) -> _T:
    """What JSON gave, as a type; path: of the file that it stands in, for the error."""
    decoded: _T = _decoded(kind, value, path, "")
    return decoded


def require(right: object, path: Path, expected: str, got: Any, at: str = "") -> None:
    """For what a type cannot say. at: the field."""
    if not right:
        raise RunError(f"{path}: {at + ': ' if at else ''}expected {expected}, got {repr(got)[:200]}")


def _decoded(kind: Any, value: Any, path: Path, at: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        return None if value is None else _decoded(inner[0], value, path, at)  # only `X | None` is used
    if origin is Annotated:
        base, bound = inner
        plain = _decoded(base, value, path, at)
        is_within = plain in bound if isinstance(bound, range) else bound.fullmatch(plain)
        require(is_within, path, _bounded(bound), value, at)
        return plain
    if isinstance(kind, type) and is_dataclass(kind):
        if isinstance(value, kind):  # decoded before
            return value
        hints = _hints(kind)
        is_object = isinstance(value, dict) and set(value) == set(hints)
        require(is_object, path, f"an object with {', '.join(sorted(hints))}", value, at)
        return kind(**{name: _decoded(hint, value[name], path, _inside(at, name)) for name, hint in hints.items()})
    if origin is dict:
        require(isinstance(value, dict), path, "an object", value, at)
        return {name: _decoded(inner[1], each, path, _inside(at, name)) for name, each in value.items()}
    if origin is list:
        require(isinstance(value, list), path, "a list", value, at)
        return [_decoded(inner[0], each, path, f"{at}[{i}]") for i, each in enumerate(value)]
    if origin is tuple:
        require(isinstance(value, list) and len(value) == len(inner), path, f"a list of {len(inner)}", value, at)
        return tuple(
            _decoded(hint, each, path, f"{at}[{i}]") for i, (hint, each) in enumerate(zip(inner, value, strict=True))
        )
    accepted = (int, float) if kind is float else kind
    require(isinstance(value, accepted) and not isinstance(value, bool), path, kind.__name__, value, at)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _bounded(bound: range | re.Pattern[str]) -> str:
    return f"{bound[0]} to {bound[-1]}" if isinstance(bound, range) else f"text like {bound.pattern}"


def _inside(at: str, name: str) -> str:
    return f"{at}.{name[:40]}" if at else name[:40]
