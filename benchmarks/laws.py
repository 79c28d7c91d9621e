"""Accuracy with which healthy trainings keep the laws: ``python -m benchmarks.laws [NAME ...]``, see --help.

Of each law how often it was held against something, and how far that was off, in parts of what rounding is allowed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.illnesses import HEALTHY, seed
from benchmarks.law_trainings import CLIENTS, LANGUAGE, OTHERS, Make
from hookstats import Snapshot
from hookstats.numbers.token_weights import LOGITS, NAMES, ROUNDING, LogitsGradient, TokenWeights, logits_of
from hookstats.rules import judge, rules_of_laws
from hookstats.rules.laws import find_sides_of_biases
from hookstats.rules.ratios import residuals as residuals_of
from hookstats.rules.step import SiteIds, Step
from hookstats.watch.arguments import DEFAULT_TENSORS

TENSORS = (*DEFAULT_TENSORS, "outside_update", "optimizer_law")


def bias(step: Step) -> list[float]:
    """Return of each layer the largest of its channels."""
    sides, calls = find_sides_of_biases(step, "param_grad")
    if sides is None:
        return []
    common, told, off = residuals_of(sides, 1 / step.ranks)
    if common != common:
        return []
    worst = np.maximum.reduceat(off, sides.begin)
    several = {count for count in calls[told].tolist() if count > 1 and (worst[told][calls[told] == count] > 1).all()}
    return [worst[i] for i in told.tolist() if calls[i] not in several]


def cross_entropy(step: Step) -> list[float]:
    found = [np.flatnonzero(step.find_finite(f"token_weights.{name}")) for name in NAMES]
    if any(len(sites) != 1 for sites in found) or "loss" not in step.scalars:
        return []
    weights = TokenWeights.of([step.totals.entries(sites) for sites in found], step.ranks)
    loss = step.scalars["loss"]
    if weights is None or not weights.is_mean(loss) or (weights.least > 1.01 and weights.is_differentiated(loss)):
        return []
    return [max(weights.least - 1, 1 - weights.most, 0.0) / ROUNDING]


def norm(step: Step) -> list[float]:
    """Return the norm of the logits' gradient over the largest, or the smallest over it, but for rounding."""
    name = logits_of(step.scalars)
    site = -1 if name is None else step.find_id(name.removeprefix(LOGITS), "grad_output")
    if name is None or site < 0 or step.nonfinite[site] or not step.calls[site]:
        return []
    totals, calls = step.totals.entries(np.array([site])), int(step.calls[site])
    found = LogitsGradient.of(step.scalars[name], step.scalars["loss"], totals, calls, step.ranks)
    return [] if found is None else [max(found.over, 1 / found.under) / (1 + ROUNDING)]


def optimizer(step: Step) -> list[float]:
    """Only whether an element is beyond what is allowed is known: 0, or 2."""
    mask = step.find_finite("optimizer_law")
    off = (step.totals.min[mask] != 1) | (step.totals.max[mask] != 1)
    return (2.0 * off).tolist()  # type: ignore[no-any-return]


def between(step: Step) -> list[float]:
    """Nothing is allowed: 0, or 2."""
    changed = step.totals.abs_max[step.find_finite("outside_update")] > 0
    return (2.0 * changed).tolist()  # type: ignore[no-any-return]


RESIDUALS = {"bias": bias, "cross_entropy": cross_entropy, "norm": norm, "optimizer": optimizer, "step": between}
LAW = {"norm": "cross_entropy"}  # what is no law of its own


FLEET: dict[str, Make] = {
    name: lambda tensors, name=name: HEALTHY[name].run(tensors=tensors).snapshots  # type: ignore[misc]
    for name in HEALTHY
}
SETS = {"fleet": FLEET, "language": LANGUAGE, "others": OTHERS, "clients": CLIENTS}
TRAININGS = FLEET | LANGUAGE | OTHERS | CLIENTS


def residuals(snapshots: list[Snapshot]) -> dict[str, list[float]]:
    """Over what is allowed, by law, of all steps."""
    sites, found = SiteIds(), {law: list[float]() for law in RESIDUALS}
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for snapshot in snapshots:
            step = Step(snapshot, sites)
            for law, own in RESIDUALS.items():
                found[law] += own(step)
    return found


def table(found: dict[str, dict[str, list[float]]], alarms: dict[str, list[str]]) -> Iterator[str]:
    """Lines of Markdown. found: by training and law."""
    yield "| law | trainings | held against | median | 99.9 % | largest | beyond | alarms |"
    yield 8 * "|---" + "|"
    for law in RESIDUALS:
        own = [each[law] for each in found.values() if each[law]]
        values = np.array([value for each in own for value in each] or [np.nan])
        rule = rules_of_laws()[LAW.get(law, law)].name
        told = [name for name, rules in alarms.items() if rule in rules]
        yield (
            f"| {law} | {len(own)} | {sum(map(len, own)):,} | {np.median(values):.2g} | "
            f"{np.quantile(values, 0.999):.2g} | {values.max():.2g} | {int((values > 1).sum())} | "
            f"{len(told)} {', '.join(told)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"only these, or all of {', '.join(SETS)}")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th of them, from the k-th on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no training begins after so many")
    parser.add_argument("--weights", action="store_true", help="with weights of tokens, as the preset has them")
    options = parser.parse_args()
    tensors = (*TENSORS, "token_weights") if options.weights else TENSORS
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin, found, alarms = time.monotonic(), {}, {}
    chosen = [name for each in options.names or SETS for name in SETS.get(each, [each])]
    first, step = map(int, options.part.split("/"))
    for name in chosen[first::step]:
        if time.monotonic() - begin > options.seconds:
            break
        seed()
        try:
            snapshots = TRAININGS[name](tensors)
        except Exception as error:  # a model that does not train in this precision on a CPU
            print(f"{name}: {type(error).__name__}: {error!s:.100}", flush=True)
            continue
        found[name] = residuals(snapshots)
        told = judge(snapshots, rules=list(rules_of_laws().values()))
        alarms[name] = [each.rule for each in told if each.severity != "note"]
        worst = {law: f"{max(own):.2g}" for law, own in found[name].items() if own}
        print(f"{name}: {worst} {[str(each) for each in told]}", flush=True)
    print(f"\n{len(found)} of {len(chosen)} healthy trainings\n")
    print("\n".join(table(found, alarms)))


if __name__ == "__main__":
    main()
