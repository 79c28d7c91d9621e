"""Steps of several ranks that are packed, merged and unpacked are what one process would have measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hookstats import ExponentBins, LinearBins, Snapshot
from hookstats.cluster.union import Place, TableRow, Tables
from hookstats.numbers.fields import FIELDS, STATISTICS, Bins, Site, Skipped, Stats, histogram_shape
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.numbers.ranks import SAME_DATA
from hookstats.records.wire import decode_step, encode_step
from hookstats.results import SiteStats
from hookstats.rules import judge
from tests import reference
from tests.cluster.steps import Here, Job, job_of, measured, placing_of, shard
from tests.conftest import BINS, HISTOGRAMS
from tests.frames import Part, Row, layout_of, merged_snapshot, snapshot_of

A, B, C = Site("a", "output"), Site("слой.\ud800", "output"), Site("c", "grad_output")
COUNTED = ("count", "zeros", "nans", "posinfs", "neginfs", "min", "max", "abs_max")


def draw(seed: Any, channels: int, n: int = 50, mean: float = 0.0) -> torch.Tensor:
    made = torch.from_numpy(np.random.default_rng(seed).normal(mean, 1.0, (channels, n)))
    made[:, ::7] = 0.0
    return made


def check(stats: SiteStats, rows: torch.Tensor, rtol: float = 1e-12, keeps: bool = True) -> None:
    """rows: [channels, values], everything that was measured of the site on any rank."""
    values = rows.double().numpy()
    sets: list[tuple[Stats[Any], Any]] = [(stats.total, values.reshape(1, -1))]
    if keeps:
        assert stats.channels is not None
        sets.append((stats.channels, values))
    for got, of in sets:
        want = reference.statistics(of)
        for name, number in want.items():
            tolerance = 0 if name in COUNTED else rtol
            scale = np.sqrt(np.abs(want["mean"]).max() ** 2 + want["var"].max()) if name == "mean" else 0
            np.testing.assert_allclose(getattr(got, name), number.squeeze(), tolerance, tolerance * scale, err_msg=name)


def check_histogram(stats: SiteStats, rows: torch.Tensor, bins: Bins | None) -> None:
    if bins is None:
        assert stats.histogram is None
        return
    assert stats._histogram is not None
    values = rows.double().numpy()
    if isinstance(bins, LinearBins):
        want = reference.linear_counts(values if bins.per_channel else values.reshape(1, -1), bins, torch.float64)
        np.testing.assert_array_equal(stats._histogram, want if bins.per_channel else want[0])
    elif bins.per_channel:
        np.testing.assert_array_equal(stats.histogram.counts, reference.octave_counts(values))
    else:
        np.testing.assert_array_equal(stats.histogram.counts, reference.exponent_counts(values.ravel()))


@pytest.mark.parametrize("apart", [1e3, 1e4])
@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_data_parallel_ranks_whose_means_are_far_apart_are_as_one_process(histogram: str, apart: float) -> None:
    bins = BINS[histogram]
    parts = [{site: draw([rank, n], 6, mean=apart * rank) for n, site in enumerate((A, B, C))} for rank in range(4)]
    parts[1][A][2, 5], parts[3][A][0, :3], parts[2][A][1, 0] = torch.nan, torch.inf, -torch.inf
    parts[0][B][4] = torch.nan  # nothing finite, on one rank
    ranks = job_of([{site: Here(values) for site, values in part.items()} for part in parts], bins)
    snapshot = snapshot_of(ranks.merged())
    assert snapshot.order == [A, B, C]
    for site in (A, B, C):
        everything = torch.cat([part[site] for part in parts], 1)
        check(snapshot[site], everything)
        check_histogram(snapshot[site], everything, bins)
        assert snapshot[site].calls == 4


def test_what_one_rank_alone_has_stays_and_what_none_has_is_empty() -> None:
    parts = [draw(rank, 64, n=300, mean=0.1) for rank in range(3)]
    layouts = [{A: Here(values, placed=shard(256, 64 * rank))} for rank, values in enumerate(parts)]
    layouts.append({A: Here(channels=64, placed=shard(256, 192))})
    alone = np.concatenate([measured(each).state(0) for each in layouts], 1)
    merged = job_of(layouts).merged().state(0)
    np.testing.assert_allclose(merged, alone, 1e-14)
    exact = [FIELDS.index(name) for name in FIELDS if name not in ("mean", "m2")]
    assert merged[exact].tobytes() == alone[exact].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_on_all_ranks_have_no_deviation(dtype: torch.dtype) -> None:
    for value in (0.1, 0.7, 3.7e5 / 3, -1e-30):
        for most in range(3, 12):
            full = [torch.full((2, most + rank), value, dtype=dtype) for rank in range(3)]
            (site,) = snapshot_of(job_of([{A: Here(each)} for each in full]).merged()).values()
            assert (site.channels.mean == full[0][0, 0].item()).all()
            assert (site.channels.std <= 1e-15 * abs(value)).all()


@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_shards_of_channels_lie_side_by_side_and_data_parallel_ranks_together(histogram: str) -> None:
    bins, whole = BINS[histogram], [draw(replica, 8, mean=1e3 * replica) for replica in range(2)]
    sites = [
        {A: Here(rows[begin:end], placed=shard(8, begin)), B: Here(rows)}
        for rows in whole
        for begin, end in ((0, 3), (3, 6), (6, 8))
    ]
    snapshot = snapshot_of(job_of(sites, bins).merged())
    check(snapshot[A], torch.cat(whole, 1))
    check_histogram(snapshot[A], torch.cat(whole, 1), bins)
    assert snapshot[A].calls == 2
    check(snapshot[B], torch.cat([whole[0]] * 3 + [whole[1]] * 3, 1))


@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_wide_sites_are_moved_as_narrow_ones_beside_them(histogram: str) -> None:
    bins, rows = BINS[histogram], draw(0, 2000, n=3)
    sites = [{B: Here(rows[:5]), A: Here(rows[at:][:1000], placed=shard(2000, at))} for at in (0, 1000)]
    merged = job_of(sites, bins).merged()
    check(snapshot_of(merged)[A], rows)
    check_histogram(snapshot_of(merged)[A], rows, bins)
    check(snapshot_of(merged)[B], torch.cat([rows[:5]] * 2, 1))


def test_a_site_of_which_the_leading_piece_was_silent_has_run_all_the_same() -> None:
    rows = draw(0, 4)
    sites = [{A: Here(channels=4, placed=shard(8, 0))}, {A: Here(rows, placed=shard(8, 4))}]
    snapshot = snapshot_of(job_of(sites).merged())
    assert snapshot.order == [A]
    assert snapshot[A].calls == 1
    assert snapshot[A].total.count == rows.numel()


def test_a_parameter_counts_once_whoever_holds_it() -> None:
    plain, sharded, left = Site("plain", "param"), Site("sharded", "param"), Site("replicated", "output")
    values = [draw(i, 8) for i in range(3)]
    sites = []
    for rank in range(4):
        half = rank % 2  # of a mesh of two; the other mesh has the same
        sites.append(
            {
                plain: Here(values[0]),
                sharded: Here(values[1][4 * half :][:4], placed=shard(8, 4 * half, rank - half)),
                left: Here(values[2], placed=Place(8, "each", 0, half == 0, half == 0)),
            }
        )
    merged = snapshot_of(job_of(sites, ExponentBins()).merged())
    check(merged[plain], values[0])
    check(merged[sharded], values[1])
    check(merged[left], torch.cat([values[2]] * 2, 1))
    assert [merged[site].calls for site in (plain, sharded, left)] == [1, 1, 2]


def test_stages_experts_and_ranks_without_sites_have_their_place() -> None:
    values = {site: draw(n, n + 2) for n, site in enumerate((A, B, C))}
    sites = [{}, {A: Here(values[A])}, {B: Here(values[B]), C: Here(channels=4)}, {C: Here(values[C])}]
    ranks = job_of(sites, ExponentBins())
    snapshot = snapshot_of(ranks.merged(rank=0))
    assert list(snapshot) == snapshot.order == [A, B, C]
    for site, rows in values.items():
        check(snapshot[site], rows)
    assert snapshot_of(job_of([{}, {}]).merged()).order == []


def test_the_order_is_the_first_ranks_then_what_others_add() -> None:
    rows = draw(0, 1)
    first = {B: Here(rows), A: Here(rows)}
    second = {C: Here(rows), A: Here(rows), B: Here(rows)}
    ranks = job_of([first, second])
    assert list(snapshot_of(ranks.merged())) == [B, A, C]
    assert snapshot_of(ranks.merged()).order == [B, A, C]
    first[B] = Here(channels=1)
    assert snapshot_of(job_of([first, second]).merged()).order == [A, C, B]


def test_a_site_of_which_ranks_have_other_channels_is_merged_as_totals_and_named() -> None:
    for bins in BINS.values():
        rows = [draw(0, 6), draw(1, 4)]
        ranks = job_of([{A: Here(each), B: Here(each[:2])} for each in rows], bins)
        assert ranks.union.unlike == [A]
        assert ranks.union.notes == ["not all ranks have the same channels of a output: merged as totals"]
        stats = snapshot_of(ranks.merged())[A]
        assert stats.channels is None
        everything = torch.cat([each.reshape(1, -1) for each in rows], 1)
        check(stats, everything, keeps=False)
        check_histogram(stats, everything, bins)
        check(snapshot_of(ranks.merged())[B], torch.cat([each[:2] for each in rows], 1))
    other_dim = job_of([{A: Here(rows[0], dim=1)}, {A: Here(rows[0], dim=-1)}])
    assert other_dim.union.unlike == [A]
    one_knows = job_of([{A: Here(rows[0], dim=1)}, {A: Here(rows[0], dim=None)}])
    assert one_knows.union.unlike == []
    for snapshot in (snapshot_of(one_knows.merged()), merged_snapshot([snapshot_of(step) for step in one_knows.steps])):
        assert snapshot[A].channel_dim == 1


def test_a_rank_that_has_not_seen_a_sites_channels_folds_them_only_where_it_measures() -> None:
    for bins in BINS.values():
        wide, narrow = draw(0, 6), draw(1, 4)
        silent = snapshot_of(job_of([{A: Here(keeps=False)}, {A: Here(wide)}], bins).merged())
        recorded = [snapshot_of(measured({A: each}, bins)) for each in (Here(keeps=False), Here(wide))]
        for merged in (silent, merged_snapshot(recorded)):
            check(merged[A], wide)
            check_histogram(merged[A], wide, bins)
            assert merged[A].channel_dim == 0
        ranks = job_of([{A: Here(narrow, keeps=False), B: Here(wide)}, {A: Here(wide), B: Here(wide)}], bins)
        assert ranks.union.unlike == []
        merged = snapshot_of(ranks.merged())
        everything = torch.cat([narrow.reshape(1, -1), wide.reshape(1, -1)], 1)
        check(merged[A], everything, keeps=False)
        check_histogram(merged[A], everything, bins)
        assert merged[A].channels is None
        assert merged[A].channel_dim is None
        check(merged[B], torch.cat([wide, wide], 1))


def test_totals_alone_merge_with_totals() -> None:
    rows = [draw(rank, 6, mean=1e3 * rank) for rank in range(3)]
    sites = [{A: Here(each[2 * i : 2 * i + 2], keeps=False, placed=shard(6, 2 * i))} for i, each in enumerate(rows)]
    steps = [measured(each) for each in sites]  # without histograms, as such steps are
    snapshot = snapshot_of(Job(steps, [placing_of(each) for each in sites]).merged())
    parts = [each[2 * i : 2 * i + 2].reshape(1, -1) for i, each in enumerate(rows)]
    check(snapshot[A], torch.cat(parts, 1), keeps=False)
    assert snapshot[A].calls == 1
    assert snapshot.frame.sites.places[[2, 5]].tolist() == [[1], [0]]


def test_more_than_the_budget_is_merged_as_totals_then_without_histograms() -> None:
    rows = [draw(rank, 64) for rank in range(2)]
    sites = [{A: Here(each), B: Here(each[:1])} for each in rows]
    for bins in (ExponentBins(), ExponentBins(True)):
        full = job_of(sites, bins).union
        assert full.notes == []
        totals = job_of(sites, bins, budget=full.bytes - 1)
        assert [row.channels for row in totals.union.rows] == [1, 1]
        assert [note.split(",")[0] for note in totals.union.notes] == [
            f"channels of all ranks would take {full.bytes} bytes"
        ]
        stats = snapshot_of(totals.merged())[A]
        assert stats.channels is None
        check(stats, torch.cat(rows, 1), keeps=False)
        check_histogram(stats, torch.cat([each.reshape(1, -1) for each in rows], 1), bins)
        least = job_of(sites, bins, budget=totals.union.bytes - 1)
        assert len(least.union.notes) == 2
        assert snapshot_of(least.merged())[A].histogram is None
        check(snapshot_of(least.merged())[A], torch.cat(rows, 1), keeps=False)


def test_scalars_are_means_of_the_ranks_that_have_them() -> None:
    told = [
        {"loss": 1.0, "lr": 0.1, "odd": np.inf, "low": -np.inf, "nan": np.nan, "zero": -0.0},
        {"loss": 2.0, "lr": 0.1, "odd": np.inf, "nan": 3.0, "late": 7.0, "low": 1.0, "zero": -0.0},
        {"loss": 6.0, "lr": 0.1, "odd": np.inf, "nan": 3.0, "low": np.inf, "zero": -0.0},
    ]
    steps = [measured({}, scalars=each, time=10.0 + rank, step=12) for rank, each in enumerate(told)]
    merged = Job(steps).merged(rank=2)
    assert (merged.step, merged.time, merged.grad_scale, merged.overflowed) == (12, 10.0, None, None)
    want = {"loss": 3.0, "lr": 0.1, "odd": np.inf, "low": np.nan, "nan": np.nan, "zero": -0.0, "late": 7.0}
    np.testing.assert_equal(merged.scalars, want)
    assert str(merged.scalars["zero"]) == "-0.0"


def test_the_scalers_marks_are_kept() -> None:
    rows = draw(0, 3)
    for overflowed in ([False, False], [False, True]):
        steps = [measured({C: Here(1024 * rows)}, grad_scale=1024.0, overflowed=each) for each in overflowed]
        merged = Job(steps).merged()
        assert (merged.grad_scale, merged.overflowed) == (1024.0, any(overflowed))
        check(snapshot_of(merged)[C], torch.cat([rows, rows], 1))


def test_skipped_tensors_are_counted_and_the_rank_that_knows_why_is_named() -> None:
    odd, lost = Site("odd", "output"), Site("lost", "output")
    left_out = [
        {A: Skipped("no data", 2)},
        {A: Skipped("sparse", 3), odd: Skipped("nested", 1)},
        {odd: Skipped("nested", 1), lost: Skipped("nothing", None)},
    ]
    ranks = Job([measured({A: Here(draw(rank, 2))}, skipped=each) for rank, each in enumerate(left_out)])
    elsewhere = "rank 1 has the reason"
    assert ranks.merged(rank=0).skipped == {
        A: Skipped("no data", 5),
        odd: Skipped(elsewhere, 2),
        lost: Skipped("rank 2 has the reason", None),
    }
    assert ranks.merged(rank=1).skipped[A] == Skipped("sparse", 5)
    assert ranks.merged(rank=2).skipped[odd] == Skipped("nested", 2)


def test_the_extremes_of_the_ranks_are_told_with_the_lowest_rank_that_has_them() -> None:
    scale = [2.0, 5.0, 1.0, 5.0, 1.0]
    sites = [{A: Here(draw(0, 4) * each + 1), B: Here(channels=3)} for each in scale]
    sites[2][A].values[0, :2] = torch.nan
    sites[1] = {B: Here(draw(1, 3)), C: Here(torch.full((1, 3), torch.nan, dtype=torch.float64))}
    ranks = job_of(sites, spread=True)
    merged = ranks.merged()
    assert list(merged.sites) == [A, B, C]
    assert list(merged.spread) == ["rms", "abs_max", "mean", "nonfinite"]
    alone = [snapshot_of(measured({A: rank[A]}))[A].total if A in rank else None for rank in sites]
    rms = [np.nan if stats is None else stats.rms for stats in alone]
    of_rms = merged.spread["rms"]
    assert (of_rms.min[0], of_rms.min_rank[0]) == (np.nanmin(rms), np.nanargmin(rms))
    assert (of_rms.max[0], of_rms.max_rank[0]) == (np.nanmax(rms), 3)
    assert [each[1] for each in of_rms] == [rms_of(sites[1][B]), 1, rms_of(sites[1][B]), 1]
    np.testing.assert_equal([each[2] for each in of_rms], [np.nan, -1, np.nan, -1])
    assert [each.tolist() for each in merged.spread["nonfinite"]] == [[0, 0, 3], [0, 1, 1], [2, 0, 3], [2, 1, 1]]
    assert merged.spread["mean"].min_rank.dtype == np.int64
    assert job_of(sites).merged().spread == {}


def rms_of(here: Here) -> float:
    return snapshot_of(measured({A: here}))[A].total.rms


def test_float64_beyond_its_range_spoils_nothing_but_itself() -> None:
    huge = [torch.full((2, 4), 1e200, dtype=torch.float64), draw(0, 2), draw(1, 2)]
    ranks = job_of([{A: Here(rows), B: Here(draw(2, 2))} for rows in huge] + [{B: Here(draw(3, 2))}])
    snapshot = snapshot_of(ranks.merged())
    total = snapshot[A].total
    assert (total.count, total.max) == (208, 1e200)
    assert not np.isfinite(total.var)
    check(snapshot[B], torch.cat([draw(2, 2)] * 3 + [draw(3, 2)], 1))
    alone = snapshot_of(job_of([{A: Here(huge[0])}, {}]).merged())[A].total
    assert alone.mean == snapshot_of(measured({A: Here(huge[0])}))[A].total.mean


@pytest.mark.parametrize("histogram", HISTOGRAMS)
def test_what_is_unpacked_serves_as_a_local_step_does(histogram: str) -> None:
    sites = [{A: Here(draw(rank, 6)), B: Here(channels=2)} for rank in range(2)]
    ranks = job_of(sites, BINS[histogram])
    merged = ranks.merged()
    assert merged.sites is ranks.merged().sites  # which recordings tell apart by being the same
    assert merged.drop_hidden().sites is ranks.merged().drop_hidden().sites
    merged = merged.drop_hidden()
    sites = Sites.from_json(json.loads(json.dumps(merged.sites.to_json())))
    shards = np.concatenate([np.asarray(each).view(np.uint8) for each in encode_step(merged, 0, is_first=False)])
    assert snapshot_of(decode_step(shards, {0: sites})).equals(snapshot_of(merged))
    assert Snapshot.from_dict(snapshot_of(merged).to_dict()).equals(snapshot_of(merged))
    judge([merged, merged])


def wander(seed: int, bins: Bins | None, rank: int) -> StepFrame:
    """A rank's sites of all widths on two devices: some silent or missing, some narrow."""
    alike, draw = np.random.default_rng(seed), np.random.default_rng([seed, rank])
    rows, words = [], [np.zeros(0, np.int64)] * 3
    for number in range(60):
        kind = ("output", "grad_output", "input", "grad_input")[alike.integers(4)]
        width, keeps, dim = int(alike.choice([1, 3, 8])), bool(alike.random() < 0.7), int(alike.integers(2))
        if draw.random() < 0.15:
            continue
        if draw.random() < 0.15:
            width = int(draw.choice([1, 4]))
        block, counts = int(draw.integers(3)), draw.integers(0, 50, histogram_shape(bins, width))
        calls = int(draw.integers(0, 3))
        moments = draw.normal(1e3 * rank, 1, (len(FIELDS), width))
        for name in ("count", "zeros", "nans", "posinfs", "neginfs", "m2", "abs_sum"):
            moments[FIELDS.index(name)] = draw.integers(0, 9, width)
        moments[2] += 1  # or it is the rounding of the means that are merged
        moments[1:6, moments[0] == 0] = 0
        state = np.concatenate([moments.view(np.int64).ravel(), [calls, draw.integers(1, 40)], counts.ravel()])
        part = Part(block, len(words[block]), width, counts.size)
        words[block] = np.concatenate([words[block], state if calls else np.zeros(len(state), np.int64)])
        is_kept = keeps and width > 1
        dim_here = -dim if draw.random() < 0.8 and is_kept else None
        rows.append(Row(Site(f"layer.{number}", kind), part, is_kept, dim_here))
    hidden, readings = draw.random(len(rows)) < 0.5, draw.integers(1, 4, len(rows))
    scalars = {"loss": float(draw.normal()), "lr": 0.5}
    layout = layout_of([0, 1, 0], rows, bins)
    given = {"step": 7, "time": 1.5 + rank, "scalars": scalars, "overflowed": False}
    return layout.frame(words, hidden.tolist(), readings.tolist(), 4.0, **given)


