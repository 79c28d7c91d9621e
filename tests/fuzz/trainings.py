"""A random tiny training, watched in a random way: against hooks of plain torch in float64, and the bare training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Channels, Monitor, Options, Snapshot
from tests.conftest import BINS
from tests.fuzz.chance import Chance
from tests.fuzz.comparing import check_site
from tests.fuzz.models import Cut, Model
from tests.fuzz.seen import Seen
from tests.plain import default_modules

_KINDS = (
    "output", "grad_output", "input", "grad_input", "model_input", "param", "param_grad", "param_grad_local",
    "param_update", "param_sample", "update_sample", "outside_update", "optimizer_law", "optimizer", "buffer",
    "buffer_sample",
)  # fmt: skip
_BINS = [name for name in BINS if not name.startswith("many")]
_OF_LAWS = {"outside_update": 0.0, "optimizer_law": 1.0}  # of every element, in a healthy training


class Script:
    """All that is drawn of a training."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        chance = self.chance = Chance(seed)
        self.width, self.batch, self.length = chance.of((4, 6, 16)), 2 + chance.upto(1), chance.of((5, 7, 9))
        self.rows = chance.of((1, 1, 1, 1, 1, 1, 1, 2))
        self.steps = 2 + chance.upto(3) if self.rows == 1 else 12
        self.micro, self.together = 1 + chance.upto(2), 1 + chance.upto(1)
        self.every = 1 if self.rows > 1 else 1 + chance.upto(2)
        self.dtype = chance.of((torch.float32, torch.float32, torch.float32, torch.float64))
        self.autocast, self.scaled = chance.comes(0.15), chance.comes(0.15)
        self.scaled = self.scaled and self.together == 1  # else a scaler is not known in the first step
        self.clip, self.early = chance.comes(0.3), chance.comes(0.2)
        self.ignored = chance.of((0.0, 0.0, 0.0, 0.3, 0.7))
        self.aside = chance.of((None, None, "eval", "paused", "no_grad"))  # a forward beside the training's
        self.to_none = chance.comes(0.5)
        self.spoiled = chance.of((0.0, 0.0, 0.0, 0.02))  # values that are not finite
        self.optimizer = chance.of((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
        self.fused = {} if chance.comes(0.7) else chance.of(({"foreach": True}, {"fused": True}))
        self.two = chance.comes(0.3)
        self.kinds = [kind for kind in _KINDS if chance.comes(0.5)] or ["output"]
        self.modules = chance.of((None, None, "*"))
        self.bins = chance.of(_BINS)
        self.channels = Channels(chance.comes(0.85), every=1 + chance.upto(1))
        self.model_seed = int(chance.numbers.integers(1 << 30))

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        return Model(Chance(self.model_seed), self.width).to(self.dtype)

    def data(self, model: Model, chance: Chance) -> torch.Tensor:
        if model.is_table:
            return torch.randint(11, (self.batch, self.length), generator=chance.tensors)
        x = chance.normal(self.batch, self.length, self.width).to(self.dtype) + chance.of((0.0, 0.0, 100.0))
        if self.spoiled:
            x[chance.mask(x.shape, self.spoiled)] = chance.of((float("nan"), float("inf")))
        return x

    def optimizers(self, model: nn.Module) -> list[Any]:
        given = [each for each in model.parameters() if each.requires_grad]
        parts = [given[::2], given[1::2]] if self.two else [given]
        extra = {"momentum": 0.9} if self.optimizer is torch.optim.SGD else {}
        return [self.optimizer(part, lr=0.01, **extra, **self.fused) for part in parts]

    def monitor(self, model: Model, scaler: Any, sink: Any) -> Monitor:
        return hookstats.attach(
            model,
            self.modules,
            tensors=self.kinds,
            histogram=BINS[self.bins],
            channels=self.channels,
            every=self.every,
            rows=self.rows,
            sinks=sink,
            options=Options(strict=not model.is_table),  # which is given integers
        )


def check_training(seed: int) -> None:
    """Raise AssertionError where a statistic is wrong, or a parameter does not end as in the bare training."""
    script = Script(seed)
    bare = _train(script, None, None)
    seen = Seen(script.kinds)
    _train(script, seen, None)
    snapshots: list[Snapshot] = []
    watched = _train(script, None, snapshots)
    for (name, here), there in zip(watched.state_dict().items(), bare.state_dict().values(), strict=True):
        same = torch.equal(here.flatten().view(torch.uint8), there.flatten().view(torch.uint8))
        assert same, f"{name} has other bits than in the bare training"
    assert [each.step for each in snapshots] == list(range(0, script.steps, script.every))
    for snapshot in snapshots:
        try:
            _check(script, bare, seen, snapshot)
        except Exception as error:
            error.add_note(f"in step {snapshot.step} of {vars(script)}")
            raise


def _train(script: Script, seen: Seen | None, snapshots: list[Snapshot] | None) -> nn.Module:
    model, chance = script.model(), Chance(script.seed + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if script.scaled else None
    optimizers = script.optimizers(model)
    monitor = None if snapshots is None else script.monitor(model, scaler, snapshots.append)
    if seen is not None:
        seen.watch(model, optimizers, scaler)
    cuts = [module for module in model.modules() if isinstance(module, Cut)]
    is_changing = bool(cuts) and chance.comes(0.3)
    for step in range(script.steps):
        is_stepping = step % script.together == script.together - 1
        if step % script.together == 0:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=script.to_none)
        for _ in range(script.micro):
            for cut in cuts if is_changing else ():
                cut.width = chance.of((2, 3, cut.whole))
            _beside(script, model, chance, monitor, seen)
            x = script.data(model, chance)
            ignored = chance.mask((script.batch, script.length), script.ignored)
            ignored[0, 0] = False
            if seen is not None:
                seen.counted = ~ignored if script.ignored else None
            with monitor.ignore(ignored) if monitor is not None and script.ignored else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=script.autocast):
                    loss = model(x).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
        if is_stepping:
            for optimizer in optimizers if scaler is not None else ():
                scaler.unscale_(optimizer)  # type: ignore[union-attr]
            if script.early:
                if monitor is not None:
                    monitor.measure_gradients()
                if seen is not None:
                    seen.read_gradients()
            if script.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        if seen is not None:
            seen.end_step()
        if monitor is not None:
            monitor.step()
    if monitor is not None:
        monitor.detach()
    return model


def _beside(script: Script, model: Model, chance: Chance, monitor: Monitor | None, seen: Seen | None) -> None:
    """A forward that is no part of the training."""
    if script.aside is None or chance.comes(0.5):
        return
    if seen is not None:
        seen.is_paused, seen.counted = script.aside != "no_grad", None
    model.train(script.aside != "eval")
    x = script.data(model, chance)
    with torch.no_grad(), monitor.paused() if monitor is not None and script.aside == "paused" else nullcontext():
        model(x)
    model.train()
    if seen is not None:
        seen.is_paused = False


def _check(script: Script, model: nn.Module, seen: Seen, snapshot: Snapshot) -> None:
    expected = seen.steps[snapshot.step]
    is_full = snapshot.step // script.every % script.channels.every == 0
    names = default_modules(model) if script.modules is None else {name for name, _ in model.named_modules()}
    for (name, tensor), tensors in expected.items():
        kind = tensor.partition(".")[0]
        is_wanted = kind in script.kinds or (name == "" and tensor == "input" and "model_input" in script.kinds)
        if is_wanted and tensors and (name in names or not _is_of_module(kind)):
            assert (name, tensor) in snapshot, f"{name} {tensor} is missing"
    if "param_grad" in script.kinds:
        gradients = [each for (_, kind), tensors in expected.items() if kind == "param_grad" for each in tensors]
        norm = float(torch.cat([each.double().flatten() for each in gradients]).norm()) if gradients else None
        assert snapshot.grad_norm == pytest.approx(norm, rel=1e-5, nan_ok=True), "grad_norm"
    for site in snapshot:
        stats, tensors = snapshot[site], expected.get(site, [])
        kind = site.tensor.partition(".")[0]
        if kind in _OF_LAWS:
            if stats.total.count and not script.spoiled:  # else the training has diverged
                assert stats.total.min == stats.total.max == _OF_LAWS[kind], f"{site}: {stats}"
            continue
        if kind == "update_sample" and not tensors:  # since the latest sample: of whatever step
            continue
        assert stats.calls == len(tensors), f"{site}: expected {len(tensors)} tensors, got {stats.calls}"
        tensors = [each for each in tensors if each.numel()]
        is_read = snapshot.rows == 1 or not _is_of_module(kind)
        if not tensors or not is_read:
            continue
        is_model_input = site.name == "" and kind == "input"
        is_kept = script.channels.which is True and is_full and not (kind.endswith("sample") or is_model_input)
        dim = _dim_of(stats, tensors, is_kept, seen.changes(site))
        scale = 1.0 if stats._scale == 1.0 else stats._scale
        try:
            check_site(stats, tensors, dim, scale)
        except AssertionError as error:
            raise AssertionError(f"{site}: {error}") from None
        assert (stats.histogram is not None) == (is_full and script.bins != "none" and not kind.endswith("sample"))


def _dim_of(stats: Any, tensors: list[torch.Tensor], is_kept: bool, is_changing: bool) -> int | None:
    """The dimension in which the channels were found; None: there are totals alone."""
    if stats.channels is not None:
        return stats.channel_dim  # type: ignore[no-any-return]
    assert not is_kept or is_changing or tensors[0].dim() == 0 or 1 in tensors[0].shape, "expected channels"
    return None


def _is_of_module(kind: str) -> bool:
    return kind in ("output", "grad_output", "input", "grad_input")
