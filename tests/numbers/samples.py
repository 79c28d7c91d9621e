"""Data of known kinds, float64, for what is estimated of a distribution's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Sample: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[Any, int], Sample]


def _normal(g: Any, n: int) -> Sample:
    return np.asarray(g.standard_normal(n))


def _mixed(share: float, times: float) -> Draw:
    """Some of many normal values so many times as large."""
    return lambda g, n: np.where(g.random(n) < share, times, 1) * _normal(g, n)


def _with_one(outlier: float) -> Draw:
    return lambda g, n: np.concatenate([_normal(g, n - 1), [outlier]])


def _of(*values: float) -> Draw:
    return lambda g, n: np.asarray(g.choice(values, n))


def _around(mean: float) -> Draw:
    return lambda g, n: _normal(g, n) + mean


def _lognormal(sigma: float) -> Draw:
    return lambda g, n: np.exp(sigma * _normal(g, n))


def _student(degrees: int) -> Draw:
    return lambda g, n: np.asarray(g.standard_t(degrees, n))


def _gelu(g: Any, n: int) -> Sample:
    x = _normal(g, n)
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(g: Any, n: int) -> Sample:
    x = np.exp(2 * _normal(g, n).reshape(-1, min(n, 50)))
    return np.ravel(x / x.sum(1, keepdims=True))


# By the names of docs/numbers.md.
KINDS: dict[str, tuple[Draw, ...]] = {
    "uniform, tanh of a normal": (lambda g, n: g.uniform(-1, 1, n), lambda g, n: np.tanh(_normal(g, n))),
    "normal, logistic, Laplace, Student's t of 10": (
        _normal,
        lambda g, n: g.logistic(size=n),
        lambda g, n: g.laplace(size=n),
        _student(10),
        lambda g, n: _normal(g, n) * (g.random(n) < 0.5) * 2,
    ),
    "Student's t of 3, 4, 5; Cauchy": (_student(3), _student(4), _student(5), _student(1)),
    "normal with one value of 10 or 100 deviations": (_with_one(10), _with_one(100)),
    "normal, 10 %, 1 % or 0.1 % of it 3, 10 or 30 times as large; a softmax": (
        _mixed(0.1, 3),
        _mixed(0.01, 10),
        _mixed(0.001, 30),
        _softmax,
    ),
    "ReLU and GELU of a normal, exponential": (
        lambda g, n: np.maximum(_normal(g, n), 0),
        _gelu,
        lambda g, n: g.exponential(size=n),
    ),
    "lognormal, sigma 1 and 2": (_lognormal(1), _lognormal(2)),
    "normal around 1 or 1.5 deviations": (_around(1), _around(1.5)),
    "clipped normal, ReLU6, integers from -3 to 3, two or three single values": (
        lambda g, n: np.clip(_normal(g, n), -1, 1),
        lambda g, n: np.clip(3 * _normal(g, n), 0, 6),
        _of(-3, -2, -1, 0, 1, 2, 3),
        _of(0, 1),
        _of(-1, 1),
        _of(1, 1.9, -1.2),
    ),
}
