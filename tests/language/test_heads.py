"""Heads instead of channels: groups of channels, merged, and how many heads a model says that there are."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hookstats
from hookstats import Channels, Site, Snapshot
from tests import ranks, scaled

OF_WEIGHT = ("param", "param_grad", "optimizer.exp_avg", "optimizer.exp_avg_sq")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("groups", [1, 3, 4, 12])
def test_groups_are_what_float64_says_of_the_reshaped_tensor(dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    means = torch.arange(12.0) * 1e4  # far apart, against deviations of 1
    x = (torch.randn(50, 12) + means).to(dtype)
    x[0, 0], x[1, 5], x[2, 11] = torch.nan, torch.inf, 0
    found = hookstats.measure(x, -1).grouped(groups)
    for number, part in enumerate(x.double().unflatten(-1, (groups, -1)).unbind(1)):
        finite = part[part.isfinite()]
        assert found.count[number] == len(finite)
        assert found.mean[number] == pytest.approx(finite.mean().item(), rel=1e-6)
        assert found.std[number] == pytest.approx(finite.std().item(), rel=1e-4)
        assert found.max[number] == finite.max()
        assert found.min[number] == finite.min()
        assert found.zeros[number] == (part == 0).sum()
        assert found.nans[number] == part.isnan().sum()
        assert found.posinfs[number] == part.isposinf().sum()


def test_a_size_that_does_not_divide_the_channels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a number that divides the 32 channels of '0.q_proj', got 5"):
        hookstats.attach(nn.Sequential(Attention()), channels=Channels(group_size={"*.q_proj": 5}))


def test_what_is_no_number_of_groups_is_refused() -> None:
    stats = hookstats.measure(torch.randn(4, 12), -1)
    with pytest.raises(ValueError, match="expected a number that divides the 12 channels, got 5"):
        stats.grouped(5)
    with pytest.raises(ValueError, match="got 0"):
        stats.grouped(0)
    with pytest.raises(TypeError, match=r"expected an int, got 2\.0"):
        stats.grouped(2.0)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(4, 4))
    with hookstats.attach(model, channels=False) as monitor:
        model(torch.randn(2, 4))
        with pytest.raises(ValueError, match="grouped: expected statistics per channel, got totals alone"):
            monitor.snapshot()["0", "output"].grouped(2)


class Attention(nn.Module):
    """Grouped queries: four heads of 8, over two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = 4, 2
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


ALL = ("output", "grad_output", "input", "grad_input", "param", "param_grad", "param_sample", "optimizer")
GROUPS = {
    **{("0.q_proj", kind): 4 for kind in ("output", "grad_output")},
    **{(f"0.{name}_proj", kind): 2 for name in "kv" for kind in ("output", "grad_output")},
    **{("0.o_proj", kind): 4 for kind in ("input", "grad_input")},
    **{(f"0.{name}_proj.weight", kind): heads for name, heads in (("q", 4), ("k", 2), ("v", 2)) for kind in OF_WEIGHT},
}


