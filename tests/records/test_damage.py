"""Files that are torn, altered or gone: what is whole is read, the rest is said and set aside, and recording goes on.

HOOKSTATS_FUZZ=5000 HOOKSTATS_SEED=1 pytest -s -k altered tests/records/test_damage.py prints how often all was read.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import hookstats
from hookstats import Site
from hookstats.__main__ import main
from hookstats.records import recording, wire, writer
from hookstats.records.attempts import Attempt, machine
from hookstats.records.errors import RunError, SchemaError
from hookstats.records.parts import Name
from hookstats.records.ring import Ring
from hookstats.records.store import Store
from hookstats.records.writer import recover
from hookstats.rules import Finding, defaults, rule_to_json
from hookstats.terminal.following import Followed
from hookstats.terminal.watching import watch
from tests.records import recorded

TRIES = int(os.environ.get("HOOKSTATS_FUZZ", "24"))
STEPS, IN_RING = 8, 3
FINDINGS = [
    Finding("loss-spike", 2, None, 3.0, float("inf"), "warning", "the loss jumped", attempt=1),
    Finding("nonfinite", 3, Site("a", "output"), 1.0, 0.0, "critical", "a value is NaN", attempt=1),
]

pytestmark = pytest.mark.filterwarnings("ignore:hookstats")


def leave(run: Path, steps: int, in_ring: int) -> Path:
    """Leave so many steps in two files of each table, some in a ring, and no writer."""
    folder = run / "rank=0"
    folder.mkdir(parents=True)
    ring = Ring.create(folder / "ring.0001", 1 << 18)
    rules = [rule_to_json(rule) for rule in defaults()]
    about = {"ring": str(ring.path), "pid": 1 << 22, "started": 1, "rules": rules, **machine()}
    Attempt(1, {"rank": 0}, 1.7e9, **about).write(folder)
    store = Store(folder)
    store.begin(1, {"rank": 0})
    for step in range(steps):
        store.add(recorded.measured(step))
        if step + 1 in (steps // 2, steps):
            store.commit(0)
    store.close()
    known = []
    for step in range(steps, steps + in_ring):
        frame = recorded.measured(step)
        is_first = frame.sites not in known
        known += [frame.sites] if is_first else []
        assert ring.write(wire.STEP, wire.encode_step(frame, known.index(frame.sites), is_first))
    (folder / "findings.jsonl").write_text("".join(json.dumps(each.to_json()) + "\n" for each in FINDINGS))
    (folder / "rules.json").write_text("{}")
    (folder / "lock").touch()
    return run


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave(tmp_path_factory.mktemp("left") / "run", STEPS, IN_RING)


@pytest.fixture
def run(left: Path, tmp_path: Path) -> Path:
    shutil.copytree(left, tmp_path / "run")
    return tmp_path / "run"


def altered(content: bytes, draw: np.random.Generator) -> bytes:
    """With bytes flipped, cut off, zeroed, or replaced by others of it."""
    kind, changed = draw.integers(5), bytearray(content)
    at = int(draw.integers(len(content)))
    if kind == 0:
        changed[at] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        for place in draw.integers(0, len(content), 8).tolist():
            changed[place] = int(draw.integers(256))
    elif kind == 2:
        del changed[at:]
    elif kind == 3:
        end = min(len(content), at + int(draw.integers(1, 64)))
        changed[at:end] = bytes(end - at)
    else:
        begin = int(draw.integers(len(content)))
        piece = content[begin : begin + 16]
        changed[at : at + len(piece)] = piece
    return bytes(changed)


def damage(path: Path, draw: np.random.Generator) -> None:
    content = path.read_bytes()
    if draw.random() < 0.1 or not content:
        path.unlink()
    else:
        path.write_bytes(b"" if draw.random() < 0.1 else altered(content, draw))


def watched(run: Path) -> int:
    """Watch a run that nobody writes any more, to its end."""
    looks = 0

    def wait(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert looks < 3, "watch waits for a run that nobody records"
        for path in (run / "rank=0").glob("a*.json"):  # an empty one may be new
            os.utime(path, (0, 0))
        os.utime(run / "rank=0", (0, 0))

    return watch(Followed(run), io.StringIO(), wait)


def command(*arguments: str) -> Callable[[Path], int]:
    def call(run: Path) -> int:
        return main([each.replace("RUN", str(run)) for each in arguments])

    call.__name__ = arguments[0]
    return call


def read(run: Path, in_files: int) -> list[int]:
    """The steps that are there; each is as it was measured.

    in_files: how many did not come through the ring, whose numbers have no checksum.
    """
    steps = list(hookstats.load(run))
    for snapshot in steps:
        if snapshot.step < in_files:
            want = recorded.measured(snapshot.step)
            np.testing.assert_array_equal(snapshot.frame.wholes, want.wholes)
            assert list(snapshot) == list(want.sites)
            assert snapshot.scalars == {} or snapshot.scalars == want.scalars
    table = hookstats.load(run).scalars
    for step, value in zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True):
        assert value == 1 / (1 + step) or step >= in_files
    return [snapshot.step for snapshot in steps]


class WriterHere:
    """The writer, in this process and at the end: one of its own takes half a second to start."""

    returncode: int | None = None

    def __init__(self, folder: Path, number: int, wake: int, judges: Any, tell: Any) -> None:
        self._arguments = (folder, number, wake, judges)

    def look_after(self, ring: Ring) -> None:
        if ring.closed and self.returncode is None:
            self.returncode = 0
            writer.run(*self._arguments)

    def wait(self, seconds: float) -> None:
        pass


def goes_on(run: Path) -> None:
    """A new attempt records."""
    made = hookstats.record(run, ring_bytes=1 << 20)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made.begin({"rank": 0})
        made.take(recorded.measured(100))
        made.close()
    assert not [each for each in told if "stopped" in str(each.message)]
    last = hookstats.load(run, steps=[100])
    assert [snapshot.step for snapshot in last] == [100]


def test_altered_files_stop_nobody_and_what_is_whole_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is damaged: everybody reads, a new attempt records, with `recover` before it or without, all is read."""
    monkeypatch.setattr(recording, "WriterProcess", WriterHere)
    in_files, in_ring = 4, 2
    draw = np.random.default_rng(int(os.environ.get("HOOKSTATS_SEED", "0")))
    left = leave(tmp_path / "left", in_files, in_ring)
    names = sorted(str(path.relative_to(left)) for path in left.rglob("*") if path.is_file())
    commands = [command("show", "RUN"), command("compare", "RUN", "RUN"), command("report", "RUN", "-o", "RUN/a.html")]
    counts: Counter[tuple[str, str]] = Counter()
    failed = []
    for number in range(TRIES):
        run = tmp_path / str(number)  # each its own: what a process could not read it does not try again
        shutil.copytree(left, run)
        name = names[int(draw.integers(len(names)))]
        damage(run / name, draw)
        told = run / "rank=0" / "a0001.json"
        if told.exists() and "a0001.json" not in name:  # the ring has moved with it
            Attempt(1, {"rank": 0}, 1.7e9, pid=1 << 22, started=1, **machine()).write(told.parent)
        of_file = Name.parse(Path(name).name)
        lost = in_files // 2 if of_file is not None and name.split("/")[1] in ("steps", "totals") else 0
        of_ring = 0 if "ring" in name else in_ring
        try:
            for each in [*commands, watched]:
                assert each(run) in (0, 1, 2), (each, name)
            assert len(read(run, in_files)) >= in_files - lost
            if number % 2:
                assert command("recover", "RUN")(run) == 0
                assert len(read(run, in_files)) >= in_files + of_ring - lost
            goes_on(run)
            found = read(run, in_files)
            assert len(found) >= in_files + of_ring + 1 - lost
            for each in [*commands, watched] if number % 10 == 0 else commands[:1]:
                assert each(run) in (0, 1), (each, name)
        except (Exception, AssertionError):
            failed.append(f"mutation {number}, of {name}: {traceback.format_exc()}")
            continue
        is_whole = len(found) == in_files + in_ring + 1
        counts[name.split("/")[1], "whole" if is_whole else "less"] += 1
        shutil.rmtree(run)
    if "HOOKSTATS_FUZZ" in os.environ:
        print(*sorted(counts.items()), sep="\n")
        print(*failed, sep="\n\n")
    assert not failed, failed[0]


