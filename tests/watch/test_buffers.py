"""tensors=("buffer",): what a model counts and averages in itself, as forward has left it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Channels, Options, Site, Snapshot
from hookstats.numbers import fields
from tests.conftest import compare
from tests.kernels.test_samples import places

STRICT = Options(strict=True)


class Counting(nn.Module):
    """A module like torchtitan's mixtures: forward counts each expert's tokens, an optimizer's own hook takes them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.register_buffer("tokens_per_expert", torch.zeros(4, dtype=dtype), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        with torch.no_grad():
            counts = torch.bincount(logits.argmax(-1).flatten(), minlength=4)
            self.tokens_per_expert += counts.to(self.tokens_per_expert.dtype)
        return logits


def optimizer_of(model: Counting, *parameters: nn.Parameter) -> torch.optim.Optimizer:
    def take(*_: object) -> None:
        model.tokens_per_expert.zero_()

    optimizer = torch.optim.SGD(parameters or model.parameters(), 0.1)
    optimizer.register_step_pre_hook(take)
    return optimizer


def values_of(snapshot: Snapshot | None, name: str = "tokens_per_expert") -> list[float]:
    channels = snapshot[name, "buffer"].channels
    assert channels.count.tolist() == [1] * len(channels.count)
    values: list[float] = channels.mean.tolist()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32])
@pytest.mark.parametrize("tensors", [("buffer",), ("output", "param_grad", "buffer")])
def test_counts_are_read_before_the_optimizer_takes_them(dtype: torch.dtype, tensors: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Counting(dtype)
    optimizer = optimizer_of(model)
    with hookstats.attach(model, tensors=tensors, every=1, options=STRICT) as monitor:
        for step in range(3):
            for _ in range(2):  # microbatches
                model(torch.randn(50, 4)).square().mean().backward()
            wanted = model.tokens_per_expert.tolist()
            optimizer.step()
            assert model.tokens_per_expert.tolist() == [0] * 4
            snapshot = monitor.step()
            assert values_of(snapshot) == wanted, step
            assert sum(wanted) == 100
            stats = snapshot["tokens_per_expert", "buffer"]  # type: ignore[index]
            assert stats.calls == 1
            assert stats.max_violation == pytest.approx(max(wanted) / 25 - 1)
            assert stats.dead_share == wanted.count(0) / 4


def test_large_counts_are_exact() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model.register_buffer("seen", torch.tensor([2**40 + 1, 3]))
    with hookstats.attach(model, "*", tensors=("buffer",), options=STRICT) as monitor:
        assert values_of(monitor.snapshot(), "seen") == [2**40 + 1, 3]


def test_of_several_optimizers_the_first_counts_and_without_one_the_steps_end() -> None:
    model = Counting()
    first, second = optimizer_of(model, model.gate.weight), optimizer_of(model, model.gate.bias)
    with hookstats.attach(model, tensors=("output", "buffer"), every=1, options=STRICT) as monitor:
        model(torch.randn(50, 4)).square().mean().backward()
        wanted = model.tokens_per_expert.tolist()
        first.step()
        second.step()
        assert values_of(monitor.step()) == wanted
        model(torch.randn(50, 4))
        assert values_of(monitor.step()) == model.tokens_per_expert.tolist()


def test_an_optimizer_of_parameters_that_are_not_watched_counts_too() -> None:
    model = Counting()
    optimizer = optimizer_of(model)
    with hookstats.attach(model, "tokens_*", tensors=("buffer",), every=1, options=STRICT) as monitor:
        model(torch.randn(50, 4)).square().mean().backward()
        optimizer.step()
        assert sum(values_of(monitor.step())) == 50
    with pytest.raises(ValueError, match=r"the glob .tokens_\*. matches nothing"):
        hookstats.attach(model, "tokens_*", tensors=("output",))


def test_with_a_closure_they_are_read_behind_its_first_call() -> None:
    model = Counting()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(50, 4)).square().mean()
        loss.backward()
        return loss

    with hookstats.attach(model, tensors=("output", "buffer"), every=1, options=STRICT) as monitor:
        for step in range(2):
            before = model.tokens_per_expert.sum().item()
            optimizer.step(closure)
            assert sum(values_of(monitor.step())) == before + 50, step


