"""Monitor: which steps are measured, and when their numbers arrive."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hookstats.modules import order
from hookstats.numbers.fields import Site, Skipped
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.snapshot import Snapshot
from hookstats.watch.arguments import check_number, check_seconds
from hookstats.watch.binding import SiteBinder
from hookstats.watch.budget import Budget
from hookstats.watch.clipping import clip_grad_norm_
from hookstats.watch.delivery import Delivery
from hookstats.watch.flags import is_capturing
from hookstats.watch.judging import Judging
from hookstats.watch.laws import Laws, laws
from hookstats.watch.overhead import Overhead, Stopwatch
from hookstats.watch.parameters import Parameters
from hookstats.watch.sampling import Sampling
from hookstats.watch.scalars import Scalars
from hookstats.watch.scaling import Scaling
from hookstats.watch.taps import Taps

_UNTIMED = nullcontext()
_JOIN_SECONDS = 30.0  # that `Monitor.detach` waits for other ranks


class Monitor:
    """Returned by `attach`: closes steps and returns their numbers. As a context manager, it detaches at the end."""

    def __init__(
        self,
        binder: SiteBinder,
        parameters: Parameters,
        delivery: Delivery,
        scaling: Scaling,
        handles: list[Any],
        device: torch.device,
        *,
        every: int | Callable[[int], bool],
        rows: int,
        budget: float | None,
        agree: Callable[[list[float]], list[float]],
        channels_every: int,
        tap_channels: bool,
        attention: Any,
        routing: Any,
        is_judged: bool,
        declared: Mapping[str, bool],
    ) -> None:
        """Made by `attach`.

        handles: of the hooks on the model. device: where most of the model is. every, rows, budget: as in attach;
        agree: as in `Budget`; channels_every: of which measured steps channels are sent, too. tap_channels: whether
        tapped tensors keep channels.
        attention, routing: `hookstats.language.attention.Attentions` and `.routers.Routers`. is_judged: whether there
        is a recording, if only on another rank. declared: `Options.laws`.
        """
        self._binder = binder
        self._parameters = parameters
        self._delivery = delivery
        self._store = binder.store
        self._handles = handles
        self._scaling = scaling
        self._every = every
        self._sampling = Sampling(binder.store.flags.enabled, rows)
        self._channels_every = channels_every
        self._attention = attention
        self._routing = routing
        self._is_judged = is_judged
        self._declared = declared
        self._judging = Judging(delivery.recorders, delivery.sinks, binder.warn_once, binder.store.strict)
        self._stopwatch = Stopwatch(binder.store.flags, device)
        self._budget = None if budget is None else Budget(budget, self._stopwatch, self._sampling, self.overhead, agree)
        self._closed = 0  # measured steps
        self._taps = Taps(binder, tap_channels)
        self._step = 0
        self._stepped = False  # step() was called
        self._measured = True  # the open step
        self._pauses = 0  # contexts
        self._is_paused = False  # by pause()
        self._set_flags()

    @property
    def sites(self) -> list[Site]:
        """The watched sites. Those in containers are in it once they were seen; those that were given up are not."""
        return self._delivery.sites()

    @property
    def skipped(self) -> dict[Site, Skipped]:
        """The sites whose tensors could not be measured, with the reason and the number of tensors so far."""
        self._binder.collect_failures()
        return self._binder.skipping.list_all()

    @property
    def state_bytes(self) -> int:
        """Device memory that holds statistics, over all devices."""
        return self._store.bytes

    def overhead(self) -> Overhead:
        """The time that hookstats takes in a step, in microseconds, on the host and on the device. Waits for no device.

        The first call runs an empty module about 2000 times, to see what a hook costs.
        """
        every, rows = self._every if isinstance(self._every, int) else math.nan, float(self._sampling.rows)
        if self._budget is not None:
            choice = self._budget.choice
            every, rows = (math.nan, math.nan) if choice is None else (choice.every, float(choice.rows))
        return self._stopwatch.overhead(self._binder.idle_hook(), self._binder.hooks())._replace(every=every, rows=rows)

    def step(self, step: int | None = None, *, sample_ids: Any = None, **scalars: Any) -> Snapshot | None:
        """Closes a training step. Call it after ``optimizer.step()``. Waits for nothing.

        Args:
            step: the number of the step that ends here, if the trainer has its own: an int, larger than the one before.
            sample_ids: integers ``[samples]``, as a list, an array or a tensor on the CPU: the samples of the data set
                that the step was of, those of all microbatches one after another. They are kept with the step
                (`Run.sample_ids`), and findings name them.
            **scalars: numbers or one-element tensors of this step (``loss=loss``), as they are now. Those of a step
                that is not measured arrive with the next measured step (``earlier_scalars``).

        Returns a Snapshot that has arrived, of this or of an earlier measured step, each once and in order; None if
        there is none.

        Raises:
            TypeError, ValueError: for other scalars or numbers of steps. RuntimeError: while a CUDA graph is captured;
                call it after each replay. An exception that a sink raises is raised here after all sinks got the
                Snapshot (an Exception only if ``strict``, otherwise it becomes a warning); the step counts as returned.
        """
        if is_capturing():
            raise RuntimeError(
                "step: expected a call outside of torch.cuda.graph, after the replay: it copies and clears the state, "
                "which would end the capture of a CUDA graph; got a call while one is captured"
            )
        number = self._step if step is None else check_number(step)
        if self._stepped and number < self._step:
            self._binder.warn_once(
                "number",
                f"step: expected a larger number than that of the step before, {self._step - 1}, got {number}: "
                "snapshots have the numbers that were given, and cannot be told apart or sorted by these",
            )
        checked = self._scalars(scalars, sample_ids)
        with self._stopwatch.closing(self._measured) if self._stopwatch.is_timing else _UNTIMED:
            self._end_step(number, checked)
        self._stopwatch.start()
        if self._budget is not None:
            self._budget.end_step(self._stopwatch.last)
        snapshot = self._delivery.fetch()
        self._delivery.raise_failure()
        self._judging.act()
        return snapshot

    def _end_step(self, number: int, checked: Scalars) -> None:
        if self._measured and self._handles:
            self._binder.collect_failures()
            self._parameters.close_step()
            self._binder.skipping.warn_common()
            is_full = self._closed % self._channels_every == 0 or self._judging.is_escalated(self._step)
            self._delivery.send(number, checked, totals_only=not is_full)
            self._closed += 1
            self._sampling.close_step()
        elif (checked.names or checked.sample_ids is not None) and self._handles:
            self._delivery.keep(number, checked)
        self._step = number + 1
        self._stepped = True
        self._binder.training.begin_step()
        self._parameters.begin_step()
        self._begin_step(self._is_due() or self._judging.is_escalated(self._step))
        self._delivery.receive(wait=False)
        self._look()
        if self._sampling.begin_step():  # decides which rows the step that begins reads
            self._binder.ignoring.refresh()
        if self._judging.is_escalated(self._step) and not self._measured:
            self._begin_step(True)

    def _look(self) -> None:
        """Takes what has been found."""
        if self._judging.look(self._step):
            self._sampling.read_whole()
            self._parameters.read_whole()

    def _begin_step(self, measured: bool) -> None:
        if measured and not self._measured:
            self._store.clear_gpus()
        self._measured = measured
        self._scaling.begin_step(measured)
        self._stopwatch.begin(measured, always=self._budget is not None and self._budget.times)
        if measured:
            self._attention.begin_step()
        self._set_flags()

    def _scalars(self, given: dict[str, Any], sample_ids: Any = None) -> Scalars:
        if not self._measured:
            return Scalars(given, None, sample_ids)
        named = self._parameters.scalars(given.get("loss")) | given
        return Scalars(named, self._scaling.marks(), sample_ids)

    def _is_due(self) -> bool:
        if self._budget is not None:
            return self._budget.begin_step()
        if not callable(self._every):
            return self._step % self._every == 0
        try:
            return bool(self._every(self._step))
        except Exception as error:
            if self._store.strict:
                raise
            self._binder.warn_once("every", f"every={self._every!r} failed, the step is not measured: {error!r}")
            return False

    def snapshot(self) -> Snapshot:
        """The open step, with channels; if it is empty, the last measured step. Waits for the device."""
        self._binder.collect_failures()
        if not self._stepped:  # one forward and backward, without steps
            self._parameters.measure()
        now = self._delivery.read_open_step(self._step, self._scalars({}))
        if now.order:
            return now
        self._delivery.receive(wait=True)
        self._delivery.raise_failure()
        return self._delivery.last or now

    @property
    def findings(self) -> list[Any]:
        """The findings of `hookstats.record`'s rules so far, each a `hookstats.results.Finding`."""
        return list(self._judging.findings)

    def check(self, timeout: float = 30.0) -> list[Any]:
        """The findings, after all closed steps were judged. Waits for device and ranks. Call it before a checkpoint.

        Raises:
            TimeoutError: if that takes longer than ``timeout`` seconds. RuntimeError: if a recording has stopped.
            ValueError: if no sink judges. FindingError: with ``record(on_finding="raise")``.
        """
        if not self._is_judged:
            raise ValueError("check: expected a sink that judges, such as sinks=[hookstats.record('runs/a')]; got none")
        end = time.monotonic() + check_seconds("check", timeout)
        self._delivery.receive(wait=True)
        self._delivery.wait_for_ranks(timeout)
        self._judging.wait(end - time.monotonic())
        self._look()
        self._delivery.raise_failure()
        self._judging.act()
        return self.findings

    def recorded(self, timeout: float = 30.0) -> Path:
        """Return where the run is recorded, for `hookstats.load`, when all closed steps are there, within 3 seconds.

        Waits for device and ranks. `hookstats.report.show` asks for it, where it is given a monitor.

        Raises:
            TimeoutError: if that takes longer than ``timeout`` seconds. ValueError: if this process records nothing.
        """
        end = time.monotonic() + check_seconds("recorded", timeout)
        self._delivery.receive(wait=True)
        self._delivery.wait_for_ranks(timeout)
        self._delivery.send_left()
        return self._judging.wait_until_written(end - time.monotonic())

    def laws(self) -> Laws:
        """Return which laws the latest step that has arrived was held against, where, and why others were not.

            print(monitor.laws())

        A law is an equation that holds in every healthy step (see docs/rules.md), checked by the rules of
        `hookstats.record`. ``Options(laws={"bias": False})`` declares one that the model breaks by design.
        """
        kinds = {kind_of(entry.site.tensor).name for entry in self._store.entries}
        kinds |= set() if self._parameters.adjoint is None else {"adjoint"}
        left_out = self._parameters.left_out_of_laws
        return laws(self._delivery.latest, kinds, self._declared, left_out, self._is_judged)

    def measure_gradients(self) -> None:
        """Reads the parameters' gradients now, before they are clipped, instead of when the optimizer steps.

            loss.backward()
            scaler.unscale_(optimizer)  # with a GradScaler: otherwise the gradients are read with its scale
            monitor.measure_gradients()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.step()

        Call it after the last of several backwards: each gradient is read once per measured step. It does nothing
        without ``"param_grad"``, in a step that is not measured, and while the monitor is paused.
        """
        self._parameters.measure_gradients()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_`, which in a measured step does not read the gradients a second time.

            norm = monitor.clip_grad_norm_(model.parameters(), 1.0)  # before optimizer.step(), behind scaler.unscale_

        In a measured step it calls `measure_gradients`, and the norm follows from what that has found, equal to torch's
        to rounding. Waits for nothing. In other steps, and where the norm does not follow (some parameters are not
        watched; a second call in one step), it is torch's function. So it is on several ranks, and for DTensors: a
        rank that does not measure a step would have another norm in the last bit.
        """
        return clip_grad_norm_(self._parameters, parameters, max_norm)

    def tap(self, tensor: torch.Tensor, name: str, channel_dim: int | None = None) -> torch.Tensor:
        """Measures any tensor inside a forward, and its gradient, as if it were the output of a module `name`.

        Returns the tensor itself: ``scores = monitor.tap(q @ k.mT, "scores")``. Its sites are (name, "output") and
        (name, "grad_output"). They are made in the first measured eager forward that calls it; a compiled forward that
        comes earlier is not measured. Tensors of the same name are merged. channel_dim: the dimension of the channels;
        None: by evidence, as for a module whose type does not tell it.

        Raises:
            TypeError: if `tensor` is no tensor, `name` no string, or `channel_dim` neither an int nor None. ValueError:
                if a watched module has that name.
        """
        return self._taps.tap(tensor, name, channel_dim)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        name: str,
        *,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
        """Measures the logits of an attention that no hook sees: of a kernel of one's own, of flash-attn.

            monitor.attention(q, k, "layers.0.attention", is_causal=True)

        Its sites are (name, "attention.max_logit"), ``.entropy``, ``.sink``, ``.bound``, as those of the functions that
        ``tensors=("attention", ...)`` sees by itself. They are made in the first measured eager forward that calls it;
        a compiled forward that comes earlier is not measured. It computes nothing in a step that is not measured, and
        nothing of q and k is kept.

        Args:
            q: ``[batch, heads, queries, width]``, as the product takes it: behind norms and rotary embeddings.
            k: ``[batch, key heads, keys, width]``; each key head belongs to the same number of heads in a row.
            name: of the sites.
            mask: bool, True where a query attends, or added to the logits; it broadcasts to the logits' shape.
            is_causal: query i sees the keys from 0 to i.
            scale: of the product; None: one over the root of the width.

        Raises:
            TypeError, ValueError: in a measured step, for what is no attention: other shapes, dtypes, devices, or the
                name of an attention that is watched already.
        """
        self._attention.measure_by_hand(q, k, name, mask, is_causal, scale)

    def router(
        self,
        name: str,
        *,
        logits: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
        experts: int | None = None,
        top_k: int | None = None,
    ) -> None:
        """Measures a router that ``tensors=("router", ...)`` does not find: of a kernel of one's own, say.

            monitor.router("layers.0.moe", logits=logits, chosen=indices)

        Its sites are (name, "router.entropy"), ``.margin`` and ``.load``, as far as what is given tells them: entropy
        and margin need logits, the load needs the chosen experts, or top_k. They are made in the first measured eager
        forward that calls it; a compiled forward that comes earlier is not measured. It computes nothing in a step that
        is not measured.

        Args:
            name: of the sites.
            logits: ``[..., experts]``, floating, before the softmax.
            chosen: ``[..., top_k]``, integers: the experts that tokens really go to. A number that is no expert's, such
                as -1, says that a token was dropped. None: the top_k largest logits.
            experts: how many there are; None: as many as logits.
            top_k: to how many of them a token goes; None: to as many as are chosen.

        Raises:
            TypeError, ValueError: in a measured step, for tensors of other dtypes, shapes or devices, for more chosen
                experts than there are, for chosen without experts, for other numbers than before, or for the name of a
                router that is watched already.
        """
        self._routing.measure_by_hand(name, logits, chosen, experts, top_k)

    def _set_flags(self) -> None:
        is_paused = not self._handles or self._pauses > 0 or self._is_paused
        self._store.flags.enabled.is_paused = is_paused
        value = self._measured and not is_paused
        if value != self._store.flags.value:
            self._store.flags.value = value
            self._binder.ignoring.refresh()

    def pause(self) -> None:
        """Measures nothing until `resume` is called: for callbacks, which cannot use ``with``."""
        self._is_paused = True
        self._set_flags()

    def resume(self) -> None:
        """Ends `pause`, however often that was called."""
        self._is_paused = False
        self._set_flags()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Measures nothing inside the block: for forwards that belong to no step."""
        self._pauses += 1
        try:
            self._set_flags()
            yield
        finally:
            self._pauses -= 1
            self._set_flags()

    @contextmanager
    def ignore(self, rows: torch.Tensor) -> Iterator[None]:
        """Leaves rows, such as padding, out of all statistics of a forward inside the block, and of its backward.

        rows: a bool tensor, True where a row is left out, such as ``[batch, sequence]``; for a Hugging Face
        attention_mask ``attention_mask == 0``. It applies to every tensor whose first dimensions are those of `rows`,
        and to every tensor whose first dimension holds all rows (``[batch * sequence, ...]``), unless the channels lie
        in one of these dimensions. All other tensors, and parameters, count whole. It applies to the thread that enters
        it; inside another `ignore`, only the inner one applies. With reentrant checkpointing, call backward inside the
        block, too. Rows of sharded tensors are those of this process's part. Waits for nothing. A CUDA graph that
        captures the block reads the rows again in every replay.

        Raises:
            TypeError: if `rows` is no bool tensor. ValueError: if it has no dimension.
        """
        with self._binder.ignoring.ignore(rows):
            yield

    def reset(self) -> None:
        """Discards the measurements of the open step, after a warm-up, for example."""
        self._store.clear()
        self._parameters.reset()
        self._binder.skipping.take()

    def detach(self) -> list[Snapshot]:
        """Removes every hook from the model. Returns the snapshots that `step` has not returned yet; waits for them.

        The measurements of the open step become one of them only if `step` was never called; otherwise that step has
        not ended.
        """
        self._take_hooks_off()
        return self._delivery.fetch_all()

    def _abandon(self, begun: int) -> None:
        """Takes the hooks off where `attach` fails. begun: how many recorders have begun; the others are not ours."""
        del self._delivery.recorders[begun:]
        self._stepped = True  # no step has begun, of which something could be kept
        self._take_hooks_off()

    def _take_hooks_off(self, error: BaseException | None = None) -> None:
        """error: which ended training."""
        for handle in self._handles:
            handle.remove()
        is_whole = bool(self._handles) and not self._stepped
        if is_whole:
            self._parameters.measure()
        self._binder.collect_failures()
        self._binder.skipping.warn_common()
        self._binder.training.forget()
        if self._handles:
            order.make_room_for_graphs()
        self._handles = []
        self._set_flags()
        try:
            self._delivery.send_scalars()
            self._delivery.receive(wait=True)
            if is_whole:
                self._delivery.send_last(self._step, self._scalars({}))
            if error is None:  # else this rank's last step may never come, and waiting for others would only time out
                self._delivery.wait_for_ranks(_JOIN_SECONDS)
            self._delivery.close()
            self._store.clear()
        finally:  # a device that has failed is not to keep what came before from being written
            self._judging.close(self._step, lambda: self.overhead()._asdict(), error)
        self._delivery.raise_failure()
        self._judging.act()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_hooks_off(error)  # what has not been fetched can still be

    def __repr__(self) -> str:
        state = f"step {self._step}" if self._handles else "detached"
        return f"Monitor({len(self.sites)} sites, {self.state_bytes / 2**20:.1f} MB, {state})"