def rot(path: Path) -> None:
    """Flip a bit at the end of a page that each reader of a step needs; the footer is as it was."""
    group = pq.read_metadata(path).row_group(0)
    columns = map(group.column, range(group.num_columns))
    [page] = [each for each in columns if each.path_in_schema.startswith("state_mean")]
    content = bytearray(path.read_bytes())
    content[page.data_page_offset + page.total_compressed_size - 1] ^= 1
    path.write_bytes(content)


def test_a_rotten_page_is_said_once_and_costs_the_steps_of_its_file(
    run: Path, recwarn: pytest.WarningsRecorder
) -> None:
    recover(run)
    rot(run / "rank=0" / "totals" / "a0001.00000000-00000003.parquet")
    recwarn.clear()
    for _ in range(2):
        loaded = hookstats.load(run)
        assert [snapshot.step for snapshot in loaded] == list(range(4, STEPS + IN_RING))
        assert loaded.scalars["step"].to_pylist() == list(range(STEPS + IN_RING))
    [told] = [str(each.message) for each in recwarn if "rank=0" in str(each.message)]
    assert "a0001.00000000-00000003.parquet" in told
    assert "hookstats recover sets it aside" in told
    with pytest.raises(KeyError, match="expected a recorded step"):
        hookstats.load(run)[2]


