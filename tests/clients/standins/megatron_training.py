"""A training as in Megatron-LM: gradients in one buffer, and an optimizer that steps copies of the parameters.

As in NVIDIA/Megatron-LM, megatron/core: distributed/distributed_data_parallel.py and optimizer/optimizer.py
(001199898c4b), optimizer/distrib_optimizer.py; megatron/training/training.py (001b00c2734d).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.clients.standins.megatron import GPTModel, Region


class DistributedDataParallel(nn.Module):
    """Adds each parameter's gradient to its part of one buffer, `main_grad`, and takes it away."""

    def __init__(self, module: nn.Module, dp: Region, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dp = module, dp
        self.parameters_with_grad: list[Any] = list(module.parameters())
        self.buffer = torch.zeros(sum(each.numel() for each in self.parameters_with_grad), dtype=dtype)
        begin = 0
        self.accumulators = []
        for each in self.parameters_with_grad:
            each.main_grad = self.buffer[begin : begin + each.numel()].view_as(each)
            begin += each.numel()
            accumulator = each.expand_as(each).grad_fn.next_functions[0][0]
            accumulator.register_hook(self._hook(each))
            self.accumulators.append(accumulator)

    def _hook(self, parameter: Any) -> Any:
        def hook(*_: Any) -> None:
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def forward(self, *args: Any) -> torch.Tensor:
        return self.module(*args)

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the distributed optimizer's buffer: anything between two bounds."""
        bounds = [len(flat) * rank // self.dp.size for rank in range(self.dp.size + 1)]
        return flat[bounds[self.dp.rank] : bounds[self.dp.rank + 1]]

    def finish_grad_sync(self, scattered: bool) -> None:
        self.buffer /= self.dp.size
        if scattered:  # the rest stays this rank's own
            self.part(self.buffer).copy_(self.part(self.dp.summed(self.buffer)))
        elif self.dp.size > 1:
            dist.all_reduce(self.buffer, group=self.dp.group)


class Optimizer:
    """Float16OptimizerWithFloat16Params, DistributedOptimizer (scattered), or FP32Optimizer (no copies)."""

    def __init__(self, model: DistributedDataParallel, copies: torch.dtype | None, scattered: bool) -> None:
        self.model, self.scattered = model, scattered
        self.pairs: list[tuple[Any, Any, slice]] = []  # a parameter, what is stepped of it, and where that lies in it
        begin = 0
        mine = model.part(torch.arange(len(model.buffer))) if scattered else torch.arange(len(model.buffer))
        for each in model.parameters_with_grad:
            part = slice(max(int(mine[0]) - begin, 0), min(int(mine[-1]) + 1 - begin, each.numel()))
            begin += each.numel()
            if copies is None:
                self.pairs.append((each, each, part))
                continue
            each.main_param, each.main_param_sharded = None, scattered
            if part.start < part.stop:
                copy = each.detach().clone().to(copies)
                each.main_param = copy.view(-1)[part].clone() if scattered else copy
                self.pairs.append((each, each.main_param, part))
        # The gradient of keys' bias is zero but for rounding, of which eps lets nothing come.
        self.optimizer = torch.optim.Adam([stepped for _, stepped, _ in self.pairs], lr=1e-2, eps=1e-4)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, stepped, part in self.pairs:
            if stepped is parameter:
                parameter.grad = parameter.main_grad
            else:
                gradient = parameter.main_grad.view(-1)[part] if self.scattered else parameter.main_grad
                stepped.grad = gradient.to(stepped.dtype)
        self.optimizer.step()
        for parameter, stepped, part in self.pairs:
            if stepped is not parameter:
                parameter.data.view(-1)[part] = stepped.view(-1).to(parameter.dtype)
        if self.scattered:
            self._gather()

    def _gather(self) -> None:
        """Every rank has the parameters of all again."""
        dp, flat = self.model.dp, torch.cat([each.detach().view(-1) for each in self.model.parameters_with_grad])
        if dp.size > 1:
            parts = [torch.zeros_like(flat) for _ in range(dp.size)]
            dist.all_gather(parts, flat, group=dp.group)
            flat = torch.cat([p[len(p) * r // dp.size : len(p) * (r + 1) // dp.size] for r, p in enumerate(parts)])
        for each, new in zip(
            self.model.parameters_with_grad,
            flat.split([each.numel() for each in self.model.parameters_with_grad]),
            strict=True,
        ):
            each.data.copy_(new.view_as(each))

    def zero_grad(self) -> None:
        for parameter, stepped, _ in self.pairs:
            parameter.grad = stepped.grad = None


class Training:
    """A model, its optimizer, and `train_step`."""

    def __init__(
        self,
        tp: Region,
        dp: Region,
        dtype: torch.dtype = torch.float32,
        copies: torch.dtype | None = None,
        scattered: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.tp, self.scattered = tp, scattered
        self.unwrapped = GPTModel(tp).to(dtype)
        self.model = DistributedDataParallel(self.unwrapped, dp, torch.float32 if dtype == torch.bfloat16 else dtype)
        self.optimizer = Optimizer(self.model, copies, scattered)

    def train_step(self, microbatches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        self.model.buffer.zero_()
        self.optimizer.zero_grad()
        losses = []
        for ids, labels in microbatches:
            loss = self.model(ids, labels).mean() / len(microbatches)
            loss.backward()
            losses.append(loss.detach())
        self.model.finish_grad_sync(self.scattered)
        for each in self.model.parameters_with_grad:  # finalize_model_grads
            if getattr(each, "sequence_parallel", False):
                each.main_grad.copy_(self.tp.summed(each.main_grad))
        self.optimizer.step()
        return torch.stack(losses).sum()
