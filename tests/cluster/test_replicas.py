"""Ranks that should hold the same tensors: which one does not, in which tensor, and where. Equal ones are silent."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # which the first step of an optimizer imports: here once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

import hookstats
from hookstats.cluster import exchange, replicas
from hookstats.cluster.contents import list_contents
from tests import ranks
from tests.cluster.bits import ALL_DTYPES, changed_bit, of_bits
from tests.plain import hearing


class Small(nn.Module):
    """With a buffer, a parameter of no dimension, and two parameters of one shape; the same on all ranks."""

    def __init__(self, scale: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full(scale, 2.0))
        self.register_buffer("seen", torch.arange(24).reshape(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.last(self.norm(self.first(x)).relu())


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    optimizer.step()
    return optimizer


def small() -> tuple[Small, torch.optim.Optimizer]:
    model = Small()
    return model, stepped(model)


def flip(tensor: torch.Tensor, index: tuple[int, ...], bit: int) -> None:
    element = int(np.ravel_multi_index(index, tensor.shape)) if index else 0
    tensor.data.copy_(changed_bit(tensor.detach(), element, bit))


def swap(tensor: torch.Tensor, a: Any, b: Any) -> None:
    with torch.no_grad():
        tensor[a], tensor[b] = tensor[b].clone(), tensor[a].clone()


def swap_weights_of_one_shape(model: Small) -> None:
    with torch.no_grad():
        ours, others = model.norm.weight, model.norm.bias
        ours.data, others.data = others.data, ours.data


def state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> torch.Tensor:
    return optimizer.state[parameter][key]


# name: (what goes wrong on rank 1, the (tensor, kind, first index) that must be named)
FAULTS: dict[str, tuple[Callable[[Small, Any], Any], list[tuple[str, str, tuple[int, ...]]]]] = {
    "nothing": (lambda m, o: None, []),
    "lowest bit": (lambda m, o: flip(m.first.weight, (15, 7), 0), [("first.weight", "param", (15, 7))]),
    "sign bit": (lambda m, o: flip(m.last.bias, (0,), 31), [("last.bias", "param", (0,))]),
    "scalar": (lambda m, o: flip(m.scale, (), 5), [("scale", "param", ())]),
    "gradient": (lambda m, o: flip(m.norm.weight.grad, (9,), 3), [("norm.weight", "param_grad", (9,))]),
    "buffer": (lambda m, o: flip(m.seen, (2, 3), 63), [("seen", "buffer", (2, 3))]),
    "moment": (
        lambda m, o: flip(state(o, m.first.bias, "exp_avg_sq"), (4,), 1),
        [("first.bias", "optimizer.exp_avg_sq", (4,))],
    ),
    "step": (lambda m, o: state(o, m.scale, "step").add_(1), [("scale", "optimizer.step", ())]),
    "swapped elements": (lambda m, o: swap(m.seen, (1, 2), (3, 4)), [("seen", "buffer", (1, 2))]),
    "swapped neighbours": (lambda m, o: swap(m.seen, (0, 0), (0, 1)), [("seen", "buffer", (0, 0))]),
    "swapped rows": (lambda m, o: swap(m.first.weight, 3, 11), [("first.weight", "param", (3, 0))]),
    "swapped tensors": (
        lambda m, o: swap_weights_of_one_shape(m),
        [("norm.weight", "param", (0,)), ("norm.bias", "param", (0,))],
    ),
    "transposed": (lambda m, o: m.seen.copy_(m.seen.view(6, 4).t().clone()), [("seen", "buffer", (0, 1))]),
}


def with_faults(rank: int, world: int) -> dict[str, list[hookstats.results.Disagreement]]:
    found = {}
    for name, (break_it, _) in FAULTS.items():
        model, optimizer = small()
        if rank == 1:
            break_it(model, optimizer)
        found[name] = hookstats.check_replicas(model, optimizer=optimizer, locate=True)
        unlocated = [replace(each, index=None, values=None, bits=None) for each in found[name]]
        assert unlocated == hookstats.check_replicas(model, optimizer=optimizer)
    return found


@cache
def faults_of(world: int) -> list[dict[str, list[hookstats.results.Disagreement]]]:
    return ranks.run(with_faults, world)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_on_one_rank_is_named_by_rank_tensor_and_first_element(fault: str, world: int) -> None:
    for found in faults_of(world):  # on every rank the same
        assert [(each.tensor, each.kind, each.index) for each in found[fault]] == FAULTS[fault][1]
        for each in found[fault]:
            assert (each.differs, each.ranks, each.reference_rank) == ("values", (1,), 0)
            assert (each.agree, each.has_majority) == ((1, False) if world == 2 else (2, True))


def test_the_sentence_says_who_differs_from_whom_and_in_which_bits() -> None:
    (two,), (three,) = (faults_of(world)[0]["sign bit"] for world in (2, 3))
    ours, theirs = two.values
    assert ours == -theirs
    pair = f"first at [0]: {ours} (0x{two.bits[0]}) on rank 0, {theirs} (0x{two.bits[1]}) on rank 1"
    assert int(two.bits[0], 16) ^ int(two.bits[1], 16) == 1 << 31
    assert two.sentence == f"last.bias (param): rank 1 differs from rank 0, the lowest; no majority agrees; {pair}"
    assert three.sentence == f"last.bias (param): rank 1 differs from the majority, rank 0 and 1 more; {pair}"


class Bag(nn.Module):
    """A buffer for each dtype, one that is not contiguous among them."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in ALL_DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), of_bits((5, 7), dtype))
        self.register_buffer("transposed", of_bits((5, 7), torch.bfloat16).t())
        self.register_buffer("zeros", torch.zeros(3))
        self.register_buffer("nans", torch.full((3,), math.nan))
        self.register_buffer("long", torch.zeros(9_000_001, dtype=torch.uint8))


