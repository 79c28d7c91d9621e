"""The sinks that send to a service: to its own offline run or local store, read back; nothing goes to the network."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hookstats
from hookstats import ExponentBins, LinearBins, Site
from hookstats.rules import Finding
from hookstats.sinks.keys import Keys
from tests.sinks.test_sinks import DEFAULT, train
from tests.snapshots import HOSTILE, snapshot

NAN, INF = float("nan"), float("inf")
ONES = torch.ones(2, 2)
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "WANDB__SERVICE_WAIT": "60",  # seconds for its process to begin, on a machine that is busy
}
# Folders of theirs, which trackio reads when it is imported.
FOLDERS = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR", "HF_HOME")


@pytest.fixture(autouse=True, scope="module")
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in OFFLINE.items():
            monkeypatch.setenv(name, value)
        for name in FOLDERS:
            monkeypatch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield


@pytest.fixture(autouse=True)
def _nothing_asks_for_an_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked = []

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "localhost", "127.0.0.1", "::1"):
            asked.append(host)
            raise socket.gaierror(f"no network in tests: {host}")
        return real(host, *args, **kwargs)

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    assert not asked


def keys_of(names: Any, **arguments: Any) -> set[str]:
    """Return the keys as a service stores them."""
    values = Keys("Test", **({"statistics": DEFAULT, "sites": None} | arguments)).values(names)
    return {f"hookstats/{key}" for key in values}


def test_without_an_active_run_a_sink_is_refused_when_it_is_made() -> None:
    for sink, package, call in [
        (hookstats.sinks.Wandb, "wandb", r"wandb\.init"),
        (hookstats.sinks.Mlflow, "mlflow", r"mlflow\.start_run"),
        (hookstats.sinks.Trackio, "trackio", r"trackio\.init"),
    ]:
        pytest.importorskip(package)
        with pytest.raises(
            RuntimeError, match=rf"expected an active run, got none: call {call}\(\) before, or give run"
        ):
            sink()


@pytest.fixture
def wandb_run(tmp_path: Path) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="test", dir=tmp_path, settings={"x_disable_stats": True, "x_disable_meta": True})
    yield run
    run.finish()


def wandb_records(path: str) -> list[Any]:
    """Read the file of an offline run, a log of LevelDB with protobufs in it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, records = Path(path).read_bytes(), 7, b"", []
    block = 1 << 15
    while at + 7 <= len(data):
        if block - at % block < 7:  # too little for a header: the next block
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # a whole record, or its last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def wandb_rows(run: Any) -> list[dict[str, Any]]:
    """The history that W&B would get."""
    run.finish()
    deadline = time.monotonic() + 60  # finish() does not wait for the file
    while not any(record.HasField("exit") for record in wandb_records(run.settings.sync_file)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rows = []
    for record in wandb_records(run.settings.sync_file):
        if record.HasField("history"):
            items = [(item.key or ".".join(item.nested_key), item.value_json) for item in record.history.item]
            rows.append({key: json.loads(value) for key, value in items})
    return rows


def test_wandb_has_each_snapshot_of_a_training_run(wandb_run: Any) -> None:
    taken = train(hookstats.sinks.Wandb())
    chosen = Keys("Test", DEFAULT, None)
    rows = wandb_rows(wandb_run)
    ours = [{key: value for key, value in row.items() if key.startswith("hookstats/")} for row in rows]
    assert ours == [{f"hookstats/{key}": value for key, value in chosen.values(each).items()} for each in taken]


def test_wandb_drops_no_late_snapshot_and_nothing_that_the_user_logs_with_a_step(wandb_run: Any) -> None:
    sink = hookstats.sinks.Wandb(wandb_run)
    for step in range(0, 40, 10):
        wandb_run.log({"loss": step}, step=step)
        if step >= 20:
            sink(snapshot(step - 15, {"a": ONES}))
            sink(snapshot(step - 14, {"a": ONES}))
        wandb_run.log({"lr": step}, step=step + 1)
    rows = wandb_rows(wandb_run)
    assert [row["hookstats/step"] for row in rows if "hookstats/step" in row] == [5, 6, 15, 16]
    assert all(row["hookstats/output/rms/a"] == 1 for row in rows if "hookstats/step" in row)
    assert [row["loss"] for row in rows if "loss" in row] == [0, 10, 20, 30]
    assert [row["lr"] for row in rows if "lr" in row] == [0, 10, 20, 30]


def test_wandbs_own_step_is_not_counted_on_by_a_snapshot_between_two_rows(wandb_run: Any) -> None:
    sink = hookstats.sinks.Wandb()
    for step in range(4):
        sink(snapshot(step, {"a": ONES}))
        wandb_run.log({"loss": step})
    rows = wandb_rows(wandb_run)
    assert [(row["_step"], row["loss"], row["hookstats/step"]) for row in rows] == [(i, i, i) for i in range(4)]


def test_wandb_takes_hostile_names_nan_inf_and_histograms(wandb_run: Any) -> None:
    sink = hookstats.sinks.Wandb(sites="*", histograms=True)
    x = torch.randn(100, 4)
    taken = snapshot(3, dict.fromkeys(HOSTILE, x), {"loss": NAN, "lr": INF}, histogram=LinearBins(-9.0, 9.0, 10_000))
    sink(taken)
    (row,) = wandb_rows(wandb_run)
    assert keys_of(taken, sites="*") <= set(row)
    assert math.isnan(row["hookstats/scalars/loss"])
    assert row["hookstats/scalars/lr"] == INF
    histograms = {key.rpartition(".")[0] for key in row if key.endswith("._type")}
    assert len(histograms) == len(HOSTILE)
    assert sum(row["hookstats/output/histogram/a.values"]) == 400
    bins = row["hookstats/output/histogram/a.bins"]
    assert (bins[0], bins[-1]) == (x.min().item(), x.max().item())


def test_a_disabled_wandb_run_is_no_trouble() -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="disabled")
    train(hookstats.sinks.Wandb())
    run.finish()


