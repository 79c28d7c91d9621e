"""Sums over tensors and their gradients together, on every backend, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import DTYPES, Backend

Term = tuple[int, int, int, list[int], int]  # tensor, dimension, where that begins here, places, offset


def sums(backend: Backend, weights: list[torch.Tensor], gradients: list[Any], terms: list[Term]) -> list[torch.Tensor]:
    rows, places = [], list[int]()
    for number, dim, begin, own, offset in terms:
        rows.append([number, dim, begin, len(places), len(places) + len(own), offset])
        places += own
    at = torch.tensor(places, dtype=torch.int64, device=backend.device)
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 6)
    found: torch.Tensor = backend.ops.joint_sums(weights, gradients, table, at)
    assert (found.dtype, tuple(found.shape)) == (torch.float64, (len(places), 3))
    return [each.cpu() for each in found.split([len(own) for *_, own, _ in terms])]


def expected(weight: torch.Tensor, gradient: torch.Tensor | None, term: Term) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums, and those of what was added up, without signs."""
    _, dim, begin, places, offset = term
    w = weight.cpu().double().movedim(dim, 0).flatten(1) if weight.dim() > 1 else weight.cpu().double()[:, None]
    g = torch.zeros_like(weight) if gradient is None else gradient
    g = g.cpu().double().movedim(dim, 0).flatten(1) if g.dim() > 1 else g.cpu().double()[:, None]
    product = (w + offset) * g
    rows = torch.stack([torch.stack([p.sum(1), p.abs().sum(1)]) for p in (product, product**2, w**2)], -1)
    here = [0 <= place - begin < len(w) for place in places]
    found = torch.zeros(2, len(places), 3, dtype=torch.float64)
    found[:, here] = rows[:, [place - begin for place, is_here in zip(places, here, strict=True) if is_here]]
    return found[0], found[1]


def check(backend: Backend, weights: list[torch.Tensor], gradients: list[Any], terms: list[Term]) -> None:
    weights, gradients = ([x if x is None else x.to(backend.device) for x in all] for all in (weights, gradients))
    for got, term in zip(sums(backend, weights, gradients, terms), terms, strict=True):
        wanted, size = expected(weights[term[0]], gradients[term[0]], term)
        assert ((got - wanted).abs() <= 1e-6 * size).all(), (term[:3], got, wanted)


def of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_gradient", ["the same", "float32"])
def test_rows_columns_and_vectors_of_every_dtype(backend: Backend, dtype: torch.dtype, of_gradient: str) -> None:
    own = dtype if of_gradient == "the same" else torch.float32
    shapes = [(300, 70), (70, 300), (37,), (8, 12, 3, 3), (3, 40, 20), (1, 1), (700,)]
    weights = [of(*shape, dtype=dtype, seed=number) for number, shape in enumerate(shapes)]
    gradients = [of(*shape, dtype=own, seed=number + 50) for number, shape in enumerate(shapes)]
    terms: list[Term] = [
        (number, dim, 0, [*range(min(size, 9)), size - 1, size // 2], offset)
        for number, shape in enumerate(shapes)
        for dim, size in enumerate(shape)
        for offset in (0, 1)
    ]
    check(backend, weights, gradients, terms)


def test_strides_of_both_that_differ(backend: Backend) -> None:
    wide, deep = of(130, 260)[:, ::2], of(16, 9, 5, 4)
    weights = [wide, of(40, 130).t(), deep, deep.to(memory_format=torch.channels_last), deep.permute(3, 1, 0, 2)]
    gradients = [of(130, 130).t(), of(130, 40), deep.to(memory_format=torch.channels_last) + 1, deep * 2]
    gradients.append((deep - 1).contiguous().permute(3, 1, 0, 2).contiguous())
    weights.append(of(1, 30).expand(7, 30))  # a stride of 0
    gradients.append(of(7, 30))
    check(
        backend,
        weights,
        gradients,
        [(n, dim, 0, [0, 3, 1, 0, 1, 2, 3], 0) for n, w in enumerate(weights) for dim in range(w.dim())],
    )


def test_places_that_are_elsewhere_and_gradients_that_are_missing_count_as_0(backend: Backend) -> None:
    weights, gradients = [of(20, 30), of(20, 30, seed=1)], [of(20, 30, seed=2), None]
    terms: list[Term] = [(0, 0, 40, [39, 40, 59, 60, 0], 0), (1, 1, 0, [3, 4, 99], 1), (0, 1, 0, [], 0)]
    check(backend, weights, gradients, terms)
    at = torch.arange(4, device=backend.device)
    table = torch.tensor([[0, 0, 0, 1, 3, 0]])  # places 0 and 3 are of no term
    found = backend.ops.joint_sums([weights[0].to(at.device)], [gradients[0].to(at.device)], table, at).cpu()  # type: ignore[union-attr]
    assert found[[0, 3]].eq(0).all()
    assert found[[1, 2]].ne(0).all()


def test_more_terms_than_one_launch_takes_and_long_sums(backend: Backend) -> None:
    many = [of(5, 6, seed=n) for n in range(300)]
    check(backend, many, [x.flip(0).contiguous() for x in many], [(n, n % 2, 0, [0, 4], n % 2) for n in range(300)])
    long, gradient = of(6, 20_001), of(6, 20_001, seed=1)
    check(
        backend,
        [long, long.t().contiguous()],
        [gradient, gradient.t().contiguous()],
        [(0, 0, 0, list(range(6)), 0), (1, 1, 0, list(range(6)), 0)],
    )


def test_two_runs_agree_bit_for_bit(backend: Backend) -> None:
    x, g = (of(4, 9000, seed=n).to(backend.device) for n in range(2))
    first, second = (sums(backend, [x], [g], [(0, 0, 0, [0, 1, 2, 3], 0)])[0] for _ in range(2))
    assert torch.equal(first, second)


def test_tiny_and_non_finite_gradients(backend: Backend) -> None:
    tiny, w = torch.full((4, 100), 1e-25), of(4, 100)
    check(backend, [w], [tiny], [(0, 0, 0, [0, 1, 2, 3], 0)])
    tiny[1, 7], tiny[2, 8] = torch.nan, torch.inf
    found = sums(backend, [w.to(backend.device)], [tiny.to(backend.device)], [(0, 0, 0, [0, 1, 2, 3], 0)])[0]
    assert found[:, 0].isfinite().tolist() == [True, False, False, True]
