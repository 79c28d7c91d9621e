"""Tests of the numbers that sinks send, and of sinks that write files: each file is read by its own readers."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import ExponentBins, LinearBins, Site, Snapshot
from hookstats.sinks.keys import Keys
from tests.conftest import ROOT
from tests.snapshots import HOSTILE, snapshot

NAN, INF = float("nan"), float("inf")
DEFAULT = ("rms", "std", "abs_max")


def train(sinks: Any, **arguments: Any) -> list[Snapshot]:
    """Three steps of a small model."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = hookstats.attach(model, every=1, sinks=sinks, options=hookstats.Options(strict=True), **arguments)
    taken = []
    for _ in range(3):
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(monitor.step(loss=loss))
    monitor.detach()
    assert all(each is not None for each in taken)
    return taken


def keys(**arguments: Any) -> Keys:
    return Keys("Test", **({"statistics": DEFAULT, "sites": None} | arguments))


def test_a_small_model_is_sent_whole_with_its_scalars_and_its_gradient_norm() -> None:
    chosen = keys()
    for taken in train(()):
        values = chosen.values(taken)
        assert next(iter(values)) == "step"
        assert values["step"] == taken.step
        expected = {"step", "nonfinite", "grad_norm", "scalars/loss", *taken.flat(*DEFAULT)}
        assert set(values) == expected
        assert {key: values[key] for key in taken.flat(*DEFAULT)} == taken.flat(*DEFAULT)
        assert values["grad_norm"] == taken.grad_norm
        assert values["nonfinite"] == 0
        assert not chosen.histograms(taken)  # which were measured, and not asked for


def large(step: int, names: list[str], more: tuple[str, ...] = ()) -> Snapshot:
    """Outputs, gradients of these and twice as many of parameters; no gradient in the first step."""
    x = torch.randn(3, 2)
    outputs = [Site(name, "output") for name in (*names, *more)]
    gradients = [Site(name, "grad_output") for name in names]
    parameters = [Site(f"{name}.{each}", "param_grad") for name in names for each in ("weight", "bias")]
    if step == 0:
        return snapshot(step, dict.fromkeys(outputs, x), silent=gradients + parameters)
    return snapshot(step, dict.fromkeys(outputs + gradients + parameters, x))


def send(values: dict[str, float]) -> set[str]:
    return {key for key in values if key.count("/") == 2}


