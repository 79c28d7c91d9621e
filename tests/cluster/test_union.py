"""Tables of sites: equal where ranks hold equal models; and what ranks make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hookstats import ExponentBins, LinearBins, Site
from hookstats.cluster.union import Place, Table, TableRow, Tables, Union, whole
from hookstats.numbers.fields import Bins, Skipped
from hookstats.numbers.frame import StepFrame
from tests.cluster.steps import BUDGET, Here, measured, placing_of, shard

A, B, C = Site("a", "output"), Site("слой.\ud800", "output[tp=1]"), Site("c", "param")


def row(site: Site = A, channels: int = 4, **fields: Any) -> TableRow:
    return TableRow(site, channels, True, True, -1)._replace(**fields)


def table(*rows: TableRow, bins: Bins | None = None, **fields: Any) -> Table:
    return Table(rows, bins or ExponentBins(), **fields)


def united(*tables: Table) -> Union:
    return Union([each.to_text() for each in tables], range(len(tables)))


@pytest.mark.parametrize("bins", [None, ExponentBins(), ExponentBins(True), LinearBins(-1.5, 2.0, 37)])
def test_a_table_comes_back_from_its_text(bins: Bins | None) -> None:
    sites = {A: Here(torch.ones(4, 2)), B: Here(keeps=False), C: Here(torch.ones(3, 2))}
    step = measured(sites, bins, scalars={"loss": 1.0}, skipped={Site("x", "output"): Skipped("no data", 1)})
    here, text, places = Tables(BUDGET, True).local(step)
    again = Table.from_text(text)
    assert again.to_text() == text
    assert (again.rows, again.bins, again.unmeasured) == (here.rows, bins, (Site("x", "output"),))
    assert (again.scalars, again.budget, again.spread) == (("loss",), BUDGET, True)
    assert places == [Place(4, "each"), Place(1, "each"), Place(3, "first")]
    assert [each.owners for each in here.rows] == ["each", "each", "first"]


def test_pieces_are_not_in_the_table_and_everything_else_is() -> None:
    def text(placed: Place, **step: Any) -> bytes:
        sites = {A: Here(torch.ones(2, 2), placed=placed)}
        return Tables(BUDGET, False).local(measured(sites, **step), placing_of(sites)).text

    assert text(shard(8, 0)) == text(shard(8, 6)) == text(shard(8, 0, counts=False))
    plain = table(row())
    others = [
        table(row(B)),
        table(row(channels=5)),
        table(row(has_bins=False)),
        table(row(keep_channels=False)),
        table(row(channel_dim=None)),
        table(row(group_size=2)),
        table(row(owners="first")),
        table(row(owners=0)),
        table(row(has_folded=True)),
        table(row(), bins=LinearBins(0, 1, 510)),
        table(row(), scalars=("loss",)),
        table(row(), unmeasured=(B,)),
        table(row(), budget=1),
        table(row(), spread=True),
        table(row(), row(B)),
        table(row(B), row()),
    ]
    assert len({each.to_text() for each in [plain, *others]}) == 1 + len(others)


def test_groups_are_kept_where_all_ranks_have_the_same() -> None:
    assert united(table(row(group_size=2)), table(row(group_size=2, channel_dim=0))).rows[0].group_size == 2
    assert united(table(row(group_size=2)), table(row(group_size=4))).rows[0].group_size is None


def test_more_than_the_budget_takes_no_memory() -> None:
    huge = united(table(row(channels=1 << 50)), table(row(B, 1 << 40)))
    assert huge.bytes < 1 << 16
    assert huge.whole.channels.tolist() == [1, 1]
    assert len(huge.notes) == 1


def test_tables_are_made_once_for_each_layout_and_anew_where_something_has_come() -> None:
    tables = Tables(BUDGET, False)
    sites = {A: Here(torch.ones(2, 2))}
    step, other = measured(sites), measured(sites)

    def with_layout(of: StepFrame, **fields: Any) -> StepFrame:
        return replace(of, step=4, time=2.0, **fields)

    first, second = tables.local(step), tables.local(other)
    assert tables.local(with_layout(step))[0] is first[0]
    assert tables.local(with_layout(other))[0] is second[0]
    assert tables.local(with_layout(step, scalars={"loss": 1.0}))[0].scalars == ("loss",)
    assert tables.local(with_layout(step))[0].scalars == ("loss",)  # or each step without it would change the table
    skipped = tables.local(with_layout(step, skipped={A: Skipped("", 1), B: Skipped("", 1)}))[0]
    assert skipped.unmeasured == (B,)
    assert tables.local(with_layout(step))[0] is skipped
    assert tables.local(with_layout(step), lambda row: Place(8, "each", 6))[0].rows[0].channels == 8


def test_a_piece_that_does_not_lie_in_its_whole_is_refused() -> None:
    for channels, offset in ((8, 5), (8, -1), (3, 0)):
        sites = {A: Here(torch.ones(4, 2), placed=shard(channels, offset))}
        with pytest.raises(ValueError, match=rf"a output: expected 4 channels from {offset} to lie in {channels}"):
            Tables(BUDGET, False).local(measured(sites), placing_of(sites))


def test_a_site_may_be_merged_under_another_name() -> None:
    apart = Site("a", "output[tp=1]")
    sites = {A: Here(torch.ones(4, 2), placed=Place(4, "each", site=apart))}
    made, *_ = Tables(BUDGET, False).local(measured(sites), placing_of(sites))
    assert [each.site for each in made.rows] == [apart]


def test_rows_come_in_the_order_of_the_first_table_then_what_others_add() -> None:
    tables = [table(row(B), row(A), scalars=("x",)), table(row(C), row(A), scalars=("y", "x"), unmeasured=(B,))]
    union = united(*tables)
    assert [each.site for each in union.rows] == [B, A, C]
    assert union.scalars == ("x", "y")
    assert union.sites == (B, A, C)
    assert union.notes == []


def test_who_counts_is_one_of_those_who_have_the_same() -> None:
    def counting(*owners: str | int | None) -> list[int]:
        """The ranks, of tables with the row of these replicas, or without it."""
        tables = [table(*([] if each is None else [row(owners=each)])) for each in owners]
        union = united(*tables)
        return [rank for rank, each in enumerate(tables) if each.rows and union.counts(each.rows[0], rank)]

    assert counting("each", None, "each") == [0, 2]
    assert counting(None, "first", "first") == [1]
    assert counting(0, 0, 2, 2) == [0, 1]
    assert counting(None, 4, 1, 4, 1) == [2, 4]
    assert counting("first", "each", 0) == [0]  # where they do not agree: nothing twice
    assert counting("each", "first", "each", 3) == [0, 2]
    assert counting(5, "each", 2) == [2]


def test_histograms_of_other_bins_are_not_merged_and_that_is_told() -> None:
    union = united(table(row()), Table((row(),), LinearBins(0, 1, 64)))
    assert (union.bins, union.whole.counters.tolist()) == (None, [0])
    assert union.notes == ["no histograms are merged, because not all ranks have the same bins"]
    assert united(table(row()), table(row(has_bins=False))).whole.counters.tolist() == [0]


def test_spread_is_told_where_all_want_it_and_the_least_budget_holds() -> None:
    assert united(table(row(), spread=True), table(row(), spread=True)).spread
    some = united(table(row(), spread=True), table(row(), budget=1000))
    assert not some.spread
    assert len(some.notes) == 2


def test_plain_tensors_are_whole_everywhere() -> None:
    assert whole(row(A, 6)) == Place(6, "each")
    assert whole(row(C, 6)).owners == "first"
