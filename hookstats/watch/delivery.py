"""Closed steps on their way from the device to `Monitor.step` and to the sinks: each once, and in order.

With a process group, by way of the other ranks: what arrives then is all ranks' together, or this one's own, marked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from hookstats.numbers.fields import Site, Skipped
from hookstats.numbers.frame import Mask, StepFrame
from hookstats.numbers.given import Given
from hookstats.numbers.kinds import is_of_kind, is_of_module, kind_of
from hookstats.numbers.ranks import StepRanks
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.arguments import Sink
from hookstats.watch.binding import SiteBinder
from hookstats.watch.drain import Drain, Held, Pending, PendingScalars
from hookstats.watch.judging import Recorder
from hookstats.watch.memory import StateStore
from hookstats.watch.scalars import Kept, Scalars

if TYPE_CHECKING:  # it takes its time, and not everybody has ranks
    from hookstats.cluster.joining import Joined

_SILENT_STEPS = 3  # measured ones, after which a site that never fired is named
LeftOut: TypeAlias = dict[Site, Skipped]  # in one step


class Delivery:
    """Delivery of steps. A failure is said once, or raised when everybody has got the step."""

    def __init__(
        self,
        store: StateStore,
        binder: SiteBinder,
        sinks: tuple[Sink, ...],
        trained: frozenset[str],
        ranks: StepRanks,
        joined: Joined | None,
    ) -> None:
        """trained: the watched modules that hold parameters which require grad. ranks: this one."""
        self.last: Snapshot | None = None  # of this rank
        self.latest: StepFrame | None = None  # of all ranks that are together
        self._store = store
        self._binder = binder
        self._drain = Drain(store, ranks)
        self._joined = joined
        is_first = joined is None or joined.is_first
        self.sinks = [sink for sink in sinks if not isinstance(sink, Recorder)] if is_first else []
        recorders = [sink for sink in sinks if isinstance(sink, Recorder)]
        self._own = [sink for sink in recorders if sink.every_rank and joined is not None]
        self._of_all = [sink for sink in recorders if sink not in self._own] if is_first else []
        self.recorders = [*self._own, *self._of_all]
        for recorder in self.recorders:
            recorder.at_exit(self.send_left)
        self._trained = trained
        self._kept = Kept()  # scalars that were not sent
        self._pending: deque[tuple[PendingScalars, LeftOut]] = deque()  # on their way
        self._finished: deque[Snapshot] = deque()  # arrived, not yet fetched
        self._failure: BaseException | None = None
        self._fired: set[Site] = set()
        self._early: list[Site] = []  # of the first delivery
        self._deliveries = 0
        self._evaluated = 0  # measured steps in a row in which a model was trained in evaluation mode
        self._evaluated_since = 0

    def sites(self) -> list[Site]:
        """The watched ones, those in containers as soon as they have been seen; not those given up."""
        return [entry.site for entry in self._store.entries if not (entry.is_container or entry.given_up)]

    def send(self, step: int, scalars: Scalars, totals_only: bool) -> None:
        """Empties the state, whose numbers are those of this step."""
        if self._joined is not None:  # whose part of the step may never come
            self._send_early(step, scalars)
        try:
            left_out = self._binder.skipping.take()
            self._pending.append(
                (self._drain.begin(self._take_scalars(step, scalars), totals_only=totals_only), left_out)
            )
        except Exception as error:  # no memory for the copy, say
            if self._store.strict:
                raise
            self._store.clear()
            self._binder.warn_once("close", f"step {step} was measured, but could not be copied: {error!r}")

    def keep(self, step: int, scalars: Scalars) -> None:
        """Keep scalars of a step that is not measured: they leave with the next measured one, or when they are many."""
        try:
            self._kept.add(step, scalars)
        except Exception as error:  # no memory for the copy, say
            if self._store.strict:
                raise
            self._binder.warn_once("scalars", f"scalars of step {step} could not be copied: {error!r}")
        if self._kept.is_full:
            self.send_scalars()
        else:
            self._send_early(step, scalars)

    def _send_early(self, step: int, scalars: Scalars) -> None:
        """Give scalars to the recorders, should the process be killed, if they are here already."""
        if scalars.names and not scalars.tensors:
            named = dict(zip(scalars.names, scalars.numbers, strict=False))  # without those of a scaler
            given = Given({step: named}, {})
            self._present([(each, each.take_early, given) for each in self.recorders])

    def send_scalars(self) -> None:
        """Send the kept scalars to the recorders, without a measured step."""
        kept, self._kept = self._kept, Kept()
        if not kept.rows:
            return
        try:
            self._pending.append((self._drain.begin_scalars(kept), {}))
        except Exception as error:
            if self._store.strict:
                raise
            self._binder.warn_once("scalars", f"scalars of {len(kept.rows)} steps could not be copied: {error!r}")

    def send_left(self) -> None:
        """Send scalars that no measured step has brought."""
        self.send_scalars()
        self.receive(wait=True)

    def _take_scalars(self, step: int, scalars: Scalars) -> Kept:
        kept, self._kept = self._kept, Kept()
        kept.add(step, scalars)
        return kept

    def receive(self, wait: bool) -> None:
        """Delivers what has arrived; or all that this rank has measured, and waits for the device."""
        while self._pending:
            pending, left_out = self._pending[0]
            if not (wait or pending.ready()):
                break
            self._pending.popleft()
            if isinstance(pending, Pending):
                self._finish_step(pending, left_out)
            else:
                self._finish_scalars(pending)
        self._give_joined()

    def wait_for_ranks(self, seconds: float) -> None:
        """Delivers what was received and other ranks still have to bring their part of, as far as they do in time."""
        if self._joined is not None:
            self._joined.wait(seconds)
        self._give_joined()

    def close(self) -> None:
        """Close: nothing is sent any more, and all has been received."""
        if self._joined is not None:
            self._joined.close()
        self._give_joined()

    def _give_joined(self) -> None:
        for frame in () if self._joined is None else self._joined.take_arrived():
            try:
                self._give(frame.drop_hidden())
            except Exception as error:
                self._report_failure("deliver", f"a step of all ranks could not be delivered: {error!r}", error)

    def fetch(self) -> Snapshot | None:
        """The oldest that has arrived and was not fetched."""
        return self._finished.popleft() if self._finished else None

    def fetch_all(self) -> list[Snapshot]:
        left = list(self._finished)
        self._finished.clear()
        return left

    def read_open_step(self, step: int, scalars: Scalars) -> Snapshot:
        """Return the open step's numbers so far, which stay where they are. Waits."""
        now = self._drain.begin(Kept.of(step, scalars), clear=False).finish().drop_hidden()
        return Snapshot(replace(now, skipped=self._binder.skipping.list_step()))

    def send_last(self, step: int, scalars: Scalars) -> None:
        """Delivers the open step, if it has anything. Waits."""
        self._finish_step(
            self._drain.begin(self._take_scalars(step, scalars)), self._binder.skipping.take(), is_open=True
        )

    def raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _finish_step(self, pending: Pending, left_out: LeftOut, is_open: bool = False) -> None:
        """is_open: nobody has closed the step, which is delivered for what it has."""
        try:
            frame = pending.finish()
        except Exception as error:
            return self._report_failure("finish", f"a step was measured, but could not be read: {error!r}", error)
        if is_open:
            self._look_for_steps(frame, pending.layout.is_parameter)
        if is_open and not frame.order.size:
            return
        try:
            self._deliver(frame, left_out, pending.held)
        except Exception as error:
            self._report_failure(
                "deliver", f"step {frame.step} was measured, but could not be delivered: {error!r}", error
            )

    def _look_for_steps(self, frame: StepFrame, is_parameter: Mask) -> None:
        """Warn where `Monitor.step` was never called."""
        most = frame.calls[is_parameter].max(initial=0)
        if most > 1 and (self.sinks or self.recorders):
            self._binder.warn_once(
                "unstepped",
                f"monitor.step() was never called: {most} steps of an optimizer are together in step {frame.step}; "
                "call it at the end of each training step",
            )

    def _finish_scalars(self, pending: PendingScalars) -> None:
        try:
            given = pending.read()
        except Exception as error:
            return self._report_failure("finish", f"scalars could not be read: {error!r}", error)
        self._present([(each, each.take_given, given) for each in self.recorders])

    def _deliver(self, frame: StepFrame, left_out: LeftOut, held: Held) -> None:
        visible = frame.drop_hidden()
        self.last = snapshot = Snapshot(visible)
        frame.skipped = visible.skipped = self._binder.skipping.list_step(left_out)
        self._deliveries += 1
        if self._deliveries == 1:
            self._early = self.sites()
        if self._deliveries <= _SILENT_STEPS:
            self._fired.update(snapshot.order)
        if self._deliveries == _SILENT_STEPS:
            self._report_silence()
        self._look_for_evaluation(snapshot)
        if self._joined is None:
            self._give(visible)
        else:
            self._present([(each, each.take, visible) for each in self._own])
            self._joined.submit(frame, held)

    def _give(self, frame: StepFrame) -> None:
        """Give a step to `Monitor.step`, and to the sinks."""
        self.latest = frame
        snapshot = self.last if self.last is not None and self.last.frame is frame else Snapshot(frame)
        self._finished.append(snapshot)
        kept = [(each, each.take, frame) for each in self._of_all]
        self._present([*kept, *((sink, sink, snapshot) for sink in self.sinks)])

    def _present(self, gifts: list[tuple[Any, Callable[[Any], object], Any]]) -> None:
        for sink, give, what in gifts:
            try:
                give(what)
            except BaseException as error:  # a KeyboardInterrupt in one sink is not to keep it from the next
                self._report_failure(("sink", id(sink)), f"the sink {sink!r} failed: {error!r}", error)

    def _report_failure(self, what: Hashable, text: str, error: BaseException) -> None:
        if self._store.strict or not isinstance(error, Exception):
            self._failure = self._failure or error
        else:
            self._binder.warn_once(what, text)

    def _report_silence(self) -> None:
        told = self._fired | self._binder.skipping.list_all().keys()
        silent = [site for site in self._early if site not in told and not self._needs_no_gradient(site)]
        if any(each.has_rules for each in self.recorders):  # of gradients, MissingGradients says it better
            silent = [site for site in silent if "grad" not in site.tensor]
        if silent and self._binder.training.is_evaluating():
            self._binder.warn_once(
                "evaluation",
                f"in {_SILENT_STEPS} measured steps nothing came from {len(silent)} sites: the model is in evaluation "
                "mode, which is not measured: call model.train(), or attach with "
                "options=hookstats.Options(training_only=False)",
            )
        elif silent:
            some = ", ".join(map(str, silent[:5])) + (f" and {len(silent) - 5} more" if len(silent) > 5 else "")
            self._binder.warn_once(
                "silence",
                f"in {_SILENT_STEPS} measured steps nothing came from {some}: a module that is never called as one, an "
                "expert without tokens, an output whose gradient is never used, a parameter that gets none, a view "
                "that was then changed in place, or a tensor inside torch.func",
            )

    def _look_for_evaluation(self, snapshot: Snapshot) -> None:
        """Warn of a model that is trained in evaluation mode, as after a validation that nobody ended."""
        is_left_out = self._binder.training.is_evaluating() and _has_learned(snapshot)
        if not is_left_out or any(is_of_module(site.tensor) for site in snapshot.order):
            self._evaluated = 0
            return
        if not self._evaluated:
            self._evaluated_since = snapshot.step
        self._evaluated += 1
        if self._evaluated == _SILENT_STEPS and any(is_of_module(site.tensor) for site in self._fired):
            self._binder.warn_once(
                "evaluation",
                f"since step {self._evaluated_since} the model has been in evaluation mode, which is not measured: "
                "after a validation call model.train(); if it is to train so, attach with "
                "options=hookstats.Options(training_only=False)",
            )

    def _needs_no_gradient(self, site: Site) -> bool:
        """Return whether no gradient is expected: nothing before it is trained, as far as that is known."""
        kind = kind_of(site.tensor)
        if not (kind.is_gradient and kind.of == "module"):
            return kind.is_part  # `Monitor.laws` says why
        if not kind.is_input:
            if site.name not in self._trained:  # a table of positions, a frozen layer
                return True
            if "." not in site.tensor:
                return False
            # Of what a module returns together some is often used by nobody, such as the last states of an LSTM.
            return any(each.name == site.name and is_of_kind(each.tensor, kind.name) for each in self._fired)
        return any(fired.name == site.name for fired in self._fired)  # of a batch


def _has_learned(snapshot: Snapshot) -> bool:
    """Return whether an optimizer has changed anything, as far as that is watched."""
    sites = [site for site in snapshot.order if kind_of(site.tensor).is_update]
    return any(snapshot[site].total.abs_max > 0 for site in sites)
