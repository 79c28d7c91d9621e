"""The shared part of sinks: the package that each needs, the run that is active, and pickling."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from hookstats.sinks.keys import Keys


def package_of(sink: str, module: str, package: str = "") -> Any:
    """Import a module for a sink. ImportError that names the package and our extra, where it is missing."""
    extra = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        needed = package or extra
        raise ImportError(f"{sink} needs {needed}: pip install 'hookstats[{extra}]' ({error})") from None


def active_run(sink: str, run: Any, begin: str, argument: str = "run") -> Any:
    """Return the run. RuntimeError for None, which says how one begins."""
    if run is None:
        raise RuntimeError(f"{sink}: expected an active run, got none: call {begin}() before, or give {argument}=")
    return run


class FileSink:
    """A sink that writes files, and opens them with the first snapshot: that may come in another process."""

    _keys: Keys
    _place: dict[str, str]  # the argument that says where, by its name

    def spec(self) -> dict[str, Any]:
        """Return, in JSON's types, what `from_spec` makes this sink from."""
        name = f"{type(self).__module__}:{type(self).__name__}"
        return {"sink": name, "arguments": {**self._place, **self._keys.arguments}}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins anew: it does not share the open file."""
        return partial(type(self), **self._place, **self._keys.arguments), ()
