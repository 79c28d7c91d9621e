"""Cost of hookstats in large jobs: sites, memory, what a merge moves, and how exact it is.

python -m benchmarks.scale

The models are built without data, each rank's share of them, and attach's own plan is asked what it would take. Times
of a merge are estimates, from what is measured on this machine and from the latency and bandwidth that are named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hookstats.cluster.exchange import FAN
from hookstats.cluster.packing import fold_states
from hookstats.numbers.fields import EXPONENT_BINS, FIELDS, Counts, ExponentBins, Site
from hookstats.numbers.frame import COUNTERS
from hookstats.watch.arguments import Channels
from hookstats.watch.layout import Layout, sites_at
from hookstats.watch.memory import StateStore
from hookstats.watch.planning import Plan

DEVICE_BYTES = 80 << 30
BUDGET = 256 << 20  # the default of attach
STEP_SECONDS = 5.0
EVERY = 10  # the default
LATENCY = 50e-6  # s, of a message between two hosts by TCP
BANDWIDTH = 1.25e9  # bytes/s, 10 Gbit/s a process: gloo's ring is not RDMA
BYTES_RECORDED = {"totals": 71, "totals, histograms": 177}  # a site and step (benchmarks/bench_records.py)
REDUCES = 2  # all-reduces of a step: which one it is, and the step


class Shape(NamedTuple):
    """The sizes of a transformer."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int  # size
    vocabulary: int
    experts: int = 0  # a layer, each of `hidden`; beside them one that is shared


