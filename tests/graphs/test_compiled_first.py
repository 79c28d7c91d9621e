"""Models that are compiled before they ever run eagerly: widths are known while a graph is traced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GPT2Config, GPT2LMHeadModel

import hookstats
from hookstats import ExponentBins, Snapshot
from tests.models import Containers
from tests.plain import hearing

ACTIVATIONS = ("output", "grad_output")

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning"),
]


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(seed))


def tensors_of(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(torch.utils._pytree.tree_leaves(output))


def steps_of(
    make: Any, compiled: str, backend: Any = "eager", inputs: Any = batch, **options: Any
) -> tuple[list[Snapshot], hookstats.Monitor]:
    """Two steps of a model: "no" compilation, "whole", or its "blocks" apart."""
    torch.manual_seed(0)
    model = make()
    mon = hookstats.attach(model, tensors=ACTIVATIONS, every=1, histogram=ExponentBins(True))
    run: Any = model
    if compiled == "whole":
        run = torch.compile(model, backend=backend, **options)
    elif compiled == "blocks":
        for block in model.blocks:
            block.compile(backend=backend, **options)
    taken = []
    for step in range(2):
        sum(each.square().sum() for each in tensors_of(run(inputs(step)))).backward()
        taken.append(mon.step())
    assert all(snapshot is not None for snapshot in taken)
    assert mon.skipped == {}
    return taken, mon  # type: ignore[return-value]


def assert_same(compiled: list[Snapshot], eager: list[Snapshot]) -> None:
    for got, want in zip(compiled, eager, strict=True):
        assert set(got.order) == set(want.order)
        for site in want.order:
            a, b = got[site], want[site]
            assert (a.calls, a.total.count) == (b.calls, b.total.count), site
            assert a.total.rms == pytest.approx(b.total.rms, rel=1e-4), site
            assert (a.channels is None) == (b.channels is None), site
            assert a.channel_dim == b.channel_dim, site
            if a.channels is not None:
                torch.testing.assert_close(
                    torch.tensor(a.channels.rms), torch.tensor(b.channels.rms), rtol=1e-3, atol=1e-7
                )


def totals_only(snapshot: Snapshot) -> list[hookstats.Site]:
    return [site for site in snapshot.order if snapshot[site].channels is None]


def gpt2(depth: int) -> nn.Module:
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_embd=16, n_layer=depth, n_head=4, use_cache=False, **NO_DROPOUT
    )
    model = GPT2LMHeadModel(config)
    model.blocks = model.transformer.h
    return model


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_gpt2_that_was_never_run_eagerly_keeps_the_channels_of_every_site(how: str) -> None:
    counter = CompileCounterWithBackend("eager")

    def ids(step: int) -> torch.Tensor:
        return torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(step))

    def make() -> nn.Module:
        model = gpt2(2 if how == "whole" else 12)  # more blocks than a frame may have graphs
        forward = model.forward
        model.forward = lambda x: forward(input_ids=x).logits
        return model

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled, _ = steps_of(make, how, counter, ids)
    assert [totals_only(snapshot) for snapshot in compiled] == [[], []]
    assert counter.frame_count <= (1 if how == "whole" else 4)
    assert_same(compiled, steps_of(make, "no", inputs=ids)[0])


class Unequal(nn.Module):
    """Blocks of several widths, with activations whose types tell none."""

    def __init__(self, widths: tuple[int, ...] = (16, 24, 24, 10)) -> None:
        super().__init__()
        ends = zip((16, *widths), widths, strict=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in ends)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("options", [{"dynamic": True}, {"fullgraph": True}], ids=["dynamic", "fullgraph"])
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_blocks_of_unequal_widths_each_have_their_own(how: str, options: dict[str, bool]) -> None:
    compiled, _ = steps_of(Unequal, how, **options)
    assert [totals_only(snapshot) for snapshot in compiled] == [[], []]
    widths = [len(compiled[0][f"blocks.{i}.1", "grad_output"].channels.count) for i in range(4)]
    assert widths == [16, 24, 24, 10]
    assert_same(compiled, steps_of(Unequal, "no")[0])


class Pairs(nn.Module):
    """Blocks that return containers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Containers("nested") for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[Any]:
        return [block(x[..., :6]) for block in self.blocks]


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_what_is_in_containers_is_found_while_tracing(how: str) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled, _ = steps_of(Pairs, how, counter)
    assert {site.tensor for site in compiled[0].order} >= {"output.0.a", "output.1.0", "grad_output.1.0"}
    assert [totals_only(snapshot) for snapshot in compiled] == [[], []]
    assert counter.frame_count <= (1 if how == "whole" else 3)
    assert_same(compiled, steps_of(Pairs, "no")[0])


