"""CUDA graphs, torch's own and those of mode="reduce-overhead", and streams: what only a GPU can show."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import hookstats
from tests.conftest import check
from tests.models import Residual
from tests.plain import OF_OUTPUTS, Plain, check_against

pytestmark = pytest.mark.gpu


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).cuda()


def captured(model: nn.Module, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A forward and backward as a graph, after three of them on a side stream, as torch's notes have it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).square().sum().backward()
    return graph


@pytest.mark.parametrize("every", [1, 2])
def test_a_captured_step_counts_at_every_replay_of_a_step_that_is_due(every: int) -> None:
    model = mlp()
    x = torch.randn(5, 6, device="cuda")
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=every)
    graph = captured(model, x)
    mon.reset()  # the warm-up
    twin = mlp()
    plain, snapshots = Plain(twin), []
    for step in range(4):
        x.copy_(torch.randn(5, 6))
        for _ in range(2):  # microbatches
            graph.replay()
            if step % every == 0:
                twin(x).square().sum().backward()
        measured = mon._measured
        mon.step()
        if measured:
            snapshots.append(mon.snapshot())
            assert {stats.calls for stats in snapshots[-1].values()} == {2}
            check_against(plain, snapshots[-1])
            plain.seen.clear()
    assert [snapshot.step for snapshot in snapshots] == list(range(0, 4, every))
    kinds = [(site.name, site.tensor) for site in snapshots[0].order]
    assert kinds == [(n, "output") for n in "012"] + [(n, "grad_output") for n in "210"]


def test_a_mask_in_a_captured_step_is_read_at_every_replay() -> None:
    model = mlp()
    x, skip = torch.randn(5, 6, device="cuda"), torch.tensor([False, True, False, False, True], device="cuda")
    mon = hookstats.attach(model, every=1)
    graph = torch.cuda.CUDAGraph()
    with mon.ignore(skip):
        model(x)
        torch.cuda.synchronize()
    with torch.cuda.graph(graph), mon.ignore(skip):
        model(x)
    mon.reset()
    skip.copy_(torch.tensor([True, True, True, False, False]))
    graph.replay()
    check(mon.snapshot()["0", "output"], model[0](x)[3:].detach(), -1)


def test_a_mask_entered_before_a_capture_and_left_after_it_is_still_there_in_replays() -> None:
    model = mlp()
    x, skip = torch.randn(5, 6, device="cuda"), torch.tensor([False, True, False, False, True], device="cuda")
    mon = hookstats.attach(model, tensors="output", every=1)
    graph = torch.cuda.CUDAGraph()
    with mon.ignore(skip):
        model(x)
        with torch.cuda.graph(graph):
            model(x)
    mon.reset()
    # What was given back is given to these, which the replay must not take for numbers of rows.
    others = [torch.full((size,), 1 << 30, dtype=torch.int32, device="cuda") for size in (1, 5) for _ in range(64)]
    graph.replay()
    check(mon.snapshot()["0", "output"], model[0](x)[~skip].detach(), -1)
    assert all(int(each.min()) == 1 << 30 for each in others)


def test_a_capture_in_a_step_that_is_not_measured_counts_in_those_that_are() -> None:
    model, x = mlp(), torch.randn(5, 6, device="cuda")
    mon = hookstats.attach(model, tensors=("output", "grad_output", "input"), every=2)
    model(x).sum().backward()
    mon.step()
    graph = captured(model, x)  # in step 1
    calls = []
    for step in range(1, 5):
        graph.replay()
        mon.step()
        if step % 2 == 0:
            snapshot = mon.snapshot()
            assert snapshot.step == step
            calls.append({stats.calls for stats in snapshot.values()})
    assert calls == [{1}, {1}]


def test_a_capture_inside_paused_measures_nothing() -> None:
    model, x = mlp(), torch.randn(5, 6, device="cuda")
    mon = hookstats.attach(model, tensors="output", every=1)
    with mon.paused():
        graph = captured(model, x)
    graph.replay()
    model(x)
    assert {stats.calls for stats in mon.snapshot().values()} == {1}


def test_a_width_first_seen_in_a_capture_leaves_the_capture_alive_and_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()
    x = torch.randn(5, 6, device="cuda")
    for layer in (model[0], model[2]):  # loads the kernels
        hookstats.measure(layer(torch.randn(5, layer.in_features, device="cuda")))
    mon = hookstats.attach(model, tensors="output", every=1)
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="run one eager forward"), torch.cuda.graph(graph):
        y = model(x)
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(y, model[2](model[1](model[0](x))))
    mon.reset()
    graph.replay()
    snapshot = mon.step()
    snapshot = snapshot or mon.snapshot()
    assert snapshot["0", "output"].calls == snapshot["2", "output"].calls == 1
    model(x)
    assert mon.snapshot()["1", "output"].calls == 1


def test_step_is_refused_in_a_capture_which_goes_on() -> None:
    model, x = mlp(), torch.randn(5, 6, device="cuda")
    mon = hookstats.attach(model, tensors="output", every=1)
    model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
        with pytest.raises(RuntimeError, match=r"outside of torch\.cuda\.graph"):
            mon.step()
    mon.reset()
    graph.replay()
    assert mon.snapshot()["0", "output"].calls == 1


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_captured_optimizer_step_counts_once_in_every_replay(is_measured: bool) -> None:
    model, x = mlp(), torch.randn(5, 6, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mon = hookstats.attach(model, tensors=("param", "param_grad"), every=1 if is_measured else 2)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    mon.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    if not is_measured:
        mon.step()
    graph.replay()
    mon.step()
    snapshot = mon.snapshot()
    assert {stats.calls for stats in snapshot.values()} == {1}
    for name, parameter in model.named_parameters():
        norm = parameter.grad.double().norm().item()
        assert snapshot[name, "param_grad"].total.l2_norm == pytest.approx(norm, rel=1e-5)


def test_a_capture_with_other_gradients_than_before_leaves_the_capture_alive() -> None:
    model = mlp()
    mon = hookstats.attach(model, tensors="param_grad", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model[0].weight.grad = torch.ones(6, 8, device="cuda").t()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="expected a measured step with a tensor like this"), torch.cuda.graph(graph):
        optimizer.step()
    mon.reset()
    graph.replay()
    snapshot = mon.snapshot()  # of what the graph has not, what is there now
    assert {stats.calls for stats in snapshot.values()} == {1}
    for name, parameter in model.named_parameters():
        assert snapshot[name, "param_grad"].total.count == parameter.numel()


def test_two_graphs_replayed_at_once_on_two_streams_keep_their_parts_apart() -> None:
    """Shapes are cut into different numbers of parts: with one scratch, arrivals of both would meet in a word."""
    layers = [nn.Linear(512, 512).cuda(), nn.Linear(64, 2048).cuda()]
    inputs = [torch.randn(4096, 512, device="cuda"), torch.randn(9000, 64, device="cuda")]
    mon = hookstats.attach(nn.ModuleList(layers), modules=lambda name, module: isinstance(module, nn.Linear))
    graphs = []
    for layer, x in zip(layers, inputs, strict=True):
        with torch.no_grad():
            layer(x)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]), torch.no_grad():
            layer(x)
    mon.reset()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(1000):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    snapshot = mon.snapshot()
    for name, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
        stats, y = snapshot[str(name), "output"], layer(x).detach()
        assert stats.calls == 1000
        assert stats.total.count == 1000 * y.numel()
        assert stats.total.rms == pytest.approx(y.double().square().mean().sqrt().item(), rel=1e-5)


def test_a_captured_graph_may_outlive_the_monitor() -> None:
    model, x = mlp(), torch.randn(5, 6, device="cuda")
    mon = hookstats.attach(model, every=1)
    graph = captured(model, x)
    mon.detach()
    del mon
    gc.collect()
    sizes = [1, 16, 1024, 1 << 14] * 16  # in the place of the flag, too: on
    others = [torch.ones(size, dtype=torch.int64, device="cuda") for size in sizes]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(bool((each == 1).all()) for each in others)


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_reduce_overhead_gives_eagers_numbers_and_uses_its_graphs(how: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Residual().cuda()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS, every=2)
    run: Any = torch.compile(model, mode="reduce-overhead") if how == "whole" else model
    if how == "blocks":
        for block in model.blocks:
            block.compile(mode="reduce-overhead")
    torch.manual_seed(0)
    twin = Residual().cuda()
    plain = Plain(twin)
    for step in range(6):
        x = torch.randn(8, 5, 16, device="cuda")
        model.zero_grad()  # what a graph has written is not to be added to
        torch.compiler.cudagraph_mark_step_begin()
        run(x).square().sum().backward()
        plain.seen.clear()
        twin(x).square().sum().backward()
        mon.step()
        snapshot = mon.snapshot()
        assert snapshot.step == step // 2 * 2
        if step % 2 == 0:
            for site in snapshot:
                want = plain.seen[tuple(site)][0].double()
                assert snapshot[site].calls == 1
                assert snapshot[site].total.rms == pytest.approx(want.square().mean().sqrt().item(), rel=1e-3)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_a_mixed_precision_step_on_the_gpu_waits_for_nothing() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    mon = hookstats.attach(model, tensors=("output", "grad_output", "param_grad"), every=1)
    x = torch.randn(5, 6, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mon.step()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    snapshot = mon.snapshot()
    assert snapshot.grad_scale == 256
    assert snapshot.overflowed is False
