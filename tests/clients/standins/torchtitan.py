"""torchtitan's Llama 3, small: its modules' names, and the ways in which it is cut over ranks.

As in pytorch/torchtitan: models/common/decoder.py (0092f08e9a44), models/llama3/model.py (030c210cb574) and
parallelize.py (01db32e97d28), distributed/pipeline_parallel.py (02ef790c7961), trainer.py (003fe2804215).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, WORDS, SEQUENCE = 16, 2, 4, 2, 24, 32, 8


class ScaledDotProductAttentionWrapper(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class GQAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, KV_HEADS, DIM // HEADS
        self.wq = nn.Linear(DIM, HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(HEADS * self.head_dim, DIM, bias=False)
        self.inner_attention = ScaledDotProductAttentionWrapper()

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor, masks: None, positions: None) -> torch.Tensor:
        batch, sequence, _ = x.shape
        # Under tensor parallelism a rank has some of the heads.
        q, k, v = (w(x).view(batch, sequence, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, freqs_cis), rotated(k, freqs_cis)
        out = self.inner_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).contiguous().view(batch, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama3TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = GQAttention()
        self.feed_forward = FeedForward()
        self.attention_norm = nn.RMSNorm(DIM, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(DIM, eps=1e-5)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor, masks: None, positions: None) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, masks, positions)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama3Model(nn.Module):
    freqs_cis: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, DIM)
        angles = torch.outer(torch.arange(SEQUENCE), 100.0 ** -torch.arange(0, 1, 2 * HEADS / DIM))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.layers = nn.ModuleDict({str(layer): Llama3TransformerBlock() for layer in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.output = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # A stage of a pipeline lacks what the others have.
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis, None, None)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def rotated(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2)


def apply_tp(model: nn.Module, tp: DeviceMesh) -> None:
    rows, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=rows),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(rows, None, None, None), desired_input_layouts=(whole, None, None, None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=rows),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=rows),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def apply_ac(model: nn.Module) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


def apply_compile(model: nn.Module, backend: str) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, backend=backend, fullgraph=True))


def apply_fsdp(model: nn.Module, dp: DeviceMesh) -> None:
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, mesh=dp)
    for block in model.layers.values():
        fully_shard(block, mesh=dp)
    if model.norm is not None and model.output is not None:
        fully_shard([model.norm, model.output], mesh=dp)
    fully_shard(model, mesh=dp)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide by one


def parallelize_llama(model: nn.Module, mesh: DeviceMesh, backend: str = "") -> nn.Module:
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        apply_tp(model, mesh["tp"])
    apply_ac(model)
    if backend:
        apply_compile(model, backend)
    if "fsdp" in names:
        apply_fsdp(model, mesh["fsdp"])
    return model


def pipeline_module_split(whole: nn.Module, pp: DeviceMesh) -> tuple[nn.Module, PipelineStage]:
    """This rank's stage: a copy without what the others have; what is left keeps its name."""
    rank, stages = pp.get_local_rank(), pp.size()
    part = copy.deepcopy(whole)
    here = LAYERS * rank // stages, LAYERS * (rank + 1) // stages
    for name in list(part.layers):
        if not here[0] <= int(name) < here[1]:
            del part.layers[name]
    if rank:
        part.tok_embeddings = None
    if rank + 1 < stages:
        part.norm = part.output = None
    return part, PipelineStage(part, rank, stages, torch.device("cpu"), group=pp.get_group())


class Trainer:
    """The part of trainer.py that a monitor meets: `model_parts`, `optimizers`, `train_step`."""

    def __init__(self, mesh: DeviceMesh | None, backend: str = "") -> None:
        torch.manual_seed(0)
        self.mesh, model = mesh, Llama3Model()
        self.names = () if mesh is None else mesh.mesh_dim_names or ()
        self.pp_schedule, self.pp_has_last_stage = None, True
        if mesh is not None and "pp" in self.names:
            model, stage = pipeline_module_split(model, mesh["pp"])
            stage.submod = parallelize_llama(model, mesh, backend)
            self.pp_has_last_stage = stage.is_last
            self.pp_schedule = Schedule1F1B(stage, 2, loss_fn=self.loss_fn, scale_grads=False)
        elif mesh is not None:
            parallelize_llama(model, mesh, backend)
        self.model_parts = [model]
        self.optimizers = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / self.global_valid_tokens

    def forward_backward_step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.pp_schedule is not None:
            is_first, is_last = self.pp_schedule._stage.is_first, self.pp_has_last_stage
            losses: list[torch.Tensor] = []
            arguments = (tokens,) if is_first else ()
            self.pp_schedule.step(*arguments, target=labels if is_last else None, losses=losses, return_outputs=False)
            return torch.stack(losses).sum() if is_last else torch.tensor(-1.0)
        with self.train_context():
            loss = self.loss_fn(self.model_parts[0](tokens), labels)
            loss.backward()
        return loss

    def train_step(self, microbatches: list[tuple[torch.Tensor, torch.Tensor]], valid: int) -> torch.Tensor:
        """Returns this rank's part of the loss."""
        self.optimizers.zero_grad()
        self.global_valid_tokens = valid
        losses = [self.forward_backward_step(*batch).detach() for batch in microbatches]
        self.optimizers.step()
        return torch.stack(losses).sum()

    @contextlib.contextmanager
    def train_context(self) -> Iterator[None]:
        with loss_parallel() if "tp" in self.names else contextlib.nullcontext():
            yield
