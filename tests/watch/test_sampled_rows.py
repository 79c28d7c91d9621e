"""attach(rows=8): every 8th row of activations and of their gradients, in each measured step from another one on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import hookstats
from tests.conftest import DEVICES, check
from tests.plain import Plain, hearing

WHOLE = 10  # measured steps that are read in full, at the beginning and after a finding


def measured(x: torch.Tensor, channel_dim: int, rows: int = 8, steps: int = WHOLE + 8) -> list[Any]:
    """Return the rows read of a module's output in sampled steps, by the row at which each begins."""
    model = nn.Sequential(nn.Identity())
    channels = hookstats.Channels(dim=channel_dim)
    with hookstats.attach(model, ["0"], tensors="output", channels=channels, every=1, rows=rows) as monitor:
        found = []
        for step in range(steps):
            model(x)
            snapshot = monitor.step()
            assert snapshot.rows == (1 if step < WHOLE else rows)
            found.append(snapshot["0", "output"])
    for whole in found[:WHOLE]:
        check(whole, x, channel_dim)
    return [found[step] for step in sorted(range(WHOLE, steps), key=lambda step: step % rows)]


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def seen_of(model: nn.Module, x: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
    """Outputs and their gradients, where the loss is the sum of squares."""
    plain = Plain(model)
    model(x).square().sum().backward()
    for handle in plain.handles:
        handle.remove()
    return {site: tensors[0] for site, tensors in plain.seen.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("x", "channel_dim", "of_phase"),
    [
        (tokens(4, 32, 16), -1, lambda x, p: x.reshape(-1, 16)[p::8]),
        (tokens(3, 5, 16), -1, lambda x, p: x.reshape(-1, 16)[p::8]),  # sequences go on where one ends
        (tokens(3, 70, 32)[:, :64], -1, lambda x, p: x[:, p::8]),  # but not where something lies between
        (tokens(3, 7, 64)[:, :, :32], -1, lambda x, p: x.reshape(-1, 32)[p::8]),
        (tokens(64, 32, dtype=torch.bfloat16), -1, lambda x, p: x[p::8]),
        (tokens(2, 64, 4, 16), -2, lambda x, p: x.reshape(-1, 4, 16)[p::8]),
        (tokens(2, 3, 17, 32), 1, lambda x, p: x[:, :, p::8]),  # lines of planes
        (tokens(17, 4, 6, 6), 1, lambda x, p: x[p::8]),  # planes
        (tokens(2, 16, 8, 8).to(memory_format=torch.channels_last), 1, lambda x, p: x.mT.flatten(-2)[..., p::8]),
        (tokens(5, 64, 3, 32), 1, lambda x, p: x),  # channels lie between rows that are fewer than 8
        (tokens(7, 16), -1, lambda x, p: x),
        (tokens(500, 3), -1, lambda x, p: x),  # of 12 bytes
        (tokens(16, 400).t(), -1, lambda x, p: x),  # its rows are channels
        (tokens(64, 32), 0, lambda x, p: x),
        (tokens(1, 16).expand(400, 16), -1, lambda x, p: x),
        (tokens(1, 64, 16).expand(3, 64, 16), -1, lambda x, p: x[:, p::8]),
    ],
)
def test_what_is_read_is_every_eighth_row_from_each_of_the_first_eight_on(
    x: torch.Tensor, channel_dim: int, of_phase: Callable[[torch.Tensor, int], torch.Tensor], device: str
) -> None:
    here = x.to(device)
    for phase, stats in enumerate(measured(here, channel_dim)):
        if x.is_contiguous(memory_format=torch.channels_last) and x.dim() == 4 and x.shape[2] == 8:
            wanted = x.permute(0, 2, 3, 1).reshape(-1, 16)[phase::8]
            check(stats, wanted, 1)
        else:
            check(stats, of_phase(x, phase), channel_dim)


def test_gradients_are_sampled_as_outputs_are_and_parameters_are_read_in_full() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    plain = Plain(model)
    tensors = ("output", "grad_output", "input", "grad_input", "model_input", "param_grad", "param")
    x = tokens(3, 32, 16)
    with hookstats.attach(model, tensors=tensors, every=1, rows=8) as monitor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(WHOLE + 3):
            plain.seen.clear()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            snapshot = monitor.step()
    phase = (WHOLE + 2) % 8
    for site in (("0", "output"), ("2", "output"), ("0", "grad_output"), ("2", "grad_output")):
        [seen] = plain.seen[site]
        check(snapshot[site], seen.flatten(0, 1)[phase::8], -1)
    [output] = plain.seen["0", "output"]
    check(snapshot["2", "input"], output.relu().flatten(0, 1)[phase::8], -1)
    assert snapshot["2", "grad_input"].total.count == 96 // 8 * 32
    assert snapshot["", "input"].total.count == x.numel()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert snapshot[name, "param"].total.count == snapshot[name, "param_grad"].total.count == parameter.numel()


@pytest.mark.parametrize("histogram", [hookstats.ExponentBins(block=32), hookstats.ExponentBins(block=32, block_dim=0)])
def test_blocks_are_made_of_neighbours(histogram: hookstats.ExponentBins) -> None:
    model, x = nn.Sequential(nn.Identity()), tokens(64, 64)
    x[::2] *= 1024  # what is neighbour of which decides
    with hookstats.attach(model, ["0"], tensors="output", histogram=histogram, every=1, rows=8) as monitor:
        for _ in range(WHOLE + 1):
            model(x)
            snapshot = monitor.step()
    read = x if histogram.block_dim == 0 else x[WHOLE % 8 :: 8]
    blocks, wanted = snapshot["0", "output"].blocks, hookstats.measure(read, histogram=histogram).blocks
    assert (blocks.distances == wanted.distances).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_sampled_of_those_that_are_not_ignored(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), tokens(4, 23, 16)
    seen = seen_of(model, x)
    padding = torch.arange(23) >= torch.tensor([23, 9, 1, 17])[:, None]
    monitor = hookstats.attach(model, tensors=("output", "grad_output"), every=1, rows=8)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for step in range(WHOLE + 4):
        with monitor.ignore(padding):
            run(x).square().sum().backward()
        snapshot = monitor.step()
        for site in snapshot:
            left = seen[tuple(site)][~padding]
            check(snapshot[site], left if step < WHOLE else left[step % 8 :: 8], -1)
    monitor.detach()


def test_fewer_rows_than_eight_that_count_are_read_whole() -> None:
    model, x = nn.Sequential(nn.Identity()), tokens(2, 40, 16)
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[0, 3:10] = False
    with hookstats.attach(model, ["0"], tensors="output", every=1, rows=8) as monitor:
        with monitor.ignore(padding):  # one block over several steps
            for _ in range(WHOLE + 8):
                model(x)
                snapshot = monitor.step()
                check(snapshot["0", "output"], x[~padding], -1)
        padding[0, 10] = False
        with monitor.ignore(padding):
            for step in range(WHOLE + 8, WHOLE + 12):
                model(x)
                snapshot = monitor.step()
                check(snapshot["0", "output"], x[~padding][step % 8 :: 8], -1)


def test_a_compiled_graph_reads_other_rows_in_each_step_and_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), tokens(4, 24, 16)
    seen = seen_of(model, x)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter)
    with hookstats.attach(model, tensors=("output", "grad_output"), every=1, rows=8) as monitor:
        for step in range(WHOLE + 5):
            run(x).square().sum().backward()
            snapshot = monitor.step()
            for site in snapshot:
                each = seen[tuple(site)]
                check(snapshot[site], each if step < WHOLE else each.flatten(0, 1)[step % 8 :: 8], -1)
            if step == 1:
                compiled = counter.frame_count
    assert counter.frame_count == compiled