class Sequence(nn.Module):
    """Convolutions along a sequence, whose activations have their channels in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_evidence_is_the_same_while_tracing(how: str) -> None:
    compiled, _ = steps_of(Sequence, how)
    assert {compiled[0][f"blocks.{i}.1", "output"].channel_dim for i in range(3)} == {1}
    assert_same(compiled, steps_of(Sequence, "no")[0])


class Shared(nn.Module):
    """One activation for two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(16, 24), nn.Linear(24, 16), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.down(self.act(self.up(x))))


def test_an_activation_of_two_widths_inside_one_graph_counts_all_in_totals() -> None:
    counter = CompileCounterWithBackend("eager")
    with pytest.warns(UserWarning, match="act output had .*folded") as told:
        compiled, _ = steps_of(Shared, "whole", counter, fullgraph=True)
    assert len([each for each in told if "folded" in str(each.message)]) == 1
    assert counter.frame_count == 1
    assert {site.name for snapshot in compiled for site in totals_only(snapshot)} == {"act"}
    assert compiled[1]["act", "grad_output"].calls == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(compiled, steps_of(Shared, "no")[0])


class Bottlenecks(nn.Module):
    """Blocks that share one activation among two widths, as residual networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shared() for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_whose_activations_have_two_widths_are_not_compiled_one_by_one() -> None:
    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled, _ = steps_of(Bottlenecks, "blocks", counter)
        eager, _ = steps_of(Bottlenecks, "no")
    assert counter.frame_count <= 4
    assert {site.name.split(".")[-1] for site in totals_only(compiled[1])} == {"act"}
    assert_same(compiled, eager)


class Routed(nn.Module):
    """A module whose number of rows depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        return self.down(self.act(self.up(rows[rows[:, 0] > 0])))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="needs torch 2.13: docs/limits.md")
def test_sizes_that_depend_on_data_are_no_obstacle() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled, _ = steps_of(Routed, "whole", "aot_eager", fullgraph=True)
    assert [totals_only(snapshot) for snapshot in compiled] == [[], []]
    assert_same(compiled, steps_of(Routed, "no")[0])


def test_a_length_that_changes_is_no_width() -> None:
    """Graphs with dynamic shapes are traced again; what was learned stays."""
    model = Unequal((24, 10))
    mon = hookstats.attach(model, tensors=ACTIVATIONS, every=1)
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    with hearing() as told:
        for length in (5, 9, 3):
            compiled(torch.randn(4, length, 16)).sum().backward()
    assert told == []
    snapshot = mon.snapshot()
    assert totals_only(snapshot) == []
    assert {snapshot[site].calls for site in snapshot.order} == {3}


def test_a_channel_dimension_that_a_tensor_of_a_graph_does_not_have_leaves_it_out_and_the_forward_runs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    mon = hookstats.attach(model, tensors="output", channels=hookstats.Channels(dim={"1": 3}), every=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"1 output.*channel_dim=3 is out of range"):
        compiled(torch.randn(2, 4))
    assert mon.snapshot()["0", "output"].calls == 1
    assert mon.skipped["1", "output"].times == 1
