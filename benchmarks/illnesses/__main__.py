"""The table of diagnoses: ``python -m benchmarks.illnesses``, see --help."""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.illnesses import HEALTHY, ILL, Training, alarms, diagnosis, thinned
from benchmarks.illnesses.training import Measured
from hookstats.rules import judge


def measured(training: Training, folder: Path | None, rows: int) -> Measured:
    """A training, or what is known of it from the last time."""
    file = None if folder is None else folder / f"{training.key}.pickle"
    if file is not None and file.exists():
        known: Measured = pickle.loads(file.read_bytes())
        return known
    result = training.run(rows=rows)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(result))
    return result


def rows_of(registered: dict[str, Training], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for each in registered.values():
        if arguments.names and not {each.name, each.key} & set(arguments.names):
            continue
        if arguments.half and (arguments.half == "unseen") != each.is_unseen:
            continue
        snapshots, losses = measured(each, arguments.save, arguments.rows)
        row = {"name": each.name, "kind": each.kind, "key": each.key, "unseen": each.is_unseen}
        row["losses"] = [losses[0], losses[-1]]
        for every, count in (("every step", 1), ("every tenth", 10)):
            found = judge(thinned(snapshots, count))
            row[every] = diagnosis(found, each) if each.rules else [f"{one.rule}@{one.step}" for one in alarms(found)]
        yield row


def half(row: dict[str, Any]) -> str:
    """Return the half: those that are unseen were never used to set a threshold."""
    return "unseen" if row["unseen"] else "seen"


def sums(rows: list[dict[str, Any]], healthy_rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| half | measured | ill | found | late, median | at most 2 before | healthy | with alarms |"
    yield 8 * "|---" + "|"
    for name in ("seen", "unseen"):
        for every in ("every step", "every tenth"):
            some = [row[every] for row in rows if half(row) == name]
            others = [row[every] for row in healthy_rows if half(row) == name]
            if not some and not others:
                continue
            found = [each for each in some if each["found"]]
            late = statistics.median([each["late"] for each in found]) if found else float("nan")
            few = sum(each["before"] <= 2 for each in found)
            yield (
                f"| {name} | {every} | {len(some)} | {len(found)} | {late:g} | {few} | "
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
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    rows, healthy_rows = [], []
    print("| illness | model | half | found | where | late | told before | told | every tenth |")
    print(9 * "|---" + "|")
    for row in rows_of(ILL, arguments):
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
    for row in rows_of(HEALTHY, arguments):
        healthy_rows.append(row)
        told = (", ".join(row[every]) or "-" for every in ("every step", "every tenth"))
        print(f"| {row['key'].replace('_', ' ')} | {half(row)} | {' | '.join(told)} |", flush=True)
    print()
    print(*sums(rows, healthy_rows), sep="\n")
    print(f"\n{time.perf_counter() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"ill": rows, "healthy": healthy_rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