def test_a_shared_wandb_run_which_has_no_step_gets_a_row_for_each_snapshot_and_plots_over_our_step() -> None:
    pytest.importorskip("wandb")
    rows: list[Any] = []
    defined: list[Any] = []
    run = SimpleNamespace(  # such a run needs a server
        settings=SimpleNamespace(mode="shared"),
        define_metric=lambda name, **arguments: defined.append((name, arguments)),
        log=lambda row: rows.append(row),
    )
    train(hookstats.sinks.Wandb(run))
    assert defined == [("hookstats/*", {"step_metric": "hookstats/step"})]
    assert [row["hookstats/step"] for row in rows] == [0, 1, 2]


@pytest.fixture
def mlflow_run(tmp_path: Path) -> Iterator[Any]:
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    with mlflow.start_run() as run:
        yield run
    mlflow.set_tracking_uri(before)


def mlflow_history(run: Any, key: str) -> list[tuple[int, float]]:
    import mlflow

    found = mlflow.MlflowClient().get_metric_history(run.info.run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def mlflow_keys(run: Any) -> set[str]:
    import mlflow

    mlflow.flush_async_logging()
    return set(mlflow.MlflowClient().get_run(run.info.run_id).data.metrics)


def test_mlflow_has_each_snapshot_of_a_training_run(mlflow_run: Any) -> None:
    taken = train(hookstats.sinks.Mlflow())
    chosen = Keys("Test", DEFAULT, None)
    rows = [chosen.values(each) for each in taken]
    assert mlflow_keys(mlflow_run) == {f"hookstats/{key}" for key in rows[0] if key != "step"}
    for key in rows[0]:
        if key != "step":
            assert mlflow_history(mlflow_run, f"hookstats/{key}") == [(row["step"], row[key]) for row in rows]


def test_mlflow_takes_hostile_names_nan_inf_and_more_than_a_thousand_metrics(mlflow_run: Any) -> None:
    sink = hookstats.sinks.Mlflow(mlflow_run.info.run_id, sites="*")
    sites = [*HOSTILE, *(f"layers.{i}" for i in range(400))]
    taken = snapshot(3, dict.fromkeys(sites, ONES), {"loss": NAN, "lr": INF})
    sink(taken)
    wanted = keys_of(taken, sites="*") - {"hookstats/step"}
    assert len(wanted) > 1000
    assert mlflow_keys(mlflow_run) == wanted
    assert math.isnan(mlflow_history(mlflow_run, "hookstats/scalars/loss")[0][1])
    assert mlflow_history(mlflow_run, "hookstats/scalars/lr")[0] == (3, INF)


def test_mlflows_file_store_loses_nothing_of_snapshots_that_come_at_once(
    mlflow_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes a folder for each level of a key, over which its threads stumble."""

    def makedirs(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)  # after a look whether it is there
        real(*args, **kwargs)

    real = os.makedirs
    monkeypatch.setattr(os, "makedirs", makedirs)
    sink = hookstats.sinks.Mlflow(statistics="rms")
    wanted = set()
    for step in range(30):
        taken = snapshot(step, {Site("a", f"output.{i}"): ONES for i in range(step // 3 + 1)})
        wanted |= keys_of(taken, statistics="rms")
        sink(taken)
    assert mlflow_keys(mlflow_run) == wanted - {"hookstats/step"}
    assert mlflow_history(mlflow_run, "hookstats/nonfinite") == [(step, 0) for step in range(30)]


def test_what_mlflow_cannot_send_is_waited_for_once(mlflow_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def log_batch(*args: Any, synchronous: bool) -> None:
        waited.append(synchronous)
        if synchronous:
            raise ConnectionError("after minutes")

    sink = hookstats.sinks.Mlflow()
    monkeypatch.setattr(type(sink._client), "log_batch", log_batch)
    with pytest.raises(ConnectionError):
        sink(snapshot(0, {"a": ONES}))
    sink(snapshot(1, {"a": ONES}))
    assert waited == [True, False]


def test_a_run_that_mlflow_does_not_have_is_refused_when_the_sink_is_made(mlflow_run: Any) -> None:
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException, match="not found"):
        hookstats.sinks.Mlflow("0" * 32)


@pytest.fixture
def trackio_run() -> Iterator[Any]:
    trackio = pytest.importorskip("trackio")
    if str(trackio.utils.TRACKIO_DIR) != os.environ["TRACKIO_DIR"]:
        pytest.skip("trackio was imported before, and would write to the user's own folder")
    run = trackio.init(project="test", auto_log_cpu=False, auto_log_gpu=False)
    yield run
    trackio.finish()


def trackio_rows(run: Any) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    run.finish()
    rows = SQLiteStorage.get_logs("test", run.name)
    return [{key: value for key, value in row.items() if key != "timestamp"} for row in rows]


def test_trackio_has_each_snapshot_of_a_training_run_beside_what_the_user_logs(trackio_run: Any) -> None:
    trackio_run.log({"loss": 1.0}, step=50)
    taken = train(hookstats.sinks.Trackio())
    trackio_run.log({"loss": 2.0})
    chosen = Keys("Test", DEFAULT, None)
    rows = [{("" if key == "step" else "hookstats/") + key: v for key, v in chosen.values(t).items()} for t in taken]
    assert trackio_rows(trackio_run) == [{"loss": 1.0, "step": 50}, *rows, {"loss": 2.0, "step": 51}]


def test_trackio_takes_hostile_names_nan_inf_and_histograms(trackio_run: Any) -> None:
    sink = hookstats.sinks.Trackio(trackio_run, sites="*", histograms=True)
    x = torch.randn(100, 4)
    taken = snapshot(3, dict.fromkeys(HOSTILE, x), {"loss": NAN, "lr": INF}, histogram=ExponentBins())
    sink(taken)
    (row,) = trackio_rows(trackio_run)
    assert keys_of(taken, sites="*") - {"hookstats/step"} <= set(row)
    assert row["step"] == 3
    assert math.isnan(row["hookstats/scalars/loss"])
    assert row["hookstats/scalars/lr"] == INF
    assert sum("/histogram/" in key for key in row) == len(HOSTILE)
    bars = row["hookstats/output/histogram/a"]
    assert sum(bars["values"]) == 400
    assert len(bars["bins"]) == len(bars["values"]) + 1
    assert np.isfinite(bars["bins"]).all()


def test_a_site_that_fires_later_keeps_the_others_as_they_are(trackio_run: Any) -> None:
    sink = hookstats.sinks.Trackio(statistics="rms")
    late = Site("b", "output")
    sink(snapshot(0, {"a": ONES}, silent=[late]))
    sink(snapshot(1, {late: ONES, "a": ONES}))
    first, second = trackio_rows(trackio_run)
    assert set(second) - set(first) == {"hookstats/output/rms/b"}


FOUND = [
    Finding("nonfinite", 12, Site("layers.0", "output"), NAN, 0.0, "critical", "3 values of layers.0 are NaN"),
    Finding("my/rule é", 13, None, 2.0, 1.0, "warning", "look at it"),
    Finding("my/rule é", 13, None, 3.0, 1.0, "warning", "look at it again"),
    Finding("outliers", 14, None, 2.0, 1.0, "note", "good to know"),
]


def test_wandb_has_an_alert_of_each_finding_that_is_more_than_a_note(wandb_run: Any) -> None:
    sink = hookstats.sinks.Wandb()
    for finding in FOUND:
        sink.finding(finding)
    wandb_rows(wandb_run)
    alerts = [record.alert for record in wandb_records(wandb_run.settings.sync_file) if record.HasField("alert")]
    assert [(alert.text, alert.level) for alert in alerts] == [
        (str(FOUND[0]), "ERROR"),
        (str(FOUND[1]), "WARN"),
        (str(FOUND[2]), "WARN"),
    ]
    assert alerts[0].title == "hookstats: nonfinite"


def test_mlflow_has_a_tag_of_each_finding(mlflow_run: Any) -> None:
    import mlflow

    sink = hookstats.sinks.Mlflow()
    for finding in FOUND:
        sink.finding(finding)
    mlflow.flush_async_logging()
    tags = mlflow.MlflowClient().get_run(mlflow_run.info.run_id).data.tags
    told = {key: text for key, text in tags.items() if key.startswith("hookstats.finding.")}
    assert list(dict(sorted(told.items())).values()) == [f"{each.severity}: {each.sentence}" for each in FOUND]
    assert "hookstats.finding.00000012.nonfinite.1" in told


def test_trackio_has_an_alert_of_each_finding_at_its_step(trackio_run: Any) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    sink = hookstats.sinks.Trackio()
    for finding in FOUND:
        sink.finding(finding)
    trackio_run.finish()
    alerts = SQLiteStorage.get_alerts("test", trackio_run.name)
    assert sorted((each["step"], each["level"], each["title"], each["text"]) for each in alerts) == sorted(
        (each.step, level, f"hookstats: {each.rule}", each.sentence)
        for each, level in zip(FOUND, ["error", "warn", "warn", "info"], strict=True)
    )


def test_tensorboard_has_a_text_of_each_finding_at_its_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = hookstats.sinks.TensorBoard(tmp_path)
    for finding in FOUND:
        sink.finding(finding)
    sink.close()
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.PluginTagToContent("text")) == set(read.Tags()["tensors"])
    texts = [
        (event.step, event.tensor_proto.string_val[0].decode())
        for tag in read.Tags()["tensors"]
        for event in read.Tensors(tag)
    ]
    assert sorted(texts) == [(each.step, f"**{each.severity}**: {each.sentence}") for each in FOUND]
    assert "hookstats/findings/nonfinite" in read.Tags()["tensors"]


def test_json_lines_has_a_line_of_its_own_kind_of_each_finding(tmp_path: Path) -> None:
    sink = hookstats.sinks.JsonLines(tmp_path / "a.jsonl")
    sink(snapshot(12, {}))
    for finding in FOUND:
        sink.finding(finding)
    sink.close()
    hookstats.sinks.JsonLines(tmp_path / "a.jsonl")  # its own lines
    first, *lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert "finding" not in first
    told = [{("rule" if key == "finding" else key): each for key, each in line.items()} for line in lines]
    assert [Finding.from_json(each) for each in told[1:]] == FOUND[1:]
    assert [line["finding"] for line in lines] == [each.rule for each in FOUND]
    assert lines[0]["site"] == ["layers.0", "output"]


def test_sinks_get_what_rules_find_in_the_process_that_trains_and_in_the_one_that_writes(tmp_path: Path) -> None:
    def lines(name: str) -> list[tuple[int, str]]:
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [(row["step"], row["finding"]) for row in rows if "finding" in row]

    class Plain:
        """A sink of somebody, which has no such method."""

        def __call__(self, snapshot: Any) -> None: ...

    net = torch.nn.Linear(2, 2)
    written = hookstats.record(
        tmp_path / "run", sinks=[hookstats.sinks.JsonLines(tmp_path / "b.jsonl")], on_finding=None
    )
    here = hookstats.sinks.JsonLines(tmp_path / "a.jsonl")
    with hookstats.attach(net, every=1, sinks=[written, here, Plain()]) as monitor:
        for step in range(3):
            net(ONES * (NAN if step == 2 else 1.0)).sum().backward()
            monitor.step()
    expected = [(finding.step, finding.rule) for finding in monitor.findings]
    assert (2, "nonfinite") in expected
    assert lines("a.jsonl") == lines("b.jsonl") == expected
