"""The operators: what they refuse, and what PyTorch asks of them."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Backend, State, check
from tests.kernels.test_kernels import normal

F32, I64 = torch.zeros(4), torch.zeros(7, dtype=torch.int64)


def test_a_tensor_without_data_is_refused() -> None:
    x = torch.zeros(3, 4)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="expected a tensor with data"):
        State(4, "none", "cpu").fold(x, 1)


def test_strides_that_merge_to_more_dimensions_than_a_kernel_takes_are_refused() -> None:
    x = torch.empty(3**13)[: 3**13].as_strided((2,) * 13, tuple(3**i for i in range(13)))
    with pytest.raises(RuntimeError, match="expected at most 12 dimensions that do not merge"):
        State(1, "none", "cpu").fold(x, 0)


def test_any_number_of_dimensions_that_merge_is_taken() -> None:
    x = normal(2**13).view((2,) * 13).permute(*range(12, -1, -1))
    backend = Backend("cpu", torch.ops.hookstats, "cpu")
    check(backend.accumulate(x, None).stats(), x, None)
    check(backend.accumulate(x, 5).stats(), x, 5)


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