def with_every_dtype(rank: int, world: int) -> list[hookstats.results.Disagreement]:
    model = Bag()
    assert hookstats.check_replicas(model) == []
    if rank == 1:
        for name, buffer in model.named_buffers():
            if name == "zeros":
                buffer[2] = -0.0
            elif name == "long":
                buffer[8_765_432] = 7
            elif name == "transposed":
                buffer.t().copy_(changed_bit(buffer.t(), 3 * 7 + 2, 9))
            else:
                flip(buffer, (2,) if name == "nans" else (3, 2), 0)
    first = hookstats.check_replicas(model, locate=True)
    for name in {each.tensor for each in first if each.index is not None}:
        delattr(model, name)
    return [*first, *hookstats.check_replicas(model, locate=True)]


@cache
def of_every_dtype() -> list[hookstats.results.Disagreement]:
    return ranks.run(with_every_dtype, 2)[0]


def test_every_dtype_signed_zeros_payloads_of_nans_strides_and_long_tensors() -> None:
    found = of_every_dtype()
    located = {each.tensor: each for each in found if each.index is not None}
    assert set(located) == {name for name, _ in Bag().named_buffers()}
    for name, each in located.items():
        assert each.index == {"transposed": (2, 3), "zeros": (2,), "nans": (2,), "long": (8_765_432,)}.get(name, (3, 2))
        assert each.values is not None
        assert each.bits[0] != each.bits[1]
    assert located["zeros"].bits == ("00000000", "80000000")
    assert located["nans"].bits == ("7fc00000", "7fc00001")
    assert located["long"].values == (0, 7)
    assert located["torch_bool"].values in ((True, False), (False, True))
    assert isinstance(located["torch_complex128"].values[0], complex)


def test_elements_of_at_most_16_tensors_are_looked_for() -> None:
    found = of_every_dtype()
    first = found[: len(list(Bag().named_buffers()))]
    assert [each.index is not None for each in first] == [i < 16 for i in range(len(first))]


def other_models(rank: int, world: int) -> dict[str, list[hookstats.results.Disagreement]]:
    found = {}
    model, optimizer = small()
    if rank == 2:
        model.first.bias.grad = None
        model.register_parameter("extra", nn.Parameter(torch.zeros(2)))
        model.seen = model.seen.reshape(6, 4)
        model.last = model.last.bfloat16()
        optimizer.state.pop(model.norm.bias)
    found["names and forms"] = hookstats.check_replicas(model, optimizer=optimizer, locate=True)
    found["nothing at all"] = hookstats.check_replicas(model if rank else nn.Module())
    found["no tensors"] = hookstats.check_replicas(nn.Module())
    found["all three differ"] = hookstats.check_replicas(nn.Linear(rank + 1, 1, bias=False))
    return found


