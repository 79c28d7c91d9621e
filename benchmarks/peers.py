"""A training step measured by hookstats, and in the ways that others take, all in one run.

Those ways measure nine statistics of whole tensors, kept in float32 on the device, without waiting: Python hooks that
call torch's operators; the same operators compiled into one function; one Triton kernel per tensor with a flag on the
device, in the manner of torchtitan's tensor logging. They have no channels, means or histograms, and hooks on the
modules that hookstats watches. In a compiled model the operators become part of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.interleaved import figures, interleaved
from benchmarks.llama import Shape
from benchmarks.steps import MODES, NEVER, OF_OUTPUTS, PERIOD, Trainer

try:
    from benchmarks import peers_triton
except ImportError:  # no Triton here
    peers_triton = None  # type: ignore[assignment]

Fold = Callable[[torch.Tensor, torch.Tensor], None]  # a tensor, and the state that it is folded into
# The state: five sums, two that are lowest, two that are highest.
NINE = ("count", "abs_sum", "square_sum", "zeros", "nonfinite", "min", "smallest", "max", "abs_max")
INFINITY = float("inf")
OURS = "hookstats, channels and a histogram per tensor"


def nine_of_nothing(device: str) -> torch.Tensor:
    return torch.tensor([0.0] * 5 + [INFINITY] * 2 + [-INFINITY, 0.0], device=device)


@torch.no_grad()
def nine_by_operators(x: torch.Tensor, state: torch.Tensor) -> None:
    """Folds a tensor's nine statistics into a state, float32 [9]; `smallest` is of what is not zero."""
    y = x.float()
    finite = torch.isfinite(y)
    kept = torch.where(finite, y, 0)
    size = kept.abs()
    sums = [finite.sum(), size.sum(), (kept * kept).sum(), (y == 0).sum(), (~finite).sum()]
    lows = [torch.where(finite, y, INFINITY).amin(), torch.where(size > 0, size, INFINITY).amin()]
    highs = [torch.where(finite, y, -INFINITY).amax(), size.amax()]
    state[:5] += torch.stack([each.float() for each in sums])
    state[5:7] = torch.minimum(state[5:7], torch.stack(lows))
    state[7:] = torch.maximum(state[7:], torch.stack(highs))


class Peer(Trainer):
    """A model in training whose modules have forward hooks, which register a hook on the gradient of their output."""

    def __init__(self, shape: Shape, device: str, modules: set[str], fold: Fold) -> None:
        super().__init__(shape, device, None)
        self._fold = fold

        def observe(module: Any, args: Any, output: torch.Tensor) -> None:
            fold(output.detach(), module.nine)
            if output.requires_grad:
                state = module.nine_of_gradient

                def observe_gradient(gradient: torch.Tensor) -> torch.Tensor:
                    fold(gradient, state)
                    return gradient

                output.register_hook(observe_gradient)

        for name, module in self.model.named_modules():
            if name in modules:  # as buffers, all blocks have one compiled program
                for state in ("nine", "nine_of_gradient"):
                    module.register_buffer(state, nine_of_nothing(device), persistent=False)
                module.register_forward_hook(observe)

    def states(self) -> dict[tuple[str, str], torch.Tensor]:
        found = {}
        for name, module in self.model.named_modules():
            if hasattr(module, "nine"):
                found[name, "output"], found[name, "grad_output"] = module.nine, module.nine_of_gradient
        return found

    def check(self, ours: Trainer) -> None:
        """Raises unless this one's statistics are those of the operators, and of the tensors that hookstats measures.

        How many values are zero is not compared there: rounding decides, and they have trained for other numbers of
        steps.
        """
        assert ours.monitor is not None
        x = torch.randn(3, 1001, device=self.device)
        x[0, :4] = torch.tensor([float("nan"), INFINITY, -INFINITY, 0.0], device=self.device)
        mine, operators = nine_of_nothing(self.device), nine_of_nothing(self.device)
        self._fold(x, mine)
        nine_by_operators(x, operators)
        torch.testing.assert_close(mine, operators, rtol=1e-5, atol=0)
        for state in self.states().values():
            state.copy_(nine_of_nothing(self.device))
        ours.monitor.reset()
        for trainer in (self, ours):
            with trainer.resumed():
                trainer.model(trainer.ids).backward()
            trainer.optimizer.zero_grad()
        snapshot = ours.monitor.snapshot()
        for (name, tensor), state in self.states().items():
            total = snapshot[name, tensor].total
            wanted = [total.count, total.nans + total.posinfs + total.neginfs]
            got = [float(state[NINE.index(each)]) for each in ("count", "nonfinite")]
            if abs(got[0] - wanted[0]) > 1e-4 * wanted[0] or got[1] != wanted[1]:  # float32 counts to 2^24
                raise RuntimeError(f"{name} {tensor}: expected count and not finite {wanted}, got {got}")


