"""Tests with guarded memory: what tests give to kernels lies between walls, and a read outside of it is noticed."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

import pytest
import torch

from tests.conftest import DTYPES, Backend, State
from tests.guarded import guarded_copy


def seen_past(x: torch.Tensor, bytes_past: int) -> torch.Tensor:
    """The bytes of x's storage and those behind them."""
    storage = x.untyped_storage()
    content = (ctypes.c_uint8 * (storage.nbytes() + bytes_past)).from_address(storage.data_ptr())
    return torch.frombuffer(content, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_guarded_copy_is_the_tensor_with_its_strides_and_offset(dtype: torch.dtype) -> None:
    x = torch.randn(9, 7).to(dtype).t()[1:, ::2]
    y = guarded_copy(x)
    assert torch.equal(x.double(), y.double())
    assert (x.stride(), x.storage_offset()) == (y.stride(), y.storage_offset())
    assert y.untyped_storage().data_ptr() % 16 == 0
    behind = seen_past(y, -y.untyped_storage().nbytes() % 16)[y.untyped_storage().nbytes() :]
    whole = len(behind) // dtype.itemsize * dtype.itemsize
    assert behind[:whole].view(dtype).double().isnan().all()
    assert guarded_copy(torch.empty(0, 3, dtype=dtype)).shape == (0, 3)


@pytest.mark.parametrize("reads_past", [False, True])
def test_a_kernel_that_reads_past_a_tensor_ends_its_process(backend: Backend, reads_past: bool) -> None:
    if backend.device != "cpu":
        pytest.skip("there compute-sanitizer looks for it")
    x = guarded_copy(torch.ones(64, 4))
    longer = seen_past(x, 16 * reads_past).view(torch.float32)
    state = State(1, "none", "cpu")
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        state.fold(longer, -1, ops=backend.ops)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if reads_past:
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
    else:
        assert status == 0
