"""The cross entropy that a loss is, as its `grad_fn` says: of which module's output, and over how many rows."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import torch
from torch import nn

from hookstats.modules.selection import clean_names
from hookstats.numbers.token_weights import LOGITS

_LOSS, _SOFTMAX = ("NllLossBackward0", "NllLoss2DBackward0"), ("LogSoftmaxBackward0",)
_PRODUCTS = ("AddmmBackward0", "MmBackward0", "ConvolutionBackward0")
_MEAN = 1  # torch's number of this reduction
_SHAPES = "Alias Clone Index Permute ReshapeAlias Select Slice Squeeze T ToCopy Transpose UnsafeView Unsqueeze View"
_SAME = frozenset(f"{name}Backward0" for name in _SHAPES.split())  # a gradient passes as it is, in another shape


class GivenLoss:
    """Looks at the losses that are given to `Monitor.step`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.problem = "the loss was not given: monitor.step(loss=loss)"  # of the latest one; empty: none
        self.no_weights = ""  # why weights of tokens are not measured
        self._latest: tuple[str, Any] = ("", lambda: None)  # the module that had the weight, which is looked at first

    def scalars(self, loss: Any) -> dict[str, float]:
        """Return how many rows the logits have, by the module whose output they are; nothing: `problem` says why."""
        self.problem = ""
        try:
            product, rows = _logits_of(loss)
            return {f"{LOGITS}{self._name_of(product)}": rows}
        except _LossProblem as problem:
            self.problem = str(problem)
        except Exception as error:  # a node that another torch makes otherwise
            self.problem = f"the grad_fn of the loss could not be read: {error!r}"
        if self.no_weights:
            self.problem += f"; weights of tokens are not measured: {self.no_weights}"
        return {}

    def _name_of(self, product: Any) -> str:
        weights = [_skip_views(node, ()) for node, _ in product.next_functions]
        read = {id(node.variable) for node in weights if hasattr(node, "variable")}
        name, module = self._latest
        if id(getattr(module(), "weight", None)) in read:
            return name
        model = self._model()
        for name, module in () if model is None else clean_names(model).items():
            if id(getattr(module, "weight", None)) in read and not isinstance(module, nn.Embedding):
                self._latest = name, weakref.ref(module)
                return name
        raise _LossProblem("the logits are no product with a weight of the model, as where FSDP has gathered it")


class _LossProblem(Exception):
    """Why the logits are not known."""


def _logits_of(loss: Any) -> tuple[Any, int]:
    """Return the node that has made the logits, and how many rows these have."""
    node = getattr(loss, "grad_fn", None)
    if node is None:
        raise _LossProblem("the loss was given without its grad_fn: give it as torch's cross_entropy has returned it")
    if node.name() not in _LOSS or node._saved_reduction != _MEAN:
        raise _LossProblem(f"the loss that was given is no mean of torch's cross_entropy, but of {node.name()}")
    softmax = _skip_views(node.next_functions[0][0], _SOFTMAX)
    product = _skip_views(softmax.next_functions[0][0], _PRODUCTS)
    (inside,), (outside,) = softmax._input_metadata, product._input_metadata
    if inside.dtype not in (torch.float32, torch.float64) or outside.dtype == torch.float16:
        raise _LossProblem("the softmax is not computed in float32, or its gradient is rounded to float16")
    return product, prod(inside.shape) // inside.shape[softmax._saved_dim]


def _skip_views(node: Any, expected: tuple[str, ...]) -> Any:
    """Return the node that follows views and casts. expected: what it is; empty: anything."""
    while node is not None and node.name() in _SAME:
        node = node.next_functions[0][0]
    if expected and (node is None or node.name() not in expected):
        raise _LossProblem(f"the logits come from no linear layer or convolution, but through {node and node.name()}")
    return node
