"""Sites whose width changes: what comes in such a step is in its totals, and later steps have the new width."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstats
from hookstats import ExponentBins, LinearBins, Options
from hookstats.numbers.fields import Bins
from tests import reference
from tests.conftest import check, compare

ALL_BINS = (None, ExponentBins(), ExponentBins(True), ExponentBins(block=32), LinearBins(-2, 2, 9, True))


@pytest.fixture(autouse=True)
def expected_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="hookstats: .* had .* channels and now has")
        yield


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def watch(model: nn.Module, histogram: Bins | None = None, **settings: Any) -> hookstats.Monitor:
    settings = {"every": 1, "options": Options(strict=True)} | settings
    return hookstats.attach(model, histogram=histogram, **settings)


def check_total(stats: hookstats.results.SiteStats, tensors: list[torch.Tensor]) -> None:
    """Totals alone, of these tensors."""
    assert stats.calls == len(tensors)
    assert stats.channels is None
    values = torch.cat([each.detach().flatten() for each in tensors]).numpy()
    compare({name: getattr(stats.total, name) for name in hookstats.numbers.fields.STATISTICS}, values, "total", 1e-12)
    if stats.histogram is not None and stats._bins == ExponentBins():
        assert (stats.histogram.counts == reference.exponent_counts(values)).all()
    elif stats.histogram is not None:
        assert stats.histogram.counts.ndim == 1 or len(stats.histogram.counts) == 1


def test_a_step_in_which_channels_are_found_in_another_dimension_has_its_totals() -> None:
    """Both dimensions have as many entries: only the second tensor shows where the channels are."""
    model = nn.Tanh()
    mon = watch(model, ExponentBins(), tensors=("output",))
    first, second = draw(4, 3, 3), draw(4, 3, 2)
    values = [model(x).detach() for x in (first, second)]
    snapshot = mon.step()
    check_total(snapshot["", "output"], values)
    model(second)
    snapshot = mon.step()
    assert snapshot["", "output"].channel_dim == 1
    check(snapshot["", "output"], values[1], 1)


@pytest.mark.parametrize("bins", ALL_BINS, ids=str)
def test_a_step_with_two_widths_has_their_totals_and_the_next_one_the_new_channels(bins: Bins | None) -> None:
    model = nn.Tanh()
    mon = watch(model, bins)
    first, second = draw(5, 3), draw(4, 6)
    outputs = [model(first), model(second)]
    sum(y.square().sum() for y in outputs).backward()  # type: ignore[union-attr]
    values = [y.detach() for y in outputs]
    del outputs  # or it waits for another backward
    taken = mon.step()
    check_total(taken["", "output"], values)
    check_total(taken["", "grad_output"], [2 * y for y in values])
    x = draw(4, 6)
    y = model(x)
    y.sum().backward()
    taken = mon.step()
    check(taken["", "output"], y.detach(), -1)
    check(taken["", "grad_output"], torch.ones(4, 6, dtype=torch.float64), -1)


def test_gradients_that_come_after_the_width_changed_count_in_the_step_in_which_they_come() -> None:
    model = nn.Tanh()
    mon = watch(model)
    y = model(draw(5, 3))
    assert mon.step() is not None
    z = model(draw(4, 6))
    taken = mon.step()
    assert taken["", "grad_output"].calls == 0
    (3 * y).sum().backward()
    z.sum().backward()
    taken = mon.step()
    check_total(taken["", "grad_output"], [torch.full((5, 3), 3.0).double(), torch.ones(4, 6).double()])
    del y, z
    assert mon.step() is not None
    model(draw(4, 6)).sum().backward()
    taken = mon.step()
    check(taken["", "grad_output"], torch.ones(4, 6, dtype=torch.float64), -1)


def test_what_was_looked_at_meanwhile_counts_once() -> None:
    model = nn.Tanh()
    mon = watch(model)
    outputs = [model(draw(5, 3)), model(draw(4, 6))]
    check_total(mon.snapshot()["", "output"], outputs)
    outputs.append(model(draw(2, 6)))
    check_total(mon.snapshot()["", "output"], outputs)
    sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
    outputs = [y.detach() for y in outputs]  # no other backward can come
    for _ in range(2):
        assert mon.snapshot()["", "grad_output"].calls == 3
    taken = mon.step()
    check_total(taken["", "output"], outputs)
    check_total(taken["", "grad_output"], [torch.ones_like(y) for y in outputs])


def test_totals_alone_are_the_same() -> None:
    model = nn.Tanh()
    mon = watch(model, channels=hookstats.Channels(every=1000))
    model(draw(2, 3))
    assert mon.step() is not None  # channels leave with this one alone
    outputs = [model(draw(5, 3)), model(draw(4, 6))]
    sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
    taken = mon.step()
    for site, tensors in (("output", outputs), ("grad_output", [torch.ones_like(y) for y in outputs])):
        stats = taken["", site]
        assert (stats.calls, stats.total.count) == (2, 39)
        assert stats.total.mean == pytest.approx(torch.cat([t.detach().flatten() for t in tensors]).mean().item())


def test_a_site_that_comes_back_while_something_waits_keeps_totals() -> None:
    model = nn.Tanh()
    mon = watch(model)
    for _ in range(3):
        outputs = [model(draw(5, 3)), model(draw(4, 6)), model(draw(2, 3))]
        sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
        taken = mon.step()
        check_total(taken["", "output"], outputs)
        check_total(taken["", "grad_output"], [torch.ones_like(y) for y in outputs])


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_forwards_of_two_widths_are_not_counted_twice(compiled: bool) -> None:
    act = nn.Tanh()
    program = torch.compile(act, backend="aot_eager", dynamic=False) if compiled else act
    mon = watch(act, options=Options())
    for _ in range(2):
        inputs = [draw(5, 3), draw(4, 6)]
        outputs: list[Any] = [checkpoint(program, x, use_reentrant=False) for x in inputs]
        sum((2 * y).sum() for y in outputs).backward()
        taken = mon.step()
        assert (taken["", "output"].calls, taken["", "output"].total.count) == (2, 39)
        assert (taken["", "grad_output"].calls, taken["", "grad_output"].total.mean) == (2, 2)


def test_threads_that_meet_two_widths_lose_nothing() -> None:
    model = nn.Tanh()
    mon = watch(model)

    def run(width: int) -> None:
        for _ in range(50):
            model(draw(5, width)).sum().backward()

    for _ in range(3):
        threads = [threading.Thread(target=run, args=(width,)) for width in (3, 6, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = mon.step()
        for kind in ("output", "grad_output"):
            assert (taken["", kind].calls, taken["", kind].total.count) == (150, 50 * 5 * 12)


def test_the_change_is_told_once() -> None:
    model = nn.Tanh()
    mon = watch(model)
    model(draw(5, 3))
    with pytest.warns(UserWarning, match=r"put had 3 channels and now has 6: .* folded into one"):
        model(draw(5, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width in (3, 6, 3):
            model(draw(5, width))
    mon.detach()
