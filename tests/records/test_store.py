"""Tests of commits: a committed frame is read back bit for bit, whatever fails or dies while it is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins, Site, Snapshot
from hookstats.numbers.fields import FIELDS
from hookstats.numbers.frame import StepFrame
from hookstats.records import files
from hookstats.records.attempts import read_attempt
from hookstats.records.parts import list_parts
from hookstats.records.store import FAN_IN, Store
from hookstats.results import Skipped
from hookstats.watch.scalars import Kept, Scalars
from tests.frames import Measured, frame_of
from tests.models import Containers, Residual, images, small_cnn
from tests.records import recorded

MOMENTS = int(os.environ.get("HOOKSTATS_KILLS", "2"))


class Undelayed:
    """`os` for files.py, which waits for no disk: here processes die, and the machine goes on."""

    def __getattr__(self, name: str) -> Any:
        return os.fstat if name == "fsync" else getattr(os, name)


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "os", Undelayed())


def drain(monitor: hookstats.Monitor, step: int, totals_only: bool = False, **scalars: float) -> StepFrame:
    kept = Kept.of(step, Scalars(scalars))
    return monitor._delivery._drain.begin(kept, totals_only=totals_only).finish().drop_hidden()


def is_kept(directory: Path, expected: list[Snapshot], merge: bool = True) -> None:
    run = hookstats.load(directory)
    assert run.steps == [snapshot.step for snapshot in expected]
    for got, want in zip(run, expected, strict=True):
        assert got.equals(want), want.step
        assert list(got) == list(want)
        assert got.frame.bins == want.frame.bins
    assert all(run[want.step].equals(want) for want in expected[::5])
    if merge:
        recorded.merge(directory)
        is_kept(directory, expected, merge=False)


def measured(model: nn.Module, x: torch.Tensor, steps: int, tiers: int = 1, **arguments: Any) -> list[StepFrame]:
    """Real monitors' steps."""
    found = []
    with hookstats.attach(model, every=1, **arguments) as monitor:
        for step in range(steps):
            model(x + step).square().mean().backward()
            found.append(drain(monitor, step, step % tiers > 0, loss=step / 3, lr=1e-3))
    return found


