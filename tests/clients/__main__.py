"""Trainers that others wrote, with hookstats and without: python -m tests.clients [--rounds 3] [NAME ...]

Each of trainers/ runs in processes of its own, in turns. Exits with 1 if a trained bit differs or a trainer fails. If
all ran, it writes benchmarks/results/clients.json. It prints a table.
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

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# The package of each trainer, as the registry names it.
TRAINERS = {
    "accelerate_loop": "accelerate",
    "diffusers_unet": "diffusers",
    "fastai_learner": "fastai",
    "forecasting_tft": "pytorch-forecasting",
    "open_clip_towers": "open-clip-torch",
    "peft_lora": "peft",
    "sb3_ppo": "stable-baselines3",
    "sentence_pairs": "sentence-transformers",
    "skorch_net": "skorch",
    "timm_vit": "timm",
    "torchvision_detection": "torchvision",
    "trl_dpo": "trl",
    "trl_grpo": "trl",
    "trl_sft": "trl",
    "ultralytics_yolo": "ultralytics",
}


def ran(name: str, bare: bool) -> dict[str, Any]:
    """What came of one training: see tests.clients.run."""
    [result] = _results(name, ["--bare"] * bare, [""])
    return result


def ran_both(name: str) -> list[dict[str, Any]]:
    """What came of a bare training, and of one that was watched: sooner, and no measure of seconds."""
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
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return [json.loads((Path(folder) / each / "result.json").read_text()) for each in folders]


def compared(name: str, rounds: int) -> dict[str, Any]:
    """Both ways in turns; seconds are medians. Everything but the seconds is that of the first round."""
    turns = [(ran(name, bare=True), ran(name, bare=False)) for _ in range(rounds)]
    watched = turns[0][1]
    return {
        "version": f"{TRAINERS[name]} {importlib.metadata.version(TRAINERS[name])}",
        "added": watched["added"],
        "seconds_bare": statistics.median(turn[0]["seconds"] for turn in turns),
        "seconds": statistics.median(turn[1]["seconds"] for turn in turns),
        "is_identical": len({each["digest"] for turn in turns for each in turn}) == 1,
        **{key: watched[key] for key in ("steps", "sites", "findings", "warnings", "report")},
    }


def _times(count: int, what: str) -> str:
    return f"{count} {what.removesuffix('s') if count == 1 else what}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| trainer | version | lines added | seconds without, with | measured steps, sites | weights | told |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in results.items():
        told = ", ".join(_times(len(each[what]), what) for what in ("findings", "warnings"))
        lines.append(
            f"| {name} | {each['version']} | {each['added']} | {each['seconds_bare']:.2f}, {each['seconds']:.2f} | "
            f"{each['steps']}, {each['sites']} | {'identical' if each['is_identical'] else '**differ**'} | {told} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*TRAINERS, []], metavar="NAME", help=f"of {', '.join(TRAINERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results, failed = dict[str, dict[str, Any]](), dict[str, str]()
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
    return 1 if failed or not all(each["is_identical"] for each in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
