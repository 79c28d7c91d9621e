"""The rows of attention that are computed again, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookstats.language import rows as module
from hookstats.language.rows import AttentionRows, attention_rows, choose_rows
from tests.language.attentions import logits_in_float64

TURN = torch.tensor([5])


def check(found: AttentionRows, logits: torch.Tensor, tolerance: float = 2e-5) -> None:
    p = logits.softmax(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    kept = sorted(found.row_index.flatten()[: int(found.kept)].tolist())
    attends = (logits.amax(-1) > -torch.inf).all(1)
    assert kept == attends.flatten().nonzero().flatten().tolist()
    for mine, wanted in ((found.max, logits.amax(-1)), (found.entropy, entropy), (found.sink, p[..., 0])):
        wanted = wanted.transpose(1, 2)[attends]
        torch.testing.assert_close(mine[attends].double(), wanted, rtol=tolerance, atol=tolerance)
    assert found.bound.shape == found.max.shape
    assert (found.bound.double() >= found.max.double() - tolerance).all()


MASKS = ["none", "bool", "of the batch", "added", "smallest number"]


def mask_of(name: str, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor | None:
    hidden = torch.rand(batch, 1, queries, keys) < 0.4
    if name == "bool":
        return ~hidden
    if name == "of the batch":  # padding: all queries of an item see the same keys
        return ~(torch.rand(batch, 1, 1, keys) < 0.4)
    if name == "added":
        return torch.randn(heads, queries, keys).masked_fill(hidden[0], -torch.inf)
    if name == "smallest number":
        return torch.zeros(batch, 1, queries, keys).masked_fill(hidden, torch.finfo(torch.float32).min)
    return None


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("key_heads", "queries", "keys"), [(6, 20, 20), (2, 13, 37), (1, 37, 13)])
def test_rows_are_those_of_a_float64_softmax(
    name: str, is_causal: bool, key_heads: int, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 6, queries, 8) * 3, torch.randn(3, key_heads, keys, 8)
    mask = mask_of(name, 3, 6, queries, keys)
    wanted = None if mask is None else mask.masked_fill(mask < -1e30, -torch.inf) if mask.is_floating_point() else mask
    logits = logits_in_float64(q, k, wanted, is_causal)
    check(attention_rows(q, k, mask, TURN, None, None, is_causal, None), logits)
    for piece in (1, 4000):  # one row after the other; some items of the batch together
        monkeypatch.setattr(module, "_PIECE_BYTES", piece)
        check(attention_rows(q, k, mask, TURN, None, None, is_causal, None), logits)
        at = choose_rows(queries, 5, TURN)
        check(attention_rows(q, k, mask, TURN, None, 5, is_causal, None), logits[:, :, at])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_logits_of_all_dtypes_are_computed_in_float32_or_more_whatever_autocast_says(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, 16, 8) * 5).to(dtype), torch.randn(2, 3, 16, 8).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_rows(q, k, None, TURN, None, None, True, None)
    assert found.max.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    check(found, logits_in_float64(q, k, None, True), 1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 1e4])
def test_logits_of_any_size(size: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 16, 8).double() * size, torch.randn(1, 2, 16, 8).double()
    check(attention_rows(q, k, None, TURN, None, None, True, None), logits_in_float64(q, k, None, True), 1e-10)


def test_a_softcap_bends_logits_before_the_mask() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 16, 8) * 30, torch.randn(1, 2, 16, 8)
    found = attention_rows(q, k, None, TURN, None, None, True, None, softcap=10.0)
    check(found, logits_in_float64(q, k, None, True, 10.0))
    assert found.bound.max() <= 10


def test_a_row_with_nan_is_nan_and_counts() -> None:
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    q[0, 0, 2] = torch.nan
    found = attention_rows(q, k, None, TURN, None, None, True, None)
    assert found.max[0, :, 0].isnan().tolist() == [False, False, True, False]
    assert int(found.kept) == 4
    assert bool(found.bound.isnan().all())


def test_in_so_many_turns_every_row_is_met_and_the_last_one_always() -> None:
    for length, rows in ((100, 8), (7, 3), (64, 64), (5, 1), (2, 2)):
        turns = [choose_rows(length, rows, torch.tensor([turn])).tolist() for turn in range(max(1, length - 1))]
        assert all(len(set(turn)) == rows and sorted(turn) == turn and turn[-1] == length - 1 for turn in turns)
        assert rows == 1 or {row for turn in turns for row in turn} == set(range(length))


def test_ignored_rows_do_not_count() -> None:
    q, k = torch.randn(2, 1, 6, 8), torch.randn(2, 1, 6, 8)
    row_index = torch.tensor([[0, 1, 2, 6], [7, 8, 9, 10]], dtype=torch.int32)
    row_index = torch.cat((row_index.flatten(), torch.tensor([3, 4, 5, 11], dtype=torch.int32))).reshape(2, 6)
    found = attention_rows(q, k, None, TURN, (row_index, torch.tensor([8], dtype=torch.int32)), None, True, None)
    assert sorted(found.row_index.flatten()[: int(found.kept)].tolist()) == [0, 1, 2, 6, 7, 8, 9, 10]


def test_other_numbers_of_dimensions() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 4, 16, 8), torch.randn(2, 3, 2, 16, 8)
    found = attention_rows(q, k, torch.ones(16, 16, dtype=torch.bool).tril(), TURN, None, None, False, None)
    check(found, logits_in_float64(q.flatten(0, 1), k.flatten(0, 1), None, True))
    one_head = attention_rows(q[0, 0], k[0, 0].repeat(2, 1, 1), None, TURN, None, None, True, None)
    assert one_head.max.shape == (4, 16, 1)


@pytest.mark.parametrize(
    ("q", "k", "mask", "said"),
    [
        (torch.zeros(2, 8), torch.zeros(2, 8), None, r"expected q \[..., heads, queries, width\] .* got \(2, 8\)"),
        (torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 6), None, r"\(1, 2, 4, 8\) and \(1, 2, 4, 6\)"),
        (
            torch.zeros(1, 3, 4, 8),
            torch.zeros(1, 2, 4, 8),
            None,
            "as many heads as key heads, or a multiple, got 3 and 2",
        ),
        (
            torch.zeros(1, 2, 4, 8),
            torch.zeros(1, 2, 4, 8),
            torch.zeros(3, 4),
            r"broadcasts to \(1, 2, 4, 4\), got \(3, 4\)",
        ),
        (torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8, device="meta"), None, "on one device, got cpu, meta"),
    ],
)
def test_what_is_no_attention_is_refused(q: Any, k: Any, mask: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attention_rows(q, k, mask, TURN, None, None, False, None)


def test_integers_are_refused() -> None:
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match=r"q and k of one of torch\.float32"):
        attention_rows(x.int(), x.int(), None, TURN, None, None, False, None)
    with pytest.raises(TypeError, match=r"a mask of bool or floating numbers, got torch\.int64"):
        attention_rows(x, x, torch.zeros(4, 4, dtype=torch.int64), TURN, None, None, False, None)
