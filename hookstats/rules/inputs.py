"""What the model is given: a batch far from those before it, inputs that are constant, or were never scaled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookstats.numbers.fields import Array
from hookstats.rules.activations import has_zero_weights
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, tensor_of
from hookstats.rules.history import Course, Streak
from hookstats.rules.step import Mask, Step
from hookstats.rules.thresholds import rule

_MASKED = -1e4  # what is so far down counts for nothing
_MOMENTS = ("count", "mean", "std", "min", "max", "abs_mean")  # of two batches, not all are equal to the bit


def _inputs(step: Step) -> Mask:
    """``[n]``: the floating inputs of the model itself that came in this step."""
    return step.is_kind("input") & step.is_of_model & (step.totals.count > 0)


def _is_first(step: Step, site: int) -> bool:
    """Whether it is the model's first argument: what else is floating may be a mask, or the last step's state."""
    return step.sites[site].tensor in ("input", "input.0")


def _is_mask(step: Step, site: int) -> bool:
    """Whether it is added to logits, so that some count for nothing."""
    return bool(step.totals.max[site] == 0 and step.totals.min[site] <= _MASKED)


@rule
class InputShift:
    """A batch is far from the batches before it (warning): its size, or its largest value.

    The rms and the largest |x| of each floating input of the model are judged. A batch is far off if either is
    ``factor`` = 10 times its level, or a tenth of it, and also ``sigmas`` = 8 deviations and ``tail`` = 3 times as far
    from it as any of the last ``window`` = 128 measured batches went, in logarithms. One value of a batch that is 1000
    times too large shows in the largest |x|. A mean that has moved by more than ``moved`` = 0.5 standard deviations of
    the data, as far beyond its own past, is a note. A first argument of
    nothing but zeros is a warning when other batches follow. The figures are ours.

    What else looks like it: a curriculum, another data set, augmentation that begins. What to do: look at the samples
    of this batch and at what loads and scales them; leave out the batch, or clip its values.

    So that a healthy run is silent: an input is judged when there are ``min_history`` = 8 batches; heavy tails widen
    their own limit; inputs that are constant, such as masks, are not judged, nor are integers.
    """

    factor: float = 10.0
    sigmas: float = 8.0
    tail: float = 3.0
    moved: float = 0.5
    window: int = 128
    min_history: int = 8

    def __post_init__(self) -> None:
        self._sizes: dict[tuple[int, str], Course] = {}
        self._means: dict[int, Course] = {}
        self._zeros: dict[int, int] = {}  # of what was 0 in the last step, since when

    def __call__(self, step: Step) -> list[Finding] | None:
        inputs = step.in_order(_inputs(step))
        return [found for site in inputs for found in self._judged(step, site)] if inputs else None

    def _judged(self, step: Step, site: int) -> Iterator[Finding]:
        totals, said = step.totals, False
        if totals.min[site] == totals.max[site] != 0:
            return
        if totals.abs_max[site] == 0:
            self._zeros.setdefault(site, step.number)
            return
        since, course = self._zeros.pop(site, None), self._sizes.get((site, "rms"))
        is_data = _is_first(step, site) and not _is_mask(step, site)
        if since is not None and is_data and course and len(course) >= self.min_history:
            yield self._were_zeros(step, site, since, course.level)
        for name, size in (("rms", totals.rms[site]), ("largest |x|", totals.abs_max[site])):
            course = self._sizes.setdefault((site, name), Course(self.window))
            if size > 0 and np.isfinite(size):
                shift = self._shift(course, float(size))
                if shift and not said:
                    said = True
                    yield self._finding(step, site, name, float(size), course.level, shift)
                course.push(float(size), self._limit(course))
        mean, std = float(totals.mean[site]), float(totals.std[site])
        course = self._means.setdefault(site, Course(self.window))
        if np.isfinite(mean) and std > 0:
            if not said and len(course) >= self.min_history:
                away = abs(mean - course.level)
                usual = max(abs(value - level) for value, level in course.past)
                if away > self.moved * std and away > max(self.sigmas * course.spread, self.tail * usual):
                    yield self._moved(step, site, mean, course.level, std)
            course.push(mean)

    def _limit(self, course: Course) -> float:
        return course.limit(self.sigmas, self.tail) if len(course) >= self.min_history else np.inf

    def _shift(self, course: Course, size: float) -> float:
        """How many times its level a size is, where that is too far up or down; else 0."""
        if len(course) < self.min_history:
            return 0.0
        level, limit = course.level, self._limit(course)
        ratio = size / level
        beyond = max(limit / level, self.factor)
        return ratio if ratio > beyond or ratio < 1 / beyond else 0.0

    def _finding(self, step: Step, site: int, name: str, size: float, level: float, shift: float) -> Finding:
        sentence = (
            f"the batch of step {step.number} is not like those before it: the {name} of {tensor_of(step.sites[site])} "
            f"is {number(size)}, {number(shift) if shift > 1 else f'1/{number(1 / shift)}'} times its usual "
            f"{number(level)}, before any layer has run. Look at the samples of this batch, and at what loads and "
            "scales them."
        )
        return step.finding("input-shift", site, shift, self.factor, "warning", sentence)

    def _were_zeros(self, step: Step, site: int, since: int, level: float) -> Finding:
        sentence = (
            f"the batch of step {since} was all zeros: {tensor_of(step.sites[site])} has an rms of {number(level)} "
            "otherwise. Look at what loads the data: a file that could not be read, a buffer that was not filled."
        )
        return step.finding("input-shift", site, 0.0, level, "warning", sentence, since=since)

    def _moved(self, step: Step, site: int, mean: float, level: float, std: float) -> Finding:
        sentence = (
            f"the mean of {tensor_of(step.sites[site])} is {number(mean)} from step {step.number} on, and was "
            f"{number(level)}: that is {number(abs(mean - level) / std)} standard deviations of the data. Look at what "
            "scales the data, unless these have changed on purpose."
        )
        return step.finding("input-shift", site, abs(mean - level) / std, self.moved, "note", sentence)


@rule
class ConstantInput:
    """All that the model sees of its input is one value, or one row (warning).

    An input of the model that has varied holds one value throughout; or the first output of the model has no variance
    in any channel, which means that all rows that came in are the same: images that were not loaded, one sample in each
    row, tokens that are all padding. This holds in ``consecutive_steps`` = 5 measured steps in a row. Where the
    first argument, if it is floating, is what it was in the step before, to the bit, for ``batches`` = 20 steps, that
    is a note. The figures are ours.

    What else looks like it: batches of one row, which are not judged; training on all data in every step, of which the
    note says so. What to do: print a batch as the model gets it.

    So that a healthy run is silent: inputs that are constant from the start, such as masks, count only where the first
    output has no variance, either; channels of fewer than ``values`` = 8 values are not judged, nor is a first output
    whose weights are all 0.
    """

    consecutive_steps: int = 5
    values: int = 8
    batches: int = 20

    def __post_init__(self) -> None:
        self._varied: set[int] = set()
        self._streak = Streak(self.consecutive_steps)
        self._last: dict[int, tuple[float, ...]] = {}  # what the inputs were, by number
        self._same = 0  # steps in a row
        self._since = self._before = -1

    def __call__(self, step: Step) -> list[Finding] | None:
        inputs = step.in_order(_inputs(step))
        outputs = step.in_order(step.is_kind("output") & (step.totals.count > 0))
        candidates = {site: self._is_constant_now(step, site) for site in inputs}
        if outputs:
            varies = bool((step.totals.min < step.totals.max)[inputs].any())
            says = not varies or (step.totals.abs_max[outputs[0]] > 0 and not has_zero_weights(step, outputs[0]))
            candidates[outputs[0]] = bool(says) and self._has_equal_rows(step, outputs[0])
        if not candidates:
            return None
        constant, judged = np.zeros((2, len(step.sites)), bool)
        constant[list(candidates)], judged[list(candidates)] = list(candidates.values()), True
        ill = self._streak.push(step.number, constant, judged)
        found = [self._finding(step, site) for site in candidates if ill[site]][:1]  # the inputs first
        return found or self._repeated(step, [site for site in inputs if _is_first(step, site)])

    def _repeated(self, step: Step, inputs: list[int]) -> list[Finding]:
        totals = step.totals
        now = {site: tuple(float(getattr(totals, name)[site]) for name in _MOMENTS) for site in inputs}
        varies = any(totals.min[site] < totals.max[site] and not _is_mask(step, site) for site in inputs)
        self._same = self._same + 1 if varies and now == self._last else 0
        if self._same == 1:
            self._since = self._before
        self._last, self._before = now, step.number
        if self._same != self.batches:
            return []
        sentence = (
            f"{tensor_of(step.sites[inputs[0]])} has been the same batch, to the bit, since step {self._since}. That "
            "is right where every step trains on all the data, or on one batch to test the model; else look at the "
            "sampler, and at workers whose random generators begin alike."
        )
        return [
            step.finding("constant-input", inputs[0], self._same, self.batches, "note", sentence, since=self._since)
        ]

    def _is_constant_now(self, step: Step, site: int) -> bool:
        is_constant = bool(step.totals.min[site] == step.totals.max[site])
        if not is_constant:
            self._varied.add(site)
        return is_constant and site in self._varied

    def _has_equal_rows(self, step: Step, site: int) -> bool:
        channels = step.channels(site)
        if channels is None or channels.count.min() < self.values or step.nonfinite[site]:
            return False
        return bool((channels.max - channels.min <= 1e-5 * channels.abs_max).all())

    def _finding(self, step: Step, site: int) -> Finding:
        where = step.sites[site]
        if step.is_kind("input")[site]:
            what = f"{tensor_of(where)} holds one value throughout, {number(float(step.totals.max[site]))}"
        else:
            what = (
                f"each channel of {tensor_of(where)}, the first one, has one value for all rows: so all rows that the "
                "model is given are the same"
            )
        sentence = (
            f"{what}, for {self._streak.lengths[site]} measured steps. Nothing can be learned from it: print a batch "
            "as the model gets it, and look at what loads and prepares it."
        )
        return step.finding("constant-input", site, 0.0, 0.0, "warning", sentence, since=self._streak.since[site])


@rule
class UnscaledInput:
    """An input of the model that was never scaled (a note): values far from the size that initial weights expect.

    The rms is beyond ``size`` = 20 (pixels from 0 to 255 have 100 and more) or below ``small`` = 0.005 (pixels that
    were divided by 255 twice have 0.002), or a channel is ``ratio`` = 1000 times the median channel, in the first
    ``consecutive_steps`` = 5 measured steps. Initial weights (He et al. 2015, Glorot and Bengio 2010) keep variances on
    the assumption that inputs have a variance near 1. The figures are ours.

    What else looks like it: data that a norm of the model scales first. What to do: subtract the mean of each feature,
    and divide by its standard deviation.

    So that a healthy run is silent: masks that are added (0, and a large negative number) are no data, and inputs of
    which more than half is 0 may be small.
    """

    size: float = 20.0
    small: float = 0.005
    ratio: float = 1000.0
    consecutive_steps: int = 5

    def __post_init__(self) -> None:
        self._seen: dict[int, int] = {}

    def __call__(self, step: Step) -> list[Finding] | None:
        inputs = step.in_order(_inputs(step))
        return [found for site in inputs if (found := self._judged(step, site))] if inputs else None

    def _judged(self, step: Step, site: int) -> Finding | None:
        seen = self._seen[site] = self._seen.get(site, 0) + 1
        if seen > self.consecutive_steps:
            return None
        totals = step.totals
        rms, largest = float(totals.rms[site]), self._largest_channel(step, site)
        is_small = 0 < rms < self.small and totals.zeros[site] <= 0.5 * totals.count[site]
        if _is_mask(step, site) or not (rms > self.size or is_small or largest > self.ratio):
            self._seen[site] = self.consecutive_steps  # once is enough to say that it is scaled
        elif seen == self.consecutive_steps:
            by_size = rms > self.size or is_small
            what = f"an rms of {number(rms)}" if by_size else f"a channel {number(largest)} times the others"
            how = "scaled twice, or not at all" if is_small else "not scaled"
            sentence = (
                f"{tensor_of(step.sites[site])} has {what}: it was {how}. Initial weights expect values near 1; "
                "subtract the mean of each feature and divide by its deviation, "
                "unless a norm of the model does that."
            )
            value, threshold = (rms, self.small if is_small else self.size) if by_size else (largest, self.ratio)
            return step.finding("unscaled-input", site, value, threshold, "note", sentence)
        return None

    @staticmethod
    def _largest_channel(step: Step, site: int) -> float:
        channels = step.channels(site)
        sizes: Array = np.empty(0) if channels is None else channels.rms[channels.rms > 0]
        return float(sizes.max() / np.median(sizes)) if len(sizes) > 1 else 0.0
