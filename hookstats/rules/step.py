"""Step: what a rule sees of a measured step, as arrays over all sites that the run has shown so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from inspect import signature
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import FIELDS, Array, Bins, Counts, ExponentBins, Site, Stats, unscale
from hookstats.numbers.frame import Mask as Mask
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.kinds import is_of_kind, is_of_module
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules.finding import MOST_SITES, Finding
from hookstats.rules.formatting import times
from hookstats.rules.history import Losses

_MOST_ALIKE = 16  # kinds of steps that are known at once: with channels and without, in training and in evaluation
_Over = TypeVar("_Over", bound=NDArray[Any])
_Made = TypeVar("_Made")


class StepTotals(Stats[Array]):
    """Statistics of all sites ``[n]``: those that rules ask for are finished at once, the others when they are read."""

    def __init__(self, moments: Array) -> None:
        super().__init__(moments)
        state = self._state
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            squares = state.m2 + state.count * state.mean**2
            found = np.array([state.mean, state.min, state.max, state.abs_sum / state.count, squares / state.count])
            if np.count_nonzero(state.count) < len(state.count):
                found[:, state.count == 0] = np.nan
            names = ("mean", "min", "max", "abs_mean")
            self.__dict__.update(zip(names, found, strict=False), rms=np.sqrt(found[-1]), l2_norm=np.sqrt(squares))


def is_bias(name: str) -> bool:
    """Return whether a parameter is a bias by its name: "0.bias", "attention.in_proj_bias", "lstm.bias_ih_l0"."""
    return "bias" in name.rpartition(".")[2]


class SiteIds:
    """All sites that a run has shown so far: each has an id that stays, its place in ``all``. And its losses."""

    def __init__(self) -> None:
        self.all: list[Site] = []
        self.losses = Losses()
        self.known: dict[Site, int] = {}
        self._latest: tuple[Sequence[Site], Counts, bool] = ([], np.empty(0, np.int64), True)
        self.once: dict[Any, tuple[int, Any]] = {}
        self._alike: dict[Any, dict[Any, Any]] = {}

    def ids(self, sites: Sequence[Site]) -> tuple[Counts, bool]:
        """Return the ids of these sites, and whether that are all so far, in order; those that are new get the next."""
        known, ids, are_all = self._latest
        if known is not sites and tuple(known) != tuple(sites):
            for site in sites:
                if site not in self.known:
                    self.known[site] = len(self.all)
                    self.all.append(site)
            ids = np.array([self.known[site] for site in sites], np.int64)
            are_all = len(ids) == len(self.all) and bool((ids == np.arange(len(ids))).all())
            self._latest = sites, ids, are_all
        return ids, are_all

    def make_for_alike(self, key: Any) -> dict[Any, Any]:
        """Return what was made for steps of this key; the oldest are forgotten."""
        found = self._alike.get(key)
        if found is None:
            if len(self._alike) >= _MOST_ALIKE:
                del self._alike[next(iter(self._alike))]
            found = self._alike[key] = {}
        return found

    def forget(self) -> None:
        """Forget what was made for steps that are alike."""
        self._alike.clear()


def make_once_for_alike(function: Callable[..., _Made]) -> Callable[..., _Made]:
    """Ask a function of a step once for all steps that are alike: see `Step.make_for_alike`."""

    binds = signature(function).bind

    @wraps(function)
    def ask(step: Step, *arguments: Any, **named: Any) -> _Made:
        if named:
            arguments = binds(step, *arguments, **named).args[1:]
        return step.make_for_alike(function, *arguments)

    return ask


class Step:
    """A measured step as a rule sees it.

    ``number``, ``scalars``, ``earlier_scalars``, ``sample_ids`` and ``drifts`` as in the Snapshot, ``rank``, and
    ``ranks``: of how many ranks it holds the numbers; ``is_of_all_ranks``: whether there are no others.
    ``losses``: of the run until this step.
    ``is_sampled``: whether some rows alone of activations and their gradients were read, see `Snapshot.rows`: means and
    shares are estimates then, and what is summed is not what all rows add up to. ``sites``: all
    that the run has shown so far; a site's
    place in this list is its id, which never changes, so that what a rule keeps by id stays aligned when other sites
    appear. All arrays are over ids ``[n]``; a site that was silent in this step, or is not in it, has ``calls`` 0,
    counts of 0, and NaN else.
    """

    def __init__(self, measured: Snapshot | StepFrame, sites: SiteIds, rank: int = 0, attempt: int = 0) -> None:
        frame = measured.frame if isinstance(measured, Snapshot) else measured
        self.number = frame.step
        self.scalars = frame.scalars
        self.earlier_scalars = frame.earlier_scalars
        self.sample_ids = frame.sample_ids
        self.overflowed = frame.overflowed
        self.drifts = frame.drifts
        self.ranks = len(frame.ranks.present)
        self.is_of_all_ranks = self.ranks == frame.ranks.world_size
        self.is_sampled = frame.rows > 1
        self.rank = rank
        self.attempt = attempt
        self._frame = frame
        self._ids, self._is_aligned = sites.ids(frame.sites)
        self._sites = sites
        self.sites: Sequence[Site] = sites.all
        self.losses = sites.losses
        self._channels: dict[int, Stats[Array] | None] = {}

    def is_kind(self, kind: str) -> Mask:
        """``[n]``: whether a site's tensor is an "output", a "grad_output", a "param", ..., see attach."""
        return self.make_for_sites(_is_kind, kind)

    @make_once_for_alike
    def find_fired(self, kind: str) -> Mask:
        """``[n]``: the sites of a kind that fired in this step."""
        return self.is_kind(kind) & (self.calls > 0)

    @make_once_for_alike
    def find_finite(self, kind: str) -> Mask:
        """``[n]``: the sites of a kind with finite values in this step."""
        return self.is_kind(kind) & (self.totals.count > 0)

    def has_any(self, kinds: Sequence[str]) -> bool:
        """Return whether a site of one of these kinds fired in this step; of none of them: True."""
        return not kinds or any(self.find_fired(kind).any() for kind in kinds)

    @make_once_for_alike
    def list_finite(self, kind: str) -> list[int]:
        """The ids of the sites of a kind with finite values in this step, in order of execution."""
        return self.put_in_order(self.find_finite(kind))

    @make_once_for_alike
    def find_fired_ids(self, kind: str) -> Counts:
        """The ids of the sites of a kind that fired, ascending."""
        return np.flatnonzero(self.find_fired(kind))

    @make_once_for_alike
    def find_finite_ids(self, kind: str) -> Counts:
        """The ids of the sites of a kind with finite values, ascending."""
        return np.flatnonzero(self.find_finite(kind))

    def make_for_alike(self, function: Callable[..., _Made], *arguments: Any) -> _Made:
        """Return what a function makes of which sites fired in this step, how often, in which order, and with values.

        It must look at no value: it is made once for all steps that agree in these, as those of a training do. An array
        cannot be written to.
        """
        key = function, arguments
        if key not in self._shared:
            made: Any = function(self, *arguments)
            if isinstance(made, np.ndarray):
                made.setflags(write=False)
            self._shared[key] = made
        return self._shared[key]  # type: ignore[no-any-return]

    @cached_property
    def _shared(self) -> dict[Any, Any]:
        frame, ids = self._frame, None if self._is_aligned else self._ids.tobytes()
        has_values = (self.totals.count > 0).tobytes()
        key = (len(self.sites), ids, frame.calls.tobytes(), frame.order.tobytes(), has_values, self.is_sampled)
        return self._sites.make_for_alike(key)

    def make_for_sites(self, function: Callable[..., _Made], *arguments: Any) -> _Made:
        """Return what a function makes of the sites of this step, such as pairs of ids; made anew when sites appear."""
        once, count = self._sites.once, len(self.sites)
        known: tuple[int, _Made] | None = once.get((function, arguments))
        if known is None or known[0] < count:
            known = once[function, arguments] = count, function(self, *arguments)
        return known[1]

    def find_id(self, name: str, tensor: str) -> int:
        """Return the id of a site; -1 where the run has shown no such one."""
        return self._sites.known.get(Site(name, tensor), -1)

    @cached_property
    def sums(self) -> Array:
        """``[n]``: of the values of each site."""
        return self.totals.mean * self.totals.count

    def find_partner(self, kind: str, other: str, key: str = "", other_key: str = "") -> Counts:
        """``[n]``: of each site of a kind, the id of that of another kind with the same name; -1 without one.

        ``step.find_partner("output", "grad_output")``. With a key, of sites whose name ends with it ("*": any), that
        of the same module, or with another key in it: ``step.find_partner("param_grad", "grad_output", "bias")``.
        """
        return self.make_for_sites(_find_partner, kind, other, key, other_key)

    @cached_property
    def calls(self) -> Counts:
        return self._spread(self._frame.calls, 0)

    @cached_property
    def order(self) -> Counts:
        """The ids of the sites that fired, in order of execution."""
        order = self._frame.order
        return order if self._is_aligned else np.asarray(self._ids[order])

    def read_scalar(self, scalar: str) -> dict[int, float]:
        """Return a scalar in the steps before this one that were not measured, and in this one, by step number."""
        scalars = {**self.earlier_scalars, self.number: self.scalars}
        return {number: each[scalar] for number, each in scalars.items() if scalar in each}

    def put_in_order(self, mask: Mask) -> list[int]:
        """The ids of these sites that fired, in order of execution."""
        return self.order[mask[self.order]].tolist()  # type: ignore[no-any-return]

    def name_sites(self, sites: Sequence[int]) -> str:
        """Up to three names of sites, and how many others there are."""
        shown = ", ".join(self.sites[site].name for site in sites[:3])
        return shown if len(sites) <= 3 else f"{shown} and {times(len(sites) - 3, 'other')}"

    @cached_property
    def totals(self) -> Stats[Array]:
        """Statistics of each site, ``[n]``, without the scaler's scale."""
        if self._is_aligned:
            return StepTotals(unscale(self._frame.wholes, self._frame.scales))
        wholes = np.zeros((len(FIELDS), len(self.sites)))
        wholes[:, self._ids] = unscale(self._frame.wholes, self._frame.scales)
        return StepTotals(wholes)

    @cached_property
    def nonfinite(self) -> Array:
        """``[n]``: how many values are NaN, Inf or -Inf."""
        return self.totals.nans + self.totals.posinfs + self.totals.neginfs

    @cached_property
    def has_nonfinite(self) -> bool:
        """Return whether any value is not finite."""
        return bool(np.count_nonzero(self.nonfinite))

    @cached_property
    def _place(self) -> Counts:
        """The place of each id in the frame; -1 where it is not in this step."""
        return self._spread(np.arange(len(self._ids)), -1)

    def state(self, site: int) -> Array | None:
        """The state of the channels of a site ``[fields, channels]``, as they were measured: the rows of `FIELDS`, with
        the scaler's scale. It costs less than `channels`, which is None where this is.
        """
        place = site if self._is_aligned else int(self._place[site])
        if place < 0 or not self._frame.sites.keeps[place] or site in self.of_samples:
            return None
        return self._frame.state(place)

    def channels(self, site: int) -> Stats[Array] | None:
        """Return the channels of a site by its id, ``[channels]``, without the scaler's scale; None where none were
        kept or sent, or where they are samples.
        """
        if site not in self._channels:
            state, scale = self.state(site), float(self.scales[site])
            self._channels[site] = None if state is None else Stats(state if scale == 1 else unscale(state, scale))
        return self._channels[site]

    def read_channels_or_whole(self, site: int) -> Stats[Array]:
        """Return the channels of a site; all together, ``[1]``, where there are none."""
        channels = self.channels(site)
        return self.totals.entries(np.array([site])) if channels is None else channels

    @cached_property
    def of_samples(self) -> dict[int, Stats[Array]]:
        """The sites that keep samples apart, by id, in order of execution: statistics ``[samples]``.

        Their channels lie along the first dimension of outputs or inputs. There are as many as ids were given with the
        step; or so many times as many, for the rows of a sample (tokens) lie one after another; or so many times fewer:
        channel i then holds the i-th samples of several microbatches, or ranks.
        """
        count, frame = len(self.sample_ids.get(self.number, ())), self._frame
        found = {}
        for i in frame.order.tolist() if count else ():
            site = int(self._ids[i])
            if frame.sites.keeps[i] and frame.sites.dims[i] == 0 and is_of_module(self.sites[site].tensor):
                channels = frame.stats(i).channels
                if (
                    channels is not None
                    and len(channels.count)
                    and (len(channels.count) % count == 0 or count % len(channels.count) == 0)
                ):
                    found[site] = channels
        return found

    @cached_property
    def has_channels(self) -> Mask:
        """``[n]``: whether channels were kept, and sent in this step, and are no samples."""
        mask = self._spread(self._frame.sites.keeps, False)
        if self.of_samples:
            mask = mask.copy()
            mask[list(self.of_samples)] = False
        return mask

    @cached_property
    def has_histograms(self) -> bool:
        """Return whether any site of this step has a histogram by exponent of its whole tensor."""
        frame = self._frame
        by_exponent = isinstance(frame.bins, ExponentBins) and not frame.bins.per_channel
        return by_exponent and bool(frame.sites.counters[frame.order].any())

    def exponents(self, chosen: Mask) -> tuple[Counts, Counts]:
        """Histograms by exponent of whole tensors, of these sites ``[n]``: the ids that have one ``[k]``, counts
        ``[k, 512]``.

        A bin is ``sign << 8 | exponent`` of float32; of the values as they were measured: with the scaler's scale.
        Empty where histograms are of another kind, or were not sent.
        """
        places = self._place[np.flatnonzero(chosen & (self._place >= 0))]
        places, counts = self._frame.exponents(places.tolist())
        return self._ids[places], counts

    @property
    def bins(self) -> Bins | None:
        return self._frame.bins

    def blocks(self, chosen: Mask) -> tuple[Counts, Counts]:
        """Counts of blocks, of these sites ``[n]``: the ids that have some ``[k]``, counts ``[k, 576]``.

        Of the values as they were measured, see `StepFrame.block_counts`.
        """
        places = self._place[np.flatnonzero(chosen & (self._place >= 0))]
        places, counts = self._frame.block_counts(places.tolist())
        return self._ids[places], counts

    @cached_property
    def _kinds_of_parameters(self) -> tuple[str, str]:
        """Updates and their parameters: of all of their values, if any are measured, else of their samples."""
        is_whole = self.make_for_sites(_has_whole_updates)
        return ("param_update", "param") if is_whole else ("update_sample", "param_sample")

    @property
    def updates(self) -> Mask:
        """``[n]``: the updates of parameters: of all of their values, if any are measured, else of their samples."""
        return self.is_kind(self._kinds_of_parameters[0])

    @property
    def weights_of_updates(self) -> Counts:
        """``[n]``: of each of `updates`, the id of the parameter's own values; -1 without one."""
        return self.find_partner(*self._kinds_of_parameters)

    @property
    def gradients_of_updates(self) -> Counts:
        """``[n]``: of each of `updates`, the id of the parameter's gradient; -1 without one."""
        return self.find_partner(self._kinds_of_parameters[0], "param_grad")

    @property
    def updates_of_gradients(self) -> Counts:
        """``[n]``: of each gradient of a parameter, the id of the one of `updates`; -1 without one."""
        return self.find_partner("param_grad", self._kinds_of_parameters[0])

    @cached_property
    def scales(self) -> Array:
        """``[n]``: with which values were multiplied before they were measured (gradients, by a GradScaler)."""
        return self._spread(self._frame.scales, 1.0)

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of all gradients, as `Snapshot.grad_norm`."""
        chosen = self.find_fired_ids("param_grad")
        if not chosen.size:
            return None
        if self.has_nonfinite and self.totals.nans[chosen].any():
            return float("nan")
        if self.has_nonfinite and self.nonfinite[chosen].any():
            return float("inf")
        return float(np.sqrt((self.totals.l2_norm[chosen] ** 2 / self.calls[chosen]).sum()))

    def finding(
        self,
        rule: str,
        site: int | None,
        value: float,
        threshold: float,
        severity: str,
        sentence: str,
        at: int | None = None,
        since: int | None = None,
        sites: Sequence[int] = (),
    ) -> Finding:
        """site: an id, or None for the whole step. at: the number of an earlier step that it is of; None: this one.

        since: the step in which it began; None: that one. sites: the ids of all sites that it is of, in order.
        """
        where = None if site is None else self.sites[site]
        number = self.number if at is None else at
        names = tuple(self.sites[each] for each in sites[:MOST_SITES])
        numbers, began = (float(value), float(threshold)), None if since is None else int(since)
        return Finding(
            rule, number, where, *numbers, severity, sentence, self.rank, self.attempt, began, names, len(sites)
        )

    def _spread(self, values: _Over, missing: Any) -> _Over:
        """An array over the frame's sites, over ids."""
        if self._is_aligned:
            return values
        result: Any = np.full(len(self.sites), missing, values.dtype)
        result[self._ids] = values
        return result  # type: ignore[no-any-return]


def _is_kind(step: Step, kind: str) -> Mask:
    return np.array([is_of_kind(site.tensor, kind) for site in step.sites], bool)


def _find_partner(step: Step, kind: str, other: str, key: str, other_key: str) -> Counts:
    partners = np.full(len(step.sites), -1, np.int64)
    for i in np.flatnonzero(step.is_kind(kind)).tolist():
        name, tensor = step.sites[i]
        if key:
            module, _, last = name.rpartition(".")
            name = f"{module}.{other_key}".strip(".")
            if key not in ("*", last):
                continue
        same = other + tensor[len(kind) :]
        first = f"{same}.0" if key and other == "output" else same  # of a module with several outputs
        found = step.find_id(name, same)
        partners[i] = step.find_id(name, first) if found < 0 else found
    return partners


def _has_whole_updates(step: Step) -> bool:
    return bool(step.is_kind("param_update").any())