def test_tensors_that_differ_in_name_shape_or_dtype_are_named_and_nobody_hangs() -> None:
    for found in ranks.run(other_models, 3):
        told = {(each.tensor, each.kind): (each.differs, each.ranks, each.values) for each in found["names and forms"]}
        assert told == {
            ("first.bias", "param_grad"): ("missing", (2,), ("float32 [16]", None)),
            ("extra", "param"): ("missing", (2,), (None, "float32 [2]")),
            ("seen", "buffer"): ("form", (2,), ("int64 [4, 6]", "int64 [6, 4]")),
            ("last.weight", "param"): ("form", (2,), ("float32 [8, 16]", "bfloat16 [8, 16]")),
            ("last.bias", "param"): ("form", (2,), ("float32 [8]", "bfloat16 [8]")),
            ("last.weight", "param_grad"): ("form", (2,), ("float32 [8, 16]", "bfloat16 [8, 16]")),
            ("last.bias", "param_grad"): ("form", (2,), ("float32 [8]", "bfloat16 [8]")),
        }
        assert {(each.differs, each.ranks, each.reference_rank) for each in found["nothing at all"]} >= {
            ("missing", (0,), 1)
        }
        assert found["no tensors"] == []
        (each,) = found["all three differ"]
        assert (each.differs, each.ranks, each.reference_rank, each.has_majority) == ("form", (1, 2), 0, False)
        assert each.sentence == (
            "weight (param): ranks 1, 2 differ from rank 0, the lowest; no majority agrees: "
            "float32 [1, 1] on rank 0, float32 [1, 2] on rank 1"
        )


def training(rank: int, world: int) -> Any:
    """100 steps of DDP with a check behind each, and the same without any."""
    collectives: list[int] = []
    gather = exchange.Exchange.gather

    def counted(self: Any, mine: Any) -> Any:
        collectives[-1] += 1
        return gather(self, mine)

    exchange.Exchange.gather = counted  # type: ignore[method-assign]
    ends = []
    for checked in (True, False):
        model = nn.parallel.DistributedDataParallel(Small(), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.Generator().manual_seed(rank)
        found = []
        for _ in range(100):
            model(torch.randn(4, 8, generator=data)).square().sum().backward()
            optimizer.step()
            if checked:
                collectives.append(0)
                found += hookstats.check_replicas(model, optimizer=optimizer)
            optimizer.zero_grad()
        ends.append((found, torch.rand(3), [p.detach().clone() for p in model.parameters()]))
    later = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=later)
    return ends, collectives


def test_equal_replicas_are_silent_over_100_steps_of_ddp_which_trains_as_without_in_one_collective_a_check() -> None:
    for ends, collectives in ranks.run(training, 2):
        (found, random, parameters), (_, random_without, parameters_without) = ends
        assert found == []
        assert collectives == [1] * 100
        assert torch.equal(random, random_without)
        assert all(map(torch.equal, parameters, parameters_without))


def wrapped(rank: int, world: int) -> list[str]:
    model = nn.parallel.DistributedDataParallel(Small())
    if rank:
        flip(model.module.first.weight, (0, 0), 0)
    mesh = init_device_mesh("cpu", (world,))
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    found = [each.sentence for group in (None, mesh) for each in hookstats.check_replicas(model, group)]
    for ranks_here, group in zip(([0, 1], [0, 2]), pairs, strict=True):
        if rank in ranks_here:
            found += [each.sentence for each in hookstats.check_replicas(model, group)]
        else:
            with pytest.raises(ValueError, match=f"process_group: expected a group that rank {rank} is in"):
                hookstats.check_replicas(model, group)
    return found


