"""Comparisons of real models that differ by one thing: the first site that differs, and what rounding explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site, Snapshot, compare
from hookstats.comparing import rounding
from hookstats.numbers.significands import count_bits, dtype_of
from tests.models import Block, Residual

TENSORS = ("output", "grad_output", "param", "param_grad", "param_update")


class TanhBlock(Block):
    """A Block with GELU's tanh approximation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def approximate_gelu(model: Residual) -> None:
    model.blocks[1].__class__ = TanhBlock


def train(
    steps: int = 3,
    seed: int = 0,
    change: Callable[[Residual], None] = lambda model: None,
    wrap: Callable[[Residual], Any] = lambda model: model,
    amp: bool = False,
    permuted: bool = False,
    batches: int = 0,
    channels: bool = True,
) -> list[Snapshot]:
    """A small residual network. seed: of its parameters. batches: the step from which on other data come; 0: none."""
    torch.manual_seed(seed)
    model = Residual(width=32, depth=3)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    snapshots: list[Snapshot] = []
    with hookstats.attach(model, every=1, tensors=TENSORS, channels=channels, sinks=snapshots.append) as monitor:
        program = wrap(model)
        for step in range(steps):
            data = torch.Generator().manual_seed(step + (100 if batches and step >= batches else 0))
            x = torch.randn(16, 8, 32, generator=data)
            if permuted:
                x = x.flip(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = program(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss.item())
    return snapshots


def compile_twin(model: Residual) -> Residual:
    """Block by block, with the operators taken apart as inductor does.

    Without its kernels, each of which takes a second to compile: by them these programs part a little less.
    """
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager_decomp_partition")
    return model


@pytest.fixture(scope="module")
def eager() -> list[Snapshot]:
    return train()


def test_equal_runs_are_silent(eager: list[Snapshot]) -> None:
    found = compare(eager, train())
    assert found.is_equal
    assert found.first is None
    assert str(found) == ""
    assert (found.distances == 0).all()
    assert found.distances.shape == (3, len(eager[0]))


def test_one_op_in_one_layer_is_found_where_it_first_shows(eager: list[Snapshot]) -> None:
    found = compare(eager, train(change=approximate_gelu))
    assert (found.first.step, found.first.site) == (0, Site("blocks.1.down", "output"))
    assert found.first.before == eager[0].order.index(found.first.site)
    assert str(found).startswith("part at step 0, blocks.1.down output: ")
    assert "rounding of float32 explains" in str(found)
    assert next(jump.site for jump in found.jumps(0)) == found.first.site
    assert (found.distances[0, : found.first.before] == 0).all()


def test_a_compiled_program_agrees_to_rounding(eager: list[Snapshot]) -> None:
    found = compare(eager, train(wrap=compile_twin))
    assert found.first is None, str(found)
    assert not found.is_equal
    assert str(found).startswith("agree to rounding: in 3 steps and ")
    assert "\n" not in str(found)
    assert 0 < found.closest < 1


def test_a_compiled_program_with_one_other_op_does_not(eager: list[Snapshot]) -> None:
    found = compare(eager, train(steps=1, change=approximate_gelu, wrap=compile_twin))
    assert (found.first.step, found.first.site) == (0, Site("blocks.1.down", "output"))


def test_samples_in_another_order_agree_to_rounding_over_many_steps() -> None:
    found = compare(train(40), train(40, permuted=True))
    assert found.first is None, str(found)
    assert not found.is_equal


@pytest.mark.parametrize("amp", [False, True])
def test_other_data_are_found_in_the_step_in_which_they_come(amp: bool) -> None:
    found = compare(train(6, amp=amp), train(6, amp=amp, batches=4))
    assert (found.first.step, found.first.site) == (4, Site("blocks.0.norm", "output"))


def test_bf16_is_found_at_its_first_site_and_named(eager: list[Snapshot]) -> None:
    low = train(amp=True)
    found = compare(eager, low)
    assert (found.first.step, found.first.site) == (0, Site("blocks.0.up", "output"))  # norms are float32 in autocast
    assert found.first.dtypes == ("float32", "bfloat16")
    assert "a's values are float32, b's bfloat16" in str(found)
    assert compare(eager[:1], low[:1], dtype="bfloat16").first is None


def test_two_bf16_programs_agree_to_the_rounding_of_bf16() -> None:
    a, b = train(amp=True), train(amp=True, wrap=compile_twin)
    assert compare(a, b).first is None
    if torch.__version__ >= (2, 13):  # one that 2.11 compiles differs by no more than the rounding of float32
        assert compare(a, b, dtype="float32").first is not None


def test_another_seed_parts_at_the_first_site_and_its_distance_is_told_over_steps(eager: list[Snapshot]) -> None:
    found = compare(eager, train(seed=1))
    assert (found.first.step, found.first.site) == (0, Site("blocks.0.up", "output"))  # the norm's weights are ones
    assert "largest distance at step" in str(found)
    assert np.nanmax(found.distances) > 0.02


def test_one_channel_that_differs_is_named_where_the_total_does_not_tell() -> None:
    def shift(model: Residual) -> None:
        with torch.no_grad():
            model.blocks[2].up.bias[5] += 1e-2  # 20 roundings

    a, b = (train(1, change=change) for change in (lambda model: None, shift))
    found = compare(a, b, dtype="tfloat32").first
    assert compare(a[0].compact(), b[0].compact(), dtype="tfloat32").first is None
    assert (found.site, found.channel) == (Site("blocks.2.up", "output"), 5)
    assert "of channel 5 is" in str(found)


def test_values_that_are_not_finite_part_at_once(eager: list[Snapshot]) -> None:
    def poison(model: Residual) -> None:
        with torch.no_grad():
            model.blocks[1].up.bias[0] = float("nan")

    first = compare(eager[:1], train(1, change=poison), dtype="float8_e5m2").first
    assert (first.site, first.statistic, first.a, first.b) == (Site("blocks.1.up", "output"), "nonfinite", 0, 128)
    assert "0 values that are NaN or Inf in a, 128 in b" in str(first)


def test_a_site_that_ran_in_one_alone_parts() -> None:
    class Branch(nn.Module):
        def __init__(self, takes: bool) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.takes = takes

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(y + 0 * self.second(y) if self.takes else y)

    def once(takes: bool) -> Snapshot:
        torch.manual_seed(0)
        model = Branch(takes)
        with hookstats.attach(model, tensors="output") as monitor:
            model(torch.ones(3, 4))
            return monitor.snapshot()

    assert str(compare(once(False), once(True)).first) == (
        "step 0, second output: it ran in b and not in a; 1 site before it agrees"
    )
    assert "it ran in a and not in b" in str(compare(once(True), once(False)))


def test_tensors_of_another_size_part() -> None:
    model = nn.Linear(4, 4)

    def once(rows: int) -> Snapshot:
        with hookstats.attach(model, tensors="output") as monitor:
            model(torch.ones(rows, 4))
            return monitor.snapshot()

    assert "12 values in a, 20 in b" in str(compare(once(3), once(5)).first)


def test_what_only_one_has_is_said_and_is_no_parting(eager: list[Snapshot]) -> None:
    found = compare(eager, [each.select(tensors="output") for each in eager[1:]])
    assert not found.is_equal
    assert found.first is None
    assert "1 steps in a alone, " in str(found)
    assert found.steps == [1, 2]
    assert "sites in a alone" in str(found)


def test_what_cannot_be_compared_is_refused(eager: list[Snapshot]) -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of float64, float32, .*; got 'fp32'"):
        compare(eager, eager, dtype="fp32")
    with pytest.raises(ValueError, match="expected two snapshots or two runs, got list and Snapshot"):
        compare(eager, eager[0])
    with pytest.raises(ValueError, match="a step that both have, got none: 1 steps in a alone, 2 steps in b alone"):
        compare(eager[:1], eager[1:])
    with pytest.raises(ValueError, match="expected a site that both watch"):
        compare(eager[0].select(tensors="output"), eager[0].select(tensors="param"))
    with pytest.raises(ValueError, match="jumps: expected one of the compared steps"):
        compare(eager, eager).jumps(77)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_dtype_is_told_from_the_bits_of_the_extremes(dtype: str) -> None:
    values = torch.randn(2000, dtype=torch.float64).to(getattr(torch, dtype)).double().numpy()
    assert dtype_of(int(count_bits(values).max())) == dtype


def test_values_that_every_dtype_has_tell_no_dtype() -> None:
    assert (count_bits(np.array([0.0, 1.0, -1.0, 6.0, 0.5, np.inf, np.nan, -np.inf])) == 0).all()
    assert count_bits(np.array([0.1, 11.0])).tolist() == [52, 4]


def test_what_is_computed_from_coarse_values_is_coarse_but_single_sites_make_no_coarse_program() -> None:
    def units(*bits: int) -> list[float]:
        return rounding.find_units(np.array(bits), np.ones(len(bits), bool)).tolist()

    low, single = rounding.UNIT_ROUNDOFF["bfloat16"], rounding.UNIT_ROUNDOFF["float32"]
    assert units(24, 8, 24, 0, 8) == [single, low, low, low, low]
    assert units(8, 24, 24, 24, 24, 0, 24) == [low, *[single] * 6]
    assert units(0, 0) == [single, single]
    assert set(rounding.find_units(np.array([24, 8]), np.ones(2, bool), is_trained=True)) == {low}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_rounding_of_values_is_within_what_is_allowed_and_a_shift_of_all_is_not(dtype: str) -> None:
    """A single site, whose values are rounded, or not; the allowance is HEADROOM times what is expected."""
    unit = rounding.UNIT_ROUNDOFF[dtype]
    x = torch.randn(64, 512, dtype=torch.float64)

    def measure_values(values: torch.Tensor) -> Snapshot:
        return make_snapshot(0, values)

    rounded = x.to(getattr(torch, dtype)).double()
    assert compare(measure_values(x), measure_values(rounded), dtype=dtype).first is None
    shifted = compare(measure_values(x), measure_values(x * (1 + unit)), dtype=dtype).first
    assert (shifted is not None) == (dtype != "float32")  # of which sums take more
    found = compare(measure_values(x), measure_values(x * (1 + 40 * unit)), dtype=dtype).first
    assert f"rounding of {dtype} explains" in str(found)


def make_snapshot(step: int, *values: torch.Tensor) -> Snapshot:
    """Sites "0", "1", ... with these values."""
    stats = [hookstats.measure(each, histogram=None) for each in values]
    return Snapshot.from_dict(
        {
            "version": 4,
            "rows": 1,
            "step": step,
            "scalars": {},
            "earlier_scalars": [],
            "grad_scale": None,
            "overflowed": None,
            "ranks": "0 of 1",
            "order": [[str(i), "output"] for i in range(len(values))],
            "skipped": [],
            "sites": [{"name": str(i), "tensor": "output"} | each._to_dict() for i, each in enumerate(stats)],
        }
    )


def test_the_first_site_is_named_whatever_differs_there() -> None:
    x = torch.randn(64, 8)
    poisoned = x.clone()
    poisoned[0, 0] = float("inf")
    found = compare(make_snapshot(0, x, x, x), make_snapshot(0, x, 1.01 * x, poisoned)).first
    assert (found.site.name, found.before) == ("1", 1)


def test_later_steps_may_lie_further_apart_as_far_as_steps_explain() -> None:
    x = torch.randn(64, 8, dtype=torch.float64)
    one = np.ones(1)
    errors = rounding.errors(2.0**-24 * one, np.zeros(1, int), 0 * one, is_alike=True)
    allowed = float(errors.bound_means(64 * one, one, one)[0])  # of a channel

    def parts(step: int, times: float) -> bool:
        a, b = (
            [make_snapshot(0, x), make_snapshot(step, x)],
            [make_snapshot(0, x), make_snapshot(step, x * (1 + times * allowed))],
        )
        return compare(a, b, dtype="float32").first is not None

    assert compare([make_snapshot(0, x)], [make_snapshot(0, x * (1 + 5 * allowed))], dtype="float32").first is not None
    assert not parts(1, 1.5)
    assert parts(1, 100)
    assert not parts(10, 15)
    assert parts(10, 1000)


def test_after_a_step_the_first_site_is_as_coarse_as_what_its_parameters_were_trained_by() -> None:
    fine, coarse = torch.randn(64, 64), torch.randn(64, 64).bfloat16()
    apart = fine * (1 + 1e-4)
    now = compare([make_snapshot(0, fine, coarse)], [make_snapshot(0, apart, coarse)]).first
    assert now.rounded_to == "float32"
    a, b = (
        [make_snapshot(0, fine, coarse), make_snapshot(1, fine, coarse)],
        [make_snapshot(0, fine, coarse), make_snapshot(1, apart, coarse)],
    )
    assert compare(a, b).first is None
