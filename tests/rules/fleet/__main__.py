"""``python -m tests.rules.fleet [names]``: what the rules say of each training of the fleet, as a table."""

from __future__ import annotations

import sys
import time

import torch

from tests.rules import fleet
from tests.rules.fleet.training import run as run_one


def said(snapshots: list) -> str:  # type: ignore[type-arg]
    found = fleet.alarms(snapshots)
    texts = [f"{each.rule}@{each.step}{'!' if each.severity == 'critical' else ''}" for each in found]
    return ", ".join(texts[:4]) + (f", {len(texts) - 4} more" if len(texts) > 4 else "") or "-"


def main() -> None:
    torch.set_num_threads(1)
    kinds = {
        "usual": fleet.USUAL,
        "unusual": fleet.UNUSUAL,
        "unusual, unseen": fleet.UNSEEN,
        "ill": {name: make for name, (make, _) in fleet.ILL.items()},
    }
    wanted = set(sys.argv[1:])
    print("| kind | training | steps | alarms, every step measured | every tenth | s |\n|---|---|---|---|---|---|")
    for kind, makers in kinds.items():
        for name, make in makers.items():
            if wanted and not wanted & {kind, name}:
                continue
            began = time.perf_counter()
            snapshots = run_one(make)
            took = time.perf_counter() - began
            tenth = said(fleet.thinned(snapshots, 10))
            print(f"| {kind} | {name} | {len(snapshots)} | {said(snapshots)} | {tenth} | {took:.1f} |", flush=True)


if __name__ == "__main__":
    main()