def folds(compiled: bool) -> dict[str, Fold | None]:
    """By what is done in the hooks; None: it cannot be done here."""
    found: dict[str, Fold | None] = {"Python hooks, torch operators": nine_by_operators}
    if not compiled:
        found["Python hooks, compiled operators"] = torch.compile(nine_by_operators, dynamic=True)
    by_triton: Fold | None = None
    if peers_triton is not None:
        by_triton = peers_triton.nine_in_graphs if compiled else peers_triton.nine_by_triton
    found["Python hooks, a Triton kernel per tensor"] = by_triton
    return found


def peer_figures(
    shape: Shape, device: str, compiled: bool, rounds: int, write: Callable[[str, dict[str, Any]], None]
) -> None:
    """Writes a figure for each contender, timed in turns."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=64):
        _peer_figures(shape, device, compiled, rounds, write)


def _peer_figures(shape: Shape, device: str, compiled: bool, rounds: int, write: Any) -> None:
    group = f"training step, {MODES[compiled]}, beside the ways of others"
    ours = Trainer(shape, device, {"tensors": OF_OUTPUTS})
    trainers: dict[str, Trainer] = {"bare": Trainer(shape, device, None), OURS: ours}
    for trainer in trainers.values():
        _ready(trainer, compiled)
    contenders: dict[str, Callable[[], float]] = {name: trainer.timed for name, trainer in trainers.items()}
    contenders |= {
        f"hookstats, every={PERIOD}, mean of {PERIOD} steps": lambda: ours.timed(PERIOD),
        "hookstats, off-step": lambda: ours.timed(NEVER),
    }
    memory = ours.memory()
    everywhere = {
        "group": group,
        "parameters": sum(p.numel() for p in ours.model.parameters()),
        "tokens": ours.ids.numel(),
    }

    def write_all(times: dict[str, list[float]]) -> None:
        for figure in figures(times, "bare"):
            figure |= everywhere | (memory if figure["name"] == OURS else {})
            if isinstance(trainers.get(figure["name"]), Peer):
                figure["hooked_bytes"] = memory["hooked_bytes"]  # the same tensors
            write("training", figure)

    interleaved(contenders, 2, write_all)  # before the others are made ready, which may take longer than there is time
    assert ours.monitor is not None
    modules = {site.name for site in ours.monitor.sites if site.tensor == "output"}
    for name, fold in folds(compiled).items():
        try:
            if fold is None:
                raise ImportError("Triton was not found")
            peer = Peer(shape, device, modules, fold)
            _ready(peer, compiled)
            peer.check(ours)
            trainers[name], contenders[name] = peer, peer.timed
        except Exception as error:
            write("not_measured", {"group": group, "name": name, "why": f"{type(error).__name__}: {error}"[:2000]})
            print(f"{group}: {name}: not measured: {error}", flush=True)
    interleaved(contenders, 1)  # warms up
    for figure in figures(interleaved(contenders, rounds, write_all), "bare"):
        print(f"{group}: {figure['name']:48} {figure['median_ms']:8.2f} ms {figure['added_ms']:+8.3f}", flush=True)


def _ready(trainer: Trainer, compiled: bool) -> None:
    if compiled:
        for block in trainer.model.blocks:
            block.compile()
    trainer.timed()
