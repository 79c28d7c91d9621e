"""Trainers that others wrote, with hookstats and without: python -m tests.clients [--rounds 3] [NAME ...]

Each of trainers/ runs in processes of its own, in turns. Exits with 1 if a trained bit differs (of a compiled trainer:
if a weight differs by more than rounding) or a trainer fails. If all ran, it writes benchmarks/results/clients.json. It
prints a table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# The package of each trainer, as the registry names it.
TRAINERS = {
    "accelerate_loop": "accelerate",
    "cleanrl_ppo": "gymnasium",
    "diffusers_unet": "diffusers",
    "fastai_learner": "fastai",
    "forecasting_tft": "pytorch-forecasting",
    "lstm_words": "torch",
    "nanogpt_compiled": "torch",
    "open_clip_towers": "open-clip-torch",
    "peft_lora": "peft",
    "pyg_gcn": "torch-geometric",
    "sb3_ppo": "stable-baselines3",
    "sentence_pairs": "sentence-transformers",
    "skorch_net": "skorch",
    "timm_vit": "timm",
    "torchtitan_compiled": "torchtitan",
    "torchtitan_ddp": "torchtitan",
    "torchtitan_tp": "torchtitan",
    "torchvision_detection": "torchvision",
    "trl_dpo": "trl",
    "trl_grpo": "trl",
    "trl_sft": "trl",
    "ultralytics_yolo": "ultralytics",
}

DIFFER = "**differ**"
ROUNDING = 1e-4  # of a tensor's largest weight: float32's, which some 24 steps of Adam have made larger


def ran(name: str, bare: bool) -> dict[str, Any]:
    """Run one training and return its result: see tests.clients.run."""
    [result] = _results(name, ["--bare"] * bare, [""])
    return result


def ran_both(name: str) -> list[dict[str, Any]]:
    """Run a bare and a watched training together: faster than in turn, but their times are not comparable."""
    return _results(name, ["--both"], ["bare", "watched"])


def _results(name: str, options: list[str], folders: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.clients.run", str(HERE / "trainers" / f"{name}.py"), folder]
        offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "YOLO_CONFIG_DIR": folder, "TQDM_DISABLE": "1"}
        done = subprocess.run(
            command + options,
            cwd=ROOT,
            env=os.environ | offline,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return [_read(Path(folder) / each) for each in folders]


def _read(folder: Path) -> dict[str, Any]:
    kept = [np.load(path) for path in sorted(folder.glob("weights.*.npz"))]  # of each rank
    return json.loads((folder / "result.json").read_text()) | {"weights": [dict(each) for each in kept]}


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest between the weights of two trainings, relative to the largest weight of the same tensor."""
    pairs = [
        (mine[name], theirs[name])
        for mine, theirs in zip(one["weights"], other["weights"], strict=True)
        for name in mine
    ]
    return float(np.max([np.abs(a - b).max() / max(np.abs(a).max(), 1e-30) for a, b in pairs]))


def compared(name: str, rounds: int) -> dict[str, Any]:
    """Both ways in turns; seconds are medians. Everything but these and the weights is that of the first round."""
    turns = [(ran(name, bare=True), ran(name, bare=False)) for _ in range(rounds)]
    bare, watched = turns[0]
    compiled = {"difference": max(difference(bare, turn[1]) for turn in turns)} if watched["is_compiled"] else {}
    return compiled | {
        "version": f"{TRAINERS[name]} {importlib.metadata.version(TRAINERS[name])}",
        "added": watched["added"],
        "seconds_bare": statistics.median(turn[0]["seconds"] for turn in turns),
        "seconds": statistics.median(turn[1]["seconds"] for turn in turns),
        "is_identical": len({each["digest"] for turn in turns for each in turn}) == 1,
        **{key: watched[key] for key in ("steps", "sites", "findings", "warnings", "report")},
    }


def weights_of(each: dict[str, Any]) -> str:
    """Compare the weights trained with and without hookstats; only compiled ones may differ by rounding."""
    if each["is_identical"]:
        return "identical"
    return f"agree to rounding: {each['difference']:.0e}" if each.get("difference", 1) <= ROUNDING else DIFFER


def _times(count: int, what: str) -> str:
    return f"{count} {what.removesuffix('s') if count == 1 else what}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| trainer | version | lines added | seconds without, with | measured steps, sites | weights | reported |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in results.items():
        told = ", ".join(_times(len(each[what]), what) for what in ("findings", "warnings"))
        lines.append(
            f"| {name} | {each['version']} | {each['added']} | {each['seconds_bare']:.2f}, {each['seconds']:.2f} | "
            f"{each['steps']}, {each['sites']} | {weights_of(each)} | {told} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*TRAINERS, []], metavar="NAME", help=f"of {', '.join(TRAINERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results, failed = dict[str, dict[str, Any]](), dict[str, str]()
    with tempfile.TemporaryDirectory() as cache:  # of what is compiled, in the first round alone
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name in arguments.names or TRAINERS:
            print(f"{name} ...", flush=True)
            try:
                results[name] = compared(name, arguments.rounds)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed[name] = str(error)
    print("\n" + table(results))
    for name, each in results.items():
        for text in each["findings"] + each["warnings"]:
            print(f"\n{name}: {text}")
    for text in failed.values():
        print(f"\n{text}")
    if not arguments.names and not failed:
        torch = importlib.metadata.version("torch")
        written = {"torch": torch, "rounds": arguments.rounds, "trainers": results}
        (ROOT / "benchmarks" / "results" / "clients.json").write_text(json.dumps(written, indent=1) + "\n")
    return 1 if failed or any(weights_of(each) == DIFFER for each in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