def test_a_parameter_that_is_not_there_yet_takes_no_other_with_it() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with hookstats.attach(model, "*", tensors=("param", "buffer"), every=1, options=STRICT) as monitor:
        model[0](torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        snapshot = monitor.step()
    assert {site.name for site, stats in snapshot.items() if stats.calls} == {
        *(f"0.{key}" for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"))
    }


def test_another_models_optimizer_reads_nothing() -> None:
    model, other = Counting(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with hookstats.attach(model, tensors=("output", "buffer"), every=1, options=STRICT) as monitor:
        other(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        model(torch.randn(50, 4))
        assert sum(values_of(monitor.step())) == 50


def test_a_buffer_that_is_replaced_is_read_where_it_is_now() -> None:
    model = Counting()
    with hookstats.attach(model, tensors=("buffer",), every=1, options=STRICT) as monitor:
        model.tokens_per_expert = torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert values_of(monitor.step()) == [1, 2, 3, 4]
        model.tokens_per_expert = torch.tensor([1, 2, 3, 4, 5])
        assert values_of(monitor.step()) == [1, 2, 3, 4, 5]
        del model.tokens_per_expert
        snapshot = monitor.step()
        assert snapshot["tokens_per_expert", "buffer"].calls == 0


def test_channels_are_dimension_zero_and_a_scalar_has_a_total() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    model.register_buffer("table", torch.randn(6, 7).T)
    with hookstats.attach(model, tensors=("output", "buffer"), every=1, options=STRICT) as monitor:
        model(torch.randn(4, 3, 8, 8))
        snapshot = monitor.step()
    assert values_of(snapshot, "1.running_mean") == pytest.approx(model[1].running_mean.tolist())
    assert values_of(snapshot, "1.running_var") == pytest.approx(model[1].running_var.tolist())
    assert snapshot["1.num_batches_tracked", "buffer"].total.mean == 1
    assert snapshot["1.num_batches_tracked", "buffer"].channels is None
    table = snapshot["table", "buffer"].channels
    assert table.mean == pytest.approx(model.table.double().mean(1))


def test_what_is_chosen_and_left_out() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def buffers(**arguments: Any) -> set[str]:
        with hookstats.attach(model, tensors=("output", "buffer"), **arguments) as monitor:
            model(torch.randn(3, 4))
            return {site.name for site in monitor.snapshot() if site.tensor == "buffer"}

    of = ["running_mean", "running_var", "num_batches_tracked"]
    assert buffers() == {f"{number}.{key}" for number in (0, 1) for key in of}
    assert buffers(modules=["0", "2"]) == {f"0.{key}" for key in of}
    assert buffers(modules=["*.running_mean", "2"]) == {"0.running_mean", "1.running_mean"}
    assert buffers(exclude=["0", "*.running_var"]) == {"1.running_mean", "1.num_batches_tracked"}
    with hookstats.attach(model, channels=Channels(["0.running_mean"]), tensors=("output", "buffer")) as monitor:
        snapshot = monitor.snapshot()
    assert [site.name for site, stats in snapshot.items() if stats.channels is not None] == ["0.running_mean"]
    with pytest.raises(ValueError, match="expected to select something that has buffer"):
        hookstats.attach(nn.ModuleList([nn.ReLU()]), tensors=("buffer",))


def test_what_cannot_be_measured_is_left_out_with_the_reason() -> None:
    model = Counting()
    model.register_buffer("mask", torch.ones(4, dtype=torch.bool))
    with pytest.warns(UserWarning, match="mask buffer"):
        monitor = hookstats.attach(model, tensors=("output", "buffer"), every=1)
    model(torch.randn(50, 4))
    snapshot = monitor.step()
    reason = monitor.skipped[Site("mask", "buffer")].reason
    monitor.detach()
    assert "torch.uint8; got torch.bool" in reason
    assert sum(values_of(snapshot)) == 50


def with_buffers() -> nn.Module:
    """Make a module with all sorts of buffers: those that have a sample, and others."""
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model.register_buffer("inv_freq", torch.rand(5), persistent=False)
    model.register_buffer("freqs_cis", torch.polar(torch.ones(3, 4), torch.rand(3, 4)))
    model.register_buffer("large", torch.rand(90, 80).t())
    model.register_buffer("small", torch.rand(7).bfloat16())
    model.register_buffer("mask", torch.ones(4) > 0)
    model.register_buffer("part", torch.rand(3, 4)[:, :2])
    model.register_buffer("spread", torch.rand(1, 4).expand(5, 4))
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("nothing", None)
    return model  # type: ignore[no-any-return]


SAMPLED = ("inv_freq", "freqs_cis", "large", "small", "1.running_mean", "1.running_var")


def of_samples(snapshot: Snapshot | None) -> dict[str, Any]:
    return {site.name: stats for site, stats in snapshot.items() if site.tensor == "buffer_sample" and stats.calls}


@pytest.mark.filterwarnings("error")
def test_samples_of_floating_buffers_are_taken_by_default_and_of_others_nothing_is_said() -> None:
    model = with_buffers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookstats.attach(model, every=1, options=STRICT) as monitor:
        for _ in range(3):
            model(torch.randn(6, 4)).square().sum().backward()
            found = {name: model.get_buffer(name).clone() for name in SAMPLED}
            optimizer.step()
            samples = of_samples(monitor.step())
            assert set(samples) == set(SAMPLED)
            for name, buffer in found.items():
                real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                flat = (real.t() if name == "large" else real).reshape(-1).double()
                wanted = flat[places(flat.numel())]
                assert (samples[name].channels, samples[name].histogram) == (None, None)
                got = {each: getattr(samples[name].total, each) for each in fields.STATISTICS}
                compare(got, wanted.numpy(), name, 1e-5)


@pytest.mark.filterwarnings("error")
def test_a_sampled_buffer_may_be_replaced_by_any_other_and_one_on_meta_or_lazy_come_when_they_are_there() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d())
    model.register_buffer("table", torch.rand(4))
    model.register_buffer("later", torch.empty(4, device="meta"))
    with hookstats.attach(model, tensors=("buffer_sample",), every=1, options=STRICT) as monitor:
        assert set(of_samples(monitor.step())) == {"table"}
        model.later = torch.full((4,), 2.0)
        model.table = torch.rand(4, 4)[:, 1]  # a view whose elements do not lie side by side
        model(torch.randn(6, 4))
        samples = of_samples(monitor.step())
        assert set(samples) == {"later", "1.running_mean", "1.running_var"}
        assert samples["later"].total.mean == 2
        model.table = torch.full((3, 3), 3.0, dtype=torch.float64)
        assert of_samples(monitor.step())["table"].total.mean == 3


def test_a_buffers_name_selects_its_sample_and_one_without_a_sample_nothing() -> None:
    model = with_buffers()
    with hookstats.attach(model, ["*.running_var", "inv_freq"], tensors=("output", "buffer_sample")) as monitor:
        assert {site.name for site in monitor.sites} == {"1.running_var", "inv_freq"}
    with pytest.raises(ValueError, match="expected to select something that has output or buffer_sample"):
        hookstats.attach(model, "mask", tensors=("output", "buffer_sample"))


def test_a_mask_of_minus_infinity_is_no_finding_and_a_nan_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    model.register_buffer("average", torch.zeros(4))
    with hookstats.attach(model, tensors=("output", "buffer"), every=1, sinks=hookstats.record(tmp_path)) as monitor:
        for step in range(4):
            model(torch.randn(3, 4))
            if step == 2:
                model.average[1] = torch.nan
            monitor.step()
    found = [each for each in hookstats.load(tmp_path).findings if each.rule == "nonfinite"]
    assert [(each.step, each.site) for each in found] == [(2, ("average", "buffer"))]
    assert "check how the model updates it" in found[0].sentence