def test_a_group_or_a_mesh_names_the_ranks() -> None:
    of_all = "first.weight (param): rank 0 differs from the majority, rank 1 and 1 more"
    of_pair = "first.weight (param): rank {} differs from rank 0, the lowest; no majority agrees"
    assert ranks.run(wrapped, 3) == [
        [of_all, of_all, of_pair.format(1), of_pair.format(2)],
        [of_all, of_all, of_pair.format(1)],
        [of_all, of_all, of_pair.format(2)],
    ]


def sharded(rank: int, world: int) -> dict[str, Any]:
    """FSDP2, HSDP, tensor parallelism and FSDP of 4 ranks, each with bits that go wrong where there is a replica."""
    found: dict[str, Any] = {}
    model = fully_shard(Small((1,)), mesh=init_device_mesh("cpu", (world,)))
    optimizer = stepped(model)
    found["FSDP2"] = hookstats.check_replicas(model, optimizer=optimizer)

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Small((1,)), mesh=grid)
    optimizer = stepped(model)
    found["HSDP"] = hookstats.check_replicas(model, optimizer=optimizer)
    if rank == 3:
        flip(local(model.first.weight), (1, 2), 4)
        flip(local(state(optimizer, model.last.bias, "exp_avg")), (0,), 4)
    found["HSDP, rank 3"] = hookstats.check_replicas(model, optimizer=optimizer, locate=True)

    model = Small()
    plan = {"first": ColwiseParallel(), "norm": SequenceParallel()}
    parallelize_module(model, grid["shard"], plan)
    found["TP"] = hookstats.check_replicas(model)
    if rank == 1:
        flip(local(model.first.weight), (0, 0), 4)  # beside rank 3
        flip(local(model.norm.weight), (5,), 4)  # beside all
    found["TP, rank 1"] = hookstats.check_replicas(model)

    model = FullyShardedDataParallel(Small((1,)), device_id=torch.device("cpu"))
    with hearing() as found["told"]:
        found["FSDP"] = hookstats.check_replicas(model)

    model = Small((1,))
    on_cpu: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model.first = FullyShardedDataParallel(model.first, sharding_strategy=ShardingStrategy.NO_SHARD, **on_cpu)
    if rank == 2:
        flip(model.first.module.weight, (0, 0), 4)
    found["whole inside of FSDP, rank 2"] = hookstats.check_replicas(FullyShardedDataParallel(model, **on_cpu))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def test_sharded_tensors_are_compared_among_the_ranks_that_hold_the_same_part() -> None:
    for found in ranks.run(sharded, 4):
        assert found["FSDP2"] == found["HSDP"] == found["TP"] == found["FSDP"] == []
        told = [(each.tensor, each.kind, each.ranks, each.reference_rank, each.index) for each in found["HSDP, rank 3"]]
        assert told == [
            ("first.weight", "param", (3,), 1, (1, 2)),
            ("last.bias", "optimizer.exp_avg", (3,), 1, (0,)),
        ]
        told = [(each.tensor, each.ranks, each.reference_rank, each.agree) for each in found["TP, rank 1"]]
        assert told == [("first.weight", (3,), 1, 1), ("norm.weight", (1,), 0, 3)]
        assert [(each.tensor, each.ranks) for each in found["whole inside of FSDP, rank 2"]] == [("first.weight", (2,))]
        assert len(found["told"]) == 1
        assert "a part cut by FullyShardedDataParallel" in found["told"][0]


def test_names_are_clean_in_a_compiled_model_and_of_a_shared_tensor_the_first() -> None:
    model = Small()
    model.last.weight = model.first.weight
    held = list_contents(torch.compile(nn.Sequential(model)), [], buffers=True, gradients=True)[0]
    names = "scale first.weight first.bias norm.weight norm.bias last.bias seen"
    assert sorted(each.name for each in held) == sorted(f"0.{name}" for name in names.split())


class Unreadable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.ones(3))
        self.lazy = nn.LazyLinear(4)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("shape_alone", torch.empty(3, device="meta"))
        self.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        self.register_buffer("given_up", torch.ones(5))
        self.given_up.untyped_storage().resize_(0)


