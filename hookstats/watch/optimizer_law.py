"""What a step made of a sampled element, over what the optimizer's formula makes of the gradient and the states there.

Read are the sampled places of gradients and states, before the step. "optimizer_law" of an element is 1 where both
agree within rounding, else their ratio: 0 where nothing was stepped, 0.5 where a gradient was halved on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW

from hookstats import _native
from hookstats.watch.batches import Parameter
from hookstats.watch.memory import local_part
from hookstats.watch.samples import SIZE, Sample

KIND = "optimizer_law"
_STATES = {SGD: ("momentum_buffer",), Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
_STATES[AdamW] = _STATES[Adam]
# Of the terms of an update: what float32 makes of 1 - beta2 ** step (capturable, fused), and of a few roundings.
_CLOSE, _ROUNDINGS = 1e-3, 8
_MOST = 2.0**20  # where nothing was to be changed, and something was


class _Read(NamedTuple):
    """What some parameters of a group had before their step; tensors ``[sampled elements of all]``."""

    owners: list[Parameter]
    group: dict[str, Any]
    eps: float  # of the parameters' dtype
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]
    step: torch.Tensor | None  # that was made before; None: of an optimizer that does not count


class OptimizerLaw:
    """Reads before a step, and judges after it."""

    def __init__(self, flag: Callable[[torch.device], torch.Tensor]) -> None:
        """flag: of a device, whether anything is measured."""
        self._flag = flag
        self._read: list[tuple[type, _Read]] = []

    def before(self, optimizer: Any, stepping: list[Parameter]) -> None:
        """Reads what the formula needs. Other optimizers, also derived ones, and scaled gradients are left out."""
        self._read = []
        kind = type(optimizer)
        if kind not in _STATES or getattr(optimizer, "grad_scale", None) is not None:
            return
        known = {id(each.get()): each for each in stepping if each.measures(KIND)}
        for group in optimizer.param_groups:
            alike: dict[Any, list[tuple[Parameter, dict[str, torch.Tensor], Any]]] = {}
            for parameter in group["params"]:
                each = known.get(id(parameter))
                state = optimizer.state.get(parameter, {})
                tensors = None if each is None else _tensors(parameter, state, _STATES[kind])
                if each is not None and tensors is not None:
                    gradient = tensors["gradient"]
                    key = gradient.device, gradient.dtype, tuple(tensors), "step" in state
                    alike.setdefault(key, []).append((each, tensors, state.get("step", 0)))
            for members in alike.values():
                self._read.append((kind, self._sampled(members, dict(group))))

    def _sampled(self, members: list[tuple[Parameter, dict[str, torch.Tensor], Any]], group: dict[str, Any]) -> _Read:
        first = members[0][1]["gradient"]
        sizes = [min(tensors["gradient"].numel(), SIZE) for _, tensors, _ in members]
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        found = {}
        for name in members[0][1]:
            flat = torch.zeros(sum(sizes), dtype=wide, device=first.device)
            _native.sample(
                [tensors[name] for _, tensors, _ in members], list(flat.split(sizes)), self._flag(first.device), []
            )
            found[name] = flat
        steps = [torch.as_tensor(step, dtype=torch.float64, device=first.device) for *_, step in members]
        step = torch.cat([each.reshape(1).expand(size) for each, size in zip(steps, sizes, strict=True)])
        lr = group["lr"]
        group["lr"] = lr.detach().to(first.device, torch.float64, copy=True) if isinstance(lr, torch.Tensor) else lr
        owners, eps = [each for each, *_ in members], torch.finfo(first.dtype).eps
        return _Read(
            owners, group, eps, found.pop("gradient").double(), {k: v.double() for k, v in found.items()}, step
        )

    def after(self, samples: dict[Parameter, Sample]) -> dict[Parameter, torch.Tensor]:
        """Of each parameter the ratios; samples: with the differences that the step has made."""
        waiting, self._read = self._read, []
        ratios: dict[Parameter, torch.Tensor] = {}
        for kind, read in waiting:
            if all(each in samples for each in read.owners):
                taken = [samples[each] for each in read.owners]
                change = torch.cat([each.differences for each in taken]).double()
                now = torch.cat([each.values for each in taken]).double()
                expected, terms = (_sgd if kind is SGD else _adam)(read, now - change, kind is AdamW)
                allowed = 2 * read.eps * (now.abs() + (now - change).abs())
                allowed += (_CLOSE + _ROUNDINGS * read.eps) * (expected.abs() + terms)
                ratio = (change / expected).nan_to_num(_MOST, _MOST, -_MOST).clamp(-_MOST, _MOST)
                ratio = torch.where((change - expected).abs() > allowed, ratio, 1.0).float()
                ratios |= dict(zip(read.owners, ratio.split([len(each.values) for each in taken]), strict=True))
        return ratios


def _tensors(parameter: torch.Tensor, state: dict[str, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor] | None:
    """This rank's gradient and states; None where they do not lie as the parameter does."""
    here = local_part(parameter)
    if here is None or parameter.grad is None or not here.numel():
        return None
    found = {"gradient": parameter.grad} | {n: state[n] for n in names if isinstance(state.get(n), torch.Tensor)}
    local = {name: local_part(each) for name, each in found.items()}
    for each in local.values():
        is_alike = each is not None and each.layout == torch.strided and each.stride() == here.stride()
        if not is_alike or each.dtype != here.dtype or each.dtype == torch.float16:
            return None
    return {name: each.detach() for name, each in local.items() if each is not None}


def _sgd(read: _Read, before: torch.Tensor, _: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The change, and the magnitude of its terms."""
    group, g = read.group, read.gradient * (-1 if read.group["maximize"] else 1)
    terms = g.abs() + group["weight_decay"] * before.abs()
    g = g + group["weight_decay"] * before
    momentum, buffer = group["momentum"], read.states.get("momentum_buffer")
    if momentum:
        new = g if buffer is None else momentum * buffer + (1 - group["dampening"]) * g
        terms = terms + (0 if buffer is None else momentum * buffer.abs())
        g = g + momentum * new if group["nesterov"] else new
    return -group["lr"] * g, group["lr"] * terms


def _adam(read: _Read, before: torch.Tensor, is_decoupled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; arXiv 1412.6980, 1711.05101, and with amsgrad the largest second moment so far."""
    assert read.step is not None
    group, g = read.group, read.gradient * (-1 if read.group["maximize"] else 1)
    is_decoupled = group.get("decoupled_weight_decay", is_decoupled)
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    size = g.abs() + (0 if is_decoupled else decay * before.abs())
    g = g if is_decoupled else g + decay * before
    zeros = torch.zeros_like(g)
    m, v = read.states.get("exp_avg", zeros), read.states.get("exp_avg_sq", zeros)
    first, second = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    if group["amsgrad"]:
        second = torch.maximum(second, read.states.get("max_exp_avg_sq", zeros))
    step = read.step + 1
    divisor = second.sqrt() / (1 - beta2**step).sqrt() + group["eps"]
    scale = lr / (1 - beta1**step) / divisor
    shrinks = lr * decay * before if is_decoupled else zeros
    return -scale * first - shrinks, scale * (beta1 * m.abs() + (1 - beta1) * size) + shrinks.abs()
