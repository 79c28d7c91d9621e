"""Tests of a judging sink's input, and of what a monitor does with its findings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import FindingError, Snapshot
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.given import Given
from tests.plain import hearing


@dataclass
class Found:
    severity: str
    sentence: str = "too large"
    is_news: bool = True
    because: str | None = None

    def __str__(self) -> str:
        return f"{self.severity}: {self.sentence}"


class Recorder:
    """Finds what `finds` says of the steps that it has taken, as soon as it is asked."""

    every_rank, has_rules = False, True

    def __init__(
        self, finds: Callable[[int], list[Found]] = lambda step: [], on_finding: Any = "log", escalate: int = 0
    ) -> None:
        self.finds = finds
        self.on_finding = on_finding
        self.escalate = escalate
        self.settings: dict[str, Any] = {}
        self.taken: list[StepFrame] = []
        self.given: list[Given] = []
        self.waited: list[float] = []
        self.closed = 0
        self._told = 0

    def begin(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def take(self, frame: StepFrame) -> None:
        self.taken.append(frame)

    def take_early(self, given: Given) -> None:
        pass

    def at_exit(self, send: Callable[[], object]) -> None:
        pass

    def take_given(self, given: Given) -> None:
        self.given.append(given)

    def findings(self) -> list[Found]:
        new = [found for frame in self.taken[self._told :] for found in self.finds(frame.step)]
        self._told = len(self.taken)
        return new

    def wait(self, timeout: float) -> None:
        self.waited.append(timeout)

    def close(self, overhead: Mapping[str, float], error: BaseException | None) -> None:
        self.closed += 1
        self.error = error
        self.overhead = dict(overhead)


class Half(nn.Module):
    """A model whose three layers include one without a gradient and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.cut, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x) + self.cut(x).detach()
        return out


@pytest.mark.parametrize("has_rules", [True, False])
def test_what_gets_no_gradient_is_said_by_the_rules_where_there_are_some(has_rules: bool) -> None:
    net, recorder = Half(), Recorder()
    recorder.has_rules = has_rules
    monitor = hookstats.attach(net, every=1, sinks=recorder)
    with hearing() as told:
        train(net, monitor, 4)
    (silence,) = [text for text in told if "nothing came from" in text]
    assert "idle output" in silence
    assert ("cut grad_output" in silence) != has_rules
    monitor.detach()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(net: nn.Module, monitor: hookstats.Monitor, steps: int) -> list[int]:
    """The steps that were measured."""
    numbers = []
    for _ in range(steps):
        net(torch.randn(3, 4)).sum().backward()
        snapshot = monitor.step(loss=1.0)
        if snapshot is not None:
            numbers.append(snapshot.step)
    return numbers


def critical_at(*steps: int) -> Callable[[int], list[Found]]:
    return lambda step: [Found("critical", f"found in {step}")] if step in steps else []


def test_a_recorder_is_given_each_step_as_it_left_the_device_and_sinks_its_snapshot() -> None:
    recorder, snapshots, net = Recorder(), list[Snapshot](), model()
    with hookstats.attach(net, every=2, sinks=[recorder, snapshots.append]) as monitor:
        train(net, monitor, 5)
    assert [frame.step for frame in recorder.taken] == [0, 2, 4] == [snapshot.step for snapshot in snapshots]
    assert all(Snapshot(d).equals(s) for d, s in zip(recorder.taken, snapshots, strict=True))
    assert recorder.closed == 1
    assert recorder.overhead["measured_step"] > recorder.overhead["measured_host"] > 0
    assert {"rank", "world_size", "model", "every", "torch"} <= set(recorder.settings)
    assert (recorder.settings["rank"], recorder.settings["model"], recorder.settings["every"]) == (0, "Sequential", 2)


