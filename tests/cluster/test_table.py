"""Tables of sites: equal where ranks hold equal models, refused where they are none, and what ranks make of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hookstats import ExponentBins, LinearBins, Site
from hookstats.cluster.agreement import Agreement
from hookstats.cluster.packing import LocalStep, StepPacking
from hookstats.cluster.table import Placed, ShardRange, Table, TableRow, Tables, whole
from hookstats.numbers import blocks
from hookstats.numbers.blocks import Drained
from hookstats.numbers.fields import FIELDS, Bins, Skipped
from tests.cluster.steps import BUDGET, Here, drained, placing_of, shard

A, B, C = Site("a", "output"), Site("слой.\ud800", "output[tp=1]"), Site("c", "param")


def row(site: Site = A, channels: int = 4, **fields: Any) -> TableRow:
    return TableRow(site, channels, 512, True, -1, False, "each")._replace(**fields)


def table(*rows: TableRow, bins: Bins | None = None, **fields: Any) -> Table:
    return Table(rows, bins or ExponentBins(), **fields)


def agreed(*tables: Table) -> Agreement:
    return Agreement(list(enumerate(tables)))


@pytest.mark.parametrize("bins", [None, ExponentBins(), ExponentBins(True), LinearBins(-1.5, 2.0, 37)])
def test_a_table_comes_back_from_its_text_with_its_checksum(bins: Bins | None) -> None:
    sites = {A: Here(torch.ones(4, 2)), B: Here(keeps=False), C: Here(torch.ones(3, 2), is_parameter=True)}
    step = drained(sites, bins, scalars={"loss": 1.0}, skipped={Site("x", "output"): Skipped("no data", 1)})
    here, shards = Tables(BUDGET, True).table_of(step)
    again = Table.from_text(here.text)
    assert (again.text, again.checksum) == (here.text, here.checksum)
    assert (again.rows, again.bins, again.unmeasured) == (here.rows, bins, (Site("x", "output"),))
    assert (again.scalars, again.budget, again.spread) == (("loss",), BUDGET, True)
    assert shards == [ShardRange()] * 3
    assert [each.replicas for each in here.rows] == ["each", "each", "first"]


def test_pieces_are_not_in_the_table_and_everything_else_is() -> None:
    def checksum(placed: Placed, **step: Any) -> int:
        sites = {A: Here(torch.ones(2, 2), placed=placed)}
        return Tables(BUDGET, False).table_of(drained(sites, **step), placing_of(sites))[0].checksum

    assert checksum(shard(8, 0)) == checksum(shard(8, 6)) == checksum(shard(8, 0, counts=False))
    assert 0 <= checksum(shard(8, 0)) < 1 << 64
    plain = table(row())
    others = [
        table(row(B)),
        table(row(channels=5)),
        table(row(counters=0)),
        table(row(keep_channels=False)),
        table(row(channel_dim=None)),
        table(row(is_parameter=True)),
        table(row(group_size=2)),
        table(row(replicas="first")),
        table(row(replicas=0)),
        table(row(), bins=LinearBins(0, 1, 510)),
        table(row(), scalars=("loss",)),
        table(row(), unmeasured=(B,)),
        table(row(), budget=1),
        table(row(), spread=True),
        table(row(), row(B)),
        table(row(B), row()),
    ]
    assert len({each.checksum for each in [plain, *others]}) == 1 + len(others)


def hostile() -> list[tuple[str, Any]]:
    good = json.loads(table(row(), scalars=("loss",), unmeasured=(B,)).text)
    name, tensor, channels, counters, keeps, dim, is_parameter, replicas, *_ = good["rows"][0]

    def with_row(*told: Any) -> dict[str, Any]:
        return {**good, "rows": [[*told, "", None] if len(told) == 8 else list(told)]}

    return [
        ("a list", []),
        ("nothing", None),
        ("another version", {**good, "version": 1}),
        ("a missing field", {key: value for key, value in good.items() if key != "spread"}),
        ("a site twice", {**good, "rows": [good["rows"][0]] * 2}),
        ("a site twice, once without a row", {**good, "unmeasured": [[name, tensor]]}),
        ("a scalar twice", {**good, "scalars": ["loss", "loss"]}),
        ("a scalar that is a number", {**good, "scalars": [1]}),
        ("bins that are none", {**good, "histogram": {"linear": {"lo": 1, "hi": 0, "n": 3}, "per_channel": False}}),
        ("a budget below 0", {**good, "budget": -1}),
        ("a budget that is true", {**good, "budget": True}),
        ("a spread that is a number", {**good, "spread": 1}),
        ("rows that are a text", {**good, "rows": "rows"}),
        ("a short row", with_row(name, tensor)),
        ("a name that is a number", with_row(1, tensor, channels, counters, keeps, dim, is_parameter, replicas)),
        ("no channels", with_row(name, tensor, 0, counters, keeps, dim, is_parameter, replicas)),
        ("channels by half", with_row(name, tensor, 4.5, counters, keeps, dim, is_parameter, replicas)),
        ("channels without end", with_row(name, tensor, 1 << 70, counters, keeps, dim, is_parameter, replicas)),
        ("counters of no histogram", with_row(name, tensor, channels, 7, keeps, dim, is_parameter, replicas)),
        ("counters that are false", with_row(name, tensor, channels, False, keeps, dim, is_parameter, replicas)),
        ("keeps a number", with_row(name, tensor, channels, counters, 1, dim, is_parameter, replicas)),
        ("a dimension that is a text", with_row(name, tensor, channels, counters, keeps, "", is_parameter, replicas)),
        ("a dimension far away", with_row(name, tensor, channels, counters, keeps, 1 << 40, is_parameter, replicas)),
        ("replicas of a word", with_row(name, tensor, channels, counters, keeps, dim, is_parameter, "all")),
        ("replicas of rank -1", with_row(name, tensor, channels, counters, keeps, dim, is_parameter, -1)),
        ("apart of a number", with_row(*good["rows"][0][:-2], 1, None)),
        ("groups of no channels", with_row(*good["rows"][0][:-1], 0)),
        ("groups of a text", with_row(*good["rows"][0][:-1], "2")),
        ("replicas that are a list", with_row(name, tensor, channels, counters, keeps, dim, is_parameter, [])),
    ]


@pytest.mark.parametrize(("what", "told"), hostile())
def test_what_is_no_table_is_refused(what: str, told: Any) -> None:
    with pytest.raises(ValueError, match="expected a table of sites"):
        Table.from_text(json.dumps(told).encode())


@pytest.mark.parametrize("text", [b"", b"\xff", b"[" * 100_000, b'{"version": 1e999}', b"9" * 5000])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="expected a table of sites"):
        Table.from_text(text)


def test_groups_are_kept_where_all_ranks_have_the_same() -> None:
    assert agreed(table(row(group_size=2)), table(row(group_size=2, channel_dim=0))).rows[0].group_size == 2
    assert agreed(table(row(group_size=2)), table(row(group_size=4))).rows[0].group_size is None


def test_a_table_that_claims_more_than_the_budget_takes_no_memory() -> None:
    huge = agreed(table(row(channels=1 << 50)), table(row(B, 1 << 40)))
    assert huge.bytes < 1 << 16
    assert huge.neutral().columns.shape == (len(FIELDS), 2)
    assert len(huge.notes) == 1


def test_tables_are_made_once_for_each_layout_and_anew_where_something_has_come() -> None:
    tables = Tables(BUDGET, False)
    sites = {A: Here(torch.ones(2, 2))}
    step, other = drained(sites), drained(sites)

    def with_layout(of: Drained, **fields: Any) -> Drained:
        made = Drained(of.layout, of.blocks, 4, 2.0, fields.get("scalars", {}), None, None, of.hidden, of.readings)
        made.skipped = fields.get("skipped", {})
        return made

    first, second = tables.table_of(step), tables.table_of(other)
    assert tables.table_of(with_layout(step))[0] is first[0]
    assert tables.table_of(with_layout(other))[0] is second[0]
    assert tables.table_of(with_layout(step, scalars={"loss": 1.0}))[0].scalars == ("loss",)
    assert tables.table_of(with_layout(step))[0].scalars == ("loss",)  # or each step without it would change the table
    skipped = tables.table_of(with_layout(step, skipped={A: Skipped("", 1), B: Skipped("", 1)}))[0]
    assert skipped.unmeasured == (B,)
    assert tables.table_of(with_layout(step))[0] is skipped
    assert tables.table_of(with_layout(step), lambda row: Placed(8, "each", ShardRange(6)))[0].rows[0].channels == 8


def test_a_piece_that_does_not_lie_in_its_whole_is_refused() -> None:
    for channels, offset in ((8, 5), (8, -1), (3, 0)):
        sites = {A: Here(torch.ones(4, 2), placed=shard(channels, offset))}
        with pytest.raises(ValueError, match=rf"a output: expected 4 channels from {offset} to lie in {channels}"):
            Tables(BUDGET, False).table_of(drained(sites), placing_of(sites))


def test_a_site_may_be_merged_under_another_name() -> None:
    apart = Site("a", "output[tp=1]")
    sites = {A: Here(torch.ones(4, 2), placed=Placed(4, "each", ShardRange(), apart))}
    made, _ = Tables(BUDGET, False).table_of(drained(sites), placing_of(sites))
    assert [each.site for each in made.rows] == [apart]


def test_rows_come_in_the_order_of_the_first_table_then_what_others_add() -> None:
    tables = [table(row(B), row(A), scalars=("x",)), table(row(C), row(A), scalars=("y", "x"), unmeasured=(B,))]
    agreement = agreed(*tables)
    assert [each.site for each in agreement.rows] == [B, A, C]
    assert agreement.scalars == ("x", "y")
    assert agreement.sites == (B, A, C)
    same = agreed(*(Table.from_text(each.text) for each in tables))
    assert (same.rows, same.sites, same.notes) == (agreement.rows, agreement.sites, agreement.notes)


def test_who_counts_is_one_of_those_who_have_the_same() -> None:
    def counting(*replicas: str | int | None) -> list[int]:
        """The ranks, of tables with the row of these replicas, or without it."""
        tables = [table(*([] if each is None else [row(replicas=each)])) for each in replicas]
        agreement = agreed(*tables)
        return [rank for rank, each in enumerate(tables) if each.rows and agreement.counts(each.rows[0], rank)]

    assert counting("each", None, "each") == [0, 2]
    assert counting(None, "first", "first") == [1]
    assert counting(0, 0, 2, 2) == [0, 1]
    assert counting(None, 4, 1, 4, 1) == [2, 4]
    assert counting("first", "each", 0) == [0]  # where they do not agree: nothing twice
    assert counting("each", "first", "each", 3) == [0, 2]
    assert counting(5, "each", 2) == [2]


def test_histograms_of_other_bins_are_not_merged_and_that_is_told() -> None:
    agreement = agreed(table(row()), Table((row(counters=66),), LinearBins(0, 1, 64)))
    assert (agreement.bins, agreement.rows[0].counters) == (None, 0)
    assert agreement.notes == ["no histograms are merged, because not all ranks have the same bins"]
    assert agreed(table(row()), table(row(counters=0))).rows[0].counters == 0


def test_spread_is_told_where_all_want_it_and_the_least_budget_holds() -> None:
    assert agreed(table(row(), spread=True), table(row(), spread=True)).spread
    some = agreed(table(row(), spread=True), table(row(), budget=1000))
    assert not some.spread
    assert some.budget == 1000
    assert len(some.notes) == 2


def test_plain_tensors_are_whole_everywhere() -> None:
    here = blocks.Row(A, (blocks.Part(0, 0, 6, 0),), True, -1, False)
    assert whole(here) == Placed(6, "each", ShardRange(0, True, True), None)
    assert whole(here._replace(is_parameter=True)).replicas == "first"


def test_steps_agree_once_for_the_same_tables_and_tell_once_what_ranks_differ_in() -> None:
    sites = [{A: Here(torch.ones(2 + rank, 2))} for rank in range(2)]
    ranks = [StepPacking(rank, Tables(BUDGET, False)) for rank in range(2)]
    local = [LocalStep(drained(each, grad_scale=8.0)) for each in sites]
    tables = [(rank, steps.table(step)[1]) for rank, (steps, step) in enumerate(zip(ranks, local, strict=True))]
    assert [steps.table(step)[0] for steps, step in zip(ranks, local, strict=True)] == [
        Table.from_text(text).checksum for _, text in tables
    ]
    for _ in range(3):
        packed = [steps.pack(step, tables) for steps, step in zip(ranks, local, strict=True)]
        merged = [of([*parts]) for of, *parts in zip(StepPacking.merges, *packed, strict=True)]
        found = [steps.unpack(merged, step, tables).drained for steps, step in zip(ranks, local, strict=True)]
        assert [each.snapshot()[A].total.count for each in found] == [10, 10]
    assert found[0].layout is ranks[0].unpack(merged, local[0], tables).drained.layout
    assert [list(steps.notes) for steps in ranks] == [
        ["not all ranks have the same channels of a output: merged as totals"]
    ] * 2
    assert ranks[0].scale(local[0]) == 8.0
    with pytest.raises(ValueError, match="expected a table of sites"):
        ranks[0].pack(local[0], [(0, b"no table")])
