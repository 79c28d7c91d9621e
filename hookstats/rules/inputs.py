"""The model's inputs: a batch far from those before it, inputs that are constant, or were never scaled."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import FIELDS
from hookstats.numbers.ranks import SAME_DATA
from hookstats.rules.activations import has_zero_weights
from hookstats.rules.engine import Ill, rule
from hookstats.rules.formatting import number
from hookstats.rules.history import Course
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step

_MASKED = -1e4  # what is so far down counts for nothing
_MOMENTS = ("count", "mean", "std", "min", "max", "abs_mean")  # of two batches, not all are equal to the bit
_MIN, _MAX = FIELDS.index("min"), FIELDS.index("max")
_LAST, _NEAR = 64, 8  # batches that are looked at for others that are equal, and how near these lie


def _find_inputs(step: Step) -> list[int]:
    """The floating inputs of the model itself that came in this step."""
    return [site for site in step.list_finite("input") if not step.sites[site].name]


def _is_first(step: Step, site: int) -> bool:
    """Return whether it is the model's first argument: others may be a mask, or the state of the last step."""
    return step.sites[site].tensor in ("input", "input.0")


def _is_mask(step: Step, site: int) -> bool:
    """Return whether it is added to logits, so that some count for nothing."""
    return bool(step.totals.max[site] == 0 and step.totals.min[site] <= _MASKED)


@rule(of="input", depth=0)
def input_shift(
    step: Step,
    memory: Memory,
    factor: float = 10.0,
    sigmas: float = 8.0,
    tail: float = 3.0,
    moved: float = 0.5,
    drifted: float = 2.0,
    window: int = 128,
    min_history: int = 8,
) -> list[Ill] | None:
    """A batch is unlike the batches before it, in its size or its largest value (warning).

    The rms and the largest |x| of each floating input of the model are judged. A batch is far off if either is
    ``factor`` = 10 times its level, or a tenth of it, and also ``sigmas`` = 8 deviations and ``tail`` = 3 times as far
    from it as any of the last ``window`` = 128 measured batches went, in logarithms. One value of a batch that is 1000
    times too large shows in the largest |x|. A mean that has moved by more than ``moved`` = 0.5 standard deviations of
    the data, as far beyond its own past, is a note; and so is a level that has come, little by little, to ``drifted`` =
    2 times what it was at first, or to half of that. A first argument of nothing but zeros is a warning when other
    batches follow. The figures are ours.

    What else looks like it: a curriculum, another data set, augmentation that begins. What to do: look at the samples
    of this batch and at what loads and scales them (in place, of data that come again, it adds up); leave out the
    batch, or clip its values.

    False-positive guards: an input is judged when there are ``min_history`` = 8 batches; heavy tails widen
    their own limit; inputs that are constant, such as masks, are not judged, nor are integers.
    """
    inputs = step.make_for_alike(_find_inputs)
    totals, found = step.totals, list[Ill]()
    for site in inputs:
        if totals.min[site] == totals.max[site] != 0:
            continue
        zeros = memory.setdefault("zeros", {})  # of what was 0 in the last step, since when
        if totals.abs_max[site] == 0:
            zeros.setdefault(site, step.number)
            continue
        since, course, count = zeros.pop(site, None), memory.course(f"rms {site}", window), len(found)
        if since is not None and len(course) >= min_history and _is_first(step, site) and not _is_mask(step, site):
            text = (
                "the batch of step {since} was all zeros: {tensor} usually has an rms of {threshold}. Check what "
                "loads the data: a file that could not be read, a buffer that was not filled."
            )
            found.append(Ill(True, text, 0.0, course.level, since=since, site=site))
            count += 1
        for name, size in (("rms", float(totals.rms[site])), ("largest |x|", float(totals.abs_max[site]))):
            course, limit = memory.course(f"{name} {site}", window), np.inf
            if not (size > 0 and np.isfinite(size)):
                continue
            level, shift = course.level, size / course.level
            is_near = 1 / factor <= shift <= factor
            if len(course) >= min_history and not (is_near and course.is_surely_usual(size, tail)):
                limit = course.limit(sigmas, tail)
                beyond = max(limit / level, factor)
                if len(found) == count and not 1 / beyond <= shift <= beyond:
                    text = (
                        "the batch of step {step} is not like those before it: the {which} of {tensor} is {size}, "
                        "{times} times its usual {level}, before any layer has run. Check the samples of this batch, "
                        "and what loads and scales them."
                    )
                    times = number(shift) if shift > 1 else f"1/{number(1 / shift)}"
                    words = {"step": str(step.number), "which": name, "size": size, "times": times, "level": level}
                    found.append(Ill(True, text, shift, factor, site=site, words=words))
            course.push(size, limit)
        if _is_first(step, site):
            found += _judge_drift(step, memory, site, memory.course(f"rms {site}", window), len(found) > count, drifted)
        mean, course = float(totals.mean[site]), memory.course(f"mean {site}", window)
        if np.isfinite(mean) and totals.min[site] < totals.max[site]:
            level, away, std = course.level, abs(mean - course.level), float(totals.std[site])
            if len(found) == count and len(course) >= min_history and away > moved * std:
                usual = max(abs(value - level) for value, level in course.past)
                if away > max(sigmas * course.spread, tail * usual):
                    text = (
                        "the mean of {tensor} is {mean} from step {since} on, and was {level} before: a shift of "
                        "{value} standard deviations of the data. Check what scales the data, unless the change is "
                        "intended."
                    )
                    words = {"mean": mean, "level": level}
                    found.append(Ill(True, text, away / std, moved, "note", site=site, words=words))
            course.push(mean)
    return found if inputs else None


