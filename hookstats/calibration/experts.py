"""Experts whose weights are stacked in one parameter: which tokens each of them is given, read off their products."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hookstats.calibration.weights import Weight
from hookstats.watch.monitor import Monitor

_PLAIN = (torch.Tensor, nn.Parameter)
_EXPERT = re.compile("expert", re.IGNORECASE)
_LINEAR = {functional.linear}
_PRODUCTS = {torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__}
_GROUPED = {each for each in (getattr(functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if each}


class Stacked:
    """A parameter ``[experts, ., .]``, and which of its experts were seen."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        """name: the module's."""
        self.name = f"{name}.{key}".lstrip(".")
        self._name = name
        self._module = module
        self._key = key
        self.input_dim: int | None = None  # of one expert's weight; None: no product has shown it

    @property
    def parameter(self) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self._module, self._key)
        return parameter

    def expert(self, number: int) -> str:
        """The name of one expert's weight: ``experts.3.down_proj``."""
        return f"{self._name}.{number}.{self._key}".lstrip(".")

    def weights(self) -> dict[str, Weight]:
        """Return the weights of all experts by name; none where no product has shown them."""
        if self.input_dim is None:
            return {}
        numbers = range(self.parameter.shape[0])
        return {self.expert(i): Weight(self._module, self._key, i, self.input_dim) for i in numbers}


def find_stacked(modules: Mapping[str, nn.Module]) -> dict[str, list[Stacked]]:
    """The parameters of three dimensions of the modules that are called experts, by the names of these."""
    found = {
        name: [Stacked(name, m, key) for key in _list_keys(m)] for name, m in modules.items() if _are_experts(name, m)
    }
    return {name: parameters for name, parameters in found.items() if parameters}


def _are_experts(name: str, module: nn.Module) -> bool:
    is_called_so = _EXPERT.search(name.rpartition(".")[2]) or _EXPERT.search(type(module).__name__)
    return bool(is_called_so) and not isinstance(module, nn.modules.conv._ConvNd)


def _list_keys(module: nn.Module) -> list[str]:
    own = module.named_parameters(recurse=False)
    return [key for key, each in own if not nn.parameter.is_lazy(each) and each.dim() == 3 and each.is_floating_point()]


class ShownRows(TorchFunctionMode):
    """Shows the monitor what each expert is given, by the products with its weight, while it is entered.

    It is seen where the weight of one expert is a view of the parameter, and where all experts' are multiplied with
    rows that lie side by side, expert after expert. Where weights are gathered first, or every expert is given every
    token, nobody sees which tokens are whose.
    """

    def __init__(self, monitor: Monitor, parameters: list[Stacked]) -> None:
        super().__init__()
        self._monitor = monitor
        self._by_storage: dict[int, list[Stacked]] = {}
        for each in parameters:
            self._by_storage.setdefault(_find_storage(each.parameter), []).append(each)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LINEAR or func in _PRODUCTS or func in _GROUPED:
            self._see(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _see(self, func: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) < 2 or not isinstance(args[1], torch.Tensor) or args[1].dim() not in (2, 3):
            return
        rows, weight = args[:2]
        found = self._find_parameter(weight)
        if found is None:
            return
        parameter = found.parameter
        if weight.dim() == 2 and func not in _GROUPED and weight.numel() == parameter[0].numel():
            self._learn(found, weight.stride(1 if func in _LINEAR else 0))
            number = (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
            self._show(found, number, rows)
        elif weight.dim() == 3 and func in _GROUPED and weight.numel() == parameter.numel() and rows.dim() == 2:
            offsets = args[2] if len(args) > 2 else kwargs.get("offs")
            if offsets is None:
                return
            self._learn(found, weight.stride(1))
            begin = 0
            for number, end in enumerate(offsets.tolist()):
                self._show(found, number, rows[begin:end])
                begin = end

    def _find_parameter(self, weight: torch.Tensor) -> Stacked | None:
        if type(weight) not in _PLAIN or weight.layout != torch.strided:
            return None
        for each in self._by_storage.get(_find_storage(weight), ()):
            parameter = each.parameter
            if 0 <= weight.storage_offset() - parameter.storage_offset() < parameter.numel():
                return each
        return None

    def _learn(self, found: Stacked, stride: int) -> None:
        found.input_dim = 1 if stride == found.parameter.stride(2) else 0

    def _show(self, found: Stacked, number: int, rows: torch.Tensor) -> None:
        if rows.numel():
            self._monitor.tap(rows, found.expert(number), channel_dim=-1)


def _find_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
