"""Description of the machine and the software that a figure was measured with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import hookstats

ROOT = Path(__file__).parent.parent


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """Its name, and what tells generations apart where a virtual machine hides the name."""
    lines = (line.partition(":") for line in (_output("lscpu") or "").splitlines())
    found = {key.strip(): value.strip() for key, _, value in lines}
    if "Model name" not in found:
        return platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('CPU ')} {found[key]}" for key in ("CPU family", "Model") if key in found]
    return f"{found['Model name']} ({', '.join(numbers).lower()})" if numbers else found["Model name"]


def describe() -> dict[str, Any]:
    """Hardware, versions, commit and date."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("COMMIT") or _output("git", "rev-parse", "--short=12", "HEAD") or "unknown",
        "uncommitted_changes": "COMMIT" not in os.environ
        and bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "hookstats": hookstats.build_info(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
        }
    return found
