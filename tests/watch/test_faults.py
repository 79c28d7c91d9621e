"""Wrong arguments, tensors that cannot be measured, failures inside: what is said, and that training goes on."""

from __future__ import annotations

import re
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, Site
from hookstats.watch import arguments
from tests.conftest import check
from tests.models import THREE_KINDS, images, small_cnn
from tests.plain import OF_OUTPUTS, hearing


def test_what_cannot_be_watched_raises_at_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got list"):
        hookstats.attach([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"without DataParallel.*DistributedDataParallel"):
        hookstats.attach(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))
    monkeypatch.setattr(arguments._native, "HAS_CUDA", False)
    model = nn.Linear(2, 2)
    monkeypatch.setattr(type(model), "parameters", lambda self: iter([torch.empty(0, device="meta")]))
    monkeypatch.setattr(
        arguments, "refuse_device", lambda device, real=arguments.refuse_device: real(torch.device("cuda"))
    )
    with pytest.raises(RuntimeError, match=r"built without CUDA kernels. Rebuild .*HOOKSTATS_CUDA=1 pip"):
        hookstats.attach(model)


def test_a_channel_dim_that_a_tensor_does_not_have_skips_the_site() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    mon = hookstats.attach(model, channels=hookstats.Channels(dim={"1": 3}))
    with pytest.warns(UserWarning, match=r"1 output.*channel_dim=3 is out of range for an output of shape \(2, 4\)"):
        model(torch.randn(2, 4)).sum().backward()
    assert set(mon.skipped) == {Site("1", "output"), Site("1", "grad_output")}
    assert mon.snapshot()["0", "grad_output"].calls == 1


class Changing(nn.Module):
    """Its n-th call returns whatever is asked for."""

    def __init__(self, *outputs: Any) -> None:
        super().__init__()
        self.outputs = list(outputs)

    def forward(self, x: torch.Tensor) -> Any:
        return self.outputs.pop(0)(x)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (lambda x: x.argmax(-1), "expected a tensor of one of .*got torch.int64"),
        (lambda x: x.bool(), "got torch.bool"),
        (lambda x: torch.complex(x, x), "got torch.complex64"),
        (lambda x: torch.complex(x, x).conj(), "got torch.complex64"),
        (lambda x: x.detach().to_sparse_csr(), "got layout torch.sparse_csr"),
        (lambda x: torch.nested.nested_tensor([x.detach(), x[:2].detach()]), "expected a"),
        (lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8), "got torch.qint8"),
        (lambda x: x.detach().to_mkldnn(), "expected a"),
        (lambda x: x.detach().to_sparse(), "expected a dense strided tensor, got layout torch.sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|Sparse CSR|deprecated|quantize)")
def test_what_cannot_be_measured_is_skipped_once_with_its_reason(output: Any, reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Changing(output, output))
    mon = hookstats.attach(model, tensors=OF_OUTPUTS)
    with pytest.warns(UserWarning, match=f"not measured: 1 output and 1 grad_output: .*{reason}"):
        model(torch.randn(3, 4))
    with hearing() as again:
        model(torch.randn(3, 4))
    assert again == []
    assert len(mon.skipped) == 2
    assert mon.snapshot()["0", "output"].calls == 2
    assert re.search(f"\nnot measured: 1 output: .*{reason}.*\nnot measured: 1 grad_output: ", mon.snapshot().table())
    assert mon.step().skipped == mon.skipped  # type: ignore[union-attr]
    assert {skipped.times for skipped in mon.snapshot().skipped.values()} == {2}
    assert set(mon.snapshot()) == {("0", "output"), ("0", "grad_output")}
    model = nn.Sequential(Changing(output))
    hookstats.attach(model, options=hookstats.Options(strict=True))
    with pytest.raises(RuntimeError, match=f"0 output and 0 grad_output.* cannot be measured: .*{reason}"):
        model(torch.randn(3, 4))


def test_warnings_that_are_errors_do_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    model = Changing(lambda x: x.argmax(-1))
    hookstats.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(torch.randn(3, 4)).shape == (3,)
    assert "not measured" in caplog.text


def test_a_subclass_that_is_a_tensor_is_measured() -> None:
    mine = type("Mine", (torch.Tensor,), {})
    model = Changing(lambda x: x.as_subclass(mine))
    mon = hookstats.attach(model)
    x = torch.randn(3, 4)
    assert type(model(x)) is mine
    check(mon.snapshot()["", "output"], x, -1)


def test_an_internal_failure_in_a_forward_does_not_stop_it() -> None:
    model = nn.Linear(4, 4)
    mon = hookstats.attach(model)
    model(torch.randn(3, 4))  # settles what a site is
    hook = next(iter(model._forward_hooks.values()))
    wrong = {"moments": torch.zeros(10, 3, dtype=torch.float64), "histogram": None}
    hook.bind(hook.output._replace(**wrong), hook.gradient)
    with pytest.warns(UserWarning, match="not measured.*expected 3 channels"):
        model(torch.randn(3, 4)).sum().backward()
    assert len(mon.skipped) == 2


@pytest.mark.filterwarnings("ignore:hookstats. per-channel state")
def test_past_the_memory_budget_all_sites_keep_totals(caplog: pytest.LogCaptureFixture) -> None:
    model = small_cnn()
    with caplog.at_level("INFO", logger="hookstats"):
        mon = hookstats.attach(
            model, options=hookstats.Options(memory_budget=70_000), histogram=ExponentBins(True), tensors=OF_OUTPUTS
        )
        assert "attached to 12 sites of 6 modules" in caplog.text
        assert "keep totals only" not in caplog.text
        assert mon.snapshot()["7", "output"].channels is not None
    with caplog.at_level("INFO", logger="hookstats"):
        mon = hookstats.attach(
            model, options=hookstats.Options(memory_budget=20_000), histogram=ExponentBins(True), tensors=OF_OUTPUTS
        )
    assert "all sites keep totals only" in caplog.text
    model(images()).sum().backward()
    assert all(stats.channels is None for stats in mon.snapshot().values())
    assert mon.state_bytes <= 20_000


