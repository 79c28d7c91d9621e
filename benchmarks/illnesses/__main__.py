"""The table of diagnoses: ``python -m benchmarks.illnesses``, see --help."""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.illnesses import healthy, ill, more, public_mistakes  # noqa: F401, they register theirs
from benchmarks.illnesses.counted import COUNTED
from benchmarks.illnesses.healthy import HEALTHY, of_fleet
from benchmarks.illnesses.more_healthy import MORE
from benchmarks.illnesses.public_healthy import PUBLIC
from benchmarks.illnesses.training import ILL, ROWS, Illness, Measured, run, seeded
from benchmarks.illnesses.twins import TWINS
from hookstats import Snapshot
from hookstats.rules import Finding, judge
from tests.rules import fleet


def measured(name: str, make: Callable[[], Measured], folder: Path | None) -> Measured:
    """A training, or what is known of it from the last time."""
    file = None if folder is None else folder / f"{name}.pickle"
    if file is not None and file.exists():
        known: Measured = pickle.loads(file.read_bytes())
        return known
    seeded()
    result = make()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(result))
    return result


def is_right(finding: Finding, illness: Illness) -> bool:
    if finding.rule not in illness.rules or finding.step < illness.began:
        return False
    return illness.where is None or any(
        site.name == place or site.name.startswith(f"{place}.") for place in illness.where for site in finding.sites
    )


def told(snapshots: list[Snapshot]) -> list[Finding]:
    """Return the findings that stand for themselves."""
    return [each for each in judge(snapshots) if each.because is None]


def diagnosis(snapshots: list[Snapshot], illness: Illness) -> dict[str, Any]:
    found = told(snapshots)
    graver = [each for each in found if each.severity != "note"]
    right = next((each for each in found if is_right(each, illness)), None)
    return {
        "found": right is not None,
        "rule": None if right is None else right.rule,
        "where": None if right is None or right.site is None else str(right.site),
        "late": None if right is None else right.step - illness.began,
        "before": sum(each.severity != "note" for each in (found if right is None else found[: found.index(right)])),
        "told": len(graver),
        "notes": len(found) - len(graver),
        "all": [f"{each.rule}@{each.step}" for each in found],
    }


def of_ill(half: str | None, folder: Path | None, names: set[str]) -> Iterator[dict[str, Any]]:
    trainings = [(each, lambda each=each: run(each.make())) for each in ILL]
    for name, (make, rules) in fleet.ILL.items():
        trainings.append((Illness(name, "fleet", make, rules, None, 0), of_fleet(make)))
    for each, training in trainings:
        if (names and each.name not in names) or (half and (half == "unseen") != each.is_unseen):
            continue
        snapshots, losses = measured(f"{each.name}.{each.kind}", training, folder)
        row = {"name": each.name, "kind": each.kind, "unseen": each.is_unseen, "losses": [losses[0], losses[-1]]}
        yield row | {
            "every step": diagnosis(snapshots, each),
            "every tenth": diagnosis(fleet.thinned(snapshots, 10), each),
        }


def of_healthy(half: str | None, folder: Path | None, names: set[str]) -> Iterator[dict[str, Any]]:
    for name, make in HEALTHY.items():
        is_unseen = name in MORE or (name not in PUBLIC | TWINS | COUNTED and zlib.crc32(name.encode()) % 2 == 1)
        if (names and name not in names) or (half and (half == "unseen") != is_unseen):
            continue
        snapshots, losses = measured(f"healthy.{name}", make, folder)
        alarms = {
            every: [f"{each.rule}@{each.step}" for each in told(kept) if each.severity != "note"]
            for every, kept in (("every step", snapshots), ("every tenth", fleet.thinned(snapshots, 10)))
        }
        yield {"name": name, "unseen": is_unseen, "losses": [losses[0], losses[-1]], **alarms}


def half(row: dict[str, Any]) -> str:
    """Return the half: those that are unseen were never used to set a threshold."""
    return "unseen" if row["unseen"] else "seen"


def sums(rows: list[dict[str, Any]], healthy_rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| half | measured | ill | found | late, median | at most 2 before | healthy | with alarms |"
    yield 8 * "|---" + "|"
    for is_unseen in (False, True):
        for every in ("every step", "every tenth"):
            some = [row[every] for row in rows if row["unseen"] == is_unseen]
            others = [row[every] for row in healthy_rows if row["unseen"] == is_unseen]
            if not some and not others:
                continue
            found = [each for each in some if each["found"]]
            late = statistics.median([each["late"] for each in found]) if found else float("nan")
            few = sum(each["before"] <= 2 for each in found)
            yield (
                f"| {'unseen' if is_unseen else 'seen'} | {every} | {len(some)} | {len(found)} | {late:g} | {few} | "
                f"{len(others)} | {sum(bool(each) for each in others)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--half", choices=("seen", "unseen"))
    parser.add_argument("--save", type=Path, help="keep what was measured here, and judge it anew the next time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="every so-many-th row is read")
    arguments = parser.parse_args()
    ROWS.append(arguments.rows)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began, names = time.perf_counter(), set(arguments.names)
    rows, healthy_rows = [], []
    print("| illness | model | half | found | where | late | told before | told | every tenth |")
    print(9 * "|---" + "|")
    for row in of_ill(arguments.half, arguments.save, names):
        rows.append(row)
        each, tenth = row["every step"], row["every tenth"]
        found = each["rule"] or f"- ({', '.join(each['all'][:3])})"
        late = "" if each["late"] is None else each["late"]
        print(
            f"| {row['name'].replace('_', ' ')} | {row['kind']} | {half(row)} | {found} | {each['where'] or ''} | "
            f"{late} | {each['before']} | {each['told']} | {tenth['rule'] or '-'} |",
            flush=True,
        )
    print("\n| healthy | half | alarms, every step measured | every tenth |\n|---|---|---|---|")
    for row in of_healthy(arguments.half, arguments.save, names):
        healthy_rows.append(row)
        alarms = (", ".join(row[every]) or "-" for every in ("every step", "every tenth"))
        print(f"| {row['name'].replace('_', ' ')} | {half(row)} | {' | '.join(alarms)} |", flush=True)
    print()
    print(*sums(rows, healthy_rows), sep="\n")
    print(f"\n{time.perf_counter() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"ill": rows, "healthy": healthy_rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