def _judge_drift(step: Step, memory: Memory, site: int, course: Course, jumped: bool, factor: float) -> list[Ill]:
    """Return what is said of a level that has left where it was at first without a jump."""
    firsts = memory.setdefault("firsts", {})
    if jumped or len(course) < 2 * _NEAR:
        firsts.pop(site, None)
        return []
    level, (first, since) = course.level, firsts.setdefault(site, (course.level, step.number))
    text = (
        "the rms of {tensor} has drifted to {level}, from {first} in the steps before step {since}: check what "
        "changes the data from epoch to epoch, such as scaling in place, unless the change is intended."
    )
    is_far = not 1 / factor <= level / first <= factor
    words = {"level": level, "first": first}
    return [Ill(True, text, level / first, factor, "note", site=site, since=since, words=words)] if is_far else []


@rule(of=("input", "output"), depth=0)
def constant_input(
    step: Step, memory: Memory, consecutive_steps: int = 5, values: int = 8, batches: int = 20
) -> list[Ill] | None:
    """The input of the model holds a single value, or the same row everywhere (warning).

    An input of the model that has varied holds one value throughout; or the first output of the model has no variance
    in any channel, which means that all rows that came in are the same: images that were not loaded, one sample in each
    row, tokens that are all padding. This holds in ``consecutive_steps`` = 5 measured steps in a row. Where the first
    argument, if it is floating, is what it was in the step before, to the bit, for ``batches`` = 20 steps, that is a
    note; and so it is where a third of the last 64 batches are what one of the eight before them was, and yet new ones
    come: that is what workers give whose random generators begin alike. The figures are ours.

    What else looks like it: batches of one row, which are not judged; training on all data in every step, of which the
    note says so; several epochs on each batch, as in PPO. What to do: print a batch as the model gets it.

    False-positive guards: inputs that are constant from the start, such as masks, count only where the first
    output has no variance, either; channels of fewer than ``values`` = 8 values are not judged, nor is a first output
    whose weights are all 0.
    """
    inputs, outputs = step.make_for_alike(_find_inputs), step.list_finite("output")
    totals, varied = step.totals, memory.keep_by_site("varied", False)
    if not inputs and not outputs:
        return None
    varies = totals.min < totals.max
    ill, judged = np.zeros((2, len(step.sites)), bool)
    for site in inputs:
        varied[site] |= varies[site]
        ill[site], judged[site] = varied[site] and not varies[site], True
    for site in outputs[:1]:
        if _has_equal_rows(step, site, values):
            is_other = totals.abs_max[site] > 0 and not has_zero_weights(step, site)
            ill[site] = is_other or not varies[inputs].any()
        judged[site] = True
    streak = memory.streak()
    lasting = streak.push(step.number, ill, judged, consecutive_steps)
    for site in [each for each in (*inputs, *outputs[:1]) if lasting[each]][:1]:  # the inputs first
        what = "{tensor} has held a single value, {largest}"
        if not step.is_kind("input")[site]:
            what = "all rows have had the same values in each channel of {tensor}, the first one"
        text = what + (
            ", for {length} measured steps. Nothing can be learned from it: print a batch as the model gets it, and "
            "check what loads and prepares it."
        )
        words = {"length": str(streak.lengths[site]), "largest": totals.max[site]}
        return [Ill(True, text, 0.0, 0.0, since=int(streak.since[site]), site=site, words=words)]
    return _judge_repeats(step, memory, [site for site in inputs if _is_first(step, site)], batches)


def _judge_repeats(step: Step, memory: Memory, inputs: list[int], batches: int) -> list[Ill]:
    """Return what is said of batches that come again, all of them or some."""
    if not inputs:
        return []
    totals, last, again = step.totals, memory.last("batches", _NEAR), memory.last("again", _LAST)
    now = [float(getattr(totals, name)[site]) for site in inputs for name in _MOMENTS]
    varies = any(totals.min[site] < totals.max[site] and not _is_mask(step, site) for site in inputs)
    same = memory.get("same", 0) + 1 if varies and last and now == last[-1] else 0
    if same == 1:
        memory["since"] = memory["before"]
    again.append(varies and now in last)
    memory["same"], memory["before"] = same, step.number
    last.append(now)
    of_all = (
        "{tensor} has been the same batch, to the bit, since step {since}. That is right where every step trains on "
        "all the data, or on one batch as a test; otherwise check the sampler, and workers whose random generators "
        "start alike."
    )
    of_some = (
        f"of the last {_LAST} measured batches, {{value}} repeat one of the {_NEAR} before them, to the bit: "
        f"{{tensor}} comes several times. That is right where a batch is used more than once; otherwise check for "
        "workers whose random generators start alike, or that all read the same files."
    )
    are_some = again[-1] and len(again) == _LAST and sum(again) >= _LAST / 3 and again.count(False) > _NEAR
    return [
        Ill(same == batches, of_all, same, batches, "note", since=memory.get("since"), site=inputs[0]),
        Ill(are_some and same != batches, of_some, sum(again), _LAST / 3, "note", site=inputs[0]),
    ]


