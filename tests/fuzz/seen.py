"""Hooks of plain torch that keep all that a training shows, of each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.plain import leaves


class Seen:
    """Tensors of each step by site, as they were then."""

    def __init__(self, kinds: list[str]) -> None:
        self.steps: list[dict[tuple[str, str], list[torch.Tensor]]] = [{}]
        self.is_paused = False
        self.counted: torch.Tensor | None = None  # rows [batch, length]
        self._kinds = kinds
        self._early: set[str] = set()  # parameters whose gradients were read before clipping
        self._stepped: set[str] = set()
        self._scaler: Any = None

    def watch(self, model: nn.Module, optimizers: list[Any], scaler: Any) -> None:
        self._model, self._scaler = model, scaler
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            if {"input", "grad_input", "model_input"} & set(self._kinds):
                module.register_forward_pre_hook(self._inputs(name), with_kwargs=True)
            module.register_forward_hook(self._outputs(name))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._local(name))
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def changes(self, site: tuple[str, str]) -> bool:
        """Return whether tensors of a site have several shapes, in any step."""
        return len({each.shape[-1:] for step in self.steps for each in step.get(site, ())}) > 1

    def _keep(self, name: str, tensor: str, value: torch.Tensor) -> None:
        self.steps[-1].setdefault((name, tensor), []).append(value.detach().clone())

    def _of_rows(self, x: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
        return x if counted is None or x.shape[:2] != counted.shape else x[counted]

    def _see(self, name: str, kind: str, path: str, x: torch.Tensor, has_gradient: bool = True) -> None:
        counted = self.counted
        # A forward in a backward is one of activation checkpointing, whose outputs were seen before.
        if torch._C._current_graph_task_id() == -1:
            self._keep(name, kind + path, self._of_rows(x.detach(), counted))
        scale = self._scale
        if has_gradient and x.requires_grad and not x.is_leaf:
            x.register_hook(lambda g: self._keep(name, f"grad_{kind}{path}", self._of_rows(g / scale, counted)))

    def _outputs(self, name: str) -> Any:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            for path, x in leaves(output):
                if not self.is_paused:
                    self._see(name, "output", path, x)

        return see

    def _inputs(self, name: str) -> Any:
        def see(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.is_paused:
                return None
            args = tuple(_alias(each) for each in args)
            kwargs = {key: _alias(each) for key, each in kwargs.items()}
            if len(args) == 1 and not kwargs:
                given = [("", args[0])]
            else:
                given = [(f".{key}", each) for key, each in [*enumerate(args), *kwargs.items()]]
            for path, x in given:
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    self._see(name, "input", path, x, has_gradient="grad_input" in self._kinds)
            return args, kwargs

        return see

    def _local(self, name: str) -> Any:
        return lambda gradient: self._keep(name, "param_grad_local", gradient / self._scale)

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def read_gradients(self) -> None:
        """Keep gradients as they are before they are clipped."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._keep(name, "param_grad", parameter.grad)
                self._early.add(name)

    def _read(self, name: str, parameter: torch.Tensor) -> None:
        self._keep(name, "param", parameter)
        if parameter.requires_grad:
            self._keep(name, "param_sample", parameter)
            if parameter.grad is not None and name not in self._early:
                self._keep(name, "param_grad", parameter.grad)

    def _of(self, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for group in optimizer.param_groups:
            yield from ((self._names[id(each)], each) for each in group["params"])

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._values = {name: each.detach().clone() for name, each in self._of(optimizer)}
        for name, parameter in self._of(optimizer):
            self._read(name, parameter)
            self._stepped.add(name)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, parameter in self._of(optimizer):
            change = parameter.detach() - self._values[name]
            self._keep(name, "param_update", change)
            self._keep(name, "update_sample", change)
            for key, value in optimizer.state[parameter].items():
                if key != "step" and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    self._keep(name, f"optimizer.{key}", value)

    def end_step(self) -> None:
        for name, parameter in self._model.named_parameters():
            if name not in self._stepped:
                self._read(name, parameter)
        for name, buffer in self._model.named_buffers():
            self._keep(name, "buffer", buffer.double() if not buffer.is_floating_point() else buffer)
            if buffer.is_floating_point():
                self._keep(name, "buffer_sample", buffer)
        self.steps.append({})
        self._early, self._stepped = set(), set()


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value
