"""Tensors that could not be measured and are left out, each counted, and sites that can never be measured."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TypeAlias

import torch

from hookstats._warn import warn
from hookstats.numbers.fields import Site, Skipped


class InsideCapture(Exception):
    """Memory that is made meanwhile would be the graph's own, cleared in every replay, or end the capture."""

    def __str__(self) -> str:
        return (
            "a CUDA graph captures its first tensor, or one of another width, and perhaps others' too: run one eager "
            "forward and backward that is measured before the capture"
        )


_OF_MANY_SITES = (str(InsideCapture()), "the device had failed before")  # told of the first alone


Problem: TypeAlias = str | Exception  # why something could not be measured


def say_reason(problem: Problem) -> str:
    """Return a reason in words."""
    if isinstance(problem, torch.AcceleratorError):
        return f"the device had failed before, in any kernel of this process: {str(problem).splitlines()[0]}"
    if isinstance(problem, InsideCapture | str):
        return str(problem).removeprefix("hookstats: ")
    return f"{type(problem).__name__}: {problem}"


class Skipping:
    """Leaves out a tensor that cannot be measured, and gives up a site that can never be."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._lock = threading.Lock()
        self._told: set[Site] = set()
        self._told_of_many: set[str] = set()
        self._to_tell: dict[str, tuple[str, list[Site]]] = {}  # by reason: the first problem, and all sites
        self._open: dict[Site, Skipped] = {}  # of the open step
        self._earlier: dict[Site, Skipped] = {}  # of the steps before
        self._given_up: dict[Site, Skipped] = {}

    def leave_out(self, sites: Iterable[Site], problem: Problem, times: int = 1, reason: str | None = None) -> None:
        """Counts, and warns of each site once; of _OF_MANY_SITES, of the first alone. RuntimeError under strict.

        reason: in common with others, which `warn_common` tells of together.
        """
        sites, problem = list(sites), say_reason(problem)
        if self._strict:
            raise RuntimeError(f"hookstats: {_list_sites(sites)} cannot be measured: {problem}")
        with self._lock:
            new = [site for site in sites if site not in self._told]
            self._told.update(sites)
            _add(self._open, {site: Skipped(problem, times) for site in sites})
            of_many = {each for each in _OF_MANY_SITES if each in problem}
            is_news = bool(new) and not of_many & self._told_of_many
            self._told_of_many |= of_many
            if reason is not None:
                self._to_tell.setdefault(reason, (problem, []))[1].extend(sites)
        if is_news and reason is None:
            warn(f"not measured: {_list_sites(new)}: {problem}")

    def give_up(self, sites: Iterable[Site], problem: Problem, reason: str | None = None) -> None:
        """Give up sites that can never be measured. reason: see `leave_out`."""
        sites = list(sites)
        self.leave_out(sites, problem, reason=reason)
        with self._lock:
            self._given_up.update(dict.fromkeys(sites, Skipped(say_reason(problem), None)))

    def warn_common(self) -> None:
        """Warn once for each reason that sites have in common, at the end of the first step in which it came."""
        with self._lock:
            found = [told for reason, told in self._to_tell.items() if reason not in self._told_of_many]
            self._told_of_many.update(self._to_tell)
            self._to_tell = {}
        for problem, sites in found:
            listed = _list_sites(sites) if len(sites) < 3 else f"{sites[0]} and {len(sites) - 1} more sites"
            warn(f"not measured: {listed}: {problem}")

    def take(self) -> dict[Site, Skipped]:
        """Take what the open step left out, which begins anew."""
        with self._lock:
            left_out, self._open = self._open, {}
            _add(self._earlier, left_out)
        return left_out

    def list_step(self, left_out: dict[Site, Skipped] | None = None) -> dict[Site, Skipped]:
        """Return what was left out of a step, for its snapshot; None: of the open one."""
        with self._lock:
            return (self._open if left_out is None else left_out) | self._given_up

    def list_all(self) -> dict[Site, Skipped]:
        """Return what was left out in all steps, the open one too."""
        with self._lock:
            everything = dict(self._earlier)
            _add(everything, self._open)
            return everything | self._given_up


def _add(to: dict[Site, Skipped], more: dict[Site, Skipped]) -> None:
    for site, skipped in more.items():
        before = to.get(site)
        times = (skipped.times or 0) + ((before.times or 0) if before else 0)
        to[site] = Skipped(skipped.reason, times)


def _list_sites(sites: list[Site]) -> str:
    return " and ".join(map(str, sites))
