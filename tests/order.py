"""The order of tests for several workers: each begins with long files, and ends with short tests, which are stolen."""

from __future__ import annotations

from itertools import islice

import pytest

# Files that take long, and about how many seconds of one core. The harness is built by the first that needs it.
SECONDS = {
    "cuda_on_cpu/test_cuda_on_cpu.py": 110,
    "graphs/test_programs.py": 45,
    "cluster/test_parallel_matrix.py": 40,
    "rules/test_fleet.py": 50,
    "graphs/test_compile.py": 30,
    "graphs/test_recompiles.py": 15,
    "modules/test_zoo.py": 40,
    "docs/test_pages.py": 40,
    "rules/test_illnesses.py": 35,
    "graphs/test_compiled_first.py": 15,
    "integrations/test_lightning.py": 30,
    "integrations/test_transformers_trainer.py": 30,
    "records/test_recording.py": 30,
    "watch/test_transformers.py": 30,
    "test_structure.py": 30,
    "cluster/test_faults.py": 25,
    "records/test_run.py": 25,
    "tools/test_edit.py": 25,
    "tools/test_capture.py": 20,
    "docs/test_recipes.py": 20,
    "cluster/test_packing.py": 20,
    "watch/test_ignore.py": 15,
    "portable/test_without_glue.py": 15,
    "records/test_store.py": 15,
    "cluster/test_parallel.py": 15,
    "records/test_recover.py": 15,
    "sinks/test_services.py": 15,
    "report/test_page.py": 15,
    "cluster/test_lockstep.py": 15,
    "cluster/test_tree.py": 10,
}


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """As pytest-xdist gives equal parts of a list to its workers: files stay whole, the longest ones come first."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0].removeprefix("tests/"), []).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    seconds = [0.0] * workers
    for file in sorted(SECONDS.keys() & files.keys(), key=lambda file: (-SECONDS[file], file)):
        least = seconds.index(min(seconds))
        parts[least] += files.pop(file)
        seconds[least] += SECONDS[file]
    short = (item for file in files.values() for item in file)
    size = -(-len(items) // workers)
    return [item for part in parts for item in (*part, *islice(short, max(0, size - len(part))))] + list(short)