def train_heads(model: nn.Module, run: nn.Module | None = None, **arguments: Any) -> Snapshot:
    """A step of AdamW, measured."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with hookstats.attach(model, **{"tensors": ALL, "every": 1, **arguments}) as monitor:
        (run or model)(torch.randn(2, 10, 32)).square().mean().backward()
        optimizer.step()
        found = [monitor.step(), *monitor.detach()]  # what ranks merge comes later
    (snapshot,) = (each for each in found if each is not None)
    return snapshot


def groups_in(snapshot: Snapshot) -> dict[tuple[str, str], int]:
    return {tuple(site): len(stats.groups.rms) for site, stats in snapshot.items() if stats.groups is not None}


@pytest.mark.parametrize("compiled", [False, True])
def test_heads_are_found_in_what_projections_give_and_take_and_in_their_weights(compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(Attention(), nn.Linear(32, 32))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else None
    snapshot = train_heads(model, run)
    assert groups_in(snapshot) == GROUPS
    found = snapshot["0.k_proj.weight", "param_grad"].groups
    gradient = model[0].k_proj.weight.grad.double().unflatten(0, (2, 8))
    assert found.rms == pytest.approx(gradient.square().mean((1, 2)).sqrt())
    assert found.count.tolist() == [8 * 32] * 2


def test_heads_are_told_in_the_table_and_among_the_largest_and_in_pandas() -> None:
    snapshot = train_heads(nn.Sequential(Attention()))
    lines = {tuple(line.split()[:2]): line.split()[3] for line in snapshot.table().splitlines()[2:]}
    assert lines["0.q_proj", "output"] == "4x8"
    assert lines["0.k_proj.weight", "param_grad"] == "2x8"
    assert lines["0.o_proj", "output"] == "32"
    every = [
        (site, number, value)
        for site in snapshot.order
        if (groups := snapshot[site].groups) is not None
        for number, value in enumerate(groups.abs_max.tolist())
    ]
    assert snapshot.top_groups("abs_max", 5) == sorted(every, key=lambda each: -each[2])[:5]
    frame = snapshot.to_pandas(groups=True)
    assert frame.index.names == ["name", "tensor", "group"]
    assert [(Site(name, kind), group) for name, kind, group in frame.index] == [each[:2] for each in every]
    assert frame["abs_max"].tolist() == [each[2] for each in every]
    with pytest.raises(ValueError, match="expected channels=True or groups=True, got both"):
        snapshot.to_pandas(channels=True, groups=True)
    with pytest.raises(ValueError, match="top_groups: expected k, a number of at least 1, got 0"):
        snapshot.top_groups("rms", 0)
    without = train_heads(nn.Sequential(nn.Linear(32, 32)))
    assert without.top_groups("rms", 5) == []
    assert len(without.to_pandas(groups=True)) == 0


def test_a_scaled_gradient_has_its_heads_without_the_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with hookstats.attach(model, tensors="grad_output", every=1) as monitor:
        scaler.scale(model(torch.randn(2, 10, 32)).square().mean()).backward()
        scaled.show(scaler, model)
        snapshot = monitor.step()
    stats = snapshot["0.q_proj", "grad_output"]
    assert stats.groups.abs_max.max() == stats.total.abs_max
    sites = snapshot.frame.sites
    place = sites.place[Site("0.q_proj", "grad_output")]
    before = int(sites.group_counts[:place].sum())
    assert snapshot.frame.groups.abs_max[before : before + 4].tolist() == stats.groups.abs_max.tolist()


def test_what_is_given_counts_more_than_what_is_found() -> None:
    given = Channels(group_size={"*.q_proj": 16, "1": 4, "1.weight": 2, "0.k_proj.weight": 4})
    snapshot = train_heads(nn.Sequential(Attention(), nn.Linear(32, 32)), channels=given)
    wanted = {site: 2 if site[0].startswith("0.q_proj") else count for site, count in GROUPS.items()}
    wanted |= {("0.k_proj.weight", kind): 4 for kind in OF_WEIGHT}
    wanted |= {("1", kind): 8 for kind in ("output", "grad_output")} | {("1.weight", kind): 16 for kind in OF_WEIGHT}
    assert groups_in(snapshot) == wanted


def test_without_channels_there_are_no_heads() -> None:
    assert groups_in(train_heads(nn.Sequential(Attention()), channels=False)) == {}
    snapshot = train_heads(nn.Sequential(Attention()))
    assert groups_in(snapshot.compact()) == {}
    odd = hookstats.results.SiteStats(np.zeros((10, 7)), 1, None, True, group_size=2)
    assert odd.groups is None  # a width that was met, and is no multiple


class Mixer(nn.Module):
    """A module with heads that is no attention; and with a parameter of another width beside its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.out_proj = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(x)


