"""Keeps of a benchmark run what a reader needs: medians, hardware, versions, commit."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.environment import describe


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    kept = [
        {
            "group": each["group"],
            "name": each["params"].get("name", each["name"]) if each["params"] else each["name"],
            "median_ms": 1e3 * each["stats"]["median"],
            "min_ms": 1e3 * each["stats"]["min"],
            "rounds": each["stats"]["rounds"],
            **each["extra_info"],
        }
        for each in output_json["benchmarks"]
    ]
    output_json.clear()
    output_json.update(describe(), threads=torch.get_num_threads(), figures=kept)
