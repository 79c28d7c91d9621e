"""Megatron-LM's GPT, small: its modules' names, plain tensors that hold parts, and gradients that lie in `main_grad`.

As in NVIDIA/Megatron-LM, megatron/core: tensor_parallel/layers.py (000c4ac24f61), models/gpt/gpt_model.py
(007562f9413e), transformer/attention.py (00c2c0adeec1), transformer/mlp.py (00caa53af309); with sequence parallelism.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

HIDDEN, LAYERS, HEADS, WORDS, SEQUENCE = 16, 2, 4, 32, 8


class Region(NamedTuple):
    """The ranks of tensor parallelism. group: None, alone."""

    group: Any
    rank: int
    size: int

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(self.size, dim)[self.rank].contiguous()

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(whole, group=self.group)
        return whole

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Along the sequence, dimension 0."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts)


class GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return region.gathered(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.region.part(ctx.region.summed(gradient), 0), None


class ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return region.part(region.summed(x), 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.region.gathered(gradient), None


class ScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return region.part(x, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.region.gathered(gradient), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        return region.summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits ``[s, b, v / tp]`` that are split over the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, region: Region) -> torch.Tensor:
        largest = logits.amax(-1)
        if region.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=region.group)
        logits = logits - largest[..., None]
        here = target - region.rank * logits.shape[-1]
        is_here = (here >= 0) & (here < logits.shape[-1])
        one_hot = F.one_hot(here.clamp(0, logits.shape[-1] - 1), logits.shape[-1]) * is_here[..., None]
        sums = region.summed(logits.exp().sum(-1))
        ctx.save_for_backward(logits.exp() / sums[..., None] - one_hot)
        return sums.log() - region.summed((logits * one_hot).sum(-1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (difference,) = ctx.saved_tensors
        return difference * gradient[..., None], None, None


def parallel(whole: torch.Tensor, region: Region, dim: int) -> nn.Parameter:
    """This rank's part of a parameter, with the attributes that Megatron gives it."""
    parameter: Any = nn.Parameter(region.part(whole, dim))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
    return parameter


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.2


class ColumnParallelLinear(nn.Module):
    """Returns the output, and a bias that is yet to be added."""

    def __init__(self, region: Region, width: int, out: int, bias: bool = True, allocates: bool = True) -> None:
        super().__init__()
        self.region = region
        self.weight = parallel(weight(out, width), region, 0) if allocates else None
        self.bias = parallel(torch.zeros(out), region, 0) if bias else None

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self.weight if weight is None else weight
        return F.linear(GatherFromSequence.apply(x, self.region), weight, self.bias), None


class RowParallelLinear(nn.Module):
    def __init__(self, region: Region, width: int, out: int) -> None:
        super().__init__()
        self.region = region
        self.weight = parallel(weight(out, width), region, 1)
        self.bias: Any = nn.Parameter(torch.zeros(out))
        self.bias.sequence_parallel = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ReduceScatterToSequence.apply(F.linear(x, self.weight), self.region), self.bias


class VocabParallelEmbedding(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region, self.weight = region, parallel(weight(WORDS, HIDDEN), region, 0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        here = ids - self.region.rank * len(self.weight)
        elsewhere = (here < 0) | (here >= len(self.weight))
        found = F.embedding(here.masked_fill(elsewhere, 0), self.weight)
        return Reduce.apply(found.masked_fill(elsewhere[..., None], 0), self.region)


class LanguageModelEmbedding(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.word_embeddings = VocabParallelEmbedding(region)
        self.position_embeddings = nn.Embedding(SEQUENCE, HIDDEN)
        self.embedding_dropout = nn.Dropout(0.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids)
        embeddings = self.word_embeddings(ids) + self.position_embeddings(places)
        return self.embedding_dropout(ScatterToSequence.apply(embeddings.transpose(0, 1).contiguous(), self.region))


class FusedScaleMaskSoftmax(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.nn.Softmax(dim=-1)(scores.masked_fill(later, -10000.0))


class DotProductAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale_mask_softmax = FusedScaleMaskSoftmax()
        self.attention_dropout = nn.Dropout(0.0)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # of [s, b, heads, width]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        context = self.attention_dropout(self.scale_mask_softmax(scores)) @ v
        return context.permute(2, 0, 1, 3).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.num_attention_heads_per_partition = HEADS // region.size
        self.core_attention = DotProductAttention()
        self.linear_proj = RowParallelLinear(region, HIDDEN, HIDDEN)
        self.linear_qkv = ColumnParallelLinear(region, HIDDEN, 3 * HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, _ = self.linear_qkv(x)  # of each head its query, its key and its value
        heads = mixed.unflatten(-1, (self.num_attention_heads_per_partition, -1))
        return self.linear_proj(self.core_attention(*heads.chunk(3, -1)))


class MLP(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(region, HIDDEN, 4 * HIDDEN)
        self.linear_fc2 = RowParallelLinear(region, 4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        intermediate, _ = self.linear_fc1(x)
        return self.linear_fc2(F.gelu(intermediate))


class TransformerLayer(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = layernorm(), layernorm()
        self.self_attention, self.mlp = SelfAttention(region), MLP(region)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, bias = self.self_attention(self.input_layernorm(x))
        x = x + (out + bias)
        out, bias = self.mlp(self.pre_mlp_layernorm(x))
        return x + (out + bias), None


class TransformerBlock(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(region) for _ in range(LAYERS))
        self.final_layernorm = layernorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.final_layernorm(x)


class GPTModel(nn.Module):
    """With `share_embeddings_and_output_weights`. Returns the loss of each token, ``[b, s]``."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.embedding = LanguageModelEmbedding(region)
        self.decoder = TransformerBlock(region)
        self.output_layer = ColumnParallelLinear(region, HIDDEN, WORDS, bias=False, allocates=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.decoder(self.embedding(ids))
        logits, _ = self.output_layer(x, weight=self.embedding.word_embeddings.weight)
        return VocabParallelCrossEntropy.apply(logits.float(), labels.T, self.region).T


def layernorm() -> nn.LayerNorm:
    norm = nn.LayerNorm(HIDDEN)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True  # its gradient is summed over the ranks of tensor parallelism
    return norm
