"""Functions that show their q and k are replaced while somebody measures them, and put back."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookstats
from tests.language import attentions
from tests.language.attentions import ALL_ROWS, ORIGINAL, Attention, batch, model_of, train


def test_functions_are_put_back_in_whatever_order_monitors_end() -> None:
    first, second = model_of(1), model_of(1)
    monitors = [hookstats.attach(model, tensors=("attention",)) for model in (first, second)]
    assert F.scaled_dot_product_attention is not ORIGINAL[0]
    assert attentions.scaled_dot_product_attention is not ORIGINAL[0]
    monitors[0].detach()
    second(batch())
    assert monitors[1].snapshot()["0.attention", "attention.bound"].total.count == 160
    monitors[1].detach()
    monitors[1].detach()
    assert F.scaled_dot_product_attention is ORIGINAL[0]
    assert attentions.scaled_dot_product_attention is ORIGINAL[0]


def test_functions_are_put_back_when_nobody_holds_model_and_monitor_any_more() -> None:
    model = model_of(1)
    monitor = hookstats.attach(model, tensors=("attention",))
    model(batch())
    assert F.scaled_dot_product_attention is not ORIGINAL[0]
    del model, monitor
    gc.collect()
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_who_replaced_the_function_later_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(1)
    monitor = hookstats.attach(model, tensors=("attention",))
    ours = F.scaled_dot_product_attention
    theirs = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
    F.scaled_dot_product_attention = theirs
    model(batch())
    assert monitor.snapshot()["0.attention", "attention.bound"].total.count == 160
    monitor.detach()
    assert F.scaled_dot_product_attention is theirs
    F.scaled_dot_product_attention = ORIGINAL[0]


def test_what_somebody_else_has_replaced_is_named_with_its_module(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the file of a watched module has the function itself."""
    names = ["torch.nn.functional.scaled_dot_product_attention", "torch.nn.functional.softmax"]
    for name in names:
        monkeypatch.setattr(name, lambda *args, **kwargs: None)
    with caplog.at_level("INFO", "hookstats"), hookstats.attach(model_of(1), tensors=("attention",)):
        said = [each.getMessage() for each in caplog.records if "replaced" in each.getMessage()]
    assert said == [f"{name} was replaced by somebody else: it is not watched" for name in names]


def test_two_monitors_on_one_model_see_the_same() -> None:
    model = model_of(1)
    with (
        hookstats.attach(model, tensors=("attention",)) as one,
        hookstats.attach(model, tensors=("attention",), channels=False) as other,
    ):
        model(batch())
        a, b = (each.snapshot()["0.attention", "attention.max_logit"] for each in (one, other))
    assert a.total.mean == pytest.approx(b.total.mean)
    assert a.channels is not None
    assert b.channels is None
    assert not model[0].attention._forward_pre_hooks
    assert not model[0].attention._forward_hooks


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    class Failing(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("mine")

    class Caught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing = Failing()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(KeyError):
                self.failing(x)
            return self.attention(x)

    snapshots = train(Caught(), 2)
    for snapshot in snapshots:
        assert snapshot["failing", "attention.bound"].total.count == 160
        assert snapshot["attention", "attention.bound"].total.count == 160


def test_what_runs_after_an_exception_is_not_of_the_attention_that_raised_it() -> None:
    class Failing(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    model = nn.Sequential(Failing())
    with hookstats.attach(model, tensors=("attention",), every=1, options=ALL_ROWS) as monitor:
        with pytest.raises(KeyError):
            model(batch())
        monitor.step()
        q = torch.randn(1, 2, 4, 8)
        F.scaled_dot_product_attention(q, q, q)  # is nobody's
        assert monitor.snapshot().order == []


def test_threads_have_attentions_of_their_own() -> None:
    models = [model_of(1, heads=heads, key_heads=heads) for heads in (2, 4)]
    monitors = [hookstats.attach(model, tensors=("attention",), options=ALL_ROWS) for model in models]
    barrier = threading.Barrier(2)

    def run(model: nn.Module) -> None:
        for _ in range(20):
            barrier.wait(60)
            model(batch())

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for monitor, heads in zip(monitors, (2, 4), strict=True):
        assert monitor.snapshot()["0.attention", "attention.bound"].total.count == 20 * 2 * heads * 20
        assert monitor.detach()


class Hooks(OrderedDict[int, Any]):
    """Hooks of a module; it is noted when somebody looks through them, who may be told that they change meanwhile."""

    changes, looks = False, 0

    def values(self) -> Any:
        self.looks += 1
        if self.changes:
            raise RuntimeError("OrderedDict mutated during iteration")
        return super().values()


def test_whose_attention_runs_is_looked_for_in_measured_steps_alone() -> None:
    model = model_of(1)
    with hookstats.attach(model, tensors=("attention",), every=2) as monitor:
        hooks = model[0].attention._forward_pre_hooks = Hooks(model[0].attention._forward_pre_hooks)
        looks = []
        for _ in range(4):
            model(batch())
            monitor.step()
            looks.append(hooks.looks)
    assert looks[0] == looks[1] < looks[2] == looks[3]


def test_hooks_that_another_thread_changes_meanwhile_do_not_end_training() -> None:
    model = model_of(1)
    expected = model(batch())
    with hookstats.attach(model, tensors=("attention",)):
        hooks = model[0].attention._forward_pre_hooks = Hooks(model[0].attention._forward_pre_hooks)
        hooks.changes = True
        assert torch.equal(model(batch()), expected)
    assert hooks.looks


@pytest.mark.parametrize("whole", [True, False])
def test_an_attention_whose_graph_breaks_is_seen(whole: bool) -> None:
    class Broken(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            torch._dynamo.graph_break()
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    torch._dynamo.reset()
    model = nn.Sequential(Broken(), nn.Linear(32, 32))
    if not whole:
        model[0].compile(backend="aot_eager")
    snapshots = train(model, 3, run=torch.compile(model, backend="aot_eager") if whole else model, every=2)
    assert [each.step for each in snapshots] == [0, 2]
    for snapshot in snapshots:
        assert snapshot["0", "attention.bound"].total.count == 2 * 4 * 20
