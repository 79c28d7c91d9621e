"""The change of a sampled element by a step, over the one that the optimizer's formula makes of gradient and states.

Read are the sampled places of gradients and states, before the step. "optimizer_law" of an element is 1 where both
agree within rounding, else their ratio: 0 where nothing was stepped, 0.5 where a gradient was halved on its way.
"""

from __future__ import annotations

from collections import Counter
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
_RECORDED = ("lr", "momentum", "eps", "weight_decay")
# Of the terms of an update: what float32 makes of 1 - beta2 ** step (capturable, fused), and of a few roundings.
_CLOSE, _ROUNDINGS = 1e-3, 8
_MOST = 2.0**20  # where nothing was to be changed, and something was


class _SampledStep(NamedTuple):
    """Some parameters before their step; tensors ``[sampled elements of all]``, for us to change."""

    owners: list[Parameter]
    group: dict[str, Any]
    eps: float  # of the parameters' dtype
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]
    step: Any  # how many were made before: a number, or a tensor as the others


class OptimizerLaw:
    """Reads before a step, and judges after it."""

    def __init__(self, flag: Callable[[torch.device], torch.Tensor]) -> None:
        """flag: of a device, whether anything is measured."""
        self._flag = flag
        self._read: list[tuple[type, _SampledStep]] = []
        self._left_out: dict[Parameter, str] = {}
        self._groups: list[dict[str, Any]] = []  # of this step, of all optimizers

    @property
    def left_out(self) -> Counter[str]:
        """The number of parameters that were left out at their latest step, by the reason."""
        return Counter(self._left_out.values())

    @property
    def scalars(self) -> dict[str, Any]:
        """The numbers of the groups of this step's optimizers, by names such as "optimizer.0.lr"."""
        found: dict[str, Any] = {}
        for number, group in enumerate(self._groups):
            values = {name: group[name] for name in _RECORDED if name in group}
            values |= {f"beta{place}": beta for place, beta in enumerate(group.get("betas", ()), 1)}
            found |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
        return found

    def end_step(self) -> None:
        self._groups = []

    def before(self, optimizer: Any, stepping: list[Parameter]) -> None:
        """Read what the formula needs."""
        self._read = []
        self._groups += [dict(group) for group in optimizer.param_groups]
        known = {id(each.get()): each for each in stepping if each.measures(KIND)}
        problem = _problem(optimizer)
        if problem is not None:
            self._left_out |= dict.fromkeys(known.values(), problem)
            return
        for group in optimizer.param_groups:
            alike: dict[Any, list[tuple[Parameter, dict[str, torch.Tensor], Any]]] = {}
            for parameter in group["params"]:
                each = known.get(id(parameter))
                if each is None or parameter.grad is None:
                    continue
                state = optimizer.state.get(parameter, {})
                tensors = _tensors(parameter, state, _STATES[type(optimizer)])
                if isinstance(tensors, str):
                    self._left_out[each] = tensors
                    continue
                self._left_out.pop(each, None)
                gradient, step = tensors["gradient"], _number_of(state.get("step", 0))
                key = gradient.device, gradient.dtype, tuple(tensors), None if isinstance(step, torch.Tensor) else step
                alike.setdefault(key, []).append((each, tensors, step))
            for members in alike.values():
                self._read.append((type(optimizer), self._sample_group(members, dict(group))))

    def _sample_group(
        self, members: list[tuple[Parameter, dict[str, torch.Tensor], Any]], group: dict[str, Any]
    ) -> _SampledStep:
        """Sample gradients and states together, by one launch."""
        _, tensors, step = members[0]
        first = tensors["gradient"]
        sizes = [min(each["gradient"].numel(), SIZE) for _, each, _ in members]
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        flat = torch.zeros(len(tensors), sum(sizes), dtype=wide, device=first.device)
        places = [place for row in flat for place in row.split(sizes)]
        _native.sample([each[name] for name in tensors for _, each, _ in members], places, self._flag(first.device), [])
        if isinstance(step, torch.Tensor):
            steps = [each.to(first.device).reshape(1) for *_, each in members]
            step = torch.cat([each.expand(size) for each, size in zip(steps, sizes, strict=True)])
        group["lr"] = _number_of(group["lr"])
        states = dict(zip(tensors, flat, strict=True))
        owners, eps = [each for each, *_ in members], torch.finfo(first.dtype).eps
        return _SampledStep(owners, group, eps, states.pop("gradient"), states, step)

    def after(self, samples: dict[Parameter, Sample]) -> dict[Parameter, torch.Tensor]:
        """Return the ratios of each parameter; samples: with the differences that the step has made."""
        waiting, self._read = self._read, []
        ratios: dict[Parameter, torch.Tensor] = {}
        for kind, read in waiting:
            if all(each in samples for each in read.owners):
                taken = [samples[each] for each in read.owners]
                change = torch.cat([each.differences for each in taken])
                now = torch.cat([each.values for each in taken])
                before = now - change
                expected, terms = (_sgd if kind is SGD else _adam)(read, before, kind is AdamW)
                allowed = terms.add_(expected.abs()).mul_(_CLOSE + _ROUNDINGS * read.eps)
                allowed.add_(now.abs_().add_(before.abs_()), alpha=2 * read.eps)
                is_off = (change - expected).abs_() > allowed
                ratio = (change / expected).nan_to_num_(_MOST, _MOST, -_MOST).clamp_(-_MOST, _MOST)
                ratio = torch.where(is_off, ratio, 1.0).float()
                ratios |= dict(zip(read.owners, ratio.split([len(each.values) for each in taken]), strict=True))
        return ratios


