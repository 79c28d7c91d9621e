"""Sinks send numbers where people look already: callables for ``attach(model, sinks=...)``, one file each. No torch.

`JsonLines` and `TensorBoard` write files, in any process; `Wandb`, `Mlflow` and `Trackio` send to the run that is
active in this one. All send the same numbers under the same keys, at most about 250 of a step:

- ``hookstats/<tensor>/<statistic>/<name>``: rms, std and abs_max of at most 64 sites, see `hookstats.sinks.keys`.
- ``.../nonfinite/<name>``: NaN and Inf of such a site, from the first snapshot on in which it has any.
- ``hookstats/nonfinite``: NaN and Inf of all sites, sent or not; ``hookstats/grad_norm``; ``hookstats/scalars/<name>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookstats.sinks.jsonl import JsonLines
from hookstats.sinks.mlflow import Mlflow
from hookstats.sinks.tensorboard import TensorBoard
from hookstats.sinks.trackio import Trackio
from hookstats.sinks.wandb import Wandb

__all__ = ["JsonLines", "Mlflow", "TensorBoard", "Trackio", "Wandb", "from_spec"]

_WITH_SPEC = {f"{sink.__module__}:{sink.__name__}": sink for sink in (JsonLines, TensorBoard)}


def from_spec(spec: Mapping[str, Any]) -> JsonLines | TensorBoard:
    """The same file sink again, in another process: from what its ``spec()`` gave, ``{"sink": ..., "arguments": ...}``.

    ValueError for anything else: nothing is imported by name, so what a file says cannot run other code.
    """
    try:
        sink, arguments = _WITH_SPEC[spec["sink"]], spec["arguments"]
        return sink(**arguments)
    except (KeyError, TypeError) as error:
        known = ", ".join(_WITH_SPEC)
        raise ValueError(
            f"from_spec: expected a dict with 'sink', one of {known}, and its 'arguments', got {spec!r}: {error}"
        ) from None
