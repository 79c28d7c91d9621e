"""The shared part of trainers' callbacks: attached while a trainer trains, one step for each of its own.

A monitor is paused whenever the trainer is not in a batch, so that evaluation, sanity checks and what other callbacks
run are left out.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

import hookstats
from hookstats import Monitor, Options, Ranks


class Attached:
    """Attaches hookstats to the model that a trainer trains.

    monitor: what `hookstats.attach` returned for the latest training; it can be asked for findings behind it, too.
    """

    def __init__(self, modules: Any = None, *, before_clipping: bool = False, **settings: Any) -> None:
        """Attaches nothing before training begins.

        Args:
            modules: as for `hookstats.attach`.
            before_clipping: parameters' gradients as they are before they are clipped; by default they are read as the
                optimizer gets them.
            settings: the other arguments of `hookstats.attach`, by name. Of its options, ``training_only`` is True
                where it is not given. ``process_group="world"``: all processes of
                the trainer, whose group is not there yet when a callback is made; likewise ``Ranks("world", ...)``.

        Raises:
            TypeError: for an argument that `hookstats.attach` does not have. What `hookstats.attach` raises comes when
                training begins.
        """
        inspect.signature(hookstats.attach).bind(None, modules, **settings)
        self.monitor: Monitor | None = None
        self._settings = settings | {"modules": modules}
        self._before_clipping = before_clipping
        self._is_attached = False
        self._scalars: dict[str, Any] = {}  # of the open step

    def __getstate__(self) -> dict[str, Any]:
        """A copy has attached nothing yet: the hooks, and who looks after them, stay with this one."""
        return self.__dict__ | {"monitor": None, "_is_attached": False, "_scalars": {}}

    def _attach(self, model: Any) -> None:
        """Attach; nothing is measured before the first batch."""
        settings = {"options": Options()} | self._settings
        options = settings["options"]
        if isinstance(options, Options):  # else attach says what it expected
            training_only = True if options.training_only is None else options.training_only
            settings["options"] = replace(options, training_only=training_only)
        ranks = settings.get("process_group")
        if ranks == "world":
            settings["process_group"] = _world()
        elif isinstance(ranks, Ranks) and ranks.group == "world":
            world = _world()
            settings["process_group"] = None if world is None else replace(ranks, group=world)
        self.monitor = hookstats.attach(model, **settings)
        self.monitor.pause()
        self._is_attached = True
        self._scalars = {}

    def _begin_batch(self) -> None:
        if self.monitor is not None:
            self.monitor.resume()

    def _end_batch(self) -> None:
        if self.monitor is not None:
            self.monitor.pause()

    def _add_loss(self, loss: Any) -> None:
        """Adds a microbatch's, as backward gets it: the sum is the loss of the step. It stays on its device."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = loss.detach()
            self._scalars["loss"] = self._scalars["loss"] + loss if "loss" in self._scalars else loss

    def _note_learning_rate(self, optimizer: Any) -> None:
        """Takes the first group's of the first optimizer that steps: schedulers change it before the step is closed."""
        groups = getattr(optimizer, "param_groups", None)
        rate = groups[0].get("lr") if groups else None
        if rate is not None and "lr" not in self._scalars:
            self._scalars["lr"] = rate.detach().clone() if isinstance(rate, torch.Tensor) else rate

    def _close_step(self, number: int) -> None:
        given, self._scalars = self._scalars, {}
        if self.monitor is not None:
            self.monitor.step(number, **{name: given[name] for name in ("loss", "lr") if name in given})

    def _detach(self, error: BaseException | None = None) -> None:
        """error: what training ended with. The trainer raises it; nothing that comes of detaching is to take its place.

        A recording says then of what training died.
        """
        if not self._is_attached or self.monitor is None:
            return
        self._is_attached = False
        if error is None:
            self.monitor.detach()
        else:
            with suppress(Exception):
                self.monitor.__exit__(type(error), error, None)


def _world() -> Any:
    """The group of all processes; None where there is one alone."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if is_distributed else None
