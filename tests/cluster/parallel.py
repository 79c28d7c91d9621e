"""Comparison of merged measurements with float64 results of every rank's own tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import hookstats
from hookstats.cluster.groups import find_group
from hookstats.cluster.joining import Joined
from hookstats.watch import scalars
from hookstats.watch.drain import Drain
from tests import reference
from tests.conftest import compare
from tests.frames import snapshot_of
from tests.plain import hearing

TENSORS = ("output", "grad_output", "param", "param_grad")
MLP = ["0", "1", "2"]
Parts = dict[tuple[str, str], list[torch.Tensor]]


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


class Kept:
    """Every tensor of a rank that is measured, kept by hooks of plain PyTorch; to be made right behind `attach`."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.seen: Parts = {}
        self.model = model
        for name in names:
            model.get_submodule(name).register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.seen.setdefault((name, "output"), []).append(local(output))
            if output.requires_grad:
                output.register_hook(
                    lambda g: (
                        self.seen.setdefault((name, "grad_output"), []).append(local(g)) if g is not None else None
                    )
                )

        return keep

    def parameters(self) -> None:
        """Keep the parameters and their gradients; call right before the optimizer steps."""
        for name, parameter in self.model.named_parameters():
            self.seen[name, "param"] = [local(parameter)]
            if parameter.grad is not None:
                self.seen[name, "param_grad"] = [local(parameter.grad)]

    def updates(self) -> None:
        """Keep what the optimizer has changed; call right behind its step."""
        for name, parameter in self.model.named_parameters():
            self.seen[name, "param_update"] = [local(parameter) - self.seen[name, "param"][0]]

    def gathered(self) -> list[Parts]:
        """Gather on all ranks what each has seen."""
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, self.seen)
        return everybodys


def merged(monitor: hookstats.Monitor, model: nn.Module, group: Any = None, placements: Any = None) -> Any:
    """The snapshot of all ranks of the group; what was warned of meanwhile."""
    store = monitor._store
    names = [entry.site.name for entry in store.entries]
    frame = Drain(store).begin(scalars.Kept.of(0, scalars.Scalars({})), clear=False).finish()
    with hearing() as told:
        world = dist.group.WORLD if group is None else group
        joined = Joined(model, world, placements, names, False, 1 << 28, 60.0)
        joined.submit(frame, {entry.site: entry.held for entry in store.entries})
        joined.wait(60.0)
        (whole,) = joined.take_arrived()
        joined.close()
    assert whole.ranks.present == tuple(sorted(find_group(world).ranks))
    return snapshot_of(whole), told


def rows_of(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """``[values, channels]``."""
    moved = [each.movedim(dim, -1) for each in tensors]
    return torch.cat([each.reshape(math.prod(each.shape[:-1]), each.shape[-1]) for each in moved])


def check_merged(
    snapshot: hookstats.Snapshot,
    site: tuple[str, str],
    parts: list[Parts],
    ranks: list[list[int]],
    dim: int = -1,
    like: tuple[str, str] | None = None,
) -> None:
    """A site is what these ranks hold: of each list one tensor, whose channels the ranks of the list have side by side.

    Counts, extremes and histograms exactly, moments to 1e-12 of float64 (means: of the rms), where the tensors are of
    that; to 1e-6 where kernels add up in float32. like: as which site the ranks kept it.
    """
    stats = snapshot[site]
    own = like or site
    held = [[rows_of(parts[r][own], dim) for r in line if own in parts[r]] for line in ranks]
    whole = torch.cat([torch.cat(line, 1) for line in held if line])
    close = 1e-12 if whole.dtype == torch.float64 else 1e-6
    rows = reference.channel_rows(whole, -1)
    if stats.channels is not None:
        named = {name: getattr(stats.channels, name) for name in hookstats.numbers.fields.STATISTICS}
        compare(named, rows, f"{site}", close)
    total = {name: getattr(stats.total, name) for name in hookstats.numbers.fields.STATISTICS}
    compare(total, rows.reshape(1, -1), f"{site} total", close)
    counts = stats.histogram.counts
    wanted = reference.exponent_counts(rows.reshape(-1)) if counts.ndim == 1 else reference.octave_counts(rows)
    assert (counts == wanted).all(), site


def of_all_ranks(monitor: hookstats.Monitor) -> tuple[hookstats.Snapshot, list[str]]:
    """Return what `Monitor.step` and `detach` gave for the one step, and all warnings."""
    with hearing() as told:
        (snapshot,) = [each for each in (monitor.step(), *monitor.detach()) if each is not None]
    assert snapshot.ranks == tuple(range(dist.get_world_size()))
    return snapshot, told


def check_all(model: nn.Module, monitor: Any, kept: Kept, ranks_of: Any) -> Any:
    """ranks_of(site): the ranks that hold it, as `check_merged` wants them; None: it is checked elsewhere."""
    snapshot, told = of_all_ranks(monitor)
    parts = kept.gathered()
    sites = {site for part in parts for site in part} - {tuple(site) for site in monitor.skipped}
    assert {(site.name, site.tensor.split("[")[0]) for site in snapshot} == sites
    for site in sites:
        lines = ranks_of(site)
        if lines is not None:
            check_merged(snapshot, site, parts, lines, 0 if "param" in site[1] else -1)
    return snapshot, told


def check_as_one_process(snapshot: hookstats.Snapshot, alone: hookstats.Snapshot) -> None:
    """Check that ranks measured what one process measures of the whole: counts exactly, moments to 1e-12, means and
    extremes to 1e-12 of the rms; so much more than rounding moves them, in float64."""
    assert set(snapshot) == set(alone)
    for site, want in alone.items():
        got = snapshot[site]
        assert got.calls == want.calls or site.tensor in ("output", "grad_output"), site  # which each rank has
        assert np.array_equal(got.histogram.counts, want.histogram.counts), site
        assert (got.channels is None) == (want.channels is None), site
        for mine, theirs in ((got.total, want.total), (got.channels, want.channels)):
            if theirs is None:
                continue
            for name in ("count", "zeros", "nans", "posinfs", "neginfs"):
                assert np.array_equal(getattr(mine, name), getattr(theirs, name)), (site, name)
            for name in ("mean", "min", "max"):
                far = np.abs(getattr(mine, name) - getattr(theirs, name))
                assert (far <= 1e-12 * np.asarray(theirs.rms)).all(), (site, name, far)
            for name in ("var", "rms", "abs_mean"):
                np.testing.assert_allclose(
                    getattr(mine, name), getattr(theirs, name), 1e-12, 0, err_msg=f"{site} {name}"
                )


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 7)).double()


def batch(rank: int) -> torch.Tensor:
    """Means 1000 standard deviations apart from rank to rank."""
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) + 1000.0 * rank


def trained(monitor: Any, model: nn.Module, x: torch.Tensor, kept: Kept) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model(x).double().square().mean().backward()
    kept.parameters()
    optimizer.step()
    if monitor is not None and any(site.tensor == "param_update" for site in monitor.sites):
        kept.updates()
    if monitor is not None:
        monitor._parameters.measure()
