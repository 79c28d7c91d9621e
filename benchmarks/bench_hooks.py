"""Time a hook costs the host: make bench. A chain of modules that do next to nothing, on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from benchmarks.interleaved import figures, interleaved, seconds
from hookstats.watch.hooks import SiteHook

MODULES = 400

Chain = nn.Sequential


class Negate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def nothing(*_: Any) -> None:
    pass


def by_operators(x: torch.Tensor) -> list[torch.Tensor]:
    """Fewer statistics than hookstats takes."""
    return [*torch.var_mean(x), x.abs().max(), x.norm(), (x == 0).sum(), torch.isfinite(x).sum()]


def measuring(chain: Chain) -> hookstats.Monitor:
    return hookstats.attach(chain, tensors=("output", "grad_output"), channels=False, histogram=None, every=1)


def returning_at_once(chain: Chain) -> hookstats.Monitor:
    """Everything but what the kernels do: to the host, this step is measured; on the device, it is not."""
    monitor = measuring(chain)
    chain(torch.ones(2, 2))  # sites learn from a first tensor, and are bound anew then
    skip = torch.zeros(1, dtype=torch.int32)
    for module in chain:
        for hook in module._forward_hooks.values():
            assert isinstance(hook, SiteHook)
            assert hook.output is not None
            assert hook.gradient is not None
            hook.bind(hook.output._replace(active=skip), hook.gradient._replace(active=skip))
    return monitor


def paused(chain: Chain) -> tuple[hookstats.Monitor, Any]:
    monitor = measuring(chain)
    pause = monitor.paused()
    pause.__enter__()
    return monitor, pause


def forward_hooks(chain: Chain, hook: Callable[..., None]) -> None:
    for module in chain:
        module.register_forward_hook(hook)


def tensor_hooks(chain: Chain, hook: Callable[[torch.Tensor], Any], of_output: Callable[[torch.Tensor], Any]) -> None:
    """Python functions on every output and its gradient; what they return is dropped."""
    results: list[Any] = [None]

    def keep(gradient: torch.Tensor) -> None:
        results[0] = hook(gradient)

    def forward_hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        results[0] = of_output(output)
        output.register_hook(keep)

    forward_hooks(chain, forward_hook)


def full_backward_hooks(chain: Chain) -> None:
    for module in chain:
        module.register_full_backward_hook(nothing)


# Each prepares a chain, and returns what must be kept alive.
CONTENDERS: dict[str, Callable[[Chain], Any]] = {
    "bare": nothing,
    "empty forward hook": lambda chain: forward_hooks(chain, nothing),
    "hookstats, paused": paused,
    "hookstats, kernels return at once": returning_at_once,
    "hookstats, measuring": measuring,
    "Python tensor hooks, empty": lambda chain: tensor_hooks(chain, nothing, nothing),
    "Python hooks, torch operators": lambda chain: tensor_hooks(chain, by_operators, by_operators),
    "full backward hooks, empty": full_backward_hooks,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Prepared:
    """A chain with a contender's hooks."""

    def __init__(self, name: str) -> None:
        self.chain = nn.Sequential(*(Negate() for _ in range(MODULES)))
        self.kept = CONTENDERS[name](self.chain)
        self.x = torch.randn(4, 4, requires_grad=True)
        self.gradient = torch.ones(4, 4)
        self.backward(self.forward())

    def forward(self) -> torch.Tensor:
        y: torch.Tensor = self.chain(self.x)
        return y

    def backward(self, y: torch.Tensor) -> None:
        y.backward(self.gradient)
        self.x.grad = None


def timed(name: str) -> Callable[[], float]:
    """Forward and backward with a contender's hooks; the shortest of three in a row, as the first is often cold."""
    prepared = Prepared(name)
    return lambda: min(seconds(lambda: prepared.backward(prepared.forward())) for _ in range(3))


def bench_hooks(benchmark: Any) -> None:
    """Forward and backward of a chain."""
    benchmark.group = "hooks"
    contenders = {name: timed(name) for name in CONTENDERS}
    times = benchmark.pedantic(interleaved, args=(contenders, 40))
    benchmark.extra_info.update(modules=MODULES, contenders=figures(times, "empty forward hook"))


def timed_close(channels_every: int) -> Callable[[], float]:
    """`Monitor.step` of 200 sites of 4096 channels, which met something once: what is there changes no time."""
    chain = nn.Sequential(*(nn.Linear(1, 4096) for _ in range(100)))
    monitor = hookstats.attach(
        chain, tensors=("output", "grad_output"), every=1, channels=hookstats.Channels(every=channels_every)
    )
    for module in chain:
        module(torch.ones(2, 1)).sum().backward()
    monitor.step()  # has channels in any case
    return lambda: seconds(monitor.step)


def bench_closing_a_step(benchmark: Any) -> None:
    """Time the copying, clearing and reading when a measured step closes."""
    benchmark.group = "closing a step"
    contenders = {"channels and histograms": timed_close(1), "totals": timed_close(1 << 30)}
    times = benchmark.pedantic(interleaved, args=(contenders, 40))
    benchmark.extra_info.update(sites=200, channels=4096, contenders=figures(times, "channels and histograms"))
