"""The ring between training and the writer: what comes out is what went in, whole and once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hookstats.records.ring import Record, Ring, RingError
from tests.conftest import ROOT


def numbers_of(record: Record) -> list[int]:
    return record.payload.view(np.int64).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_records_of_any_length_come_out_whole_and_in_order(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    ring = Ring.create(tmp_path / "ring", 4096)
    sent: list[list[int]] = []
    received: list[list[int]] = []
    position = 0
    while len(received) < 2000:
        pieces = [draw.integers(0, 99, draw.integers(0, 90)) for _ in range(draw.integers(1, 4))]
        if ring.write(1 + len(sent) % 3, pieces):
            sent.append(np.concatenate(pieces).tolist())
        elif draw.random() < 0.5:
            for record in ring.read(position):
                assert record.number == len(received)
                assert record.kind == 1 + record.number % 3
                received.append(numbers_of(record))
                position = record.end
                if draw.random() < 0.1:
                    break
            ring.tail = position
    assert received == sent[: len(received)]
    assert ring.head > 50 * ring.capacity


def test_a_full_ring_takes_nothing_more_and_keeps_what_it_has(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path / "ring", 4096)
    count = 0
    while ring.write(1, [np.full(50, count)]):
        count += 1
    assert not ring.write(1, [np.arange(50)])
    assert [numbers_of(record)[0] for record in ring.read(0)] == list(range(count))
    assert count == 4096 // 440
    assert ring.fits(1700)
    assert not ring.fits(1800)
    ring, count = Ring.create(tmp_path / "steps", 4096), 0
    while ring.write(1, [np.full(50, count)], is_step=True):
        count += 1
    assert count == (4096 - 512) // 440
    assert ring.write(1, [np.full(50, count)])  # steps leave room for what is small


_WRITES = """
import sys
from pathlib import Path
import numpy as np
from hookstats.records.ring import Ring

ring = Ring(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    while not ring.write(1, [np.full(1 + number % 70, number)]):
        pass
"""


def test_one_process_reads_what_another_one_writes_meanwhile(tmp_path: Path) -> None:
    """Two hundred times around the ring: a position that is seen is never ahead of what it counts."""
    ring, count = Ring.create(tmp_path / "ring", 1 << 14), 12_000
    writing = subprocess.Popen([sys.executable, "-c", _WRITES, str(ring.path), str(count)], cwd=ROOT)
    read = 0
    try:
        while read < count and writing.poll() in (None, 0):
            for record in ring.read(ring.tail):
                assert record.number == read
                assert (record.payload.view(np.int64) == read).all()
                assert len(record.payload) == 8 * (1 + read % 70)
                read += 1
                ring.tail = record.end
        assert writing.wait() == 0
    finally:
        writing.kill()
        writing.wait()
    assert read == count
    assert ring.head == ring.tail > 200 * ring.capacity


_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from hookstats.records import ring as module

def write(path, lines):
    def run(frame, event, argument):
        nonlocal lines
        lines -= 1
        if lines == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return run

    ring = module.Ring.create(path, 1 << 16)
    sys.settrace(lambda frame, event, argument: run if frame.f_code.co_filename == module.__file__ else None)
    number, read = 0, []
    while True:
        while not ring.write(1, [np.full(1 + number % 70, number)]):
            ring.tail = read.pop(0)  # the ring is never empty
        number += 1
        if number % 20 == 0:
            read.append(ring.head)

draw = np.random.default_rng(0)
wrapped = 0
for attempt in range(40):
    path, lines = Path(sys.argv[1]) / str(attempt), int(draw.integers(1, 30_000))
    child = os.fork()
    if child == 0:
        try:
            write(path, lines)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    ring = module.Ring(path)
    records = list(ring.read(ring.tail))
    for record in records:
        assert record.payload.view(np.int64).tolist() == [record.number] * (1 + record.number % 70)
    last = records[-1].number if records else -1
    assert last in (ring.written - 1, ring.written - 2), (last, ring.written)
    wrapped += ring.head > ring.capacity
print(wrapped)
"""


def test_what_is_written_outlives_a_process_that_is_killed_anywhere(tmp_path: Path) -> None:
    """Records that were counted as written are there, at whatever line of ring.py it is killed."""
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10  # of 40: the ring was full


def test_a_torn_ring_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = Ring.create(path, 1 << 16)
    for number in range(20):
        assert ring.write(1, [np.full(100, number)])
    del ring
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        torn = bytearray(whole)
        at = draw.choice([draw.integers(0, 88), 4096 + 840 * draw.integers(0, 20) + draw.integers(0, 32)])
        torn[at] ^= 1 << draw.integers(0, 8)
        path.write_bytes(torn)
        try:
            found = [numbers_of(record) for record in Ring(path).read(0)]
            assert all(numbers == numbers[:1] * 100 for numbers in found if len(numbers) == 100)
        except RingError:
            wrong += 1
    assert wrong > 100
    for text in (b"", b"x" * 4096, b"x" * 9000):
        path.write_bytes(text)
        with pytest.raises(RingError, match="expected a ring"):
            Ring(path)
