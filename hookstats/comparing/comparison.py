"""Two runs, or two snapshots, side by side: where they part, how far, and how that grows over depth and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from hookstats.comparing import rounding
from hookstats.comparing.pairs import FAMILIES, Judged, SnapshotPair
from hookstats.numbers.fields import Array, Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.merge import align
from hookstats.numbers.significands import dtype_of
from hookstats.numbers.snapshot import Snapshot
from hookstats.numbers.tables import align_columns

# By how much what lies apart may grow in a step, because parameters feed on their own roundings; those of n steps add
# up. Adam makes a whole update of a gradient that is rounding alone (as that of an attention's key bias is): with it a
# small GPT grew 4 times over what is allowed in its first step, and hardly more in 200.
GROWTH = 16.0
_NEGLIGIBLE = 2.0**-22  # the measurement's own rounding
_MOST_ROWS, _MOST_STEPS = 40, 9  # of the tables of a comparison
JUMP = 4.0  # from the sites before to a site; below that is how distances grow anyway


Compared: TypeAlias = Snapshot | Iterable[Snapshot] | str | Path


@dataclass(frozen=True)
class Divergence:
    """A site at which two runs differ by more than rounding explains.

    ``statistic``: "mean", "abs_mean", "rms", "min", "max"; "count" where the tensors are not of the same size, or one
    site was silent; "nonfinite" where there are more NaN and Inf in one. ``a``, ``b``: what it is in both, ``channel``:
    of which (None: of the whole tensor). ``difference``: relative to the values' scale (their rms; for min and max the
    largest magnitude; for a bias's gradient that of the sum it is, see `hookstats.comparing.rounding`; 1 for counts),
    and ``allowed``: what rounding explains of it. ``dtypes``: of the values in a and b, as their bits tell;
    ``rounded_to``: the dtype whose rounding was allowed. ``before``: sites that ran before it in this step, and agree.
    """

    step: int
    site: Site
    statistic: str
    channel: int | None
    a: float
    b: float
    difference: float
    allowed: float
    dtypes: tuple[str | None, str | None]
    rounded_to: str
    before: int

    def __str__(self) -> str:
        where = f"step {self.step}, {self.site}"
        sites = "site before it agrees" if self.before == 1 else "sites before it agree"
        before = f"{self.before} {sites}" if self.before else "the first site of the step"
        if self.statistic == "count" and 0 in (self.a, self.b):
            ran, silent = ("a", "b") if self.a else ("b", "a")
            return f"{where}: it ran in {ran} and not in {silent}; {before}"
        what = self.statistic if self.channel is None else f"{self.statistic} of channel {self.channel}"
        if self.statistic in ("count", "nonfinite"):
            what = {"count": "values", "nonfinite": "values that are NaN or Inf"}[self.statistic]
            return f"{where}: {self.a:.0f} {what} in a, {self.b:.0f} in b; {before}"
        values = f"{what} is {self.a:.6g} in a, {self.b:.6g} in b"
        told = f"apart by {self.difference:.2g} of the values' scale, rounding of {self.rounded_to} explains"
        kinds = "" if self.dtypes[0] == self.dtypes[1] else f"; a's values are {self.dtypes[0]}, b's {self.dtypes[1]}"
        return f"{where}: {values}, {told} {self.allowed:.2g}{kinds}; {before}"


class Jump(NamedTuple):
    """A site at which the distance is several times that of all sites of its kind before it."""

    site: Site
    before: float
    distance: float


class Comparison:
    """Result of `compare`.

    ``first``: the first `Divergence`, None where the runs agree to rounding. ``is_equal``: whether they are the same,
    bit for bit. ``steps``: those that both have, k of them, and ``sites``, those that both watch, n of them, in order
    of execution. ``distances``: float64 ``[k, n]``, how far mean, abs_mean and rms lie apart at most, relative to the
    larger rms: 0 where they are the same, about 1 where the tensors have nothing in common; NaN where a site was
    silent. ``closest``: the largest share of what is allowed that was seen, up to the first divergence.

    ``str(comparison)`` is empty where runs are equal, one line where they agree to rounding; else that of the first
    divergence, how distances grow, and a table.
    """

    def __init__(self, a: Iterable[Snapshot], b: Iterable[Snapshot], dtype: str | None) -> None:
        """a, b: by step, ascending."""
        self.first: Divergence | None = None
        self.is_equal = True
        self.steps: list[int] = []
        self.closest = 0.0
        self._dtype = dtype
        self._bits: dict[Site, list[int]] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._parted: SnapshotPair | None = None
        steps = Counter[str]()
        only: list[set[Site]] = [set(), set()]
        place: dict[Site, int] = {}
        rows: list[tuple[list[int], Array]] = []
        for of_a, of_b in align((a, b)):
            if of_a is None or of_b is None:
                steps["b" if of_a is None else "a"] += 1
                continue
            pair = SnapshotPair(of_a, of_b)
            self.steps.append(of_a.step)
            self.is_equal = self.is_equal and pair.is_equal()
            if pair.a.frame.sites.names != pair.b.frame.sites.names:
                watched = set(pair.a), set(pair.b)
                only = [only[0] | watched[0] - watched[1], only[1] | watched[1] - watched[0]]
            for site in pair.sites:
                place.setdefault(site, len(place))
            rows.append(([place[site] for site in pair.sites], pair.distances))
            if self.first is None:
                self._judge(pair)
                self._parted = pair if self.first else None
        sites = Counter({name: len(each) for name, each in zip("ab", only, strict=True)})
        counted = [(count[name], what, name) for what, count in (("steps", steps), ("sites", sites)) for name in "ab"]
        alone = [f"{count} {what} in {name} alone" for count, what, name in counted if count]
        self.is_equal = self.is_equal and not alone
        self.alone = ", ".join(alone)
        self.sites = list(place)
        self.distances = np.full((len(rows), len(place)), np.nan)
        for row, (at, distances) in zip(self.distances, rows, strict=True):
            row[at] = distances

    def _judge(self, pair: SnapshotPair) -> None:
        """Looks for the first divergence in a step, and remembers how far apart all was."""
        for site, bits in zip(pair.sites, pair.bits().T.tolist(), strict=True):
            self._bits[site] = [max(each) for each in zip(self._bits.get(site, [0, 0]), bits, strict=True)]
        bits = np.array([self._bits[site] for site in pair.sites], np.int64).reshape(-1, 2)
        gap = self.steps[-1] - self.steps[-2] if len(self.steps) > 1 else 0
        if self._dtype is not None:
            units = np.full(len(bits), rounding.UNIT_ROUNDOFF[self._dtype])
        else:
            units = rounding.find_units(bits.max(1), pair.is_of_module, is_trained=gap > 0)
        parted: list[tuple[int, str, Judged, Array]] = []
        for family, judged in pair.judge(units, is_alike=self._dtype is not None).items():
            grown = np.array([self._seen.get((family, kind.name), 0.0) for kind in pair.kinds])
            allowed = np.fmax(1.0, GROWTH * gap) * np.fmax(judged.allowed, grown)
            parted += [(i, family, judged, allowed) for i in np.flatnonzero(judged.distance > allowed)[:1].tolist()]
            for kind in set(pair.kinds) if family != "counts" else ():
                mine = np.array([kind == each for each in pair.kinds])
                most = float(judged.distance[mine].max())
                self._seen[family, kind.name] = max(most, self._seen.get((family, kind.name), 0.0))
            if family != "counts":
                self.closest = max(self.closest, float((judged.distance / allowed).max(initial=0)))
        if parted:
            i, family, judged, allowed = min(parted, key=lambda each: each[0])
            self.first = Divergence(
                pair.a.step,
                pair.sites[i],
                FAMILIES[family][int(judged.statistic[i])],
                None if judged.channel[i] < 0 else int(judged.channel[i]),
                float(judged.a[i]),
                float(judged.b[i]),
                float(judged.distance[i]),
                float(allowed[i]),
                (dtype_of(bits[i, 0]), dtype_of(bits[i, 1])),
                self._dtype or dtype_of(round(-np.log2(units[i]))) or "float64",
                i,
            )

    def jumps(self, step: int) -> list[Jump]:
        """The sites at which the distance grows most in a step, in order of execution: three at most.

        Compared with the largest distance at sites of the same kind (outputs, gradients, ...) that ran before.
        ValueError for a step that was not compared.
        """
        if step not in self.steps:
            raise ValueError(f"jumps: expected one of the compared steps {self.steps[:5]}, ...; got {step}")
        before: dict[str, float] = {}
        found = []
        for site, distance in zip(self.sites, self.distances[self.steps.index(step)].tolist(), strict=True):
            kind = kind_of(site.tensor).name
            most = before.setdefault(kind, 0.0)
            if distance > max(JUMP * most, _NEGLIGIBLE):
                found.append(Jump(site, most, distance))
            before[kind] = max(most, distance) if distance == distance else most
        largest = sorted(found, key=lambda jump: jump.distance / max(jump.before, _NEGLIGIBLE), reverse=True)[:3]
        return [jump for jump in found if jump in largest]

    def __str__(self) -> str:
        if self.is_equal:
            return ""
        if self.first is None or self._parted is None:
            size = f"{len(self.steps)} steps and {len(self.sites)} sites"
            said = f"agree to rounding: in {size} they are at most {self.closest:.2g} of what it explains apart"
            return f"{said}; {self.alone}" if self.alone else said
        lines = [f"part at {self.first}", *filter(None, [self.alone])]
        for jump in self.jumps(self.first.step):
            lines.append(f"the distance jumps at {jump.site}: from {jump.before:.2g} to {jump.distance:.2g}")
        if len(self.steps) > 1:
            lines += ["", *_growth(self.steps, self.sites, self.distances)]
        return "\n".join([*lines, "", *_table(self._parted, self.first.before)])

    def __repr__(self) -> str:
        found = "equal" if self.is_equal else "agree to rounding" if self.first is None else f"part at {self.first}"
        return f"Comparison({len(self.steps)} steps, {len(self.sites)} sites, {found})"


_EXPECTED = "a Snapshot, the directory of a run, what hookstats.load gives, or Snapshots one after another"


def compare(a: Compared, b: Compared, *, dtype: str | None = None) -> Comparison:
    """Find where two programs that should compute the same differ by more than rounding explains.

    ``a``, ``b``: two Snapshots (whatever their steps), or two runs: the directory of a recorded run (whose rank 0 is
    read), what `hookstats.load` gives, or Snapshots one after another. Runs are compared in the steps that both have,
    all in the sites that both watch.

    ``dtype``: that of the values whose rounding is allowed, a name such as "float32", "bfloat16", "float8_e4m3fn" or
    "tfloat32"; if it is coarser than float32, one program may hold weights of that dtype and the other finer ones.
    None: told from the bits that min and max of each site need; where a and b differ, the finer one, and what is
    computed from coarser values is as coarse. `hookstats.comparing.rounding` derives how much is allowed: of an
    element, after D sites, 8 e sqrt(D), with e of one rounding and one sum; of a mean over n elements sqrt(n) less, of
    what roundings of weights do to one over C channels sqrt(C) less. It holds in the first step that is compared, when
    both programs have the same parameters. From then on 16 times as much is allowed, and 16 times what lay apart in any
    step before; n times that where it is the n-th step after the last measured one.

    TypeError for what is neither; ValueError where nothing can be compared, or for an unknown dtype; RunError, a
    ValueError, for a directory that is no recorded run.
    """
    if dtype is not None and (not isinstance(dtype, str) or dtype not in rounding.UNIT_ROUNDOFF):
        raise ValueError(f"compare: dtype: expected one of {', '.join(rounding.UNIT_ROUNDOFF)}; got {dtype!r}")
    if isinstance(a, Snapshot) != isinstance(b, Snapshot):
        raise ValueError(f"compare: expected two snapshots or two runs, got {type(a).__name__} and {type(b).__name__}")
    a, b = _open_run(a), _open_run(b)
    if isinstance(a, Snapshot) and isinstance(b, Snapshot):
        b = Snapshot(replace(b.frame, step=a.step))
    comparison = Comparison([a] if isinstance(a, Snapshot) else a, [b] if isinstance(b, Snapshot) else b, dtype)
    if not comparison.steps:
        raise ValueError(f"compare: expected a step that both have, got none: {comparison.alone or 'both are empty'}")
    if not comparison.sites:
        raise ValueError("compare: expected a site that both watch and that ran in one of them, got none")
    return comparison


def _open_run(run: Compared) -> Snapshot | Iterator[Snapshot]:
    if isinstance(run, Snapshot):
        return run
    if isinstance(run, (str, Path)):
        from hookstats.records.run import load  # needs pyarrow, which two snapshots do not

        run = load(run)
    if not isinstance(run, Iterable):
        raise TypeError(f"compare: expected {_EXPECTED}; got {run!r}")
    return _check_snapshots(run)


def _check_snapshots(run: Iterable[Snapshot]) -> Iterator[Snapshot]:
    for each in run:
        if not isinstance(each, Snapshot):
            raise TypeError(f"compare: expected {_EXPECTED}; got a {type(run).__name__} with {each!r}")
        yield each


def _growth(steps: Sequence[int], sites: Sequence[Site], distances: Array) -> list[str]:
    """The largest distance of each kind of tensor over the steps."""
    chosen = sorted(set(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).round().astype(int).tolist()))
    kinds = [kind_of(site.tensor).name for site in sites]
    rows = [["largest distance at step", *(str(steps[i]) for i in chosen)]]
    for kind in dict.fromkeys(kinds):
        mine = distances[np.ix_(chosen, [i for i, each in enumerate(kinds) if each == kind])]
        rows.append([kind, *(f"{most:.2g}" for most in np.nan_to_num(mine).max(1))])
    return align_columns(rows, left=1)


def _table(pair: SnapshotPair, first: int) -> list[str]:
    """A line for each site of a step, in order of execution; where there are many, from shortly before the first one
    that parts."""
    begin = max(0, min(first - 3, len(pair.sites) - _MOST_ROWS))
    end = min(begin + _MOST_ROWS, len(pair.sites))
    rows = [["", "site", "tensor", "rms a", "rms b", "mean a", "mean b", "distance"]]
    for i in range(begin, end):
        site = pair.sites[i]
        stats = pair.a[site].total, pair.b[site].total
        numbers = [*(f"{each.rms:.5g}" for each in stats), *(f"{each.mean:.5g}" for each in stats)]
        mark = ">" if i == first else ""
        rows.append([mark, site.name or "(model)", site.tensor, *numbers, f"{pair.distances[i]:.2g}"])
    lines = align_columns(rows, left=3)
    if end - begin < len(pair.sites):
        lines.append(f"({begin} sites before these, {len(pair.sites) - end} after them)")
    return lines