def test_where_channels_are_rotten_a_step_has_its_totals(run: Path) -> None:
    recover(run)
    rot(run / "rank=0" / "details" / "a0001.00000000-00000003.parquet")
    snapshot = hookstats.load(run)[0]
    with pytest.raises(RunError, match="read the step again for what is whole"):
        _ = [(stats.channels, stats.histogram) for stats in snapshot.values()]
    again = hookstats.load(run)[0]
    np.testing.assert_array_equal(again.totals.rms, snapshot.totals.rms)
    assert not [site for site, stats in again.items() if stats.channels is not None or stats.histogram is not None]
    assert main(["show", str(run), "--step", "0"]) == 0


def test_recover_sets_aside_what_cannot_be_read_and_says_so(run: Path) -> None:
    folder = run / "rank=0"
    rot(folder / "totals" / "a0001.00000000-00000003.parquet")
    (folder / "details" / "a0001.00000004-00000007.parquet").write_bytes(b"torn")
    with pytest.warns(UserWarning, match=r"it is set aside as a0001\..*\.damaged") as told:
        assert recover(run) == {"rank=0": [1]}
    assert len([each for each in told if "is set aside" in str(each.message)]) == 2
    aside = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.damaged"))
    assert aside == [
        "details/a0001.00000004-00000007.parquet.damaged",
        "totals/a0001.00000000-00000003.parquet.damaged",
    ]
    assert hookstats.load(run).steps == list(range(4, STEPS + IN_RING))
    assert recover(run) == {"rank=0": []}


def test_a_ring_of_an_earlier_version_is_left_as_it_is(run: Path) -> None:
    """Its records are others: what cannot be read would be said to be torn."""
    path = run / "rank=0" / "ring.0001"
    own = path.read_bytes()
    path.write_bytes(b"HSRING1" + own[7:])
    with pytest.raises(SchemaError, match=r"ring.0001: expected a ring of this version .* recover the run with that"):
        recover(run)
    assert path.read_bytes() == b"HSRING1" + own[7:]
    goes_on(run)
    path.write_bytes(own)
    assert recover(run) == {"rank=0": [1]}
    assert hookstats.load(run).steps == [*range(STEPS + IN_RING), 100]