def test_of_many_sites_64_are_sent_evenly_and_the_same_ones_in_every_step(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    names = [f"layers.{i}" for i in range(200)]
    chosen = keys()
    rows = [send(chosen.values(large(step, names, ("later",) * (step > 1)))) for step in range(4)]
    outputs = {key.split("/")[2] for key in rows[1] if key.startswith("output/rms")}
    gradients = {key.split("/")[2] for key in rows[1] if key.startswith("grad_output/rms")}
    parameters = {key.split("/")[2] for key in rows[1] if key.startswith("param_grad/rms")}
    assert outputs == gradients
    assert (len(outputs), len(parameters)) == (21, 22)
    places = sorted(int(name.split(".")[1]) for name in outputs)
    assert (places[0], places[-1]) == (0, 199)
    assert set(np.diff(places)) <= {9, 10, 11}
    assert len(rows[1]) == 64 * 3
    assert rows[0] == {key for key in rows[1] if key.startswith("output/")}
    assert rows[1] == rows[2] == rows[3]
    assert rows[1] == send(keys().values(large(7, names)))  # a resumed run sends the same
    told = [str(warning.message) for warning in recwarn if "sites" in str(warning.message)]
    assert len(told) == 2  # one of each Keys
    assert "Test gets 64 of 800 sites, evenly from first to last" in told[0]


def test_sites_that_appear_later_are_added_while_there_is_room() -> None:
    chosen, x = keys(statistics="rms"), torch.ones(2, 2)
    early = [f"a.{i}" for i in range(60)]
    late = [f"b.{i}" for i in range(10)]
    assert len(send(chosen.values(snapshot(0, dict.fromkeys(early, x))))) == 60
    with pytest.warns(UserWarning, match="64 of 70 sites"):
        values = send(chosen.values(snapshot(1, dict.fromkeys([*late, *early], x))))
    assert values == {f"output/rms/{name}" for name in [*early, *late[:4]]}
    assert send(chosen.values(snapshot(2, dict.fromkeys(reversed(late), x)))) == {f"output/rms/b.{i}" for i in range(4)}


def test_globs_choose_sites_without_a_limit_and_statistics_are_chosen() -> None:
    names = [f"layers.{i}" for i in range(200)]
    chosen = keys(sites=["layers.1*", "layers.7"], statistics="mean")
    values = send(chosen.values(large(0, names)))
    wanted = [name for name in names if fnmatchcase(name, "layers.1*") or name == "layers.7"]
    assert len(wanted) > 64
    assert values == {f"output/mean/{name}" for name in wanted}


def test_a_glob_that_matches_nothing_is_told_once(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    chosen = keys(sites=["a", "b*", "c"])
    for step in range(3):
        chosen.values(snapshot(step, {"a": torch.ones(2, 2)}))
    told = [str(warning.message) for warning in recwarn]
    assert told == ["hookstats: Test: sites: the globs 'b*', 'c' match nothing; the names are 'a', ..."]


def test_what_is_not_finite_is_sent_from_the_first_time_on_and_counted_over_all_sites() -> None:
    chosen = keys(sites="a", statistics="rms")
    bad, good = torch.tensor([[1.0, NAN], [INF, -INF]]), torch.ones(2, 2)
    rows = [
        chosen.values(snapshot(step, {"a": a, "b": b}))
        for step, (a, b) in enumerate([(good, good), (good, bad), (bad, bad), (good, good)])
    ]
    assert [row["nonfinite"] for row in rows] == [0, 3, 6, 0]
    assert [row.get("output/nonfinite/a") for row in rows] == [None, None, 3, 0]
    assert rows[2]["output/rms/a"] == 1


def test_a_step_in_which_nothing_fired_has_its_scalars() -> None:
    values = keys().values(snapshot(3, {}, {"loss": 2.0}, silent=[Site("a", "output")]))
    assert values == {"step": 3, "nonfinite": 0, "scalars/loss": 2}


def test_hostile_names_have_keys_of_their_own_that_every_service_takes() -> None:
    sites = [Site(name, "output") for name in HOSTILE] + [Site("a", f"output.{name}") for name in HOSTILE]
    sites += [Site("b", "output.x/rms"), Site("rms/b", "output.x")]
    taken = snapshot(0, dict.fromkeys(sites, torch.ones(2, 2)), dict.fromkeys(HOSTILE, 1.0))
    found = set(keys(sites="*", statistics=["rms", "abs_mean"]).values(taken))
    assert len(found) == 2 + len(HOSTILE) + 2 * len(sites)
    for key in found:
        assert len(f"hookstats/{key}") <= 250  # mlflow
        assert all(0 < len(part.encode()) <= 255 and part.strip(".") for part in key.split("/"))  # a file's name
        assert all(letter.isalnum() or letter in "_.- /" for letter in key)
    assert {"output/rms/whole-model", "output/rms/a", "output/rms/a b", "output/rms/слой.层"} <= found
    assert "output/rms/a_b-c14cddc0" in found  # "a/b"


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize(
    "bins",
    [
        ExponentBins(),
        ExponentBins(per_channel=True),
        LinearBins(-1.0, 1.0, 50),
        LinearBins(-16.0, 16.0, 8192),
        LinearBins(-1.0, 1.0, 50, per_channel=True),
    ],
    ids=str,
)
def test_histograms_hold_every_value_in_at_most_512_bars(bins: Any, scale: float) -> None:
    x = torch.randn(3000, 3) * torch.tensor([1e-3, 1.0, 2.0])
    x[0, 0] = -9
    x = ((x * 1024).floor() + 1 / 3) / 1024  # none so near to an edge that float32 would decide
    taken = snapshot(
        0, {"a": torch.tensor([[NAN]]).expand(3000, 3), "b": x, "not sent": x}, histogram=bins, scale=scale
    )
    chosen = keys(sites=["a", "b"], histograms=True)
    chosen.values(taken)
    found = chosen.histograms(taken)
    assert list(found) == ["output/histogram/b"]  # nothing was counted in a
    bars = found["output/histogram/b"]
    values = x.double().numpy().reshape(-1) / scale
    assert bars.sum == pytest.approx(values.sum())
    assert bars.square_sum == pytest.approx((values**2).sum())
    if bins == ExponentBins(per_channel=True):
        values = np.abs(values)
    else:
        assert bars.edges[0] == values.min()
    assert bars.edges[-1] == values.max()
    assert 10 < len(bars.counts) <= 512
    assert bars.counts[0] > 0
    assert bars.counts[-1] > 0
    assert ((bars.counts[1:] > 0) | (bars.counts[:-1] > 0)).all()  # bins that are empty side by side are one
    assert (np.diff(bars.edges) > 0).all()
    np.testing.assert_array_equal(bars.counts, np.histogram(values, bars.edges)[0])


@pytest.mark.parametrize(
    ("sink", "package", "extra"),
    [
        ("TensorBoard", "tensorboard", "tensorboard"),
        ("Wandb", "wandb", "wandb"),
        ("Mlflow", "mlflow", "mlflow"),
        ("Trackio", "trackio", "trackio"),
    ],
)
def test_a_missing_package_is_told_when_the_sink_is_made(
    sink: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^{sink} needs .*: pip install 'hookstats\[{extra}\]'"):
        getattr(hookstats.sinks, sink)(*[tmp_path] * (sink == "TensorBoard"))


FILE_SINKS = [hookstats.sinks.JsonLines, hookstats.sinks.TensorBoard]


@pytest.mark.parametrize("sink", FILE_SINKS)
def test_file_sinks_are_made_again_from_json(
    sink: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = sink("a/b", statistics=["mean"], sites=["x*"], histograms=True)
    spec = json.loads(json.dumps(made.spec()))
    monkeypatch.chdir("/")  # as the other process may
    again = hookstats.sinks.from_spec(spec)
    assert type(again) is sink
    assert again.spec() == made.spec()
    assert str(tmp_path / "a" / "b") in spec["arguments"].values()
    assert spec["arguments"].items() >= {"statistics": ["mean"], "sites": ["x*"], "histograms": True}.items()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hookstats.sinks.jsonl:JsonLines", "got 'hookstats"),
        ({"sink": "hookstats.sinks.jsonl:JsonLines"}, "'arguments'$"),
        ({"sink": "os:system", "arguments": {"command": "true"}}, "one of hookstats.*: 'os:system'$"),
        ({"sink": ["a"], "arguments": {}}, "unhashable"),
        ({"sink": "hookstats.sinks.jsonl:JsonLines", "arguments": [1]}, "must be a mapping"),
        ({"sink": "hookstats.sinks.jsonl:JsonLines", "arguments": {}}, "missing 1 required"),
        (
            {"sink": "hookstats.sinks.tensorboard:TensorBoard", "arguments": {"directory": "a", "path": "b"}},
            "unexpected keyword argument 'path'",
        ),
    ],
)
def test_what_is_no_spec_of_a_file_sink_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"from_spec: expected a dict with 'sink', .*{message}"):
        hookstats.sinks.from_spec(spec)


# A process without torch that has a snapshot, as the one that writes records has.
ALONE = """
import json, os, sys, time, hookstats
from hookstats.sinks import from_spec
taken = hookstats.Snapshot.from_dict(json.loads(sys.argv[1]))
sink = from_spec(json.loads(sys.argv[2]))
"""


def alone(code: str, taken: Snapshot, sink: Any) -> list[str]:
    return [sys.executable, "-c", ALONE + code, json.dumps(taken.to_dict()), json.dumps(sink.spec())]


@pytest.mark.parametrize("sink", FILE_SINKS)
def test_file_sinks_need_no_torch(sink: Callable[..., Any], tmp_path: Path) -> None:
    taken = snapshot(3, {"a": torch.randn(4, 2)}, histogram=ExponentBins())
    code = "sink(taken); sink.close(); hookstats.sinks.Wandb; print('torch' in sys.modules)"
    command = alone(code, taken, sink(tmp_path / "a", histograms=True))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert list(tmp_path.rglob("*"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_of_three_steps_are_read_by_json_and_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "new" / "a.jsonl"
    chosen = keys()
    taken = train(hookstats.sinks.JsonLines(path))
    assert lines(path) == [chosen.values(each) for each in taken]
    frame = pandas.read_json(path, lines=True)
    assert frame["step"].tolist() == [0, 1, 2]
    wanted = [each["0", "output"].total.rms for each in taken]
    np.testing.assert_allclose(frame["output/rms/0"], wanted, rtol=1e-9)  # pandas keeps ten digits of JSON


def test_json_lines_have_nan_inf_and_histograms(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "a.jsonl"
    sink = hookstats.sinks.JsonLines(path, histograms=True)
    sink(snapshot(0, {"a": torch.full((2, 2), NAN)}, {"loss": NAN}))
    sink(snapshot(1, {"a": torch.tensor([[1.0, 3.0]])}, {"loss": -INF, "lr": INF}, histogram=ExponentBins()))
    first, second = lines(path)
    assert math.isnan(first["scalars/loss"])
    assert math.isnan(first["output/rms/a"])
    assert second["scalars/loss"] == -INF
    assert second["output/histogram/a"] == {"counts": [1, 1], "edges": [1, 2, 3]}
    frame = pandas.read_json(path, lines=True)
    assert frame["scalars/loss"].isna().tolist() == [True, False]
    assert frame["scalars/lr"].tolist()[1] == INF


def test_a_json_line_is_one_write_and_is_in_the_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data) or write(file, data))
    sink = hookstats.sinks.JsonLines(tmp_path / "a")
    for step in range(3):
        sink(snapshot(step, {"a": torch.ones(2, 2)}))
        assert [row["step"] for row in lines(tmp_path / "a")] == list(range(step + 1))
    assert [data.count(b"\n") for data in written] == [1, 1, 1]


@pytest.mark.parametrize("size", [1, 80_000])
def test_a_line_torn_anywhere_is_cut_off_when_the_file_is_opened_again(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sink = hookstats.sinks.JsonLines(path)
    for step in range(2):
        sink(snapshot(step, {"a": torch.ones(2, 2)}, {f"s{i}": 0.0 for i in range(size // 20)}))
    sink.close()
    whole = path.read_bytes()
    end = whole.index(b"\n") + 1
    assert len(whole) - end > (65_536 if size > 1 else 0)  # more than is looked at in one go
    for cut in (*range(end, len(whole) - 1, max(7, size // 30)), len(whole) - 1, len(whole)):
        path.write_bytes(whole[:cut])
        again = hookstats.sinks.JsonLines(path)
        again(snapshot(2, {"a": torch.ones(2, 2)}))
        again.close()
        steps = [row["step"] for row in lines(path)]
        assert steps == ([0, 1, 2] if cut == len(whole) else [0, 2])


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("first\nthe last line has no end")
    with pytest.raises(ValueError, match=r"got .*notes, ending b'the last line has"):
        hookstats.sinks.JsonLines(path)
    assert path.read_text() == "first\nthe last line has no end"
    path.write_bytes(b"first\n" + bytes(1 << 16))
    with pytest.raises(ValueError, match=r"ending b'\\x00"):
        hookstats.sinks.JsonLines(path)
    with pytest.raises(FileExistsError):
        hookstats.sinks.JsonLines(path / "a")


def test_a_full_disk_leaves_whole_lines_and_raises(tmp_path: Path) -> None:
    sink = hookstats.sinks.JsonLines(tmp_path / "a.jsonl")
    code = """
import resource
sink(taken)
size = os.path.getsize(json.loads(sys.argv[2])["arguments"]["path"])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(2.5 * size), resource.RLIM_INFINITY))
sink(taken)
for _ in range(2):
    try:
        sink(taken)
    except OSError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sink(taken)
"""
    command = alone(code, snapshot(3, {"a": torch.ones(2, 2)}), sink)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("expected to write") == 2
    assert [row["step"] for row in lines(tmp_path / "a.jsonl")] == [3, 3, 3]


def test_a_second_process_is_refused_until_the_first_one_ends_and_its_forks_hold_nothing(tmp_path: Path) -> None:
    taken, sink = snapshot(0, {"a": torch.ones(2, 2)}), hookstats.sinks.JsonLines(tmp_path / "a.jsonl")
    code = """
sink(taken)
child = os.fork()
if child == 0:  # as a worker of a DataLoader
    print(os.getpid(), flush=True)
    time.sleep(600)
sys.stdin.read()
"""
    command = alone(code, taken, sink)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        child = int(first.stdout.readline())
        try:
            with pytest.raises(OSError, match="nobody else writes; give each rank and each sink its own"):
                sink(taken)
            first.kill()
            first.wait()
            os.kill(child, 0)  # is alive
            sink(taken)
        finally:
            os.kill(child, signal.SIGKILL)
    assert len(lines(tmp_path / "a.jsonl")) == 2


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", lock)
    hookstats.sinks.JsonLines(tmp_path / "a")(snapshot(0, {"a": torch.ones(2, 2)}))
    assert len(lines(tmp_path / "a")) == 1


def events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory), {"scalars": 0, "histograms": 0}).Reload()


def test_tensorboards_reader_gives_the_numbers_of_three_steps_back_to_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter

    def write(self: Any, data: bytes) -> None:  # in tensorboard's own thread
        time.sleep(0.02)
        real(self, data)

    real = record_writer.write
    monkeypatch.setattr(record_writer, "write", write)
    chosen = keys()
    taken = train(hookstats.sinks.TensorBoard(tmp_path, histograms=True))
    read = events(tmp_path)  # without close(): each snapshot is flushed
    rows = [chosen.values(each) for each in taken]
    assert set(read.Tags()["scalars"]) == {f"hookstats/{key}" for key in rows[0] if key != "step"}
    for tag in read.Tags()["scalars"]:
        found = read.Scalars(tag)
        assert [event.step for event in found] == [0, 1, 2]
        assert [event.value for event in found] == [np.float32(row[tag.removeprefix("hookstats/")]) for row in rows]


def test_tensorboards_reader_gives_histograms_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    x = torch.randn(500, 8)
    taken = snapshot(7, {"a": x}, histogram=ExponentBins())
    sink = hookstats.sinks.TensorBoard(tmp_path, histograms=True)
    sink(taken)
    sink.close()
    chosen = keys(histograms=True)
    chosen.values(taken)
    bars = chosen.histograms(taken)["output/histogram/a"]
    (event,) = events(tmp_path).Histograms("hookstats/output/histogram/a")
    value = event.histogram_value
    assert (event.step, value.num, value.min, value.max) == (7, 4000, x.min().item(), x.max().item())
    assert value.sum == pytest.approx(x.double().sum().item())
    assert value.sum_squares == pytest.approx(x.double().square().sum().item())
    assert value.bucket_limit == bars.edges[1:].tolist()
    assert value.bucket == bars.counts.tolist()
    shown = EventAccumulator(str(tmp_path)).Reload().Tensors("hookstats/output/histogram/a")[0]
    expected = np.stack([bars.edges[:-1], bars.edges[1:], bars.counts], axis=1).astype(np.float32)
    np.testing.assert_array_equal(make_ndarray(shown.tensor_proto), expected)


def test_tensorboard_takes_hostile_names_nan_and_float64_beyond_float32(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = hookstats.sinks.TensorBoard(tmp_path, statistics="max")
    tensors = {name: torch.full((2, 2), float(i)) for i, name in enumerate(HOSTILE)}
    sink(snapshot(0, {**tensors, "big": torch.tensor([[1e300]], dtype=torch.float64)}, {"loss": NAN}))
    read = events(tmp_path)
    values = [read.Scalars(tag)[0].value for tag in read.Tags()["scalars"] if "/max/" in tag]
    assert sorted(values) == [*map(float, range(len(HOSTILE))), INF]
    assert math.isnan(read.Scalars("hookstats/scalars/loss")[0].value)
