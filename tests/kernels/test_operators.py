"""The operators: what they refuse, and what PyTorch asks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import HISTOGRAMS, Backend, State, check
from tests.kernels.test_kernels import normal

F32, I64 = torch.zeros(4), torch.zeros(7, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda s: (torch.zeros(3, 4, dtype=torch.int64), *s.tensors, None, 1),
            RuntimeError,
            "float32 .*got Long",
        ),
        (
            lambda s: (torch.zeros(3, 4, dtype=torch.complex64), *s.tensors, None, 1),
            RuntimeError,
            "got ComplexFloat",
        ),
        (lambda s: (torch.zeros(3, 5), *s.tensors, None, 1), RuntimeError, r"expected 4 channels in.* 1.*\[3, 5\]"),
        (lambda s: (torch.zeros(3, 4), *s.tensors, None, 2), RuntimeError, "channel_dim=2 is out of range"),
        (lambda s: (F32, s.moments.float(), *s.tensors[1:], None, 0), RuntimeError, "moments: expected float64"),
        (lambda s: (F32, s.moments[1:], *s.tensors[1:], None, 0), RuntimeError, r"moments: expected float64 \[10"),
        (lambda s: (F32, s.moments, s.counters[:1], None, None, 0), RuntimeError, "counters: expected int64"),
        (
            lambda s: (F32, *s.tensors[:2], I64, None, 0),
            RuntimeError,
            r"histogram: expected int64 \[512\] or \[4, 64\]",
        ),
        (lambda s: (F32, *s.tensors, torch.zeros(1), 0), RuntimeError, "active: expected one int32"),
    ],
)
def test_wrong_arguments_say_what_was_expected_and_what_arrived(
    make: Callable[[State], tuple[Any, ...]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torch.ops.hookstats.accumulate(*make(State(4, "per_tensor", "cpu")))


def test_a_tensor_without_data_is_refused() -> None:
    x = torch.zeros(3, 4)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="expected a tensor with data"):
        torch.ops.hookstats.accumulate(x, *State(4, "none", "cpu").tensors, None, 1)


def test_a_state_without_channels_is_refused() -> None:
    with pytest.raises(RuntimeError, match="moments: expected float64"):
        torch.ops.hookstats.accumulate(torch.zeros(3, 4), *State(0, "none", "cpu").tensors, None, 1)


def test_strides_that_merge_to_more_dimensions_than_a_kernel_takes_are_refused() -> None:
    x = torch.empty(3**13)[: 3**13].as_strided((2,) * 13, tuple(3**i for i in range(13)))
    with pytest.raises(RuntimeError, match="expected at most 12 dimensions that do not merge"):
        torch.ops.hookstats.accumulate(x, *State(1, "none", "cpu").tensors, None, 0)


def test_any_number_of_dimensions_that_merge_is_taken() -> None:
    x = normal(2**13).view((2,) * 13).permute(*range(12, -1, -1))
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    check(backend.accumulate(x, None).stats(), x, None)
    check(backend.accumulate(x, 5).stats(), x, 5)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expected a dense strided tensor"):
        torch.ops.hookstats.accumulate(torch.eye(4).to_sparse(), *State(4, "none", "cpu").tensors, None, 1)


def test_merge_refuses_states_that_do_not_fit() -> None:
    ops = torch.ops.hookstats
    with pytest.raises(RuntimeError, match="expected 3 channels to merge"):
        ops.merge(*State(3, "none", "cpu").tensors, *State(4, "none", "cpu").tensors)
    with pytest.raises(RuntimeError, match="same kind of histogram"):
        ops.merge(*State(3, "none", "cpu").tensors, *State(3, "per_tensor", "cpu").tensors)


@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_opcheck(histogram: str) -> None:
    x = normal(20, 4).float().requires_grad_()
    a, b = State(4, histogram, "cpu"), State(4, histogram, "cpu")
    active = torch.ones(1, dtype=torch.int32)
    torch.library.opcheck(torch.ops.hookstats.accumulate.default, (x, *a.tensors, active, 1, *a.range))
    torch.library.opcheck(torch.ops.hookstats.merge.default, (*a.tensors, *b.tensors))


@pytest.mark.parametrize("skip_recomputation", [False, True])
def test_opcheck_of_counters_that_leave_their_version_alone(skip_recomputation: bool) -> None:
    """A graph of torch 2.15 refuses a gradient hook that changes a version while it is traced."""
    counter, amount = torch.tensor(5), torch.tensor(3)
    torch.library.opcheck(torch.ops.hookstats.add.default, (counter, amount, skip_recomputation))
    before, version = int(counter), counter._version
    torch.ops.hookstats.add(counter, amount, skip_recomputation)
    assert (int(counter), counter._version) == (before + 3, version)


def test_negative_view_bits_are_resolved() -> None:
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    x = torch.complex(normal(50, 4), normal(50, 4)).conj().imag
    assert x.is_neg()
    check(backend.accumulate(x, 1).stats(), x, 1)