def test_findings_are_collected_and_told(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    recorder = Recorder(lambda step: [Found("note", "a note")] if step == 0 else [Found("warning", "a warning")])
    with caplog.at_level(logging.INFO, "hookstats"), hookstats.attach(net, every=1, sinks=recorder) as monitor:
        caplog.clear()
        train(net, monitor, 2)
        assert [found.sentence for found in monitor.findings] == ["a note", "a warning"]
        assert [(each.levelname, each.message) for each in caplog.records] == [
            ("INFO", "note: a note"),
            ("WARNING", "warning: a warning"),
        ]


def test_notes_are_summed_up_every_1000_steps_and_at_the_end_where_they_are_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = Recorder(lambda step: [Found("note", f"of step {step}")] if step in (200, 600, 1200) else [])
    net = model()
    with caplog.at_level(logging.WARNING, "hookstats"), hookstats.attach(net, every=200, sinks=notes) as monitor:
        train(net, monitor, 1100)
        first = [record.getMessage() for record in caplog.records]
        train(net, monitor, 200)
    assert first == ["2 new notes in monitor.findings, such as: note: of step 200"]
    said = [(record.levelno, record.getMessage()) for record in caplog.records[1:]]
    assert said == [(logging.WARNING, "a new note in monitor.findings, such as: note: of step 1200")]


def test_raise_ends_training_for_what_is_critical_and_for_nothing_else() -> None:
    net = model()
    finds = lambda step: [Found("critical" if step == 2 else "warning", f"found in {step}")]  # noqa: E731
    monitor = hookstats.attach(net, every=1, sinks=Recorder(finds, on_finding="raise"))
    train(net, monitor, 2)
    with pytest.raises(FindingError, match=r"^critical: found in 2$") as caught:
        train(net, monitor, 1)
    assert [found.severity for found in caught.value.findings] == ["critical"]
    assert len(monitor.findings) == 3
    train(net, monitor, 1)  # it goes on if it is caught
    monitor.detach()


def test_a_callable_is_called_with_each_finding_and_may_fail() -> None:
    net, seen = model(), list[str]()

    def fail(finding: Found) -> None:
        seen.append(finding.sentence)
        raise KeyError(finding.sentence)

    monitor = hookstats.attach(net, every=1, sinks=Recorder(critical_at(0, 1), on_finding=fail))
    with pytest.warns(UserWarning, match="on_finding=.* failed: KeyError"):
        train(net, monitor, 2)
    assert seen == ["found in 0", "found in 1"]
    strict = hookstats.attach(
        net, every=1, sinks=Recorder(critical_at(0), on_finding=fail), options=hookstats.Options(strict=True)
    )
    with pytest.raises(KeyError):
        train(net, strict, 1)


def test_a_finding_makes_the_next_steps_measured_with_channels() -> None:
    net, snapshots = model(), list[Snapshot]()
    recorder = Recorder(critical_at(0, 8), on_finding=None, escalate=3)
    with hookstats.attach(
        net, every=4, channels=hookstats.Channels(every=100), sinks=[recorder, snapshots.append]
    ) as monitor:
        train(net, monitor, 14)
    with_channels = [s.step for s in snapshots if s["0", "output"].channels is not None]
    assert [snapshot.step for snapshot in snapshots] == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert with_channels == [0, 1, 2, 3, 9, 10, 11]
    assert all((s["0", "output"].histogram is not None) == (s.step in with_channels) for s in snapshots)


def test_a_note_makes_no_further_steps_measured() -> None:
    net, recorder = model(), Recorder(lambda step: [Found("note")], escalate=3)
    with hookstats.attach(net, every=4, sinks=recorder) as monitor:
        assert train(net, monitor, 9) == [0, 4, 8]


def test_escalation_compiles_no_program_anew() -> None:
    net, recorder = torch.compile(model(), backend="aot_eager"), Recorder(critical_at(2), escalate=3)
    torch._dynamo.reset()
    with hookstats.attach(net, every=2, channels=hookstats.Channels(every=2), sinks=recorder) as monitor:
        train(net, monitor, 2)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert train(net, monitor, 6) == [2, 3, 4, 5, 6]


def test_check_waits_for_the_verdict_on_all_closed_steps() -> None:
    net, recorder = model(), Recorder(critical_at(1), on_finding="raise")
    monitor = hookstats.attach(net, every=1, sinks=recorder)
    train(net, monitor, 1)
    assert monitor.check(timeout=7) == []
    assert 6 < recorder.waited[0] <= 7  # what other ranks have left of it
    with pytest.raises(FindingError):
        train(net, monitor, 1)
    assert [found.sentence for found in monitor.check()] == ["found in 1"]
    monitor.detach()
    with pytest.raises(ValueError, match="expected a sink that judges"):
        hookstats.attach(net).check()


def test_what_is_found_when_it_is_closed_is_told_at_detach() -> None:
    net, seen = model(), list[Found]()

    class Late(Recorder):
        def findings(self) -> list[Found]:
            return [Found("warning")] if self.closed and not seen else []

    monitor = hookstats.attach(net, sinks=Late(on_finding=seen.append))
    train(net, monitor, 1)
    assert not seen
    monitor.detach()
    assert len(seen) == 1


def test_a_recorder_that_fails_does_not_disturb_training() -> None:
    net, snapshots = model(), list[Snapshot]()

    class Bad(Recorder):
        def take(self, frame: StepFrame) -> None:
            raise OSError("no disk")

        def close(self, overhead: Mapping[str, float], error: BaseException | None) -> None:
            raise OSError("no disk at the end")

    monitor = hookstats.attach(net, every=1, sinks=[Bad(), snapshots.append])
    with pytest.warns(UserWarning, match="no disk"):
        train(net, monitor, 2)
    with pytest.warns(UserWarning, match="could not be closed.*no disk at the end"):
        monitor.detach()
    assert len(snapshots) == 2


def test_what_cannot_begin_raises_at_attach_and_leaves_no_hook() -> None:
    net = model()

    class Bad(Recorder):
        def begin(self, settings: dict[str, Any]) -> None:
            raise PermissionError("a read-only disk")

    with pytest.raises(PermissionError):
        hookstats.attach(net, sinks=Bad())
    assert not any(module._forward_hooks for module in net.modules())


def test_of_several_recordings_each_acts_on_its_own_findings(caplog: pytest.LogCaptureFixture) -> None:
    net, seen = model(), list[str]()
    told = Recorder(critical_at(0), on_finding=lambda finding: seen.append(finding.sentence))
    silent = Recorder(critical_at(1), on_finding=None, escalate=2)
    raising = Recorder(critical_at(4), on_finding="raise")
    with hookstats.attach(net, every=lambda step: step < 2 or step == 4, sinks=[told, silent, raising]) as monitor:
        assert train(net, monitor, 4) == [0, 1, 2, 3]  # escalated behind step 1 alone
        assert seen == ["found in 0"]
        assert [each.getMessage() for each in caplog.records if each.levelno > logging.INFO] == []
        with pytest.raises(FindingError, match="found in 4"):
            train(net, monitor, 1)
        assert [finding.sentence for finding in monitor.findings] == ["found in 0", "found in 1", "found in 4"]


def test_what_follows_from_a_finding_is_kept_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Sink:
        def __init__(self) -> None:
            self.told: list[str] = []

        def __call__(self, snapshot: hookstats.Snapshot) -> None:
            pass

        def finding(self, finding: Found) -> None:
            self.told.append(finding.sentence)

    both = [Found("warning", "the cause"), Found("warning", "the effect", is_news=False)]
    net, sink, seen = model(), Sink(), list[str]()
    logging_one = Recorder(lambda step: both if step == 0 else [])
    calling = Recorder(lambda step: both if step == 1 else [], on_finding=lambda each: seen.append(each.sentence))
    with caplog.at_level(logging.INFO), hookstats.attach(net, every=1, sinks=[logging_one, calling, sink]) as monitor:
        train(net, monitor, 4)
        assert [each.sentence for each in monitor.findings] == 2 * ["the cause", "the effect"]
    assert sink.told == 2 * ["the cause"]
    assert seen == ["the cause"]
    said = [(each.levelname, each.getMessage()) for each in caplog.records if "the " in each.getMessage()]
    assert said == [("WARNING", "warning: the cause"), ("INFO", "warning: the effect")]