def _has_equal_rows(step: Step, site: int, values: int) -> bool:
    state = step.state(site)
    if state is None or step.nonfinite[site]:
        return False
    low, high = state[_MIN, 0], state[_MAX, 0]
    if high - low > 1.1e-5 * max(abs(low), abs(high)):  # which spares most the others
        return False
    channels = step.channels(site)
    if channels is None or channels.count.min() < values:
        return False
    return bool((channels.max - channels.min <= 1e-5 * channels.abs_max).all())


@rule(per_site=False, depth=0)
def same_data(step: Step, consecutive_steps: int = 10) -> Ill | None:
    """All ranks get the same data, to the bit: the model's input, or its last output, is equal on all (note).

    Of a step that was merged (``attach(process_group=...)``), the states of the model's floating inputs and of its last
    output are compared as hashes, in ``consecutive_steps`` = 10 measured steps in a row. Data parallel ranks then
    compute one gradient several times over, and the batch is as large as that of one rank.

    What else looks like it: by design, tensor and sequence parallelism without data parallelism, where all ranks work
    on one batch. What to do: a ``DistributedSampler``, or another shard and another seed for each rank.

    False-positive guards: tensors that hold one value are not compared; all ranks must agree. Where the model has
    dropout and ids as its input, ranks that draw the same data are not found.
    """
    if step.ranks == 1:
        return None
    say = (
        f"all {step.ranks} ranks have been given the same data, to the bit, since step {{since}}: each computes what "
        "the others do. Give the loader a DistributedSampler, or each rank a shard and a seed of its own. Under "
        "tensor parallelism alone this is right."
    )
    return Ill(SAME_DATA in step.scalars, say, step.ranks, 1, "note", steps=consecutive_steps)


@rule(of="input", depth=0, is_cause=False)
def unscaled_input(
    step: Step,
    memory: Memory,
    size: float = 20.0,
    small: float = 0.005,
    ratio: float = 1000.0,
    consecutive_steps: int = 5,
) -> Ill | list[Ill] | None:
    """An input of the model was never scaled: it is far from the size that initial weights expect (note).

    The rms is beyond ``size`` = 20 (pixels from 0 to 255 have 100 and more) or below ``small`` = 0.005 (pixels that
    were divided by 255 twice have 0.002), or a channel is ``ratio`` = 1000 times the median channel, in the first
    ``consecutive_steps`` = 5 measured steps. Initial weights (He et al. 2015, Glorot and Bengio 2010) keep variances on
    the assumption that inputs have a variance near 1. The figures are ours.

    What else looks like it: data that a norm of the model scales first. What to do: subtract the mean of each feature,
    and divide by its standard deviation.

    False-positive guards: masks that are added (0, and a large negative number) are no data, and inputs of
    which more than half is 0 may be small, if their largest value is not below ``small``, too.
    """
    inputs = step.make_for_alike(_find_inputs)
    if not inputs:
        return None
    seen, totals, found = memory.keep_by_site("seen", 0), step.totals, list[Ill]()
    for site in inputs:
        seen[site] += 1
        if seen[site] > consecutive_steps:
            continue
        rms, largest = float(totals.rms[site]), _compare_largest_channel(step, site)
        is_small = 0 < rms < small and (totals.zeros[site] <= 0.5 * totals.count[site] or totals.abs_max[site] < small)
        if _is_mask(step, site) or not (rms > size or is_small or largest > ratio):
            seen[site] = consecutive_steps  # once is enough to say that it is scaled
        elif seen[site] == consecutive_steps:
            numbers = (rms, size) if rms > size else (rms, small) if is_small else (largest, ratio)
            what = "an rms of {value}" if rms > size or is_small else "a channel {value} times the others"
            text = (
                f"{{tensor}} has {what}: it was {'scaled twice, or not at all' if is_small else 'not scaled'}. "
                "Initial weights expect values near 1: subtract each feature's mean and divide by its deviation, "
                "unless a norm of the model does that."
            )
            found.append(Ill(True, text, *numbers, "note", site=site))
    return found


def _compare_largest_channel(step: Step, site: int) -> float:
    channels = step.channels(site)
    sizes = np.empty(0) if channels is None else channels.rms[channels.rms > 0]
    return float(sizes.max() / np.median(sizes)) if len(sizes) > 1 else 0.0
