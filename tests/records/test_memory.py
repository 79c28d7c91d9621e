"""Writing and merging hold no more memory, however long a run is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

_BOUNDED = """
import sys
from pathlib import Path
from tests.records import recorded
from hookstats.records import parts, store
from hookstats.records.store import Store
store.ROW_GROUP = parts.ROW_GROUP = 2000  # of which it holds some at once, however long the run is
store = Store(Path(sys.argv[1]) / "rank=0")
store.begin(0, {})
frame = recorded.measured(1)  # of totals alone
sizes = []
for step in range(1600):
    frame.step = step
    store.add(frame)
    if step % 50 == 49:
        store.commit(step)
        while store.merge():
            pass
    if step % 400 == 399:
        peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        sizes.append(int(peak.split()[1]) >> 10)
print(*sizes)
"""


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _BOUNDED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    sizes = [int(size) for size in done.stdout.split()]
    assert len(sizes) == 4, done.stderr
    assert sizes[-1] <= 200
    assert sizes[-1] - sizes[1] <= 8, sizes
