"""Tests of the channel dimension of a tensor: by type, by evidence, by the caller's word; and that it is shown."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import hookstats
from hookstats.modules.evidence import Ran, Widths, find_channel_dim_by_evidence, find_widths
from hookstats.watch.binding import SiteBinder
from tests.conftest import check
from tests.modules.zoo import LayerNorm2d, OwnNorm2d, Upside

NOTHING = Widths(frozenset(), frozenset(), True)


def dim_of(x: torch.Tensor, widths: Widths = NOTHING, *ran: tuple[tuple[int, ...], int]) -> int:
    before = Ran()
    for sizes, dim in ran:
        before.note(sizes, dim)
    return find_channel_dim_by_evidence(x, widths, before)


def test_a_vector_of_its_own_tells_the_channels_of_a_module() -> None:
    assert dim_of(torch.zeros(2, 7, 4, 10), find_widths(nn.RMSNorm(10))) == 3  # a norm for each head
    assert dim_of(torch.zeros(2, 16, 5, 6), find_widths(OwnNorm2d(16))) == 1


def test_a_leaf_has_the_channels_of_the_latest_output_of_its_shape() -> None:
    sequence = (2, 16, 50)
    assert dim_of(torch.zeros(sequence)) == 2
    assert dim_of(torch.zeros(sequence), NOTHING, (sequence, 1)) == 1
    assert dim_of(torch.zeros(sequence), NOTHING, (sequence, 1), (sequence, 2)) == 2


def test_a_width_inside_a_module_comes_before_those_of_what_ran() -> None:
    block = Widths(frozenset(), frozenset({16}), False)
    assert dim_of(torch.zeros(2, 16, 50), block, ((2, 50), 1)) == 1
    assert dim_of(torch.zeros(2, 16, 50), NOTHING, ((2, 16), 1), ((2, 50), 1)) == 2
    assert dim_of(torch.zeros(2, 16, 50), NOTHING, ((2, 50), 1), ((2, 16), 1)) == 1


def test_what_ran_is_remembered_whatever_else_ran_since() -> None:
    """A width, also when its shape had others since; the last dimension of such a number, after many other shapes."""
    again = (((2, 8, 16), 1), ((2, 8, 16), 2))
    assert dim_of(torch.zeros(3, 8, 5), NOTHING, *again) == 1
    lengths = [((4, n + 1, 64), 2) for n in range(1100)]
    assert dim_of(torch.zeros(4, 5, 7, 3), NOTHING, ((4, 3, 32, 32), 1), *lengths) == 3


def test_ties_are_broken_by_layout_then_squareness_then_use_then_place() -> None:
    eights = Widths(frozenset({8}), frozenset({8}), True)
    seen_as_nchw = torch.zeros(2, 8, 8, 8).permute(0, 3, 1, 2)
    assert dim_of(seen_as_nchw, eights, ((2, 5, 6, 3), 3)) == 1
    sides = Widths(frozenset({8, 16}), frozenset(), True)
    assert dim_of(torch.zeros(2, 8, 8, 16), sides) == 3
    assert dim_of(torch.zeros(2, 16, 8, 8), sides, ((2, 5, 6, 3), 3)) == 1
    assert dim_of(torch.zeros(2, 8, 8, 8), eights, ((2, 5, 6, 3), 3)) == 3
    assert dim_of(torch.zeros(2, 8, 8, 8), eights, ((2, 3, 5, 6), 1)) == 1
    assert dim_of(torch.zeros(2, 8, 8), eights) == 2
    assert dim_of(torch.zeros(2, 8, 8).transpose(1, 2), eights) == 2  # a map's pixels as a sequence


def test_a_batch_is_taken_for_channels_only_where_nothing_else_has_their_size() -> None:
    assert dim_of(torch.zeros(8, 5, 8), Widths(frozenset({8}), frozenset(), True)) == 2
    assert dim_of(torch.zeros(8, 5, 6), Widths(frozenset({8}), frozenset(), True)) == 0
    assert dim_of(torch.zeros(8, 5, 6), NOTHING, ((3, 8), 1)) == 2
    batch_last_in_memory = torch.zeros(5, 8, 6, 8).permute(3, 1, 2, 0)
    assert dim_of(batch_last_in_memory, Widths(frozenset({8}), frozenset(), True)) == 1
    assert find_channel_dim_by_evidence(torch.empty(8), NOTHING, Ran()) == 0


def sequence_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 6, 3), nn.GELU(), nn.Conv2d(1, 4, 3), LayerNorm2d(4), nn.ReLU())


def run(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """All outputs; the maps of the second half are sequences as images."""
    outputs = [x]
    for i, module in enumerate(model):
        outputs.append(module(outputs[-1][:, None] if i == 2 else outputs[-1]))
    outputs[-1].square().sum().backward()
    return [each.detach() for each in outputs[1:]]


def test_activations_and_norms_behind_convolutions_are_measured_by_channel() -> None:
    model = sequence_model()
    mon = hookstats.attach(model, every=1)
    outputs = run(model, torch.randn(2, 3, 9))
    snapshot = mon.snapshot()
    for i, y in enumerate(outputs):
        check(snapshot[str(i), "output"], y, 1)
        assert snapshot[str(i), "grad_output"].channels is not None
    lines = {line.split()[0]: line.split() for line in snapshot.table().splitlines()[2:] if " output " in line}
    assert [lines[str(i)][3:5] for i in range(5)] == [["6", "1"], ["6", "1"], ["4", "1"], ["4", "1"], ["4", "1"]]
    assert [snapshot[str(i), "output"].channel_dim for i in range(5)] == [1, 1, 1, 1, 1]


def test_what_the_caller_says_comes_before_all_evidence() -> None:
    model = sequence_model()
    mon = hookstats.attach(model, every=1, channels=hookstats.Channels(dim={"1": 2, "3": -1}))
    outputs = run(model, torch.randn(2, 3, 9))
    snapshot = mon.snapshot()
    check(snapshot["1", "output"], outputs[1], 2)
    check(snapshot["3", "output"], outputs[3], 3)
    assert (snapshot["1", "output"].channel_dim, snapshot["3", "output"].channel_dim) == (-1, -1)


def test_a_settled_site_enters_python_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    rebind = SiteBinder.rebind

    def counted(self: SiteBinder, hook: Any, value: Any, problem: Any) -> None:
        entered.append(hook.spec.name)
        rebind(self, hook, value, problem)

    monkeypatch.setattr(SiteBinder, "rebind", counted)
    model, shared = sequence_model(), nn.ReLU()
    mon = hookstats.attach(nn.ModuleDict({"model": model, "shared": shared}), ["model.*", "shared"], every=1)
    flat, image = torch.randn(2, 8), torch.randn(2, 8, 5, 8)
    for step in range(3):
        run(model, torch.randn(2, 3, 9))
        shared(flat), shared(image)  # of two numbers of dimensions, in turn
        mon.step()
        assert len(entered) == (7 if step == 0 else 0)
        entered.clear()


def test_a_silu_that_a_unet_shares_among_widths_keeps_totals_and_says_so_once() -> None:
    model = Upside()
    mon = hookstats.attach(model, every=1)
    values = []
    model.silu.register_forward_hook(lambda m, a, y: values.append(y.detach().flatten().double()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            values.clear()
            model(torch.randn(2, 3, 16, 16)).square().sum().backward()
            snapshot = mon.step()
    assert len([each for each in told if "folded" in str(each.message)]) == 1
    for kind in ("output", "grad_output"):
        stats = snapshot["silu", kind]
        assert (stats.calls, stats.channels, stats.channel_dim) == (4, None, None)
        assert stats.total.count == torch.cat(values).numel()
    assert snapshot["silu", "output"].total.mean == pytest.approx(torch.cat(values).mean().item(), rel=1e-6)
    assert snapshot["norm", "output"].channel_dim == 1


def test_weights_that_are_in_out_have_their_outputs_as_channels() -> None:
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2Model(config)
    mon = hookstats.attach(model, "h.0.*", tensors=("param",), every=1)
    snapshot = mon.step()
    for name in ("h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc"):  # [16, 48], [16, 16], [16, 64]
        stats = snapshot[f"{name}.weight", "param"]
        weight = model.get_parameter(f"{name}.weight").detach()
        assert stats.channel_dim == 1
        check(stats, weight, 1)