class _Bad(nn.Module):
    """Makes one row of its input NaN, in one of its steps."""

    def __init__(self, at: int, row: int) -> None:
        super().__init__()
        self.calls, self.at, self.row = 0, at, row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if self.calls == self.at:
            x[self.row] = torch.nan
        self.calls += 1
        return x


def test_after_a_finding_all_rows_are_read_for_ten_steps_and_the_finding_says_what_it_saw(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), _Bad(WHOLE + 4, (WHOLE + 4) % 8))
    recording = hookstats.record(tmp_path / "run", rules=[hookstats.rules.nonfinite], on_finding=None)
    with hookstats.attach(model, every=1, rows=8, sinks=[recording]) as monitor:
        rows = []
        for _ in range(WHOLE + 5):
            model(tokens(64, 16))
            snapshot = monitor.step()
            rows.append(snapshot.rows)
        [finding] = monitor.check()
        for _ in range(WHOLE + 3):
            model(tokens(64, 16))
            snapshot = monitor.step()
            rows.append(snapshot.rows)
    assert "it may have begun earlier, in another row" in finding.sentence
    first, after = rows[: WHOLE + 5], rows[WHOLE + 5 :]
    assert first == [1] * WHOLE + [8] * 5
    assert after in ([1] * WHOLE + [8] * 3, [8] + [1] * WHOLE + [8] * 2)  # it is found at once, or when asked for
    kept = hookstats.load(tmp_path / "run")
    assert [kept[step].rows for step in range(len(rows))] == rows


