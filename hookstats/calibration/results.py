"""Calibration: what all layers were given; kept, read again, and made into scales and masks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hookstats.calibration.experts import find_stacked
from hookstats.calibration.inputs import InputStats
from hookstats.calibration.weights import LINEAR, Weight, choose_pruned, compute_smoothing, find_weight
from hookstats.modules.selection import clean_names
from hookstats.numbers.tables import align_columns, html

_VERSION = 1
# Keys of the file, and of InputStats, in its order.
_CHANNELS = {"input_abs_max": "abs_max", "input_mean": "mean", "input_abs_mean": "abs_mean", "input_l2_norm": "l2_norm"}
_COUNTS = ("tokens", "nonfinite", "zeros")
_PERCENTILES = (99.0, 99.9, 99.99)


class Calibration(Mapping[str, InputStats]):
    """Result of `hookstats.calibrate`: a mapping from names to `InputStats`, in the order of the model.

    A name is that of a module, or of one of several experts whose weights are stacked in a parameter:
    ``"layers.0.mlp.experts.3.down_proj"``.

    ``not_covered``: the names of the parameters that hold stacked experts of which nobody saw what they were given.
    """

    def __init__(
        self, inputs: Mapping[str, InputStats], weights: Mapping[str, Weight], not_covered: Iterable[str] = ()
    ) -> None:
        """weights: by the same names; empty where there is no model."""
        self._inputs = dict(inputs)
        self._weights = dict(weights)
        self.not_covered = tuple(not_covered)

    def __getitem__(self, name: str) -> InputStats:
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def find_uncovered(self, tokens: int = 128) -> dict[str, int]:
        """The layers and experts that were given fewer than ``tokens`` tokens, each with how many it was given.

        Those that were never called have 0, and so have the parameters of ``not_covered``.
        """
        few = {name: stats.tokens for name, stats in self.items() if stats.tokens < tokens}
        return few | dict.fromkeys(self.not_covered, 0)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The names that were given the same inputs, such as query, key and value of an attention, group by group.

        Their statistics are the same bit for bit. A layer that was given nothing but zeros, or nothing at all, is a
        group of its own.
        """
        found: dict[Any, list[str]] = {}
        for name, stats in self.items():
            found.setdefault(stats.bits() if stats.amax > 0 else name, []).append(name)
        return [tuple(names) for names in found.values()]

    def smoothquant(self, alpha: float = 0.5) -> dict[str, torch.Tensor]:
        """The scales of SmoothQuant for each layer's input channels; the model is not changed.

        ``s = max|x|^alpha / max|w|^(1 - alpha)`` for each channel, of the inputs and of all weights that are given them
        (`groups`), with the weights as they are now; both the maximum of weights and s are at least 1e-5, as in the
        authors' code. The layer before is divided by s, the weight's input channels are multiplied with it. Xiao et al.
        2022, arXiv 2211.10438, equation 4.

        Returns float32 ``[C]`` on the weight's device, by name; the same tensor for all names of a group. Layers
        without a token (`find_uncovered`) have no scales.

        Raises:
            ValueError: unless 0 <= alpha <= 1; where the calibration has no model.
        """
        _check_share("smoothquant", "alpha", alpha)
        weights = self._find_weights("smoothquant")
        scales: dict[str, torch.Tensor] = {}
        for names in self.groups:
            if self[names[0]].tokens:
                of_group = compute_smoothing(self[names[0]], [weights[name] for name in names], alpha)
                scales |= dict.fromkeys(names, of_group)
        return {name: scales[name] for name in self if name in scales}

    def wanda(self, sparsity: float = 0.5) -> dict[str, torch.Tensor]:
        """The masks of Wanda: which elements of each weight are pruned; the model is not changed.

        In each row those whose ``|w| * l2_norm`` of their input channel is least, ``int(width * sparsity)`` of them, as
        in the authors' code; ``width`` is the number of elements of a row. Sun et al. 2023, arXiv 2306.11695, equation
        1. Of a convolution, for which they say nothing, a row is what makes one output channel, and all taps of an
        input channel have its norm.

        Returns bool tensors of the weights' shapes, on their devices, True where an element is pruned, by name:
        ``model.get_submodule(name).weight.data[mask] = 0``. Layers without a token (`find_uncovered`) have no mask.

        Raises:
            ValueError: unless 0 <= sparsity <= 1; where the calibration has no model.
        """
        _check_share("wanda", "sparsity", sparsity)
        weights = self._find_weights("wanda")
        return {name: choose_pruned(stats, weights[name], sparsity) for name, stats in self.items() if stats.tokens}

    def _find_weights(self, what: str) -> dict[str, Weight]:
        missing = [name for name in self if name not in self._weights]
        if missing:
            raise ValueError(
                f"{what}: expected the weights of {len(self)} layers, got none of {missing[0]!r}: this calibration was "
                "loaded without its model, Calibration.load(path, model)"
            )
        return self._weights

    def table(self) -> str:
        """A text table, a line for each name: tokens, channels, amax, percentiles of |x|, and values left out.

        ``outlier``: the largest abs_max of a channel over the median one. Percentiles are those of
        `InputStats.quantile`.
        """
        return "\n".join([*align_columns(self._list_rows(), left=1), *self._list_uncovered()])

    def _list_rows(self) -> list[list[str]]:
        rows = [
            ["layer", "tokens", "channels", "amax", *(f"p{each:g}" for each in _PERCENTILES), "outlier", "nonfinite"]
        ]
        for name, stats in self.items():
            median = float(np.median(stats.abs_max)) if len(stats.abs_max) else 0.0
            outlier = f"{stats.amax / median:.1f}" if median else "-"
            numbers = [stats.amax, *(stats.quantile(each / 100) for each in _PERCENTILES)]
            shown = [f"{number:.3g}" if stats.tokens else "-" for number in numbers]
            counts = [str(stats.tokens), str(len(stats.abs_max))]
            rows.append([name or "(model)", *counts, *shown, outlier, str(stats.nonfinite)])
        return rows

    def _list_uncovered(self) -> list[str]:
        return [f"not covered: {name}: which tokens its experts are given was not seen" for name in self.not_covered]

    def __repr__(self) -> str:
        silent = sum(stats.tokens == 0 for stats in self.values()) + len(self.not_covered)
        return f"Calibration({len(self)} layers, {silent} without a token)"

    def _repr_html_(self) -> str:
        """Return the table for notebooks, of 60 layers at most."""
        return html(repr(self), self._list_rows(), 1, self._list_uncovered())

    def save(self, path: str | Path) -> None:
        """Writes a file of safetensors, which `load` reads without any loss.

        For each name ``name.input_abs_max``, ``.input_mean``, ``.input_abs_mean``, ``.input_l2_norm`` (float64
        ``[C]``), ``.amax``, ``.p99``, ``.p99.9``, ``.p99.99`` (float64 ``[1]``), ``.tokens``, ``.nonfinite``,
        ``.zeros`` (int64 ``[1]``) and ``.magnitudes`` (int64 ``[255]``), as `InputStats` has them.

        Raises:
            ImportError: without safetensors (``pip install 'hookstats[calibration]'``).
            OSError: where the file cannot be written.
        """
        arrays: dict[str, Any] = {}
        for name, stats in self.items():
            arrays |= {f"{name}.{key}": getattr(stats, own) for key, own in _CHANNELS.items()}
            arrays |= {f"{name}.{key}": np.array([getattr(stats, key)], np.int64) for key in _COUNTS}
            arrays |= {f"{name}.p{each:g}": np.array([stats.quantile(each / 100)]) for each in _PERCENTILES}
            arrays |= {f"{name}.amax": np.array([stats.amax]), f"{name}.magnitudes": stats.magnitudes}
        experts = {name: weight.input_dim for name, weight in self._weights.items() if weight.expert is not None}
        about = {"version": _VERSION, "names": list(self), "not_covered": self.not_covered, "experts": experts}
        _import_safetensors().numpy.save_file(arrays, str(path), {"hookstats.calibration": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> Calibration:
        """Read a file that `save` wrote.

        Args:
            path: of the file.
            model: the model, which `smoothquant` and `wanda` need for its weights; None: without.

        Raises:
            ImportError: without safetensors.
            FileNotFoundError: without the file.
            ValueError: for a file that `save` did not write, or for another model: one without a layer of the file, or
                with another width there.
        """
        safetensors = _import_safetensors()
        try:
            with safetensors.safe_open(str(path), "numpy") as file:
                about = json.loads((file.metadata() or {})["hookstats.calibration"])
                if about["version"] != _VERSION:
                    raise ValueError(f"load: {path}: expected version {_VERSION}, got {about['version']!r}")
                inputs = {name: _read(file, name) for name in about["names"]}
        except (KeyError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"load: {path}: expected a file that Calibration.save wrote, got another one: {error}"
            ) from None
        weights = {} if model is None else _read_weights(model, about["experts"])
        if model is not None:
            _check_model(inputs, weights)
        return cls(inputs, weights, about["not_covered"])


def _read(file: Any, name: str) -> InputStats:
    def array(key: str) -> Any:
        return file.get_tensor(f"{name}.{key}")

    tokens, nonfinite, zeros = (int(array(key)[0]) for key in _COUNTS)
    abs_max, mean, abs_mean, l2_norm = map(array, _CHANNELS)
    return InputStats(abs_max, mean, abs_mean, l2_norm, tokens, nonfinite, zeros, array("magnitudes"))


def _read_weights(model: nn.Module, experts: Mapping[str, int]) -> dict[str, Weight]:
    """experts: the input_dim of each expert of stacked ones."""
    named = clean_names(model)
    weights = {name: find_weight(module) for name, module in named.items() if isinstance(module, LINEAR)}
    for parameters in find_stacked(named).values():
        for parameter in parameters:
            parameter.input_dim = experts.get(parameter.expert(0))
            weights |= parameter.weights()
    return weights


def _check_model(inputs: Mapping[str, InputStats], weights: Mapping[str, Weight]) -> None:
    for name, stats in inputs.items():
        if name not in weights:
            raise ValueError(f"load: expected a model with the layers of the file, got one without {name!r}")
        weight, wanted = weights[name], len(stats.abs_max)
        got = weight.get().shape[weight.input_dim] * weight.groups
        if got != wanted:
            raise ValueError(f"load: expected {wanted} input channels of {name!r}, as in the file, got {got}")


def _import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ImportError("a calibration's file needs safetensors: pip install 'hookstats[calibration]'") from None
    return safetensors


def _check_share(what: str, argument: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{what}: expected {argument} from 0 to 1, got {value!r}")
