"""Steps of several ranks that are packed, merged and unpacked are what one process would have measured."""

from __future__ import annotations

import numpy as np

from hookstats.cluster.agreement import Agreement
from hookstats.cluster.flat import merge
from hookstats.cluster.packing import Packer
from hookstats.cluster.table import Tables
from hookstats.numbers.blocks import Drained
from hookstats.records.ranks import merged_snapshot
from tests.recorded import drained


def merged(steps: list[Drained]) -> Drained:
    tables = [Tables(1 << 28, True).of(step) for step in steps]
    agreement = Agreement([(rank, table) for rank, (table, _) in enumerate(tables)])
    packers = [Packer(agreement, rank) for rank in range(len(steps))]
    flats = [packer.pack(step, *table) for packer, step, table in zip(packers, steps, tables, strict=True)]
    return packers[0].unpack(merge(flats), steps[0])


def test_ranks_with_equal_sites_merge_as_they_do_offline() -> None:
    steps = [drained(4), drained(4), drained(4)]
    online, offline = merged(steps).snapshot(), merged_snapshot([step.snapshot() for step in steps])
    assert list(online) == list(offline)
    assert online.order == offline.order
    for site in online:
        np.testing.assert_allclose(online[site]._measured, offline[site]._measured, rtol=1e-12)