@pytest.mark.parametrize("table", ["steps", "totals", "scalars"])
def test_a_damaged_file_of_an_attempt_that_goes_on_brings_no_step_twice(run: Path, table: str) -> None:
    """Its last commit says how far the ring was read; another table says it as well."""
    (run / "rank=0" / table / "a0001.00000004-00000007.parquet").write_bytes(b"torn")
    assert recover(run) == {"rank=0": [1]}
    expected = [0, 1, 2, 3, *range(STEPS, STEPS + IN_RING)] if table != "scalars" else list(range(STEPS + IN_RING))
    loaded = hookstats.load(run)
    assert loaded.steps == expected
    rows = [pq.ParquetFile(path).read(["step"])["step"] for path in (run / "rank=0" / "steps").glob("*.parquet")]
    found = sorted(step for each in rows for step in each.to_pylist())
    assert found == (expected if table == "steps" else list(range(STEPS + IN_RING)))


@pytest.mark.parametrize("text", [b"[]", b"7", b"{", b"\xff", b"[" * 100_000, b"{}"])
def test_what_an_attempt_left_is_written_though_nothing_says_whose_it_is(run: Path, text: bytes) -> None:
    path = run / "rank=0" / "a0001.json"
    path.write_bytes(text)
    assert watched(run) == 1
    assert recover(run) == {"rank=0": [1]}
    assert path.with_name("a0001.json.damaged").read_bytes() == text
    assert hookstats.load(run).steps == list(range(STEPS + IN_RING))
    goes_on(run)


@pytest.mark.parametrize("line", [b"{}", b"[]", b"\xff", b'{"rule": 1}', b"[" * 100_000])
def test_a_damaged_finding_of_an_earlier_attempt_stops_nobody(run: Path, line: bytes) -> None:
    path = run / "rank=0" / "findings.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert [each.rule for each in hookstats.load(run).findings] == ["loss-spike", "nonfinite"]
    assert watched(run) == 1
    goes_on(run)
    assert len(hookstats.load(run).findings) >= 2


def test_names_come_from_the_rows_where_their_file_is_damaged(run: Path) -> None:
    (run / "rank=0" / "sites.json").write_text("{")
    before = [list(snapshot) for snapshot in hookstats.load(run)]
    assert before == [list(recorded.measured(step).sites) for step in range(STEPS)]
    recover(run)
    goes_on(run)
    for snapshot in hookstats.load(run, steps=slice(0, STEPS + IN_RING)):
        assert list(snapshot) == list(recorded.measured(snapshot.step).sites)


def test_a_new_attempt_has_a_number_that_no_file_has(run: Path) -> None:
    recover(run)
    (run / "rank=0" / "totals" / "a0041.00000000-00000003.parquet.damaged").write_bytes(b"")
    made = hookstats.record(run)
    made.begin({"rank": 0})
    assert made._attempt == 42
    made.close()


def test_a_file_that_was_changed_by_one_bit_anywhere_is_not_read_as_another(run: Path) -> None:
    """Each bit of a footer, and of some pages."""
    recover(run)
    path = run / "rank=0" / "steps" / "a0001.00000000-00000003.parquet"
    content, draw = path.read_bytes(), np.random.default_rng(0)
    length = int.from_bytes(content[-8:-4], "little")
    for number, at in enumerate(draw.integers(len(content) - length - 8, len(content), 40).tolist()):
        changed = bytearray(content)
        changed[at] ^= 1 << (number % 8)
        copy = run.with_name(f"bit{number}")
        shutil.copytree(run, copy)
        (copy / "rank=0" / "steps" / path.name).write_bytes(changed)
        assert hookstats.load(copy).steps == list(range(4, STEPS + IN_RING)), at
        shutil.rmtree(copy)
