"""The interface that watch has to this room: a monitor gives its steps, and gets them merged."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookstats._warn import warn
from hookstats.cluster.exchange import Exchange
from hookstats.cluster.groups import check_placements, find_group
from hookstats.cluster.merging import Merging
from hookstats.cluster.placements import Placements, is_comparable
from hookstats.cluster.union import Placing, Tables, whole
from hookstats.modules.sharding import LocalShard
from hookstats.numbers.fields import Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.ranks import StepRanks


class Joined:
    """The ranks of a process group, this one among them. Its methods return at once, but `wait` and `close`."""

    def __init__(
        self,
        model: nn.Module,
        process_group: Any,
        placements: Any,
        names: Iterable[str],
        spread: bool,
        budget: int,
        timeout: float,
    ) -> None:
        """names: of the watched modules and parameters. spread: whether the ranks' extremes are wanted.

        budget: bytes that all ranks' sites together may take on each rank. timeout: seconds, for ranks that are late.
        TypeError, ValueError where process_group or placements are not as `hookstats.attach` has them.
        """
        group = find_group(process_group)
        wanted = check_placements(placements, group, names)
        rank = dist.get_rank()
        self._merging = Merging(group.ranks, Tables(budget, spread), timeout)
        self._placements = partial(Placements, group=group, wanted=wanted)
        self._model = weakref.ref(model)
        self._replicated = [weakref.ref(each) for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self._placing: tuple[Any, Any, Placing] = None, None, whole  # and what it was made of
        weakref.finalize(self, self._merging.give_up).atexit = False  # where nobody detaches the monitor, nor holds it
        self._arrived: list[StepFrame] = []
        self._exchange = partial(Exchange, "agreeing", group.ranks, timeout)
        self.ranks = StepRanks((rank,), len(group.ranks))
        self.is_first = rank == min(group.ranks)

    def submit(self, frame: StepFrame, held: dict[Site, LocalShard]) -> None:
        """Merge a step. held: what this rank has of each site; the same object while nothing of it has changed."""
        try:
            there = (each for each in (ref() for ref in self._replicated) if each is not None)
            replicated = {each: is_comparable(each) for each in there}
            if self._placing[0] is not held or self._placing[1] != replicated:
                placing = self._placements(self._model() or nn.Module(), held=held, replicated=replicated)
                self._placing = held, replicated, placing
        except Exception as error:  # the groups of the model were destroyed, say
            self._merging.submit(frame, problem=repr(error))
        else:
            self._merging.submit(frame, self._placing[2])

    def take_arrived(self) -> list[StepFrame]:
        """Return the steps of all ranks together, or of this one alone, in the order of their submission; each once."""
        arrived, self._arrived = [*self._arrived, *self._merging.take_arrived()], []
        return arrived

    def largest(self, numbers: list[float]) -> list[float]:
        """Return the largest of each number over all ranks, which wait for each other; its own where one is gone."""
        try:
            found: list[float] = self._exchange().max(np.array(numbers)).tolist()
        except (RuntimeError, TimeoutError) as error:
            warn(f"the ranks could not agree on what measuring costs, each goes by its own times: {error!r}")
            return numbers
        return found

    def wait(self, timeout: float) -> None:
        """Wait until all that was submitted has arrived, or `timeout` seconds have passed."""
        self._arrived += self._merging.wait(timeout)

    def close(self) -> None:
        """End merging: steps that are not merged by now are this rank's own."""
        self._arrived += self._merging.close()
