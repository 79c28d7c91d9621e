"""Memory: what a rule keeps from one step to the next. All of it can be written as JSON, and read back."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from hookstats.rules.history import Course, Losses, Streak, Window, extend

_Kept = TypeVar("_Kept")
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set}
_CLASSES: dict[str, type] = {each.__name__: each for each in (Course, Losses, Streak, Window)}


class Memory(dict[str, Any]):
    """A dict of a rule's own: None, numbers, strings, arrays, and lists, tuples, sets, deques and dicts of these.

    ``sites``: how many the run has shown so far; the judge sets it.
    """

    sites = 0

    def keep_by_site(self, name: str, missing: Any) -> Any:
        """An array ``[n]`` by the ids of sites, with `missing` for those that have appeared since; to be written to."""
        values = self.get(name)
        if values is None or len(values) < self.sites:
            values = self[name] = extend(
                np.empty(0, np.array(missing).dtype) if values is None else values, self.sites, missing
            )
        return values

    def streak(self, key: str = "") -> Streak:
        return self._keep_once(f"streak {key}", Streak)

    def window(self, name: str, length: int, min_history: int) -> Window:
        return self._keep_once(name, lambda: Window(length, min_history))

    def course(self, name: str, length: int) -> Course:
        return self._keep_once(name, lambda: Course(length))

    def last(self, name: str, length: int) -> deque[Any]:
        """The last values that were appended, at most so many."""
        return self._keep_once(name, lambda: deque(maxlen=length))

    def _keep_once(self, name: str, make: Callable[[], _Kept]) -> _Kept:
        found = self.get(name)
        if found is None:
            found = self[name] = make()
        return found


def to_state(value: Any) -> Any:
    """Return what a memory holds, as JSON has it; TypeError for anything else."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if number - number == 0 else {"float": str(number)}
    if isinstance(value, (np.integer, np.bool_)):
        return value.item()
    if isinstance(value, np.ndarray):
        text = b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.str, list(value.shape), text]}
    if isinstance(value, dict):
        return {"dict": [[to_state(key), to_state(each)] for key, each in value.items()]}
    if isinstance(value, deque):
        return {"deque": [value.maxlen, [to_state(each) for each in value]]}
    if isinstance(value, (tuple, set)):
        return {"set" if isinstance(value, set) else "tuple": [to_state(each) for each in value]}
    if isinstance(value, list):
        return [to_state(each) for each in value]
    if type(value).__name__ in _CLASSES:
        return {type(value).__name__: to_state(vars(value))}
    raise TypeError(f"a rule's memory: expected numbers, strings, arrays, and collections of these; got {value!r:.200}")


def from_state(value: Any) -> Any:
    """Return what `to_state` was given; ValueError for what it does not write."""
    if isinstance(value, list):
        return [from_state(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    try:
        ((kind, inside),) = value.items()
        if kind == "float":
            return float(inside)
        if kind == "array":
            dtype, shape, text = inside
            return np.frombuffer(b64decode(text), np.dtype(dtype)).reshape(shape).copy()
        if kind == "dict":
            return {from_state(key): from_state(each) for key, each in inside}
        if kind == "deque":
            return deque((from_state(each) for each in inside[1]), maxlen=inside[0])
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](from_state(each) for each in inside)
        if kind in _CLASSES:
            made: Any = object.__new__(_CLASSES[kind])
            vars(made).update(from_state(inside))
            return made
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"a rule's memory: expected what was written by `Judge.state`, got {value!r:.200}") from error
    raise ValueError(f"a rule's memory: expected what was written by `Judge.state`, got {value!r:.200}")