class Mesh(NamedTuple):
    """Number of ranks in each dimension of the mesh. expert: part of data."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sharded: bool = True  # parameters over data

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline


JOBS: list[tuple[str, Shape, Mesh]] = [
    ("7 B, FSDP 64", Shape(32, 4096, 11008, 32, 32, 128, 32000), Mesh(64)),
    ("70 B, FSDP 32 x TP 8", Shape(80, 8192, 28672, 64, 8, 128, 128256), Mesh(32, 8)),
    ("70 B, FSDP 256", Shape(80, 8192, 28672, 64, 8, 128, 128256), Mesh(256)),
    ("405 B, TP 8 x PP 16 x FSDP 128", Shape(126, 16384, 53248, 128, 8, 128, 128256), Mesh(128, 8, 16)),
    ("1 T MoE, EP 64 x PP 16 x DP 2", Shape(61, 7168, 2048, 64, 64, 128, 163840, 384), Mesh(128, 1, 16, 64)),
]


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, mesh: Mesh) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden // mesh.tensor, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden // mesh.tensor, width, bias=False)
        self.act = nn.SiLU()


class Block(nn.Module):
    def __init__(self, shape: Shape, mesh: Mesh) -> None:
        super().__init__()
        heads, kv = (max(1, n // mesh.tensor) * shape.head for n in (shape.heads, shape.kv_heads))
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, heads, bias=False)
        self.k, self.v = (nn.Linear(shape.width, kv, bias=False) for _ in range(2))
        self.out = nn.Linear(heads, shape.width, bias=False)
        self.feed_forward = FeedForward(shape.width, shape.hidden, mesh)
        if shape.experts:
            self.router = nn.Linear(shape.width, shape.experts, bias=False)
            here = range(shape.experts // mesh.expert)
            self.experts = nn.ModuleList(FeedForward(shape.width, shape.hidden, mesh) for _ in here)


class Stage(nn.Module):
    """Modules and sites of the first rank of the first stage."""

    def __init__(self, shape: Shape, mesh: Mesh) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary // mesh.tensor, shape.width)
        self.layers = nn.ModuleList(Block(shape, mesh) for _ in range(math.ceil(shape.layers / mesh.pipeline)))
        if mesh.pipeline == 1:
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary // mesh.tensor, bias=False)


# Without samples of parameters, whose sites take 128 bytes each and are merged as totals.
KINDS = ("output", "grad_output", "param_grad")


class State(NamedTuple):
    """Memory that a rank keeps."""

    sites: int
    channels: int
    bytes: int  # with all channels and the default histogram
    totals: int  # without channels


def state_of(shape: Shape, mesh: Mesh) -> State:
    with torch.device("meta"):
        stage = Stage(shape, mesh)
    plan = Plan(stage, None, None, KINDS, Channels())
    store = StateStore(ExponentBins(), 1 << 62, strict=True)
    widths: list[int] = []
    for module, spec, _, _ in plan.hooks():  # of a SiLU and a Block the width is learned in the first forward
        width = spec.channels.width or (shape.hidden // mesh.tensor if isinstance(module, nn.SiLU) else shape.width)
        widths += [width] * len(spec.sites)
    for name, slot in plan.parameters.items():
        parameter = slot.get()
        assert parameter is not None
        rows = parameter.shape[0]  # of the weight of a norm each entry
        widths.append(max(1, math.ceil(rows / mesh.data)) if mesh.sharded and "experts" not in name else rows)
    return State(len(widths), sum(widths), sum(map(store.site_bytes, widths)), len(widths) * store.site_bytes(1))


class Merge(NamedTuple):
    """Data that a drain moves on one rank. Times are estimates."""

    sites: int  # of all ranks
    kept: str  # of a site, where the whole is to fit into the budget
    bytes: int  # that each rank brings, and gets
    levels: int
    collectives: int  # of each all-reduce two a level, whatever the number of sites
    seconds: float


def seconds_of(groups: Iterable[int], size: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> float:
    """The time of a merge of `size` bytes through groups of these sizes, from below; all members on hosts of their own.

    Up to the first member of each group, which has one connection for all. Down by a binomial tree.
    """
    seconds = 0.0
    for members in groups:
        seconds += REDUCES * (latency + members * 10e-6) + members * size / bandwidth  # 10 us a message: system calls
        seconds += math.ceil(math.log2(members)) * (REDUCES * latency + size / bandwidth)
    return seconds


def merge_of(shape: Shape, mesh: Mesh) -> Merge:
    state = state_of(shape, mesh)
    own = state.sites - (shape.experts and 9 * math.ceil(shape.layers / mesh.pipeline) * shape.experts // mesh.expert)
    sites = own * mesh.pipeline + (9 * shape.layers * shape.experts if shape.experts else 0)
    kept, size = "channels", state.bytes * mesh.pipeline * mesh.tensor  # at least
    if size > BUDGET:
        kept, size = "totals, histograms", sites * 8 * (len(FIELDS) + EXPONENT_BINS + 8)
    if size > BUDGET:
        kept, size = "totals", sites * 8 * (len(FIELDS) + 8)
    groups = groups_of(mesh.ranks)
    return Merge(sites, kept, size, len(groups), REDUCES * 2 * len(groups), seconds_of(groups, size))


def groups_of(ranks: int) -> list[int]:
    """Return the largest number of members that a group of each level has."""
    return [min(ranks, FAN), *groups_of(-(-ranks // FAN))] if ranks > 1 else []


def host_seconds(sites: int, rounds: int = 20) -> float:
    """Time how long the host takes to read a copied step of so many sites, measured here."""
    size = len(FIELDS) + COUNTERS + EXPONENT_BINS
    places, names = (
        [(0, i * size, 1, EXPONENT_BINS) for i in range(sites)],
        [Site(str(i), "output") for i in range(sites)],
    )
    of = sites_at(np.array(places), names, [False] * sites, [None] * sites, None, ExponentBins())
    layout = Layout([0], of)
    block: Counts = np.ones((sites, size), np.int64)
    block[:, : len(FIELDS)] = np.ones(len(FIELDS)).view(np.int64)
    taken = []
    for step in range(rounds):
        begin = time.perf_counter()
        frame = layout.frame([block.reshape(-1)], [False] * sites, [0] * sites, None, step=step)
        assert frame.totals.rms.size == sites
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


class Accuracy(NamedTuple):
    """The errors of a merge against longdouble: relative to the rms of all, and to the variance."""

    mean: float
    var: float


def accuracy_of(ranks: int, elements: int = 16) -> Accuracy:
    """Measure the error of merged ranks whose means lie 1,000 deviations apart."""
    draw = np.random.default_rng(ranks)
    count = draw.integers(1, 1 << 20, (ranks, elements)).astype(np.float64)
    mean = 1e3 * draw.normal(size=(ranks, elements))
    m2 = count * draw.chisquare(3, (ranks, elements)) / 3
    parts = np.zeros((ranks, len(FIELDS), elements))
    for name, numbers in (("count", count), ("mean", mean), ("m2", m2)):
        parts[:, FIELDS.index(name)] = numbers
    parts[:, FIELDS.index("max")] = 1.0
    while len(parts) > 1:
        parts = np.stack([fold_states(parts[i : i + FAN]) for i in range(0, len(parts), FAN)])
    merged, second = parts[0, FIELDS.index("mean")], parts[0, FIELDS.index("m2")]
    n, means, own = (each.astype(np.longdouble) for each in (count, mean, m2))
    middle = (n * means).sum(0) / n.sum(0)
    spread = (own + n * (means - middle) ** 2).sum(0)
    rms = np.sqrt(spread / n.sum(0) + middle**2)
    return Accuracy(float((abs(merged - middle) / rms).max()), float((abs(second - spread) / spread).max()))


def tables() -> list[str]:
    lines = [
        "| job | ranks | sites a rank | channels | state MB, with channels | MB, totals | of 80 GB | default keeps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, shape, mesh in JOBS:
        state = state_of(shape, mesh)
        kept = state.bytes if state.bytes <= BUDGET else state.totals
        lines.append(
            f"| {name} | {mesh.ranks:,} | {state.sites:,} | {state.channels:,} | {state.bytes / 1e6:.0f} | "
            f"{state.totals / 1e6:.1f} | {100 * kept / DEVICE_BYTES:.2f} % | "
            f"{'channels' if state.bytes <= BUDGET else 'totals'} |"
        )
    lines += [
        "",
        "| job | sites of all | merged | MB | levels, collectives | merge ms | of 10 steps | host ms | GB a day |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shape, mesh in JOBS:
        merge = merge_of(shape, mesh)
        host = host_seconds(merge.sites)
        drains = 86400 / STEP_SECONDS / EVERY
        share = merge.seconds / (EVERY * STEP_SECONDS)
        recorded = drains * merge.sites * BYTES_RECORDED[merge.kept] / 1e9
        lines.append(
            f"| {name} | {merge.sites:,} | {merge.kept} | {merge.bytes / 1e6:.1f} "
            f"| {merge.levels}, {merge.collectives} | "
            f"{1e3 * merge.seconds:.0f} | {100 * share:.2f} % | {1e3 * host:.1f} | {recorded:.1f} |"
        )
    lines += [
        "",
        "| ranks | levels | groups up to | ms at 50 us | ms at 500 us | error of mean / rms | of variance |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in (16, 64, 256, 1024, 4096, 16384):
        groups = groups_of(ranks)
        size = 1000 * 8 * (len(FIELDS) + EXPONENT_BINS + 7)
        near, far = (1e3 * seconds_of(groups, size, latency) for latency in (LATENCY, 10 * LATENCY))
        found = accuracy_of(ranks)
        lines.append(
            f"| {ranks:,} | {len(groups)} | {FAN} | {near:.0f} | {far:.0f} | {found.mean:.1e} | {found.var:.1e} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(tables()))
