"""Random tensors and random trainings against float64, by the numbers of their seeds.

    python -m tests.fuzz                           # 20,000 tensors, 2,000 trainings
    python -m tests.fuzz --tensors 0 --trainings 1 --seed 1234   # one of them again

Prints how many were wrong, and the first wrong one with its seed. Returns 1 where one was.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable

import torch

from tests.fuzz.tensors import check_tensor
from tests.fuzz.trainings import check_training


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--trainings", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; those of the others follow")
    options = parser.parse_args(words)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wrong = _run("tensors", check_tensor, options.seed, options.tensors)
        return int(wrong + _run("trainings", check_training, options.seed, options.trainings) > 0)
    finally:
        torch.set_num_threads(threads)


def _run(what: str, check: Callable[[int], None], seed: int, count: int) -> int:
    """Return how many are wrong."""
    begun, wrong = time.monotonic(), list[int]()
    for each in range(seed, seed + count):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of widths that change, and of numpy's empty slices
                check(each)
        except Exception:
            if not wrong:
                print(f"{what}: seed {each}:\n{traceback.format_exc()}", flush=True)
            wrong.append(each)
    seeds = f", seeds {', '.join(map(str, wrong[:10]))}" if wrong else ""
    print(f"{what}: {count}, {len(wrong)} wrong{seeds}; {time.monotonic() - begun:.0f} s", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