def _problem(optimizer: Any) -> str | None:
    """Say why the law does not apply to it; None: it does."""
    if type(optimizer) not in _STATES:
        return f"{type(optimizer).__name__} is none of SGD, Adam, AdamW"
    if getattr(optimizer, "grad_scale", None) is not None:
        return "a fused optimizer divides their gradients by a scale"
    if any(isinstance(beta, torch.Tensor) for group in optimizer.param_groups for beta in group.get("betas", ())):
        return "betas that are tensors"
    return None


def _number_of(value: Any) -> Any:
    """A number, unless it lies on a device, for which training would have to wait: then a copy, as it is now."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.item() if value.is_cpu else value.detach().to(torch.float64, copy=True)


def _tensors(parameter: torch.Tensor, state: dict[str, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor] | str:
    """This rank's gradient and states; or why they are left out."""
    here = local_part(parameter)
    if here is None or not here.numel():
        return "this rank has nothing of them"
    found = {"gradient": parameter.grad} | {n: state[n] for n in names if isinstance(state.get(n), torch.Tensor)}
    local = {name: local_part(each) for name, each in found.items()}
    for name, each in local.items():
        if each is None or each.layout != torch.strided or each.shape != here.shape:
            return f"their {name} is no dense tensor of the same shape"
        if each.stride() != here.stride():
            return f"their {name} lies in memory in another order than they do"
        if each.dtype != here.dtype or each.dtype == torch.float16:
            return f"their {name} is of {each.dtype}"
    return {name: each.detach() for name, each in local.items() if each is not None}


def _sgd(read: _SampledStep, before: torch.Tensor, _: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The change, and the magnitude of its terms."""
    group, g = read.group, read.gradient
    momentum, buffer, decay = group["momentum"], read.states.get("momentum_buffer"), group["weight_decay"]
    if group["maximize"]:
        g.neg_()
    terms = g.abs()
    if decay:
        terms.add_(before.abs(), alpha=decay)
        g.add_(before, alpha=decay)
    if momentum:
        new = g.clone()
        if buffer is not None:
            terms.add_(buffer.abs(), alpha=momentum)
            new = buffer.mul_(momentum).add_(g, alpha=1 - group["dampening"])
        g = g.add_(new, alpha=momentum) if group["nesterov"] else new
    return g.mul_(-group["lr"]), terms.mul_(group["lr"])


def _adam(read: _SampledStep, before: torch.Tensor, is_decoupled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; arXiv 1412.6980, 1711.05101, and with amsgrad the largest second moment so far."""
    group, g = read.group, read.gradient
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    is_decoupled = group.get("decoupled_weight_decay", is_decoupled)
    m, v = (read.states[name] if name in read.states else torch.zeros_like(g) for name in ("exp_avg", "exp_avg_sq"))
    # Cauchy-Schwarz: for any gradients and beta1, what is less was zeroed, or has underflown.
    v = torch.maximum(v, m.square().mul_(1 - beta2))
    if group["maximize"]:
        g.neg_()
    size = g.abs()
    if decay and not is_decoupled:
        g.add_(before, alpha=decay)
        size.add_(before.abs(), alpha=decay)
    terms = m.abs().mul_(beta1).add_(size, alpha=1 - beta1)
    first, second = m.mul_(beta1).add_(g, alpha=1 - beta1), v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if group["amsgrad"] and "max_exp_avg_sq" in read.states:
        second = torch.maximum(second, read.states["max_exp_avg_sq"])
    step = read.step + 1
    divisor = second.sqrt_().mul_((1 - beta2**step) ** -0.5).add_(group["eps"])
    scale = lr / (1 - beta1**step)
    change, terms = first.div_(divisor).mul_(-scale), terms.div_(divisor).mul_(scale)
    if decay and is_decoupled:
        shrinks = before * (lr * decay)
        change.sub_(shrinks)
        terms.add_(shrinks.abs_())
    return change, terms
