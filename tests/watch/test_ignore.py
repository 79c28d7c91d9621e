"""Monitor.ignore: padding does not count, in forward and backward, eager and compiled."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookstats
from hookstats.watch import ignoring
from tests.conftest import DEVICES, check
from tests.models import Residual
from tests.plain import OF_OUTPUTS, Plain, hearing

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def model(depth: int = 3) -> Residual:
    torch.manual_seed(0)
    return Residual(depth=depth)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(seed))


def padding(seed: int = 0) -> torch.Tensor:
    """True behind each sequence's end."""
    lengths = torch.randint(1, 8, (4,), generator=torch.Generator().manual_seed(seed))
    return torch.arange(7) >= lengths[:, None]


def check_masked(plain: Plain, masks: list[torch.Tensor], snapshot: hookstats.Snapshot) -> None:
    """Every site, against the same tensors without the rows that are masked."""
    assert len(snapshot) == len(snapshot.order) > 0
    for site in snapshot:
        tensors = plain.seen[tuple(site)]
        assert snapshot[site].calls == len(tensors) == len(masks)
        check(snapshot[site], torch.cat([t[~m] for t, m in zip(tensors, masks, strict=True)]), -1)


class Places(nn.Module):
    """With a table of as many rows as the mask has."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(32, 8), nn.Embedding(28, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.places(torch.arange(28, device=ids.device))
        out: torch.Tensor = self.head(self.tokens(ids) + table[:7] + table.mean(0))
        return out


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_table_with_as_many_rows_as_the_mask_loses_none_of_them(backend: str | None) -> None:
    torch.manual_seed(0)
    net, mask = Places(), padding()
    mon = hookstats.attach(net, every=1, tensors=OF_OUTPUTS)
    run = net if backend is None else torch.compile(net, backend=backend, fullgraph=True)
    with mon.ignore(mask):
        run(torch.randint(32, (4, 7))).square().sum().backward()
    snapshot, kept = mon.snapshot(), int((~mask).sum())
    for kind in ("output", "grad_output"):
        assert snapshot["places", kind].total.count == 28 * 8
        assert snapshot["tokens", kind].total.count == kept * 8
        assert snapshot["head", kind].total.count == kept * 4


@pytest.mark.parametrize("device", DEVICES)
def test_masked_rows_do_not_count_and_each_microbatch_has_its_mask(device: str) -> None:
    net = model().to(device)
    mon, plain = hookstats.attach(net, every=1, tensors=OF_OUTPUTS), Plain(net)
    masks = [padding(seed).to(device) for seed in range(3)]
    losses = []
    for seed, mask in enumerate(masks):
        x = batch(seed).to(device)
        x[mask] = torch.inf  # what is there must not be seen
        with mon.ignore(mask):
            losses.append(torch.where(mask[..., None], 0.0, net(x)).square().sum())
    for loss in losses[::-1]:  # outside, and in another order
        loss.backward()
    for kind in ("output", "grad_output"):
        for name in ("head", "blocks.0.up"):
            if kind == "grad_output":
                plain.seen[name, kind].reverse()
    snapshot = mon.snapshot()
    for site in (("head", "output"), ("blocks.0.up", "output"), ("head", "grad_output")):
        want = torch.cat([t[~m] for t, m in zip(plain.seen[site], masks, strict=True)])
        assert snapshot[site].calls == 3
        assert snapshot[site].total.nans == 0
        check(snapshot[site], want, -1)
    assert mon.skipped == {}


def test_outside_of_a_mask_all_rows_count_also_after_an_error_inside() -> None:
    net = model()
    mon, plain = hookstats.attach(net, every=1, tensors=OF_OUTPUTS), Plain(net)
    net(batch())
    with mon.ignore(padding()):
        net(batch(1))
        with mon.ignore(padding(5)):
            net(batch(2))
        net(batch(3))
    with pytest.raises(KeyError), mon.ignore(padding()):
        raise KeyError
    net(batch(4)).square().sum().backward()
    none = torch.zeros(4, 7, dtype=torch.bool)
    masks = [none, padding(), padding(5), padding(), none]
    for name in ("head", "blocks.1"):
        want = torch.cat([t[~m] for t, m in zip(plain.seen[name, "output"], masks, strict=True)])
        check(mon.snapshot()[name, "output"], want, -1)


def test_inputs_and_tapped_tensors_are_masked_and_parameters_are_not() -> None:
    net = model()
    kinds = ("input", "grad_input", "param")
    mon = hookstats.attach(net, every=1, tensors=kinds)
    kept = ~padding()
    with mon.ignore(padding()):
        mon.tap(net(batch()), "scores").sum().backward()
    snapshot = mon.snapshot()
    check(snapshot["blocks.0.norm", "input"], batch()[kept], -1)
    check(snapshot["scores", "output"], net(batch())[kept].detach(), -1)
    assert snapshot["head", "grad_input"].total.count == kept.sum() * 16
    assert snapshot["head.weight", "param"].total.count == 64


def test_flattened_tokens_are_masked_and_tensors_of_other_shapes_count_as_a_whole() -> None:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.pooled = nn.Linear(16, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            tokens = self.flat(x.flatten(0, 1))
            return self.pooled(tokens.mean(0, keepdim=True))

    net = Flattens()
    mon, plain = hookstats.attach(net, every=1), Plain(net)
    with mon.ignore(padding()):
        net(batch()).sum().backward()
    kept = ~padding().reshape(-1)
    for kind in ("output", "grad_output"):
        check(mon.snapshot()["flat", kind], plain.seen["flat", kind][0][kept], -1)
        check(mon.snapshot()["pooled", kind], plain.seen["pooled", kind][0], -1)


@pytest.mark.parametrize("mask", [torch.zeros(4, 7, dtype=torch.bool), torch.ones(4, 7, dtype=torch.bool)])
def test_a_mask_may_leave_all_or_nothing(mask: torch.Tensor) -> None:
    net = model()
    mon = hookstats.attach(net, every=1, tensors=OF_OUTPUTS)
    with mon.ignore(mask):
        net(batch()).square().sum().backward()
    assert {stats.total.count > 0 for stats in mon.snapshot().values()} == {not mask.any().item()}


@pytest.mark.parametrize(("how", "backend"), [("whole", "aot_eager"), ("blocks", "eager"), ("blocks", "inductor")])
def test_compiled_models_take_every_new_mask_without_compiling_anew(
    how: str, backend: str, only_monitors: None, without_gpp: None
) -> None:
    net: Any = model(2)
    if backend == "inductor":  # fewer kernels
        net.blocks, net.head = nn.ModuleList([nn.Sequential(nn.Linear(16, 8), nn.Tanh())]), nn.Linear(8, 4)
    twin = copy.deepcopy(net)
    mon = hookstats.attach(net, every=2, tensors=OF_OUTPUTS)
    counter = CompileCounterWithBackend(backend)
    run: Any = net
    if how == "whole":
        run = torch.compile(net, fullgraph=True, backend=counter)
    else:
        for block in net.blocks:
            block.compile(fullgraph=True, backend=counter)
    plain = Plain(twin)
    frames = []
    for step in range(4):
        mask = padding(step)
        with mon.ignore(mask):
            loss = run(batch(step)).square().sum()
        loss.backward()
        frames.append(counter.frame_count)
        snapshot = mon.step()
        assert (snapshot is not None) == (step % 2 == 0)
        if snapshot is None:
            continue
        plain.seen.clear()
        twin(batch(step)).square().sum().backward()
        for site in snapshot:
            rows = plain.seen[tuple(site)][0][~mask].double()
            assert snapshot[site].calls == 1
            assert snapshot[site].total.count == rows.numel()
            assert snapshot[site].total.rms == pytest.approx(rows.square().mean().sqrt().item(), rel=1e-4)
    assert frames[1:] == [2 * frames[0]] * 3  # the steps that are not measured run the bare program, whatever the mask
    for _ in range(2):
        run(batch()).square().sum().backward()  # measured without a mask: graphs of their own, once
        mon.step()
    assert counter.frame_count == 3 * frames[0]


def test_compiled_autograd_masks_gradients() -> None:
    net = model(1)
    mon = hookstats.attach(net, every=1, tensors=OF_OUTPUTS)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        with mon.ignore(padding()):
            loss = net(batch()).square().sum()
        loss.backward()
    twin = model(1)
    plain = Plain(twin)
    twin(batch()).square().sum().backward()
    check_masked(plain, [padding()], mon.snapshot())


def test_what_is_no_mask_is_refused() -> None:
    mon = hookstats.attach(model())
    with (
        pytest.raises(TypeError, match=r"expected a bool tensor.*got torch.int64.*attention_mask == 0"),
        mon.ignore(torch.ones(4, 7, dtype=torch.int64)),
    ):
        pass
    with pytest.raises(TypeError, match="got list"), mon.ignore([True]):  # type: ignore[arg-type]
        pass
    some = torch.ones(4, 7, dtype=torch.bool)
    for mask in (some[0, 0], some.to("meta"), some.to_sparse()):
        with (
            pytest.raises(
                ValueError, match=r"expected a dense tensor with data, of one or more dimensions.*got Tensor of shape"
            ),
            mon.ignore(mask),
        ):
            pass


def test_a_mask_that_is_entered_in_a_step_that_is_not_measured_counts_in_those_that_are() -> None:
    net = model()
    mon = hookstats.attach(net, every=2)
    net(batch())
    mon.step()
    kept = int((~padding()).sum())
    counts = []
    with mon.ignore(padding()):
        for step in range(1, 5):
            net(batch(step))
            if step % 2 == 0:
                counts.append(mon.snapshot()["head", "output"].total.count)
            mon.step()
    assert counts == [4 * kept] * 2


def test_a_mask_that_no_tensor_fits_is_told_once() -> None:
    net = model()
    mon = hookstats.attach(net, every=1, tensors=OF_OUTPUTS)
    wrong = padding().t()
    with (
        pytest.warns(UserWarning, match=r"no tensor that was measured begins with the shape of the rows, \(7, 4\)"),
        mon.ignore(wrong),
    ):
        net(batch()).sum().backward()
    assert mon.snapshot()["head", "output"].total.count == 4 * 7 * 4
    with hearing() as told:
        with mon.ignore(wrong):
            net(batch())
        with mon.ignore(padding()):
            net(batch())
        mon.step()
        with mon.paused(), mon.ignore(wrong):
            net(batch())
    assert told == []


@pytest.mark.parametrize("channels", [True, False])
def test_channels_are_no_rows_also_where_totals_alone_are_kept(channels: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 7, 1))
    mon = hookstats.attach(net, every=1, channels=channels)
    x = torch.randn(4, 3, 2, 2)
    with (
        pytest.warns(UserWarning, match="every row counted"),
        mon.ignore(padding()),
    ):  # [4, 7], as [batch, channels] here
        net(x)
    assert mon.snapshot()["0", "output"].total.count == 4 * 7 * 4


def test_masks_that_end_in_another_order_than_they_began_leave_nothing_behind() -> None:
    net = model()
    mon = hookstats.attach(net, every=1, tensors=OF_OUTPUTS)
    first, second = mon.ignore(padding()), mon.ignore(padding(5))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    net(batch())
    assert mon.snapshot()["head", "output"].total.count == 4 * (~padding(5)).sum()
    second.__exit__(None, None, None)
    mon.reset()
    net(batch())
    assert mon.snapshot()["head", "output"].total.count == 4 * 28


def test_a_width_that_is_learned_inside_a_mask_is_masked() -> None:
    net = nn.Sequential(nn.ReLU())
    mon = hookstats.attach(net, every=1)  # of unknown width: bound inside the mask
    with mon.ignore(padding()):
        net(batch())
    check(mon.snapshot()["0", "output"], batch().relu()[~padding()], -1)


def test_a_mask_that_cannot_be_applied_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    mon = hookstats.attach(net, every=1, tensors=OF_OUTPUTS)

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ignoring, "_rows", fails)
    with pytest.warns(UserWarning, match="ignore: every row counts: .*out of memory"), mon.ignore(padding()):
        net(batch()).sum().backward()
    assert mon.snapshot()["head", "output"].total.count == 4 * 28


def test_no_word_of_masks_that_did_their_work() -> None:
    net = model()
    mon = hookstats.attach(net, every=1, tensors=OF_OUTPUTS)
    with hearing() as told:
        with mon.ignore(padding()):
            net(batch())
            with mon.ignore(padding()[:2]):
                net(batch()[:2])
            with mon.paused():
                net(batch()[:1])
            net(batch()[:1])  # another shape: whole
        compiled = torch.compile(net.blocks[0], backend="aot_eager")
        with mon.ignore(padding()):
            net.head(compiled(batch()).mean(1, keepdim=True))
    assert told == []


def test_a_failure_under_strict_leaves_no_mask_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    mon = hookstats.attach(net, every=1, options=hookstats.Options(strict=True))

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ignoring, "_rows", fails)
        with pytest.raises(RuntimeError, match="out of memory"), mon.ignore(padding()):
            pass
    net(batch())
    assert mon.snapshot()["head", "output"].total.count == 4 * 28


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_ignored_on_the_thread_that_entered_and_in_its_forwards_backward(compiled: bool) -> None:
    net = model(2)
    mon = hookstats.attach(net, every=1)
    run: Any = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    ours, theirs = padding(), padding(5)
    losses: list[torch.Tensor] = []

    def forward(seed: int) -> None:
        loss = run(batch(seed)).square().sum()
        if compiled:  # aot_eager refuses two forwards before the first backward
            loss.backward()
        else:
            losses.append(loss)

    def elsewhere() -> None:
        forward(1)  # nothing is ignored here
        with mon.ignore(theirs):
            forward(2)

    with mon.ignore(ours):
        forward(0)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        forward(3)
    for loss in losses:  # behind it, on one thread
        loss.backward()
    kept = 2 * int((~ours).sum()) + int((~theirs).sum()) + ours.numel()
    for site in (("head", "output"), ("head", "grad_output"), ("blocks.1.up", "grad_output")):
        assert mon.snapshot()[site].calls == 4
        width = 4 if site[0] == "head" else 32
        assert mon.snapshot()[site].total.count == kept * width


def test_a_step_that_another_thread_closes_renews_the_rows_of_all() -> None:
    net = model()
    mon = hookstats.attach(net, every=2)
    mon.step()  # the next one is not measured
    with mon.ignore(padding()):
        thread = threading.Thread(target=mon.step)
        thread.start()
        thread.join()
        net(batch())
    assert mon.snapshot()["head", "output"].total.count == 4 * (~padding()).sum()