def unreadable(rank: int, world: int) -> tuple[list[str], list[hookstats.results.Disagreement]]:
    model = Unreadable()
    with hearing() as told:
        assert hookstats.check_replicas(model) == []
        model.plain.data[1] += rank
        found = hookstats.check_replicas(model)
    return told, found


def test_what_cannot_be_read_is_named_in_one_warning_and_the_rest_is_compared() -> None:
    for told, found in ranks.run(unreadable, 2):
        assert [each.tensor for each in found] == ["plain"]
        assert len(told) == 1
        for said in (
            "lazy.weight (param): not initialised yet",
            "sparse (buffer): of layout sparse_coo",
            "shape_alone (buffer): on meta, without data",
            "nested (buffer): a nested tensor",
            "given_up (buffer): on cpu, without data",
        ):
            assert said in told[0]


def failing(rank: int, world: int) -> tuple[str, list[Any]]:
    """Rank 1 raises; then all is well again; then it comes too late."""
    model = Small()
    broken = SimpleNamespace(param_groups=[{"params": [model.scale]}], state=None)
    with pytest.raises(AttributeError if rank else RuntimeError) as told:
        hookstats.check_replicas(model, optimizer=broken if rank else None)
    assert hookstats.check_replicas(nn.Module()) == []
    late = dist.new_group()
    if rank == 0:
        replicas._TIMEOUT = 0.1
        replicas._exchanges.clear()  # as at the first call
        with pytest.raises(RuntimeError, match=r"expected the ranks 0, 1 to come within 0.1 s, got: "):
            hookstats.check_replicas(model)
    dist.barrier(late)
    return str(told.value)


def test_a_rank_that_fails_fails_the_check_everywhere_and_who_does_not_come_is_waited_for_in_vain() -> None:
    said, _ = ranks.run(failing, 2)
    assert said == "hookstats: expected the tensors of all ranks [0, 1], but these could not tell: [1]"


def test_without_distributed_and_for_other_arguments_it_says_what_was_expected() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"process_group: expected .* to be initialized"):
        hookstats.check_replicas(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=re.escape("model: expected a torch.nn.Module, got list")):
        hookstats.check_replicas([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("optimizer: expected an Optimizer or a sequence of them, got int")):
        hookstats.check_replicas(nn.Linear(2, 2), optimizer=3)


def leaving(rank: int, world: int) -> list[hookstats.results.Disagreement]:
    """Without destroying the process group, as scripts do."""
    place = os.environ["HOOKSTATS_RENDEZVOUS"]
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
    return hookstats.check_replicas(Small())


def test_the_interpreter_ends_as_usual_behind_a_check() -> None:
    for each in ranks.outcomes(leaving, 2, init=""):
        assert (each.result, each.code) == ([], 0), each.output


def one_locates(rank: int, world: int) -> list[Any]:
    model, _ = small()
    if rank:
        flip(model.scale, (), 0)
    return [each.index for each in hookstats.check_replicas(model, locate=rank == 1)]


def test_where_one_rank_asks_for_the_element_all_look_for_it() -> None:
    assert ranks.run(one_locates, 2) == [[()]] * 2


def anew(rank: int, world: int) -> list[list[str]]:
    """torch.distributed is ended and initialised again, with another store."""
    found = []
    for time in range(2):
        model, _ = small()
        if rank:
            flip(model.scale, (), 0)
        found.append([each.tensor for each in hookstats.check_replicas(model)])
        dist.destroy_process_group()
        place = os.environ["HOOKSTATS_RENDEZVOUS"]
        dist.init_process_group("gloo", init_method=f"file://{place}{time}", rank=rank, world_size=world)
        dist.barrier()  # or one rank ends while the other one still connects
    return found


def test_a_process_group_that_is_initialised_anew_is_used_anew() -> None:
    assert ranks.run(anew, 2) == [[["scale"], ["scale"]]] * 2


def alone(rank: int, world: int) -> list[hookstats.results.Disagreement]:
    with pytest.raises(TypeError, match=r"process_group: expected a torch\.distributed\.ProcessGroup"):
        hookstats.check_replicas(Small(), "all")
    return hookstats.check_replicas(Small())


def test_one_rank_agrees_with_itself() -> None:
    assert ranks.run(alone, 1) == [[]]