def test_a_width_learned_late_that_would_break_the_budget_keeps_totals() -> None:
    model = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Tanh())
    mon = hookstats.attach(model, options=hookstats.Options(memory_budget=200_000), histogram=None, tensors=OF_OUTPUTS)
    with pytest.warns(UserWarning, match=r"'1' and later sites would not fit into memory_budget=200000") as caught:
        model(torch.randn(2, 4))
    assert len(caught) == 1
    assert [mon.snapshot()[name, "output"].channels is None for name in "012"] == [False, True, True]


def test_outputs_that_are_parameters_are_measured_and_their_gradients_left_alone() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    model = Table()
    mon = hookstats.attach(model, every=1)
    for _ in range(3):
        model(torch.zeros(1)).sum().backward()
    check(mon.snapshot()["", "output"], torch.cat([model.weight] * 3), -1)
    # A hook on a leaf would stay there and fire more often at each step.
    assert mon.snapshot()["", "grad_output"].calls == 0
    assert mon.skipped == {}


@pytest.mark.parametrize("container", [False, True])
def test_functorch_fake_and_meta_tensors_pass_through(container: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return (y, y) if container else y

    def first(y: Any) -> torch.Tensor:
        return y[0] if container else y

    model = Pair(4, 4)
    mon = hookstats.attach(model, every=1)
    torch.func.vmap(model)(torch.randn(3, 4))
    torch.func.grad(lambda x: first(model(x)).sum())(torch.randn(4))
    torch.autograd.functional.jacobian(lambda x: first(model(x)), torch.randn(4), vectorize=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(torch.randn(3, 4)))
    mon.step()
    model(torch.randn(3, 4))
    snapshot = mon.step()
    assert mon.skipped == {}
    assert snapshot["", "output.0" if container else "output"].calls == 1
    on_meta = Pair(4, 4, device="meta")
    mon = hookstats.attach(on_meta, every=1)
    on_meta(torch.empty(3, 4, device="meta"))
    assert mon.snapshot().order == []


def test_a_dispatch_mode_that_is_active_hides_nothing() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(4, 4)
    mon = hookstats.attach(model, tensors=THREE_KINDS)
    with FlopCounterMode(display=False):
        model(torch.randn(3, 4)).sum().backward()
    assert {stats.calls for stats in mon.snapshot().values()} == {1}


def test_a_gradient_without_data_is_skipped() -> None:
    class Zero(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return torch._efficientzerotensor(gradient.shape)

    model = nn.Linear(4, 4)
    mon = hookstats.attach(model)
    Zero.apply(model(torch.randn(3, 4))).sum().backward()
    with pytest.warns(UserWarning, match="expected a tensor with data"):
        assert list(mon.skipped) == [("", "grad_output")]


def test_an_output_without_elements_changes_nothing() -> None:
    model = Changing(lambda x: x[:, :0], lambda x: x, lambda x: x[:0])
    mon = hookstats.attach(model)
    x = torch.randn(3, 4)
    model(x)
    assert mon.snapshot()["", "output"].calls == 0
    model(x)
    model(x)
    check(mon.snapshot()["", "output"], x, -1)
    assert mon.skipped == {}


def test_other_python_threads_run_while_a_kernel_does() -> None:
    """One that waits for the GIL alone gets it inside the hook, sooner or later: nobody else would give it away."""
    x = torch.randn(1 << 22)
    state = hookstats.attach(model := Changing(lambda x: x), channels=False)
    hook = next(iter(model._forward_hooks.values()))
    hook(model, None, x)
    is_inside, seen = False, []

    def look(may_run: threading.Lock) -> None:
        with may_run:
            seen.append(is_inside)

    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        end = time.monotonic() + 60
        while True not in seen and time.monotonic() < end:
            may_run = threading.Lock()
            may_run.acquire()
            thread = threading.Thread(target=look, args=(may_run,))
            thread.start()
            is_inside = True
            may_run.release()
            hook(model, None, x)
            is_inside = False
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert True in seen
    assert state.snapshot()["", "output"].calls == 1 + len(seen)


def test_a_width_that_the_type_does_not_tell_is_corrected_once_without_a_word() -> None:
    class Gated(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.glu(super().forward(x))

    model = Gated(4, 8)
    mon = hookstats.attach(model, every=1, histogram=ExponentBins(True))
    x = torch.randn(6, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        y = model(x)
        y.sum().backward()
    assert [str(each.message) for each in told] == []
    check(mon.snapshot()["", "output"], y, -1)


def test_the_channel_rule_follows_the_tensor_not_the_first_one() -> None:
    model = nn.ReLU()
    mon = hookstats.attach(model, every=1)
    flat, image = torch.randn(2, 8), torch.randn(2, 8, 5, 8) + torch.arange(8.0).view(8, 1, 1)
    y, z = model(flat), model(image)
    check(mon.snapshot()["", "output"], torch.cat([y, z.movedim(1, -1).reshape(-1, 8)]), -1)


def test_a_default_device_does_not_move_the_flags() -> None:
    with torch.device("meta"):
        mon = hookstats.attach(model := nn.Linear(3, 3, device="cpu"), every=1)
        model(torch.zeros(2, 3, device="cpu"))
        snapshot = mon.step()
    assert snapshot["", "output"].calls == 1
