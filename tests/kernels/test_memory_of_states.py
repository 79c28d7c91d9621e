"""Tests of Python around the operators: parts and copies of memory, tensors without data."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hookstats import _native
from hookstats._native import operators
from tests.conftest import Backend, State, check
from tests.kernels.test_kernels import normal


def test_copies_of_blocks_and_zeros(backend: Backend) -> None:
    blocks = [torch.arange(9, device=backend.device), torch.arange(70_000, device=backend.device)]
    copies = operators.Copies(backend.operators).take(blocks, True)
    assert [each.tolist() == list(range(len(each))) for each in copies] == [True, True]
    assert not any(block.any() for block in blocks)
    again = [torch.ones(3, dtype=torch.int64, device=backend.device)]
    assert operators.Copies(backend.operators).take(again, False)[0].tolist() == again[0].tolist() == [1, 1, 1]
    backend.operators.clear(again)
    assert again[0].tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match=r"take: expected contiguous int64, got Float"):
        operators.Copies(backend.operators).take([torch.zeros(3, device=backend.device)], False)


def test_memory_is_copied_whatever_mode_is_active() -> None:
    block = torch.arange(5)
    with FakeTensorMode():
        (copy,) = operators.Copies(_native.OPS).take([block], False)
    assert copy.tolist() == [0, 1, 2, 3, 4]


def test_a_part_is_no_view_and_shares_the_memory() -> None:
    memory = torch.zeros(20, dtype=torch.int64)
    part = _native.part(memory, 3, (2, 3), torch.float64)
    part.fill_(1.0)
    assert (part.dtype, part.shape, part._version, memory._version) == (torch.float64, (2, 3), 1, 0)
    assert memory.nonzero().flatten().tolist() == list(range(3, 9))
    del memory
    assert part.sum() == 6
    with pytest.raises(RuntimeError, match="expected words 18 to 21 in a memory of 20"):
        _native.part(torch.zeros(20, dtype=torch.int64), 18, (3,), torch.int64)


def test_of_tensors_that_come_together_those_without_data_are_named(backend: Backend) -> None:
    first = normal(40, 6).float()
    with FakeTensorMode():
        fake = torch.zeros(3, 6)
    given = [first, None, normal(40, 5).float(), torch.empty(0, 6), torch.zeros(3, 6, device="meta"), fake]
    given = [each if each is None or each.is_meta or each is fake else each.to(backend.device) for each in given]
    states = [State(6, "per_tensor", backend.device) for _ in given]
    failures = backend.batch(states, [1] * len(given)).accumulate(given)
    assert [number for number, _ in failures] == [2, 4, 5]
    assert "expected 6 channels in dimension 1" in failures[0][1]
    assert f"expected a tensor on {backend.device}" in failures[1][1]
    assert "expected a plain tensor with data" in failures[2][1]
    check(states[0].stats(), first, 1)
    assert [int(state.counters[0]) for state in states] == [1, 0, 0, 0, 0, 0]


def test_no_call_leaves_memory_behind() -> None:
    """Strings that an operator returns are never freed by torch (up to 2.13)."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    states = [State(1, "none", "cpu")]
    batch, copies = Backend("cpu", torch.ops.hookstats, "cpu").batch(states, [0]), operators.Copies(_native.OPS)
    x, block = torch.zeros(3), torch.zeros(8, dtype=torch.int64)
    for _ in range(2):  # what is made once, first
        before = resident()
        for _ in range(20_000):
            batch.accumulate([x])
            copies.take([block], True)
    assert resident() - before < 20 * 20_000


def test_what_is_merely_looked_at_is_refused_as_if_it_were_folded_and_is_not(backend: Backend) -> None:
    state, ops = State(6, "per_tensor", backend.device), backend.operators
    site = state.site(1, ops=ops)
    ops.fold(torch.zeros(3, 6, device=backend.device), site.number, only_look=True)
    with pytest.raises(RuntimeError, match="expected 6 channels in dimension 1"):
        ops.fold(torch.zeros(3, 5, device=backend.device), site.number, only_look=True)
    assert int(state.counters[0]) == 0
