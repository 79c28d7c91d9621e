"""The softmax of rows on every backend, against float64 on the same logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import hookstats
from tests.conftest import DTYPES, Backend

NUMBERS = ("max", "logsumexp", "entropy", "p_max", "p_first", "margin")


def truth(logits: torch.Tensor, top_k: int = 0) -> torch.Tensor:
    """[numbers, ...] of rows without NaN and Inf, in float64."""
    x = logits.double()
    masked = (x == -math.inf).all(-1)
    log_p = torch.log_softmax(x, -1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    found = [x.amax(-1), torch.logsumexp(x, -1), entropy, p.amax(-1), p[..., 0]]
    if top_k:
        largest = x.topk(top_k + 1, -1).values
        margin = largest[..., top_k - 1] - largest[..., top_k]
        found.append(margin.masked_fill(largest[..., top_k] == -math.inf, -math.inf))
    return torch.stack(found).masked_fill(masked, -math.inf)


def check(found: torch.Tensor, logits: torch.Tensor, top_k: int = 0) -> None:
    """Largest logit and margin to one rounding; others to 2e-6 of the larger of themselves and 1, as they are sums of
    numbers from 0 to log(n); probabilities to 4e-6 of themselves, as far as float32 has them."""
    wanted = truth(logits, top_k)
    is_double = logits.dtype == torch.float64
    assert found.dtype == (torch.float64 if is_double else torch.float32)
    rounding = 1e-13 if is_double else 2e-6
    for name, here, want in zip(NUMBERS, found.cpu().double(), wanted, strict=False):
        assert here.shape == want.shape
        if name == "max":
            torch.testing.assert_close(here, want, rtol=0, atol=0)
        elif name.startswith("p_"):
            torch.testing.assert_close(here, want, rtol=2 * rounding, atol=1e-35, msg=lambda m, n=name: f"{n}: {m}")
        elif name == "margin":
            torch.testing.assert_close(here, want, rtol=rounding, atol=0, msg=lambda m: f"margin: {m}")
        else:
            torch.testing.assert_close(here, want, rtol=rounding, atol=rounding, msg=lambda m, n=name: f"{n}: {m}")


def rows(backend: Backend, logits: torch.Tensor, top_k: int = 0) -> torch.Tensor:
    found: torch.Tensor = backend.ops.softmax_rows(backend.to_device(logits), top_k)
    return found.cpu()


def logits(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return x.clamp(-400, 400).to(dtype) if dtype.itemsize == 1 else x.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(dtype, 1.0) for dtype in DTYPES]
    + [(dtype, scale) for dtype in (torch.float32, torch.bfloat16) for scale in (1e-3, 100.0, 1e4)],
    ids=str,
)
def test_every_number_is_that_of_a_float64_softmax(backend: Backend, dtype: torch.dtype, scale: float) -> None:
    for n in (1, 2, 3, 8, 15, 16, 17, 64, 200, 1025, 5003):
        x = logits((7, n), dtype, scale, n)
        for top_k in {0, 1, 2, min(8, n - 1), min(16, n - 1)} - ({0} if n > 1 else {1, 2}):
            if top_k < n:
                check(rows(backend, x, top_k), x, top_k)


# name: rows of a dtype that do not lie side by side, or not from a whole pack on
LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "one row": lambda t: logits((33,), t),
    "four dimensions": lambda t: logits((2, 3, 5, 19), t),
    "transposed": lambda t: logits((40, 9), t).t(),
    "heads inside": lambda t: logits((3, 4, 2, 30), t).transpose(1, 2),
    "every other": lambda t: logits((6, 90), t)[:, ::2],
    "odd offset": lambda t: logits((5, 1021), t)[:, 3:-2],
    "columns": lambda t: logits((50, 64), t)[:, 5:22],
    "expanded rows": lambda t: logits((1, 9), t).expand(7, 9),
    "expanded entries": lambda t: logits((7, 1), t).expand(7, 9),
    "fourteen dimensions": lambda t: logits((2,) * 14, t).permute(*range(13, -1, -1)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_read_where_they_lie(backend: Backend, name: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[name](dtype)
    top_k = 1 if x.shape[-1] > 1 else 0
    check(rows(backend, x, top_k), x, top_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_masked_entries_count_nowhere(backend: Backend, dtype: torch.dtype) -> None:
    causal = torch.full((700, 700), -math.inf).triu(1)[::7]
    x = (logits((100, 700)) * 3 + causal).to(dtype)
    check(rows(backend, x, 3), x, 3)
    x = x.flip(-1)  # the first entries are masked
    check(rows(backend, x, 3), x, 3)


@pytest.mark.parametrize("top_k", [0, 2, 9])
def test_a_row_of_masked_entries_alone_has_minus_infinity_everywhere(backend: Backend, top_k: int) -> None:
    x = logits((4, 600))
    x[1] = -math.inf
    found = rows(backend, x, top_k)
    assert (found[:, 1] == -math.inf).all()
    assert found[:, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("top_k", [0, 2, 9])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_row_with_nan_or_infinity_is_nan_and_its_neighbours_are_not(
    backend: Backend, dtype: torch.dtype, bad: float, top_k: int
) -> None:
    for n in (11, 1300):
        for place in (0, n // 2, n - 1):
            for others in (0.0, -math.inf):
                x = logits((3, n), dtype)
                x[1] += others
                x[1, place] = bad
                found = rows(backend, x, top_k)
                assert found[:, 1].isnan().all(), (n, place, others)
                check(found[:, [0, 2]], x[[0, 2]], top_k)


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FC001FF, -0x400001])
def test_a_nan_of_any_bits_is_seen(backend: Backend, payload: int) -> None:
    x = logits((2, 40))
    x[0, 5] = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    assert rows(backend, x)[:, 0].isnan().all()


def test_the_largest_finite_numbers_neither_overflow_nor_count_as_masked(backend: Backend) -> None:
    lowest, highest = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    for row in ([lowest] * 5, [highest, lowest, 0.0], [lowest, 1.0, 1.0], [-math.inf, lowest, lowest]):
        x = torch.tensor([row])
        check(rows(backend, x, 1), x, 1)


def test_equal_largest_entries_have_no_margin_and_too_few_have_none_at_all(backend: Backend) -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0], [5.0, -math.inf, -math.inf, 4.0], [5.0, -math.inf, -math.inf, -math.inf]])
    assert rows(backend, x, 1)[5].tolist() == [0.0, 1.0, -math.inf]
    assert rows(backend, x, 2)[5].tolist() == [1.0, -math.inf, -math.inf]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), (2, 0, 4)])
def test_without_rows_there_are_no_numbers_and_without_entries_rows_are_masked(
    backend: Backend, shape: tuple[int, ...]
) -> None:
    found = rows(backend, torch.empty(shape))
    assert found.shape == (5, *shape[:-1])
    assert (found == -math.inf).all()


def test_a_sequence_of_rows_has_the_numbers_of_each_alone(backend: Backend) -> None:
    """A row's numbers depend on nothing beside it: bit for bit, with any number of rows, in any order of threads."""
    x = logits((300, 77))
    together = rows(backend, x, 2)
    alone = torch.cat([rows(backend, x[i : i + 1], 2) for i in range(0, 300, 50)], dim=1)
    assert torch.equal(together[:, ::50], alone)
    if backend.name == "cuda_on_cpu":
        for seed in (1, 2):
            backend.ops.shuffle(seed)
            assert torch.equal(rows(backend, x, 2), together)


def test_numbers_do_not_depend_on_the_number_of_threads(threads: None) -> None:
    x = logits((4096, 64))
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(torch.stack(hookstats.softmax_rows(x)[:5]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_public_function_names_the_numbers() -> None:
    x = logits((2, 3, 8))
    x.requires_grad_()
    found = hookstats.softmax_rows(x, top_k=2)
    assert found._fields == NUMBERS
    assert all(number is not None and number.shape == (2, 3) and not number.requires_grad for number in found)
    assert hookstats.softmax_rows(x).margin is None
    torch.testing.assert_close(found.logsumexp, torch.logsumexp(x, -1).detach())


def test_a_graph_keeps_it_with_any_number_of_rows() -> None:
    def numbers(x: torch.Tensor) -> torch.Tensor:
        return hookstats.softmax_rows(x * 2, top_k=1).entropy.sum()

    compiled = torch.compile(numbers, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 5):
        x = logits((n, 4))
        assert torch.equal(compiled(x), numbers(x))


def test_the_operator_keeps_its_schema_and_its_shapes_while_traced() -> None:
    for top_k in (0, 2):
        torch.library.opcheck(torch.ops.hookstats.softmax_rows.default, (logits((3, 4, 9)), top_k))
