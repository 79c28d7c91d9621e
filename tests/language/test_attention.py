"""tensors=("attention",): the logits of unmodified models, in training that stays as it was."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hookstats
from hookstats import Channels, Options, _native
from hookstats._warn import WarnOnce
from hookstats.language import rows
from tests import ranks
from tests.language.attentions import ALL_ROWS, KINDS, ORIGINAL, Attention, batch, logits_of, model_of, train

COMPILES = True


@pytest.mark.parametrize("options", [{}, {"key_heads": 2}, {"key_heads": 1}, {"by_name": True}])
def test_statistics_of_each_head_are_those_of_a_float64_softmax(options: dict[str, Any]) -> None:
    model = model_of(1, **options)
    logits = logits_of(model[0].attention, batch())
    (snapshot,) = train(model)
    p = logits.softmax(-1)
    wanted = {
        "max_logit": logits.amax(-1),
        "entropy": -(p * p.clamp_min(1e-300).log()).sum(-1),
        "sink": p[..., 0],
    }
    for name, values in wanted.items():
        stats = snapshot["0.attention", f"attention.{name}"]
        assert stats.total.count == values.numel()
        by_head = values.transpose(0, 1).flatten(1).numpy()
        assert abs(stats.channels.max - by_head.max(1)).max() < 1e-5
        assert abs(stats.channels.mean - by_head.mean(1)).max() < 1e-5
        assert abs(stats.channels.std - by_head.std(1, ddof=1)).max() < 1e-5
    bound = snapshot["0.attention", "attention.bound"]
    assert (bound.channels.max >= logits.amax((0, 2, 3)).numpy() - 1e-6).all()


def test_a_sample_of_rows_is_another_one_at_each_step_and_holds_the_last() -> None:
    model = model_of(1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    snapshots = train(nn.Sequential(model, Scale()), 4, options=Options(strict=True, attention_rows=6))
    stats = [each["0.0.attention", "attention.max_logit"] for each in snapshots]
    assert [each.total.count for each in stats] == [2 * 4 * 6] * 4
    assert len({float(each.total.mean) for each in stats}) == 4


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.3}, {"key_heads": 2}, {"checkpointed": True}, {"checkpointed": False}]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_training_does_not_change_by_one_bit(options: dict[str, Any], autocast: bool) -> None:
    found = []
    for watched in (False, True):
        model = model_of(**options)
        torch.manual_seed(2)
        monitor = hookstats.attach(model, tensors=("attention",), every=1, options=ALL_ROWS) if watched else None
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", enabled=autocast):
                loss = model(batch()).square().mean()
            loss.backward()
            losses.append(loss.item())
            if monitor:
                monitor.step()
        if monitor:
            monitor.detach()
        found.append((losses, [parameter.grad for parameter in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_recomputation_is_not_counted(checkpointed: bool) -> None:
    (snapshot,) = train(model_of(1, checkpointed=checkpointed))
    assert snapshot["0.attention", "attention.max_logit"].total.count == 2 * 4 * 20
    assert snapshot["0.attention", "attention.bound"].total.count == 2 * 4 * 20


def test_nothing_is_computed_in_a_step_that_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from hookstats.language import attention as module

    calls = []
    compute = module.attention_rows
    monkeypatch.setattr(module, "attention_rows", lambda *args: calls.append(1) or compute(*args))
    snapshots = train(model_of(2), 5, every=2)
    assert [each.step for each in snapshots] == [0, 2, 4]
    assert len(calls) == 6


def test_sites_that_do_not_fit_into_the_memory_do_not_disturb_those_that_do() -> None:
    model = model_of(1)
    options = hookstats.Options(memory_budget=10_000)
    with pytest.warns(UserWarning, match="would not fit"):
        monitor = hookstats.attach(model, tensors=("attention",), every=1, options=options)
    with monitor:
        model(batch())
        snapshot = monitor.snapshot()
    assert {site.tensor for site in snapshot} == {"attention.max_logit", "attention.entropy"}
    assert {site.tensor for site in snapshot.skipped} == {"attention.sink", "attention.bound"}


def test_evaluation_and_pauses_are_left_out() -> None:
    model = model_of(1)
    with hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as monitor:
        model(batch())
        with monitor.paused():
            model(batch())
        model.eval()
        model(batch())
        snapshot = monitor.snapshot()
    assert snapshot["0.attention", "attention.bound"].total.count == 2 * 4 * 20


def test_what_fails_inside_a_graph_is_told_and_becomes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    model = model_of(1)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "_warn_once", WarnOnce())
        patch.setattr(_native, "softmax_rows", fail)
        with pytest.warns(UserWarning, match="not measured in a graph, by .*rows: RuntimeError: no memory"):
            (failed,) = train(model, run=torch.compile(model, backend="aot_eager", fullgraph=True))
    (whole,) = train(model, run=torch.compile(model, backend="aot_eager", fullgraph=True))
    assert len(whole) == 4
    for site, stats in whole.items():
        assert stats.total.count > 0, site
        assert failed[site].total.count == 0, site


@pytest.mark.parametrize(("compiled", "rows"), [("whole", None), ("blocks", 6)])  # and, below, the whole with 6 rows
def test_graphs_measure_what_eager_mode_does(compiled: str, rows: int | None) -> None:
    options = {"every": 2, "options": Options(strict=True, attention_rows=rows), "tensors": ("output", "attention")}
    wanted = train(model_of(3, key_heads=2), 5, **options)
    torch._dynamo.reset()
    model = model_of(3, key_heads=2)
    torch._dynamo.utils.counters.clear()
    if compiled == "whole":
        found = train(model, 5, run=torch.compile(model, fullgraph=True, backend="aot_eager"), **options)
    else:
        for block in model:
            block.compile(fullgraph=True, backend="aot_eager")
        found = train(model, 5, **options)
    assert [each.step for each in found] == [each.step for each in wanted] == [0, 2, 4]
    for mine, other in zip(found, wanted, strict=True):
        assert [site.tensor for site in mine.order].count("attention.max_logit") == 3
        for site in other.order:
            assert mine[site].total.count == other[site].total.count, site
            assert abs(mine[site].channels.mean - other[site].channels.mean).max() < 1e-5, site
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= (2 if compiled == "whole" else 3), graphs  # measured and bare; a block's first has its own


def test_a_graph_with_a_checkpoint_inside_measures_what_eager_mode_does() -> None:
    options = {"every": 2, "options": Options(strict=True, attention_rows=6), "tensors": ("output", "attention")}
    wanted = train(model_of(2, checkpointed=False), 3, **options)
    torch._dynamo.reset()
    model = model_of(2, checkpointed=False)
    found = train(model, 3, run=torch.compile(model, fullgraph=True, backend="aot_eager"), **options)
    for mine, other in zip(found, wanted, strict=True):
        assert set(mine) == set(other)
        for site in other:
            assert mine[site].total.count == other[site].total.count, site
            assert mine[site].total.mean == pytest.approx(other[site].total.mean, abs=1e-5), site


def test_ignored_rows_count_nowhere() -> None:
    model = model_of(1)
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[0, 12:] = True
    with hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as monitor:
        with monitor.ignore(padding):
            model(batch())
        snapshot = monitor.snapshot()
    stats = snapshot["0.attention", "attention.max_logit"]
    values = logits_of(model[0].attention, batch()).amax(-1).transpose(1, 2)[~padding]
    assert stats.total.count == values.numel() == 4 * 32
    assert stats.total.mean == pytest.approx(values.mean().item(), abs=1e-6)


def test_multihead_attention_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    with hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as monitor:
        model(batch())
        snapshot = monitor.snapshot()
    x = batch().detach()
    q, k, _ = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in F.linear(x, *own(model.self_attn)).chunk(3, -1))
    stats = snapshot["self_attn", "attention.max_logit"]
    assert stats.total.max == pytest.approx((q @ k.mT / math.sqrt(8)).max().item(), rel=1e-5)
    assert stats.total.count == 2 * 4 * 20


def own(module: nn.MultiheadAttention) -> tuple[torch.Tensor, torch.Tensor]:
    return module.in_proj_weight.detach(), module.in_proj_bias.detach()


def test_nested_tensors_are_skipped_with_the_reason() -> None:
    nested = torch.nested.nested_tensor([torch.randn(4, 20, 8), torch.randn(4, 7, 8)])
    monitor = hookstats.attach(model_of(1))
    with pytest.warns(UserWarning, match="expected dense q and k, got nested"):
        monitor.attention(nested, nested, "mine")
    assert "nested" in monitor.skipped[hookstats.Site("mine", "attention.bound")].reason
    monitor.detach()


def test_causal_masks_of_torch() -> None:
    from torch.nn.attention.bias import causal_lower_right

    class LowerRight(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(q[:, :, -5:], q, q, attn_mask=causal_lower_right(5, 20))

    x, model = batch().detach(), LowerRight()
    with hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as monitor:
        model(x)
        stats = monitor.snapshot()["", "attention.entropy"]
    assert stats.total.count == 2 * 4 * 5
    q = x.unflatten(-1, (4, 8)).transpose(1, 2)
    logits = q[:, :, -5:] @ q.mT / math.sqrt(8)
    logits = logits.masked_fill(~torch.ones(5, 20, dtype=torch.bool).tril(15), -torch.inf)
    p = logits.softmax(-1)
    assert stats.total.mean == pytest.approx(-(p * p.clamp_min(1e-30).log()).sum(-1).mean().item(), rel=1e-5)


def test_attention_by_hand_is_as_that_of_a_function() -> None:
    model = model_of(1, key_heads=2)
    (wanted,) = train(copy.deepcopy(model))
    with hookstats.attach(model, channels=Channels(True), options=ALL_ROWS) as monitor:
        attention, x = model[0].attention, batch()
        q, k, _ = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in attention.qkv(x).split([32, 16, 16], -1))
        monitor.attention(q, k, "mine", is_causal=True)
        found = monitor.snapshot()
        for kind in KINDS:
            mine, other = found["mine", kind], wanted["0.attention", kind]
            assert (mine.channels.mean == other.channels.mean).all()
        with pytest.raises(TypeError, match="expected two tensors and a name, got list, Tensor and 'mine'"):
            monitor.attention([1], k, "mine")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="as many heads as key heads, or a multiple, got 4 and 3"):
            monitor.attention(q, k[:, :1].repeat(1, 3, 1, 1), "mine")
        with monitor.paused():
            monitor.attention(q, k[:, :, :, :3], "mine")  # nothing is looked at
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_attention_by_hand_in_a_graph() -> None:
    class Own(Attention):
        monitor: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            self.monitor.attention(q, k, "own")
            return ((q @ k.mT).softmax(-1) @ v).sum()

    model = Own()
    with hookstats.attach(model, every=1) as monitor:
        model.monitor = monitor
        model(batch())
        first = monitor.step()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        compiled(batch())
        second = monitor.step()
        model.monitor = None
    assert first["own", "attention.entropy"].total.mean == pytest.approx(second["own", "attention.entropy"].total.mean)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="expected modules that compute attention for 'attention', found none"):
        hookstats.attach(nn.Sequential(nn.Linear(2, 2)), tensors=("output", "attention"))
    with pytest.raises(ValueError, match="found none"):
        hookstats.attach(model_of(1), tensors=("output", "attention"), exclude="*attention")


def test_flex_attention_with_a_block_mask() -> None:
    from torch.nn.attention import flex_attention as flex

    class Flex(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            near = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 5), None, None, 20, 20, device="cpu")
            return flex.flex_attention(q, k, v, block_mask=near).transpose(1, 2).flatten(2)

    model, x = Flex(), batch().detach()
    with torch.no_grad(), hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as monitor:
        model(x)
        stats = monitor.snapshot()["", "attention.max_logit"]
    near = torch.ones(20, 20, dtype=torch.bool).tril() & ~torch.ones(20, 20, dtype=torch.bool).tril(-5)
    logits = logits_of(model, x).masked_fill(~near, -torch.inf).amax(-1)
    assert stats.total.count == 2 * 4 * 20
    assert stats.total.mean == pytest.approx(logits.mean().item(), rel=1e-5)
    assert stats.total.min == pytest.approx(logits.min().item(), rel=1e-5)


@pytest.mark.parametrize("of_module", [False, True])
def test_attention_that_is_written_out_is_seen_at_its_softmax(of_module: bool) -> None:
    class Own(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            later = torch.ones(20, 20, dtype=torch.bool).triu(1)
            logits = (q @ k.mT / math.sqrt(8)).masked_fill(later, torch.finfo(torch.float32).min)
            p = self.softmax(logits) if of_module else torch.softmax(logits, -1)
            return self.out((p @ v).transpose(1, 2).flatten(2))

    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Own(), batch().detach()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        with hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as monitor:
            run(x)
            snapshot = monitor.snapshot()
        logits = logits_of(model, x)
        assert snapshot["", "attention.max_logit"].total.mean == pytest.approx(logits.amax(-1).mean().item(), rel=1e-5)
        sink = logits.softmax(-1)[..., 0].mean().item()
        assert snapshot["", "attention.sink"].total.mean == pytest.approx(sink, rel=1e-5)
        assert snapshot["", "attention.sink"].total.count == 2 * 4 * 20
        assert hookstats.Site("", "attention.bound") not in snapshot.order


def test_attention_functions_of_transformers_are_seen_with_what_they_mask() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers import AttentionInterface

    from tests.language import zoo

    def like_flash(module: Any, q: Any, k: Any, v: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        """Causal by itself, with a mask of keys."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        whole = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return ORIGINAL[0](q, k, v, whole, scale=kwargs["scaling"]).transpose(1, 2), None

    del transformers
    AttentionInterface.register("like_flash", like_flash)
    try:
        found = []
        for attention in ("sdpa", "like_flash"):
            model = zoo.make("llama", attention)
            with hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as monitor:
                model(**zoo.batch())
                found.append(monitor.snapshot())
    finally:
        AttentionInterface._global_mapping.pop("like_flash")
    site = ("model.layers.1.self_attn", "attention.entropy")
    assert found[0][site].total.count == found[1][site].total.count
    assert found[0][site].total.mean == pytest.approx(found[1][site].total.mean, rel=1e-5)


class Parallel(nn.Module):
    """Queries, keys and values of their own, as tensor parallelism cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def tensor_parallel(rank: int, world: int) -> None:
    for compiled in (False, True):
        compare_with_one_rank(world, compiled)


def compare_with_one_rank(world: int, compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Parallel())
    with hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) as alone:
        model(batch())
        wanted = alone.snapshot()
    cut = {f"0.{name}": ColwiseParallel() for name in "qkv"} | {"0.out": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), cut)
    monitor = hookstats.attach(model, tensors=("attention",), options=ALL_ROWS, every=1, process_group=dist.group.WORLD)
    (torch.compile(model, backend="aot_eager") if compiled else model)(batch())
    monitor.step()
    (found,) = monitor.detach()
    assert len(found.order) == 4
    for site in found.order:
        mine, other = found[site].channels, wanted[site].channels
        assert mine.count.tolist() == other.count.tolist() == [40] * 4
        assert abs(mine.mean - other.mean).max() < 1e-5


def test_heads_of_tensor_parallel_ranks_lie_side_by_side() -> None:
    ranks.run(tensor_parallel, 2, timeout=180)
