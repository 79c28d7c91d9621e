"""Gradients that break an identity in a measured step are told, with their parameter and factor; right ones are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookstats
from benchmarks import illnesses
from hookstats.rules import Finding, identity, judge
from hookstats.rules.formatting import number
from hookstats.rules.identities import compare
from hookstats.rules.step import SiteIds, Step
from tests.identities.models import RMSNorm
from tests.identities.test_checking import Experts
from tests.identities.trainings import proved, snapshots, times
from tests.rules.trainings import train

pytestmark = pytest.mark.usefixtures("one_thread")


def findings(*given: Any, **how: Any) -> list[Finding]:
    return judge(snapshots(*given, **how), rules=[identity])


def of_groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Step matrices by one optimizer, and all else by another, as some trainers do."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    return [torch.optim.SGD(matrices, 1e-3), torch.optim.AdamW(others, 1e-3)]


HEALTHY: dict[str, dict[str, Any]] = {
    "float32": {},
    "autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "microbatches": {"microbatches": 3},
    "a scale": {"scale": 2.0**12},
    "two optimizers": {"make": of_groups},
    "norms less one": {"offset": 1.0},
    "totals": {"channels": hookstats.Channels(every=3)},
    "no channels": {"channels": False},
    "modules that are not watched": {"modules": ["embedding"]},
    "all clipped together": {"fault": lambda step, model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)},
}


@pytest.mark.parametrize("how", HEALTHY)
def test_gradients_that_are_right_are_silent(how: str) -> None:
    taken = snapshots(**HEALTHY[how])
    assert judge(taken, rules=[identity]) == []
    for each in taken:
        found = compare(Step(each, SiteIds()))
        assert len(found) == len(proved()) == 11
        assert max(float(one.z.max()) for one in found) < 4


FAULTS: dict[str, tuple[str, float]] = {
    "up twice": ("layers.1.mlp.up_proj.weight", 2.0),
    "down lost half": ("layers.0.mlp.down_proj.weight", 0.5),
    "values x4": ("layers.0.attention.v_proj.weight", 4.0),
    "a norm averaged": ("layers.1.norm1.weight", 0.25),
    "a head lost": ("head.weight", 0.0),
}


@pytest.mark.parametrize("how", ["float32", "autocast", "totals", "microbatches"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_gradient_that_is_wrong_is_named_with_its_factor(fault: str, how: str) -> None:
    name, factor = FAULTS[fault]
    found = findings(times(name, factor), **HEALTHY[how])
    assert found
    assert {each.rule for each in found} == {"identity"}
    assert {each.severity for each in found} == {"warning"}
    said = f"gradient of {name} is 0" if not factor else f"gradient of {name} looks {number(factor)} times"
    assert all(said in each.sentence for each in found), found


def test_a_scaler_that_is_known_changes_nothing() -> None:
    """Powers of two do not round: what rounding explains is the same with one."""

    def all_z(scaler: Any) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 4))
        x = torch.randn(64, 8)
        found = hookstats.find_identities(model, lambda: model(x))
        optimizer, taken = torch.optim.SGD(model.parameters(), 1e-2), list[Any]()
        options = hookstats.Options(identities=found, strict=True)
        with hookstats.attach(model, every=1, sinks=taken.append, options=options) as monitor:
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                monitor.step()
        return [each.z.tolist() for one in taken for each in compare(Step(one, SiteIds()))]

    plain = all_z(torch.amp.GradScaler("cpu", enabled=False))
    assert len(plain) == 3
    assert plain == [pytest.approx(each) for each in all_z(torch.amp.GradScaler("cpu", init_scale=2.0**10))]


def test_a_copy_that_an_optimizer_steps_in_float32_is_judged_in_its_place() -> None:
    """Megatron-LM keeps it as `main_param`, which wants no gradient and is given one."""
    torch.manual_seed(0)
    model, taken = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).bfloat16(), list[Any]()
    x = torch.randn(16, 8).bfloat16()
    found = hookstats.find_identities(model, lambda: model(x))
    copies: dict[str, Any] = {name: each.detach().float() for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        each.main_param = copies[name]  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(list(copies.values()), 1e-2)
    options = hookstats.Options(identities=found, strict=True)
    with hookstats.attach(model, every=1, sinks=taken.append, options=options) as monitor:
        for step in range(4):
            model(x).float().square().mean().backward()
            for name, each in model.named_parameters():
                assert each.grad is not None
                copies[name].grad = each.grad.float() * (2 if step > 1 and name == "2.weight" else 1)
            optimizer.step()
            model.zero_grad()
            monitor.step()
    assert [len(compare(Step(each, SiteIds()))) for each in taken] == [1] * 4
    (finding,) = judge(taken, rules=[identity])
    assert (finding.step, finding.severity) == (2, "critical")
    assert "gradient of 2.weight looks 1.98 times" in finding.sentence  # that of bfloat16 is rounded


def test_an_expert_that_had_no_token_is_not_judged() -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(30, 8)
    some, every = x.clone(), x.clone()
    some[:, 0], every[:, 0] = torch.arange(30) % 2, torch.arange(30) % 3
    found = hookstats.find_identities(model, lambda: model(some))
    options = hookstats.Options(identities=found, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    taken = train(model, lambda step: model((some, every)[step]).square().sum(), optimizer, 2, options=options)
    assert [len(compare(Step(each, SiteIds()))) for each in taken] == [1, 0]


def test_what_held_before_is_critical_and_is_told_in_the_step() -> None:
    (found,) = findings(times("layers.1.mlp.up_proj.weight", 2.0, begin=2))[:1]
    assert (found.severity, found.step, found.since) == ("critical", 2, 2)
    assert found.value > found.threshold == 64
    assert "looks 2 times as large as it should be" in found.sentence


def test_a_slight_difference_is_told_after_two_steps_in_a_row() -> None:
    once = times("layers.1.mlp.up_proj.weight", 1.0002)
    rule = identity(single=1e9)
    taken = snapshots(times("layers.1.mlp.up_proj.weight", 1.001))
    assert {each.step for each in judge(taken, rules=[rule])} == {1}
    taken = snapshots(lambda step, model: once(step, model) if step == 1 else None)
    assert judge(taken, rules=[rule]) == []


def test_a_small_share_of_all_sums_is_told_after_three_steps() -> None:
    """2 % are less than what rounding to bfloat16 explains of a single sum."""
    name = "layers.1.mlp.up_proj.weight"
    taken = snapshots(times(name, 1.02), autocast=True, steps=6)
    assert max(float(each.z.max()) for one in taken for each in compare(Step(one, SiteIds()))) < 8
    found = judge(taken, rules=[identity])
    assert found
    assert all(name in each.sentence and "larger over the one" in each.sentence for each in found), found
    assert any(f"The gradient of {name} looks 1.02 times as large" in each.sentence for each in found), found
    assert {(each.severity, each.step, each.since) for each in found} == {("warning", 2, 0)}
    assert findings(autocast=True, steps=20) == findings(dtype=torch.bfloat16, steps=20) == []


def test_the_sums_that_differ_are_named_where_they_lie_side_by_side() -> None:
    def change(step: int, model: Any) -> None:
        model.layers[0].mlp.down_proj.weight.grad[:, 20:28] *= 2

    (found,) = findings(change)
    assert "differs between them in the sums 20 to 27 of 64 by" in found.sentence


def test_a_parameter_without_a_gradient_is_told() -> None:
    def lose(step: int, model: Any) -> None:
        model.layers[0].norm2.weight.grad = None

    found = findings(lose)
    assert found
    assert "gradient of layers.0.norm2.weight is 0" in found[0].sentence


def _clipped_one_by_one(step: int, model: Any) -> None:
    for each in model.parameters():
        nn.utils.clip_grad_norm_([each], 0.01)


def _clipped_by_value(step: int, model: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [(_clipped_one_by_one, "a factor of its own"), (_clipped_by_value, "clipping by value")],
)
def test_what_changes_all_gradients_is_said_once(change: Callable[[int, Any], None], said: str) -> None:
    (found,) = findings(change)
    assert found.site is None
    assert said in found.sentence
    assert findings(change, before_clipping=True) == []


def _freeze(model: Any) -> None:
    model.layers[1].mlp.up_proj.weight.requires_grad_(False)


def _nan(step: int, model: Any) -> None:
    model.layers[1].mlp.up_proj.weight.grad.fill_(torch.nan)


def _decay(step: int, model: Any) -> None:
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight.mul_(0.9)


@pytest.mark.parametrize(
    "how", [{"prepare": _freeze}, {"fault": _nan}, {"fault": _decay}], ids=["frozen", "not finite", "changed"]
)
def test_what_says_nothing_is_not_judged(how: dict[str, Any]) -> None:
    taken = snapshots(steps=1, **how)
    assert judge(taken, rules=[identity]) == []
    assert len(compare(Step(taken[0], SiteIds()))) == 9  # the norm's, and that of up and down, are left out


def test_gradients_that_cancel_are_silent() -> None:
    """All data in each batch, and labels that contradict each other: sums vanish, their roundings do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    x, y = torch.randn(64, 8).repeat(2, 1), torch.tensor([0] * 64 + [1] * 64)
    found = hookstats.find_identities(model, lambda: model(x))
    options = hookstats.Options(identities=found, strict=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    taken = train(model, lambda step: F.cross_entropy(model(x), y), optimizer, 400, every=10, options=options)
    assert judge(taken, rules=[identity]) == []
    assert len(compare(Step(taken[-1], SiteIds()))) == 1


def test_a_recording_judges_and_says_so_and_can_be_told_not_to(tmp_path: Path) -> None:
    def run(path: Path, **options: Any) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        x = torch.randn(64, 8)
        found = hookstats.find_identities(model, lambda: model(x))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with hookstats.attach(
            model,
            every=1,
            sinks=hookstats.record(path, on_finding=None),
            options=hookstats.Options(identities=found, **options),
        ) as monitor:
            for _ in range(4):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                model[2].weight.grad *= 2
                optimizer.step()
                monitor.step()
            return [each for each in monitor.check() if each.rule == "identity"], monitor.laws()["identity"]

    (found,), law = run(tmp_path / "a")
    assert "2.weight looks 2 times" in found.sentence
    assert (law.is_applied, law.where) == (True, "32 sums of 1 identities")
    assert run(tmp_path / "b", laws={"identity": False})[0] == []
    assert [each.sentence for each in judge(hookstats.load(tmp_path / "a"), rules=[identity])] == [found.sentence]


def test_other_things_than_identities_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Options.identities: expected what hookstats.find_identities returns"):
        hookstats.Options(identities=["a"])
    with pytest.raises(ValueError, match=r"has no parameter 'layers"):
        hookstats.attach(nn.Linear(2, 2), options=hookstats.Options(identities=proved()))


def test_compiled_blocks_under_autocast_are_judged() -> None:
    def compiled(model: Any) -> None:
        for each in model.layers:
            each.compile(backend="aot_eager")

    name = "layers.0.mlp.up_proj.weight"
    taken = snapshots(times(name, 2.0, begin=2), autocast=True, prepare=compiled)
    z = [max(float(each.z.max()) for each in compare(Step(step, SiteIds()))) for step in taken]
    assert max(z[:2]) < 4
    found = judge(taken, rules=[identity])
    assert {each.step for each in found} == {2}
    assert all(name in each.sentence for each in found)


class Normed(nn.Module):
    """Queries and keys that leave their norms in float32, before products that autocast takes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = RMSNorm(16), RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.q_norm(self.q(x).float()) @ self.k_norm(self.k(x).float()).transpose(-1, -2)
        out: torch.Tensor = self.out(logits.softmax(-1).to(x.dtype) @ self.v(x))
        return out


def test_what_autocast_takes_between_modules_is_judged_by_its_precision() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(4, 24, 16)
    found = hookstats.find_identities(model, lambda: model(x))
    assert any("q_norm.weight" in each.parameters and each.kind == "pair" for each in found.identities)

    def loss_of(step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        return y.float().square().mean()

    options = hookstats.Options(identities=found)
    taken = train(model, loss_of, torch.optim.SGD(model.parameters(), 1e-2), 3, options=options)
    assert judge(taken, rules=[identity]) == []
    assert max(float(each.z.max()) for step in taken for each in compare(Step(step, SiteIds()))) < 4


@pytest.mark.parametrize("kind", [each for each in illnesses.KINDS if each != "lstm"])  # which has no identity
def test_healthy_trainings_of_the_fleet_are_silent(kind: str) -> None:
    setup, taken = illnesses.HEALTHY[f"as_it_is.{kind}"].make(), list[hookstats.Snapshot]()
    given, _ = setup.data(0)
    found = hookstats.find_identities(setup.model, lambda: setup.model(given))
    options = hookstats.Options(identities=found, strict=True)
    with hookstats.attach(setup.model, every=1, sinks=taken.append, options=options) as monitor:
        for number in range(25):
            monitor.step(loss=setup.step(number))
    judged = [each for step in taken for each in compare(Step(step, SiteIds()))]
    assert len(judged) == 25 * len(found)
    assert (len(found) > 0) == (kind != "tanh")
    assert judge(taken, rules=[identity]) == []
