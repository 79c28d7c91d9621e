"""A pytest plugin: the outcome of each test as a line of JSON, as soon as it is known.

python -m pytest -p benchmarks.outcomes, with OUTCOMES=FILE: what stopped before its end has lost nothing. Tests that
run the CUDA kernels on a CPU are left out where there is a GPU: they say the same on any machine. A worker of
pytest-xdist whose GPU failed in a test ends, as all its later tests would fail, and is replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_configure(config: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(Worker())
    else:  # the process that spreads the tests hears of all of them
        config.pluginmanager.register(Outcomes(Path(os.environ["OUTCOMES"])))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if os.environ.get("GPU") == "harness":
        return
    imitated = [item for item in items if "harness" in item.fixturenames or "cuda_on_cpu" in item.name]
    config.hook.pytest_deselected(items=imitated)
    items[:] = [item for item in items if item not in set(imitated)]


class Worker:
    """Ends behind a test that has failed and taken the GPU with it."""

    def __init__(self) -> None:
        self._gpu_works = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                self._gpu_works = False

    @pytest.hookimpl(trylast=True)  # the outcome has been sent
    def pytest_runtest_logfinish(self) -> None:
        if not self._gpu_works:
            os._exit(70)


class Outcomes:
    """The list of tests, and then each test's outcome."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._knows_tests = False

    def _tests(self, ids: Iterable[str]) -> None:
        found = list(ids)
        if found and not self._knows_tests:
            self._knows_tests = True
            self._write({"tests": found})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: Any) -> None:
        self._tests(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._tests(ids)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "said": str(report.longrepr)[-2000:]})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome != "passed":
            line["said"] = str(report.longrepr)[-2000:]
        self._write(line)