def counted_by_all(own: TableRow) -> Place:
    return Place(own.channels, "each")


@pytest.mark.parametrize("histogram", ["none", "per_tensor", "per_channel", "linear_per_channel"])
@pytest.mark.parametrize("seed", range(3))
def test_any_ranks_merge_as_their_recordings_do(seed: int, histogram: str) -> None:
    steps = [wander(seed, BINS[histogram], rank) for rank in range(5)]
    ranks = Job(steps, [counted_by_all] * 5)
    want = merged_snapshot([snapshot_of(step) for step in steps])
    unlike, folded = set(ranks.union.unlike), 0
    got = snapshot_of(ranks.merged())
    assert set(got) == set(want)
    assert got.order == want.order
    assert (got.grad_scale, got.overflowed) == (want.grad_scale, want.overflowed)
    got.scalars.pop(SAME_DATA, None)  # which recordings do not tell
    assert got.scalars == pytest.approx(want.scalars, rel=1e-14)
    for site, stats in want.items():
        here = got[site]
        assert (here.calls, here._scale) == (stats.calls, stats._scale)
        if not stats.calls:
            continue
        of_histogram = None if stats._histogram is None else stats._histogram
        pairs = [(here.total, stats.total)]
        if site in unlike:  # also where those that differ were silent
            if of_histogram is not None and of_histogram.ndim == 2:
                of_histogram = of_histogram.sum(0, keepdims=True)
        else:
            assert here._per_channel == stats._per_channel
            assert stats.channel_dim in (None, here.channel_dim)  # a rank that was silent may know it
            assert here._measured.shape == stats._measured.shape
            pairs.append((Stats(here._moments), Stats(stats._moments)))
            folded += here._measured.shape[1] == 1 < here.calls
        np.testing.assert_equal(here._histogram, of_histogram)
        for one, other in pairs:
            for names, tolerance in ((COUNTED, 0), ([name for name in STATISTICS if name not in COUNTED], 1e-12)):
                mine, theirs = (np.array([getattr(each, name) for name in names]) for each in (one, other))
                np.testing.assert_allclose(mine, theirs, tolerance, err_msg=f"{site}: {names}")
    assert unlike
    assert folded


