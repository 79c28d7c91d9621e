"""The order of tests for several workers: each begins with long files, and ends with short tests, which are stolen."""

from __future__ import annotations

from itertools import islice

import pytest

# Files that take long, and about how many seconds of one core. The harness is built by the first that needs it.
SECONDS = {
    "cuda_on_cpu/test_cuda_on_cpu.py": 40,
    "docs/test_pages.py": 40,
    "graphs/test_programs.py": 40,
    "graphs/test_compile.py": 35,
    "rules/test_public_mistakes.py": 90,
    "cluster/test_parallel_matrix.py": 20,
    "modules/test_zoo.py": 20,
    "glue/test_without_glue.py": 15,
    "graphs/test_recompiles.py": 15,
    "graphs/test_slots.py": 15,
    "identities/test_finding.py": 15,
    "integrations/test_transformers_trainer.py": 15,
    "language/test_zoo.py": 15,
    "numbers/test_kurtosis.py": 15,
    "records/test_damage.py": 15,
    "records/test_store.py": 15,
    "sinks/test_services.py": 15,
    "tools/test_capture.py": 15,
    "tools/test_edit.py": 15,
    "tools/test_probe.py": 15,
    "cuda_on_cpu/test_other_gpus.py": 10,
    "cuda_on_cpu/test_scratch.py": 10,
    "fuzz/test_few.py": 10,
    "kernels/test_kernels.py": 10,
    "kernels/test_rows.py": 10,
    "kernels/test_unaligned.py": 10,
    "language/test_attention.py": 10,
    "report/test_notebook.py": 10,
    "rules/test_engine.py": 10,
    "terminal/test_command_line.py": 10,
    "terminal/test_doctor.py": 10,
    "watch/test_ignore.py": 10,
    "watch/test_training_only.py": 10,
}
# Files that wait most of that time, for ranks, browsers and clocks. One worker has them, so that the others compute.
WAITING = {
    "serve/test_pages.py": 60,
    "cluster/test_lost_ranks.py": 20,
    "cluster/test_merging.py": 15,
    "records/test_recording.py": 35,
    "report/test_page.py": 20,
    "cluster/test_drifts.py": 10,
    "cluster/test_healthy_replicas.py": 10,
    "cluster/test_steps_apart.py": 10,
    "serve/test_server.py": 10,
    "serve/test_growing.py": 10,
}


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Deal a list as pytest-xdist does to its workers: files stay whole, the longest ones come first."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0].removeprefix("tests/"), []).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    seconds = [0.0] * workers
    for file in sorted(WAITING.keys() & files.keys(), key=lambda file: (-WAITING[file], file)):
        parts[-1] += files.pop(file)
        seconds[-1] += WAITING[file]
    for file in sorted(SECONDS.keys() & files.keys(), key=lambda file: (-SECONDS[file], file)):
        least = seconds.index(min(seconds))
        parts[least] += files.pop(file)
        seconds[least] += SECONDS[file]
    short = (item for file in files.values() for item in file)
    size = -(-len(items) // workers)
    return [item for part in parts for item in (*part, *islice(short, max(0, size - len(part))))] + list(short)
