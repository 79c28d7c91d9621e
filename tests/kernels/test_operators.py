"""The operators: what they refuse, and what PyTorch asks of them."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import HISTOGRAMS, Backend, State, check
from tests.kernels.test_kernels import normal

F32, I64 = torch.zeros(4), torch.zeros(7, dtype=torch.int64)


def test_a_tensor_without_data_is_refused() -> None:
    x = torch.zeros(3, 4)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="expected a tensor with data"):
        torch.ops.hookstats.accumulate(x, *State(4, "none", "cpu").tensors, None, 1)


def test_strides_that_merge_to_more_dimensions_than_a_kernel_takes_are_refused() -> None:
    x = torch.empty(3**13)[: 3**13].as_strided((2,) * 13, tuple(3**i for i in range(13)))
    with pytest.raises(RuntimeError, match="expected at most 12 dimensions that do not merge"):
        torch.ops.hookstats.accumulate(x, *State(1, "none", "cpu").tensors, None, 0)


def test_any_number_of_dimensions_that_merge_is_taken() -> None:
    x = normal(2**13).view((2,) * 13).permute(*range(12, -1, -1))
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    check(backend.accumulate(x, None).stats(), x, None)
    check(backend.accumulate(x, 5).stats(), x, 5)


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
