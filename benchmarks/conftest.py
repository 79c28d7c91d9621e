"""Keeps of a benchmark run what a reader needs: medians, hardware, versions, commit."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.environment import describe


def _figures(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    """Collect the figures of one benchmark: its own, or those of the contenders that it timed in turns."""
    extra = dict(benchmark["extra_info"])
    contenders = extra.pop("contenders", None)
    if contenders is not None:
        return [{"group": benchmark["group"], **extra, **contender} for contender in contenders]
    return [
        {
            "group": benchmark["group"],
            "name": benchmark["params"].get("name", benchmark["name"]) if benchmark["params"] else benchmark["name"],
            "median_ms": 1e3 * benchmark["stats"]["median"],
            "min_ms": 1e3 * benchmark["stats"]["min"],
            "rounds": benchmark["stats"]["rounds"],
            **extra,
        }
    ]


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    kept = [figure for each in output_json["benchmarks"] for figure in _figures(each)]
    output_json.clear()
    output_json.update(describe(), threads=torch.get_num_threads(), figures=kept)


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Contenders that were timed in turns: pytest-benchmark shows what took them all."""
    session = getattr(config, "_benchmarksession", None)
    for each in session.benchmarks if session else ():
        for figure in each.extra_info.get("contenders", ()):
            if "added_ms" not in figure:
                continue
            added = f"{figure['added_ms']:+.3f} over {figure['compared_with']}"
            terminalreporter.write_line(f"{each.group}: {figure['name']}: {figure['median_ms']:.3f} ms, {added}")