KINDS: dict[str, Callable[[], list[StepFrame]]] = {
    "defaults": lambda: measured(small_cnn(), images(), 9),
    "channels off": lambda: measured(small_cnn(), images(), 9, channels=False, histogram=None),
    "octaves a channel": lambda: measured(small_cnn(), images(), 9, histogram=ExponentBins(per_channel=True)),
    "linear a channel": lambda: measured(small_cnn(), images(), 9, histogram=LinearBins(-2, 2.5, 9, per_channel=True)),
    "linear": lambda: measured(small_cnn(), images(), 9, histogram=LinearBins(-2.0, 2.5, 9)),
    "tiers": lambda: measured(Residual(), torch.randn(4, 5, 16), 10, tiers=3),
    "parameters": lambda: measured(
        Residual(), torch.randn(4, 5, 16), 9, tensors=("output", "param", "param_grad"), modules=["*"]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_equals_what_was_drained(tmp_path: Path, kind: str) -> None:
    steps = KINDS[kind]()
    recorded.keep(tmp_path, {0: steps}, commit_each=1)
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


def test_scaled_gradients_are_kept_as_measured_and_shown_without_the_scale(tmp_path: Path) -> None:
    steps = []
    for step, scale in enumerate((1024.0, 3.7, float("inf"), 1.0)):
        frame = recorded.measured(step)
        frame.grad_scale, frame.overflowed = scale, not np.isfinite(scale)
        steps.append(frame)
    recorded.keep(tmp_path, {0: steps})
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


def test_silent_sites_late_containers_and_a_model_without_a_name_are_kept(tmp_path: Path) -> None:
    model, steps = Containers("tuple"), []
    with hookstats.attach(model, ["*", ""], every=1) as monitor:
        for step, kind in enumerate(["tuple", "tuple", "dict", "nested", "dataclass", "tuple"]):
            model.kind = kind
            if step != 1:
                model(torch.randn(4, 6))
            steps.append(drain(monitor, step))
    recorded.keep(tmp_path, {0: steps}, commit_each=2)
    expected = [Snapshot(frame) for frame in steps]
    assert Site("", "output.0") in expected[-1]
    assert len(expected[-1]) > len(expected[0])
    assert not expected[1].order
    is_kept(tmp_path, expected)


def one_site(name: str, state: np.ndarray[Any, Any], step: int = 0) -> StepFrame:
    """state: ``[fields, channels]``."""
    return frame_of([Measured(Site(name, "output"), state)], step=step, time=1.75e9)


def test_a_site_whose_width_changes_in_a_step_is_kept_as_it_is_read(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Wide())
    monitor = hookstats.attach(model, every=1, options=hookstats.Options(training_only=False), tensors="output")
    steps = []
    for step, widths in enumerate([(5, 5), (5, 3), (3,), (3, 1), (1,)]):
        for width in widths:
            model(torch.randn(4, width))
        steps.append(drain(monitor, step))
    recorded.keep(tmp_path, {0: steps})
    assert {each.sites.channels[0] for each in steps} == {1, 3, 5}
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


def test_every_bit_of_a_state_is_kept(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (len(FIELDS), 64), np.int64)
    special = [np.nan, np.inf, -np.inf, -0.0, 0.0, 5e-324, -5e-324, 2.2e-308, 1e308, -1e308, 1.0, 2.0**60 + 4096]
    states = [bits.view(np.float64)] + [np.full((len(FIELDS), 1), value) for value in special]
    states += [np.full((len(FIELDS), 3), value) for value in special]
    steps = [one_site(f"s{i}", state, i) for i, state in enumerate(states)]
    recorded.keep(tmp_path, {0: steps})
    run = hookstats.load(tmp_path)
    for i, state in enumerate(states):
        assert run[i].frame.state(0).tobytes() == np.ascontiguousarray(state).tobytes(), i
        assert run[i].equals(Snapshot(steps[i]))


def test_names_may_be_anything(tmp_path: Path) -> None:
    names = ["", '\'; drop table "x" --', "a\nb\r\tc\0d", "Größe 層 🔥", "lone \ud800", "x" * 10_000, "*[?]", "../x"]
    steps = []
    for step, name in enumerate(names):
        frame = one_site(name, np.ones((len(FIELDS), 2)), step)
        frame.skipped = {Site(name, "output.0"): Skipped(f"no {name!r}", 3), Site("gone", "input"): Skipped("", None)}
        frame.scalars = {name.replace("\ud800", ""): float("nan"), "loss": -0.0}
        steps.append(frame)
    recorded.keep(tmp_path, {0: steps})
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


def test_a_step_without_anything_leaves_a_trace(tmp_path: Path) -> None:
    steps = [frame_of([], step=step) for step in range(3)]
    recorded.keep(tmp_path, {0: steps})
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


def test_row_groups_are_flushed_while_a_part_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookstats.records.store.FLUSH", 10_000)
    monkeypatch.setattr("hookstats.records.parts.ROW_GROUP", 5)
    monkeypatch.setattr("hookstats.records.store.ROW_GROUP", 5)
    steps = [recorded.measured(step) for step in range(40)]
    recorded.keep(tmp_path, {0: steps}, commit_each=40)
    [whole] = (tmp_path / "rank=0" / "totals").glob("*.parquet")
    assert pq.ParquetFile(whole).num_row_groups > 5
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


def test_channels_and_histograms_of_small_steps_share_a_row_group(tmp_path: Path) -> None:
    """A row group for each step takes most of the writer's time."""
    recorded.keep(tmp_path, {0: [recorded.measured(step) for step in range(40)]}, commit_each=40)
    for table in ("totals", "details"):
        [whole] = (tmp_path / "rank=0" / table).glob("*.parquet")
        assert pq.ParquetFile(whole).num_row_groups < 4  # of ten steps, or forty


def test_merging_leaves_few_parts_and_sorts_totals_by_site_and_step(tmp_path: Path) -> None:
    steps = [recorded.measured(step) for step in range(FAN_IN**2 + 4)]
    recorded.keep(tmp_path, {0: steps}, commit_each=1, merge=True)
    for folder in (tmp_path / "rank=0").iterdir():
        assert len(list(folder.glob("*"))) < 2 * FAN_IN if folder.is_dir() else True
    merged = [path for path in (tmp_path / "rank=0" / "totals").iterdir() if path.name[6:14] != path.name[15:23]]
    assert len(merged) > 1
    for path in merged:
        keys = pq.read_table(path, columns=["site", "step"])
        pairs = list(zip(keys["site"].to_pylist(), keys["step"].to_pylist(), strict=True))
        assert pairs == sorted(pairs)
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


def test_files_of_many_channels_are_not_written_again(tmp_path: Path) -> None:
    """A quarter of the writer's time went there. Totals of the same steps become one file."""
    draw, steps = np.random.default_rng(0), []
    for step in range(FAN_IN):
        made = [Measured(Site(f"{i}", "output"), draw.normal(3, 1, (len(FIELDS), 4096))) for i in range(10)]
        steps.append(frame_of(made, step=step))
    recorded.keep(tmp_path, {0: steps}, commit_each=1, merge=True)
    assert len(list((tmp_path / "rank=0/details").iterdir())) == FAN_IN
    assert len(list((tmp_path / "rank=0/totals").iterdir())) == 1
    is_kept(tmp_path, [Snapshot(frame) for frame in steps])


class Failing(Undelayed):
    """A file system of which one call fails: the n-th of those that reach a disk."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if name not in ("write", "fsync", "replace"):
            return call

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                if name == "write":
                    call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])  # torn
                raise OSError(28, f"no space, at {name}")
            return call(*arguments)

        return counted


def ended(folder: Path) -> bool:
    """Return whether attempt 0 has ended."""
    return (folder / "a0000.json").exists() and read_attempt(folder, 0).ended is not None


def script(directory: Path) -> None:
    """Do a writer's work, from wherever it was broken off."""
    store = Store(directory / "rank=0")
    if not ended(directory / "rank=0"):
        store.begin(0, {})
        for step in range(store.read_progress(0).consumed, 18):
            store.add(recorded.measured(step))
            if step % 2:
                store.commit(step + 1)
        store.finish(0)
    while store.merge():
        pass


def test_no_failing_write_sync_or_rename_tears_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Failing(-1)
    monkeypatch.setattr(files, "os", counting)
    script(tmp_path / "all")
    expected = [Snapshot(recorded.measured(step)) for step in range(18)]
    points = range(1, counting.calls + 1)
    assert len(points) > 200
    tried = [1, 2, 3, *np.random.default_rng(0).choice(points, 8 if MOMENTS < 20 else len(points), replace=False)]
    for at in dict.fromkeys(map(int, tried)):  # each once: what was fixed does not fail again
        directory = tmp_path / str(at)
        monkeypatch.setattr(files, "os", Failing(at))
        with pytest.raises(OSError, match="no space"):
            script(directory)
        monkeypatch.setattr(files, "os", Undelayed())
        if list(directory.glob("rank=0/steps/a*.parquet")):
            run = hookstats.load(directory)
            assert all(a.equals(b) for a, b in zip(run, expected, strict=False)), at
        script(directory)
        is_kept(directory, expected, merge=False)
        left = [each for parts in list_parts(directory / "rank=0").counting.values() for each in parts]
        assert len(left) == len(list(directory.glob("rank=0/*/*"))), at


class Ordered:
    """`os` for files.py, which takes note of what is renamed, and while its content, or the folder of what was renamed
    before it, is not on the disk yet."""

    def __init__(self) -> None:
        self.written: set[int] = set()  # inodes
        self.renamed: set[Path] = set()  # folders
        self.too_early: list[str] = []
        self.parts: dict[str, list[str]] = {}  # the tables of which there is such a part, in the order of their names

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, content: Any) -> int:
        self.written.add(os.fstat(descriptor).st_ino)
        return os.write(descriptor, content)

    def fsync(self, descriptor: int) -> None:
        self.written.discard(os.fstat(descriptor).st_ino)
        self.renamed -= {path for path in self.renamed if path.stat().st_ino == os.fstat(descriptor).st_ino}

    def replace(self, path: Path, final: Path) -> None:
        if path.stat().st_ino in self.written or self.renamed - {path.parent}:
            self.too_early.append(final.name)
        os.replace(path, final)
        self.renamed.add(path.parent)
        self.parts.setdefault(final.name, []).append(final.parent.name)


def test_nothing_counts_that_is_not_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = Ordered()
    monkeypatch.setattr(files, "os", ordered)
    script(tmp_path)
    assert ordered.too_early == []
    assert not ordered.written
    assert not ordered.renamed
    committed = [ordered.parts[f"a0000.{first:08}-{first + 1:08}.parquet"] for first in range(0, 18, 2)]
    assert {tables[-1] for tables in committed} == {"steps"}  # whose part says that those of the others count


def test_an_attempt_goes_on_after_its_writer_died_and_not_after_it_ended(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="expected begin"):
        Store(tmp_path / "other").commit(1)
    store.begin(3, {"a": 1})
    store.add(recorded.measured(0))
    store.commit(100)
    store.add(recorded.measured(1))  # is lost with its writer, and comes again
    store = Store(tmp_path)
    assert store.read_progress(3).consumed == 100
    assert store.read_progress(4).consumed == 0
    store.begin(3, {"a": 2})
    store.add(recorded.measured(1))
    with pytest.raises(ValueError, match="the attempt that was begun, 3"):
        store.finish(4)
    store = Store(tmp_path)
    store.begin(3, {})
    store.finish(3, "died: of a test", dropped=7)
    for attempt, expected in ((3, "has not ended; attempt 3 is died: of a test"), (2, "an attempt after 3")):
        with pytest.raises(ValueError, match=expected):
            Store(tmp_path).begin(attempt, {})
    known = read_attempt(tmp_path, 3)
    assert (known.settings, known.dropped) == ({"a": 1}, 7)


def test_what_was_broken_off_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    """A commit whose `steps` has not got its name, a file that is half written, one that a wider one covers."""
    recorded.keep(tmp_path, {0: [recorded.measured(step) for step in range(3)]})
    folder = tmp_path / "rank=0"
    totals = folder / "totals"
    [whole] = totals.iterdir()
    (totals / "a0000.00000003-00000009.parquet").write_bytes(whole.read_bytes())
    (totals / "a0000.00000001-00000002.parquet").write_bytes(whole.read_bytes())
    (totals / "open.parquet.tmp").write_bytes(b"PAR1")
    (totals / "notes.txt").write_text("of a person")
    is_kept(tmp_path, [Snapshot(recorded.measured(step)) for step in range(3)], merge=False)
    store = Store(folder)
    store.begin(1, {})
    assert sorted(path.name for path in totals.iterdir()) == [whole.name, "notes.txt"]
    store.add(recorded.measured(3))
    store.finish(1)
    is_kept(tmp_path, [Snapshot(recorded.measured(step)) for step in range(4)], merge=False)


def test_numbers_that_go_back_in_an_attempt_have_files_of_their_own(tmp_path: Path) -> None:
    """Also where they are the same numbers, and when the files are merged."""
    store = Store(tmp_path / "rank=0")
    store.begin(1, {})
    for number in range(3):
        for step in range(8):
            store.add(recorded.measured(step, step + 100 * number))
            store.commit(8 * number + step)
    while store.merge():
        pass
    names = {path.name for path in (tmp_path / "rank=0" / "steps").iterdir()}
    assert {name.partition(".")[0] for name in names} == {"a0001", "a0001-2", "a0001-3"}
    assert len(names) == 6
    run = hookstats.load(tmp_path)
    assert run.steps == list(range(8))
    for step, snapshot in enumerate(run):
        assert snapshot.equals(Snapshot(recorded.measured(step, step + 200)))
