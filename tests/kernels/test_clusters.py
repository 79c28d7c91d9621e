"""Small tensors in the variants of HOOKSTATS_SMALL: the same bits in clusters as through scratch, on every GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import DTYPES, ROOT, Backend, State, check
from tests.kernels.test_kernels import LAYOUTS, normal

CLUSTERS, FINER, EARLY = 1, 2, 4  # bits of HOOKSTATS_SMALL

# Each of 2 to 4 parts where small tensors are cut finer. Only rows in packs have kernels for clusters.
SHAPES: dict[str, tuple[int, int]] = {
    "rows": (600, 68),
    "three groups of channels": (700, 132),
}


@pytest.fixture
def imitated(harness: Any) -> Iterator[Backend]:
    harness.reserve_scratch()
    yield Backend("cuda_on_cpu", harness, "cpu")
    harness.use_small_variant(0)
    harness.use_gpu()
    harness.shuffle(0)


def folded(backend: Backend, x: torch.Tensor, dim: int | None, histogram: str, mask: Any = None) -> tuple[State, int]:
    """Twice into one state; and how many launches were of clusters."""
    before = backend.ops.cluster_launches()
    state = backend.accumulate(x, dim, histogram, mask=mask)
    backend.accumulate(2 * x, dim, histogram, into=state, mask=mask)
    return state, backend.ops.cluster_launches() - before


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_cluster_gives_the_bits_of_the_way_through_scratch(imitated: Backend, dtype: torch.dtype, shape: str) -> None:
    x = normal(*SHAPES[shape]).to(dtype)
    x.view(-1)[7::1001] = float("nan")
    for histogram in ("none", "per_tensor", "per_channel"):
        imitated.ops.use_small_variant(FINER)
        through_scratch, clusters = folded(imitated, x, 1, histogram)
        assert clusters == 0
        imitated.ops.use_small_variant(FINER | CLUSTERS)
        in_cluster, clusters = folded(imitated, x, 1, histogram)
        assert clusters == 2
        assert in_cluster.same_bits(through_scratch)
        check(imitated.accumulate(x, 1, histogram).stats(), x, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype_is_right_in_every_variant(imitated: Backend, layout: str, dtype: torch.dtype) -> None:
    make, channel_dim = LAYOUTS[layout]
    x = make(dtype)
    for variant in (FINER, FINER | CLUSTERS | EARLY):
        imitated.ops.use_small_variant(variant)
        check(imitated.accumulate(x, channel_dim, "per_channel").stats(), x, channel_dim)


def test_rows_that_do_not_count_are_left_out_of_parts_that_are_cut_finer(imitated: Backend) -> None:
    x, mask = normal(700, 68).float(), torch.arange(700) % 3 > 0
    imitated.ops.use_small_variant(FINER | CLUSTERS)
    check(folded(imitated, x, 1, "per_channel", mask)[0].stats(), torch.cat([x[mask], 2 * x[mask]]), 1)


def test_the_order_of_blocks_and_threads_of_a_cluster_changes_nothing(imitated: Backend) -> None:
    x = normal(700, 132).float()
    imitated.ops.use_small_variant(FINER | CLUSTERS)
    for histogram in ("none", "per_channel"):
        states = []
        for seed in range(4):
            imitated.ops.shuffle(seed)
            states.append(folded(imitated, x, 1, histogram)[0])
        assert all(state.same_bits(states[0]) for state in states)


@pytest.mark.parametrize("blocks", range(4))
def test_a_flag_that_changes_while_a_cluster_runs_drops_the_moments_of_its_channels(
    imitated: Backend, blocks: int
) -> None:
    x, flag, state = normal(700, 64).float(), torch.ones(1, dtype=torch.int32), State(64, "none", "cpu")
    imitated.ops.use_small_variant(FINER | CLUSTERS)
    imitated.ops.switch_off_after(flag, blocks)  # of 4, which are one cluster
    before = imitated.ops.cluster_launches()
    imitated.ops.accumulate(x, *state.tensors, flag, 1)
    imitated.ops.switch_off_after(flag, -1)
    assert imitated.ops.cluster_launches() == before + 1
    assert int(flag) == 0
    assert not state.moments.any()
    assert int(state.counters[0]) == 0


@pytest.mark.parametrize("gpu", [{"capability": 89}, {"capability": 90, "built_for": 80}], ids=["sm_89", "PTX of 8.0"])
def test_where_code_or_gpu_has_no_clusters_the_way_through_scratch_gives_the_same_bits(
    imitated: Backend, gpu: dict[str, int]
) -> None:
    x = normal(700, 68).float()
    imitated.ops.use_small_variant(FINER | CLUSTERS)
    in_cluster, clusters = folded(imitated, x, 1, "per_channel")
    assert clusters == 2
    imitated.ops.use_gpu(**gpu)
    without, clusters = folded(imitated, x, 1, "per_channel")
    assert clusters == 0
    assert without.same_bits(in_cluster)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("partial_cluster", "not every block of the cluster reaches its barrier"),
        ("left_cluster", "the shared memory of a block that has ended is read"),
    ],
)
def test_the_harness_finds(harness: Any, fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        harness.run_faulty(fault)


@pytest.mark.gpu
def test_clusters_on_a_gpu_give_the_bits_of_the_way_through_scratch() -> None:
    program = (
        "import torch; from tests.conftest import DTYPES, State; torch.manual_seed(0)\n"
        "shapes = ((4096, 4096), 1), ((600, 68), 1), ((700, 67), 1), ((4, 2, 64, 72), 1), ((50000,), None)\n"
        "for shape, dim in shapes:\n"
        "  x = torch.randn(shape, dtype=torch.float64).cuda()\n"
        "  for dtype in DTYPES:\n"
        "    for histogram in ('none', 'per_channel'):\n"
        "      channels = 1 if dim is None else shape[dim]\n"
        "      state = State(channels, histogram, 'cuda')\n"
        "      for _ in range(20):\n"
        "        torch.ops.hookstats.accumulate(x.to(dtype), *state.tensors, None, dim or 0)\n"
        "      print(shape, dtype, state.moments.view(torch.int64).sum().item(), int(state.counters[0]))"
    )

    def run(variant: int) -> str:
        command = [sys.executable, "-c", program]
        environment = os.environ | {"HOOKSTATS_SMALL": str(variant)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    through_scratch = run(FINER)
    assert len(through_scratch.splitlines()) == 60
    assert run(FINER | CLUSTERS) == through_scratch
    assert run(FINER | CLUSTERS | EARLY) == through_scratch
    assert run(CLUSTERS) == run(EARLY) == run(0)
