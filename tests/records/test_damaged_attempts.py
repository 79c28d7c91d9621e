"""A run that a killed process left and that was then damaged: all that reads it gives RunError, or ends.

HOOKSTATS_FUZZ=2000 HOOKSTATS_SEED=1 pytest -s -k mutated tests/records/test_damaged_attempts.py prints what was
read, and what was refused, by each reader.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hookstats
from hookstats import Site
from hookstats.records import wire
from hookstats.records.errors import RunError
from hookstats.records.places import machine
from hookstats.records.recording import Recording
from hookstats.records.ring import Ring
from hookstats.records.store import Store
from hookstats.records.writer import recover
from hookstats.rules import Finding, defaults, rule_to_json
from hookstats.terminal.following import Followed
from hookstats.terminal.watching import watch
from tests.records import recorded
from tests.records.test_torn_runs import altered

TRIES = int(os.environ.get("HOOKSTATS_FUZZ", "40"))
STEPS, IN_RING = 4, 3
FINDINGS = [
    Finding("loss-spike", 2, None, 3.0, float("inf"), "warning", "the loss jumped"),
    Finding("nonfinite", 3, Site("a", "output"), 1.0, 0.0, "critical", "a value is NaN"),
]
VALUES: list[Any] = [None, True, -1, 0, 2**70, 1.5, "x", "", [], [1], {}, {"a": 1}, [[["x"]]], "\0", "../../x"]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in parts, three in a ring, and nobody who writes."""
    run = tmp_path_factory.mktemp("left") / "run"
    folder = run / "rank=0"
    store = Store(folder)
    store.begin(1, {"rank": 0})
    for step in range(STEPS):
        store.add(recorded.measured(step))
    ring = Ring.create(folder / "ring.0001", 1 << 18)
    store.commit(0)
    store.close()
    known: list[Any] = []
    for step in range(STEPS, STEPS + IN_RING):
        frame = recorded.measured(step)
        if frame.sites not in known:
            assert ring.write(wire.SITES, wire.of_sites(len(known), frame.sites))
            known.append(frame.sites)
        assert ring.write(wire.STEP, wire.of_step(frame, known.index(frame.sites)))
    lines = [json.dumps({"number": i, **layout.to_json()}) + "\n" for i, layout in enumerate(known)]
    (folder / "ring.0001.layouts").write_text("".join(lines))
    told = {"attempt": 1, "ring": str(folder / "ring.0001"), **machine(), "pid": 1 << 22, "started": 1}
    told |= {"settings": {"rank": 0}, "rules": [rule_to_json(rule) for rule in defaults()]}
    (folder / "ring.0001.json").write_text(json.dumps(told))
    (folder / "lock").touch()
    return run


@pytest.fixture
def run(left: Path, tmp_path: Path) -> Path:
    shutil.copytree(left, tmp_path / "run")
    return tmp_path / "run"


def description(run: Path) -> Path:
    return run / "rank=0" / "ring.0001.json"