def test_ids_of_samples_are_those_of_all_ranks_one_after_the_other() -> None:
    """Ranks may give other numbers of them, or none; those of earlier steps stay this rank's own."""
    sites = {A: Here(torch.ones(2, 3))}
    given = [{3: [7, -1], 2: [5]}, {}, {3: [0, 2**62, 9]}, {3: []}]
    steps = [measured(sites, sample_ids={n: np.array(ids, np.int64) for n, ids in each.items()}) for each in given]
    job = Job(steps)
    for rank in range(4):
        ids = {n: each.tolist() for n, each in job.merged(rank).sample_ids.items()}
        assert ids == {**given[rank], 3: [7, -1, 0, 2**62, 9]}


def test_ids_of_samples_that_would_take_too_much_are_this_ranks_own_and_a_note_says_so() -> None:
    sites = {A: Here(torch.ones(2, 3))}
    job = Job([measured(sites, sample_ids={3: np.arange(1 << 20)}), measured(sites)])
    assert job.union.notes == ["2097152 sample_ids of a step are too many: not merged"]
    assert job.merged().sample_ids[3].shape == (1 << 20,)
    assert job.merged(rank=1).sample_ids == {}


def test_tables_are_made_once_for_each_layout_and_anew_where_something_has_come() -> None:
    tables = Tables(1 << 30, False)
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


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)])
def test_groups_of_channels_are_kept_where_all_ranks_have_the_same(sizes: tuple[int, int]) -> None:
    steps = [measured({A: Here(draw(size, 4), group_size=size)}) for size in sizes]
    assert snapshot_of(Job(steps).merged())[A].group_size == (2 if sizes == (2, 2) else None)


def test_histograms_of_other_bins_are_not_merged_and_that_is_told() -> None:
    steps = [
        measured({A: Here(draw(rank, 2))}, bins) for rank, bins in enumerate((ExponentBins(), LinearBins(0, 1, 64)))
    ]
    job = Job(steps)
    assert snapshot_of(job.merged())[A].histogram is None
    assert job.union.notes == ["no histograms are merged, because not all ranks have the same bins"]
    some = job_of([{A: Here(draw(rank, 2), has_bins=rank == 0)} for rank in range(2)], ExponentBins())
    assert snapshot_of(some.merged())[A].histogram is None