def test_ten_steps_of_five_hundred_are_read_in_full_whatever_is_found() -> None:
    model, rows = nn.Sequential(nn.Linear(16, 16)), []
    with hookstats.attach(model, tensors="output", every=1, rows=8) as monitor:
        for _ in range(512):
            model(tokens(8, 16))
            snapshot = monitor.step()
            rows.append(snapshot.rows)
    assert rows == ([1] * 10 + [8] * 490) + [1] * 10 + [8] * 2


def test_a_snapshot_keeps_which_rows_were_read() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with hookstats.attach(model, every=1, rows=4) as monitor:
        for _ in range(WHOLE + 1):
            model(tokens(64, 16)).sum().backward()
            snapshot = monitor.step()
    again = hookstats.Snapshot.from_dict(snapshot.to_dict())
    assert again.equals(snapshot)
    assert again.rows == again["0", "output"].rows == snapshot["0", "output"].rows == 4
    assert again["0.weight", "param_grad"].rows == 1
    assert "of activations and their gradients, one of 4 rows was read: extremes are of these" in snapshot.table()


def test_a_standard_error_holds_and_is_none_where_all_is_read() -> None:
    torch.manual_seed(0)
    x, off = torch.randn(4096, 16) + torch.linspace(-1, 1, 16), []
    for stats in measured(x, -1):
        error = stats.standard_error
        assert error.channels is not None
        off += [*((stats.channels.mean - x.double().mean(0).numpy()) / error.channels)]
        assert abs(stats.total.mean - float(x.double().mean())) < error.mean
        assert abs(stats.total.rms - float(x.double().square().mean().sqrt())) < error.rms
        assert abs(stats.total.zeros / stats.total.count) <= error.share
        assert error.rms < 0.1
    assert 0.6 < torch.tensor(off).square().mean().sqrt() < 1.5
    whole = hookstats.measure(x).standard_error
    assert whole.mean == whole.rms == whole.share == 0


def test_nothing_is_warned_of() -> None:
    with hearing() as heard:
        measured(tokens(64, 32), -1)
    assert heard == []


def findings_of(step_of: Callable[[nn.Module, torch.optim.Optimizer], torch.Tensor], steps: int) -> set[str]:
    """Return the findings of a training on 128 rows in each step, of which 16 are read."""
    torch.manual_seed(0)
    model, snapshots = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), list[hookstats.Snapshot]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hookstats.attach(model, every=1, rows=8, sinks=snapshots.append) as monitor:
        for _ in range(steps):
            monitor.step(loss=step_of(model, optimizer))
    return {each.rule for each in hookstats.rules.judge(snapshots)}


def test_rules_of_sums_are_silent_where_rows_were_not_read_and_judge_the_first_steps() -> None:
    def healthy(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss = model(torch.randn(128, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def adding(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss = model(torch.randn(128, 16)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert findings_of(healthy, 40) & {"bias-gradient", "growing-gradients"} == set()
    assert "growing-gradients" in findings_of(adding, WHOLE)