def test_what_says_nothing_of_heads_has_none() -> None:
    torch.manual_seed(0)
    assert groups_in(train_heads(nn.Sequential(Mixer()))) == {}
    model = nn.Sequential(Attention())
    model[0].q_proj.register_parameter("lora_A", nn.Parameter(torch.randn(8, 32)))
    model[0].num_key_value_heads = 1
    model[0].k_proj, model[0].v_proj = nn.Linear(32, 8), nn.Linear(32, 8)
    found = train_heads(model)
    assert groups_in(found) == {site: heads for site, heads in GROUPS.items() if heads == 4}
    assert found["0.q_proj.lora_A", "param"].channels is not None
    assert {site.name for site, stats in found.items() if stats.group_size} == {
        "0.q_proj",
        "0.q_proj.weight",
        "0.o_proj",
    }


def test_heads_of_torchs_own_attention_lie_in_its_parameters() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    found = groups_in(train_heads(model, tensors=("output", "param_grad")))
    assert found == {("self_attn.in_proj_weight", "param_grad"): 12}


@pytest.mark.parametrize(
    ("kind", "outputs", "inputs"),
    [
        ("llama", {"self_attn.q_proj": 4, "self_attn.k_proj": 4, "self_attn.v_proj": 4}, {"self_attn.o_proj": 4}),
        ("gpt2", {"attn.c_attn": 12}, {"attn.c_proj": 4}),
        ("gpt_neox", {"attention.query_key_value": 12}, {"attention.dense": 4}),
        ("falcon", {"self_attention.query_key_value": 6}, {"self_attention.dense": 4}),  # one head of keys
        ("deepseek_v3", {"self_attn.q_b_proj": 4, "self_attn.kv_b_proj": 4}, {"self_attn.o_proj": 4}),
        ("mamba", {}, {}),
    ],
)
def test_heads_of_models_of_transformers(kind: str, outputs: dict[str, int], inputs: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    from tests.language import zoo

    model = zoo.make(kind)
    with hookstats.attach(model, tensors=("output", "input")) as monitor:
        model(**zoo.batch())
        found = groups_in(monitor.snapshot())
    assert {of(site): count for site, count in found.items() if ".1." in site[0] and site[1] == "output"} == outputs
    assert {of(site): count for site, count in found.items() if ".1." in site[0] and site[1] == "input"} == inputs


def of(site: tuple[str, str]) -> str:
    """Its name behind the number of the layer."""
    return site[0].partition(".1.")[2]


def test_heads_are_kept_and_read_again(tmp_path: Path) -> None:
    snapshot = train_heads(nn.Sequential(Attention()), sinks=hookstats.record(tmp_path))
    run = hookstats.load(tmp_path)
    assert run[0].equals(snapshot)
    assert groups_in(run[0]) == GROUPS
    merged = hookstats.load(tmp_path, ranks="merged")[0]
    assert groups_in(merged) == GROUPS
    for again in (Snapshot.from_dict(snapshot.to_dict()), pickle.loads(pickle.dumps(snapshot))):
        assert again.equals(snapshot)
        assert groups_in(again) == GROUPS
        assert again.table() == snapshot.table()
        assert again.top_groups("rms", 100) == snapshot.top_groups("rms", 100)
    some = snapshot.frame.sites.select(np.array([snapshot.frame.sites.place[Site("0.o_proj", "input")]]))
    assert some.group_counts.tolist() == [4]
    changed = snapshot.to_dict()
    assert Snapshot.from_dict(changed).equals(snapshot)
    next(site for site in changed["sites"] if site["group_size"])["group_size"] = 2
    assert not Snapshot.from_dict(changed).equals(snapshot)


def tensor_parallel(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    wanted = train_heads(model, tensors=("output", "param_grad", "input"))
    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    cut = {f"0.{name}_proj": ColwiseParallel() for name in "qkv"} | {"0.o_proj": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), cut)
    found = train_heads(model, tensors=("output", "param_grad", "input"), process_group=dist.group.WORLD)
    assert found.world_size == world
    assert groups_in(found) == groups_in(wanted) != {}
    for site in groups_in(wanted):
        assert found[site].groups.rms == pytest.approx(wanted[site].groups.rms, rel=1e-4)  # type: ignore[union-attr]


def test_heads_of_tensor_parallel_ranks_lie_side_by_side() -> None:
    ranks.run(tensor_parallel, 2, timeout=180)