def watched(run: Path) -> int:
    """Of a run that nobody writes any more: it ends, or it raises."""

    looks = 0

    def wait(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert looks < 3, "watch waits for a run that nobody records"
        if description(run).exists():  # an empty one may be new
            os.utime(description(run), (0, 0))

    return watch(Followed(run), io.StringIO(), wait)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a list of settings": lambda d: d.update(settings=[]),
    "no rank": lambda d: d["settings"].clear(),
    "rules of lists": lambda d: d.update(rules=[[]]),
    "rules in a dict": lambda d: d.update(rules={}),
    "unknown arguments": lambda d: d["rules"][0]["arguments"].update(nonsense=1),
    "arguments in a list": lambda d: d["rules"][0].update(arguments=[]),
    "a process of text": lambda d: d.update(pid="x"),
    "a huge process": lambda d: d.update(pid=2**70),
    "another attempt": lambda d: d.update(attempt=7),
    "a ring in a list": lambda d: d.update(ring=[]),
    "no host": lambda d: d.pop("host"),
    "a start of text": lambda d: d.update(started="x"),
    "no start": lambda d: d.pop("started"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_description_is_told_and_watch_ends(run: Path, kind: str) -> None:
    told = json.loads(description(run).read_text())
    DAMAGES[kind](told)
    description(run).write_text(json.dumps(told))
    with pytest.raises(RunError, match=r"ring\.0001\.json: .*expected"):
        recover(run)
    assert description(run).exists()
    with suppress(RunError):  # what it has no use for it does not look at
        assert watched(run) == 1


@pytest.mark.parametrize("text", [b"[]", b"7", b"{", b"\xff", b"[" * 100_000])
def test_a_description_of_other_json_keeps_the_ring_and_ends_watch(run: Path, text: bytes) -> None:
    description(run).write_bytes(text)
    for read in (recover, watched):
        with pytest.raises(RunError, match=r"ring\.0001\.json: expected"):
            read(run)
    assert (run / "rank=0" / "ring.0001").exists()


def test_an_emptied_description_keeps_the_ring(run: Path) -> None:
    description(run).write_bytes(b"")
    with pytest.raises(RunError, match=r"ring\.0001\.json: expected JSON"):
        recover(run)
    assert description(run).exists()


def test_a_new_attempt_begins_beside_a_damaged_one(run: Path) -> None:
    description(run).write_text("[]")
    recording = Recording(run)
    recording.begin({"rank": 0})
    assert recording._attempt == 2
    recording.close()


def test_parts_are_kept_where_the_manifest_is_gone(run: Path) -> None:
    (run / "rank=0" / "manifest.json").unlink()
    parts = sorted((run / "rank=0").rglob("*.parquet"))
    with pytest.raises(RunError, match=r"manifest\.json: expected it beside"):
        recover(run)
    assert sorted((run / "rank=0").rglob("*.parquet")) == parts
    description(run).unlink()
    with pytest.raises(RunError, match=r"manifest\.json: expected it beside"):
        watched(run)


def test_recover_clears_what_a_killed_writer_had_begun(run: Path) -> None:
    left = [run / "rank=0" / "totals" / name for name in ("00000099.parquet", "00000098.parquet.tmp")]
    for path in left:
        path.write_bytes(b"torn")
    assert recover(run) == {"rank=0": [1]}
    assert not [path for path in left if path.exists()]
    assert hookstats.load(run).steps == list(range(STEPS + IN_RING))


def swapped(text: bytes, draw: np.random.Generator) -> bytes:
    """JSON in which one value, anywhere, is another."""
    told = json.loads(text)
    at = told
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = keys[int(draw.integers(len(keys)))]
        if not isinstance(at[key], dict | list) or not at[key] or draw.random() < 0.3:
            at[key] = VALUES[int(draw.integers(len(VALUES)))]
            break
        at = at[key]
    return json.dumps(told).encode()


def shown(run: Path) -> str:
    loaded = hookstats.load(run)
    return loaded[loaded.steps[-1]].table() if loaded.steps else ""


def compared(run: Path) -> hookstats.results.Comparison:
    return hookstats.compare(run, run)


def reported(run: Path) -> Path:
    return hookstats.report.write(run, run / "report.html")


WITHOUT_CHECKSUM = ("ring.0001", "ring.0001.json", "ring.0001.layouts")


def test_mutated_files_raise_run_errors_or_give_what_was_recorded(run: Path, tmp_path: Path) -> None:
    """What is numbers in the ring has no checksum: of its steps nothing but the kind of error is held then.

    Some readers see the run before it is recovered, and again afterwards.
    """
    (run / "rank=0" / "findings.jsonl").write_text(
        "".join(json.dumps(each.to_json()) + "\n" for each in FINDINGS), encoding="utf-8"
    )
    whole = tmp_path.with_name(tmp_path.name + "-whole")
    shutil.copytree(run, whole)
    recover(whole)
    wanted = {snapshot.step: snapshot for snapshot in hookstats.load(whole)}
    assert list(wanted) == list(range(STEPS + IN_RING))
    draw = np.random.default_rng(int(os.environ.get("HOOKSTATS_SEED", "0")))
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    names += ["rank=0/ring.0001.json"] * len(names)
    counts: dict[tuple[str, str], list[int]] = {}
    outside = sorted(tmp_path.iterdir())
    for number in range(TRIES):
        copy = tmp_path / "copy"
        shutil.copytree(run, copy)
        name = names[int(draw.integers(len(names)))]
        content = (copy / name).read_bytes()
        if name.endswith(".json") and draw.random() < 0.6:
            (copy / name).write_bytes(swapped(content, draw))
        elif draw.random() < 0.1 or not content:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(b"" if draw.random() < 0.1 else altered(content, draw))
        is_checked = not name.endswith(WITHOUT_CHECKSUM)

        def loaded(run: Path, checked: int = STEPS + IN_RING if is_checked else STEPS) -> None:
            steps = list(hookstats.load(run))
            assert [snapshot.step for snapshot in steps] == list(wanted)[: len(steps)]
            assert all(snapshot.equals(wanted[snapshot.step]) for snapshot in steps[:checked])

        slow = (reported,) if number % 10 == 0 else ()  # half a second
        for reader in (watched, shown, compared, *slow, recover, loaded, shown, compared, *slow):
            kind = (name.split("/")[1] if name.count("/") == 1 else "parts", reader.__name__)
            count = counts.setdefault(kind, [0, 0])
            try:
                reader(copy)
                count[0] += 1
            except AssertionError as error:
                raise AssertionError(f"mutation {number}, of {name}") from error
            except RunError:
                count[1] += 1
            except (OSError, ValueError, RuntimeError) as error:  # another machine, a process that lives, a link
                assert reader is recover, (number, name, error)  # noqa: PT017
                assert "expected" in str(error), (number, name, error)  # noqa: PT017
                count[1] += 1
        shutil.rmtree(copy)
        assert sorted(tmp_path.iterdir()) == outside
    if "HOOKSTATS_FUZZ" in os.environ:
        for kind, (read, refused) in sorted(counts.items()):
            print(*kind, "read", read, "refused", refused)
