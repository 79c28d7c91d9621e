"""Comparison of merged measurements with float64 results of every rank's own tensors."""

from __future__ import annotations

import math
from collections.abc import Collection
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
COUNTED = ("count", "nans", "posinfs", "neginfs")
CLOSE = ("mean", "std", "rms", "min", "max", "abs_max")
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


def check_sites(
    found: hookstats.Snapshot,
    wanted: hookstats.Snapshot,
    *,
    more: Collection[Any] = (),
    but: Collection[Any] = (),
    times: float = 1,
    flat: bool = False,
    rtol: float = 1e-4,
) -> None:
    """Check that ranks measured what one process measures of the whole: all sites, none missing, to rounding; but the
    weights of tokens, which ranks of several dimensions do not have.

    more: sites that only the ranks have. but: sites that count once for each rank. times: by how much the ranks'
    gradients of outputs are larger. flat: their parameters have totals alone. rtol: in float64, 1e-12.
    """
    wanted_sites = {site for site in wanted if site.tensor.partition(".")[0] != "token_weights"}
    found_sites = {site for site in found if site.tensor.partition(".")[0] != "token_weights"}
    assert {str(site) for site in (found_sites ^ wanted_sites) - set(more)} == set()
    assert found.skipped == {}
    for site in wanted_sites - set(but):
        is_flat = flat and site.name.endswith((".weight", ".bias"))
        is_of_output = site.tensor.startswith("grad_output")
        _check_site(site, found[site], wanted[site], times if is_of_output else 1, is_flat, rtol)


def _check_site(site: Any, found: Any, wanted: Any, times: float, is_flat: bool, rtol: float) -> None:
    pairs = [(found.total, wanted.total)]
    assert (found.channels is None) == (wanted.channels is None or is_flat), site
    if found.channels is not None:
        pairs.append((found.channels, wanted.channels))
    if rtol < 1e-9:  # else rounding takes values into other bins, and to zero
        assert found.total.zeros == wanted.total.zeros, site
        assert found.calls == wanted.calls or site.tensor in ("output", "grad_output"), site  # which each rank has
        np.testing.assert_array_equal(found.histogram.counts, wanted.histogram.counts, str(site))
    for ours, theirs in pairs:
        for name in () if site.tensor.endswith("_sample") else COUNTED:  # of other elements of each rank's part
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), (site, name)
        # A buffer counts once for each rank, so that n - 1 is another divisor.
        for name in [each for each in CLOSE if each != "std" or site.tensor != "buffer_sample"]:
            np.testing.assert_allclose(
                getattr(ours, name),
                getattr(theirs, name) * times,
                rtol=rtol,
                atol=rtol * wanted.total.abs_max * times,
                err_msg=f"{site} {name}",
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
