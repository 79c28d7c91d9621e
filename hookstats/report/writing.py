"""The content of a page, made from a recorded run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Counts, Site
from hookstats.numbers.kinds import is_of_module, kind_of
from hookstats.report import detail, planes
from hookstats.report.pair import RunPair
from hookstats.report.precision import precision
from hookstats.report.record import Recorded
from hookstats.report.reducing import edges, marks, transpose_bytes
from hookstats.rules import Finding, head, story

_FINDINGS = 2000  # on a page: the gravest, and what follows from them
_TEXT = 20_000  # characters of settings
_ABOUT = {
    "gradient": ("param_grad", "grad_output"),
    "parameters": ("param_update", "update_sample", "param_grad"),
    "loss": ("loss",),
    "progress": ("loss",),
    "nonfinite": ("loss",),
}  # by a word of a rule's name, kinds of tensors, or a scalar
_LINES_OF_SECOND = ["rms", "abs_max"]


class PageContents:
    """The content of a page: ``record``, to become JSON, and bytes by name, made when they are first asked for.

    A name begins with its group, of which all is made at once: each of `planes.HEATMAPS` (its heatmaps), ``line``
    (``line.rms`` of all sites, and all lines of each site by its place), ``more`` (what belongs to the record and takes
    long to tell, as JSON), and ``details.3`` (pictures of the site with this place).
    ``seconds``: how long all of that took.
    """

    def __init__(self, recorded: Recorded, second: Recorded | None = None) -> None:
        """second: another run beside the first. ValueError where a run holds no step, or no site."""
        for run in [recorded] if second is None else [recorded, second]:
            if not len(run.steps) or not run.sites:
                held = f"{run.name} holds {len(run.steps)} steps of {len(run.sites)} sites"
                raise ValueError(f"expected a run in which something was measured; {held}")
        began = time.monotonic()
        self._own = recorded
        self._pair = None if second is None else RunPair(recorded, second)
        self._runs = [recorded] if self._pair is None else [self._pair.first, self._pair.second]
        self._begin = edges(len(self._runs[0].steps), planes.COLUMNS)
        # What the first picture shows is read together with what the record says: reading is most of the time.
        both = [planes.read(run, "rms", planes.BAD) for run in self._runs]
        self._is_bad = [marks(bad, self._begin) for _, bad in both]
        known = [~np.isnan(bad) for _, bad in both]
        self._bad = float(both[0][1].sum(where=known[0]))
        self.record = self._record([each.sum(axis=1) for each in known])
        self._made: dict[str, dict[str, bytes]] = {"rms": self._heatmaps("rms", [values for values, _ in both])}
        details = (f"details.{place}" for place in range(len(self.record["sites"])))
        self._locks = {group: threading.Lock() for group in (*planes.HEATMAPS, "line", "more", *details)}
        self.seconds = time.monotonic() - began

    def __getitem__(self, name: str) -> bytes:
        """KeyError for what there is not."""
        first, _, rest = name.partition(".")
        group = f"details.{rest.partition('.')[0]}" if first == "details" else first
        with self._locks[group]:
            if group not in self._made:
                began = time.monotonic()
                self._made[group] = self._make(group)
                self.seconds += time.monotonic() - began
        return self._made[group][name]

    def render_all(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the whole record, and all other bytes; pictures of as many sites as have room."""
        blobs: dict[str, bytes] = {}
        for key in planes.HEATMAPS:
            blobs |= self._made.get(key) or self._make(key)
        codes = np.frombuffer(blobs["rms.relative"], np.uint8).reshape(len(self.record["sites"]), -1)
        own = self._own
        detailed = detail.choose_sites(own, planes.measure_unrest(codes[: len(own.sites)])) if len(own.detailed) else []
        blobs |= self._lines() | detail.details(own, detailed)
        return self.record | {"detailed": detailed} | self._more(), blobs

    def _make(self, group: str) -> dict[str, bytes]:
        if group in planes.HEATMAPS:
            return self._heatmaps(group, [planes.read(run, group)[0] for run in self._runs])
        if group == "line":
            return self._lines()
        if group == "more":
            return {"more": json.dumps(self._more(), allow_nan=False).encode()}
        place = int(group.removeprefix("details."))
        is_seen = place < len(self._own.sites) and len(self._own.detailed)
        return detail.details(self._own, [place]) if is_seen else {group: b"{}"}

    def _heatmaps(self, key: str, values: list[Array]) -> dict[str, bytes]:
        """values: of each run."""
        kind = planes.HEATMAPS[key][1]
        found: dict[str, bytes] = {}
        for of, each, is_bad in zip(("", "other_"), values, self._is_bad, strict=False):
            relative, absolute = planes.heatmap(each, kind, is_bad)
            found |= {f"{key}.{of}relative": relative.tobytes(), f"{key}.{of}absolute": absolute.to_bytes()}
        if self._pair is not None:
            apart = planes.difference(values[0], values[1], kind, self._is_bad[0] | self._is_bad[1])
            found[f"{key}.difference"] = apart.tobytes()
        return found

    def _lines(self) -> dict[str, bytes]:
        found = planes.lines(self._runs[0], list(planes.LINES))
        if self._pair is not None:
            found = np.concatenate([found, planes.lines(self._runs[1], _LINES_OF_SECOND)])
        return {"line.rms": transpose_bytes(found[0])} | {
            f"line.{i}": transpose_bytes(found[:, i]) for i in range(found.shape[1])
        }

    def _more(self) -> dict[str, Any]:
        run = self._own
        windows = detail.windows(run, planes.line_columns(len(self.record["sites"])))
        values = self._bad + float(np.nansum(run.statistic("count")))
        told = {"windows": windows, "precision": precision(run), "values": values}
        return told if self._pair is None else told | self._pair.find_parting()

    def _record(self, fired: list[Counts]) -> dict[str, Any]:
        """fired ``[n]``, of each run: in how many steps each site was not silent."""
        own, pair, steps = self._own, self._pair, self._runs[0].steps
        sites, first = self._runs[0].sites, own.steps
        place = {site: i for i, site in enumerate(sites)}
        chapters, left_out = chapters_of(own, place)
        rows = order_sites(sites)
        if pair is not None:
            ordered = pair.order_sites()
            rows = [place[ordered[i]] for i in order_sites(ordered)]
        return {
            "name": own.name,
            "written": round(time.time()),
            "sites": [list(site) for site in sites],
            "rows": rows,
            "steps": [int(steps[0]), int(steps[-1]), len(steps)],
            "measured": [int(first[0]), int(first[-1]), len(first)],
            "begin": steps[self._begin].tolist(),
            "line_begin": steps[edges(len(steps), planes.line_columns(len(sites)))].tolist(),
            "lines": [*planes.LINES, *(f"other_{name}" for name in _LINES_OF_SECOND if pair is not None)],
            "times": None if own.times is None else [float(own.times[0]), float(own.times[-1])],
            "readings": int(fired[0].sum()),
            "fired": fired[0].tolist(),
            "statistics": planes.describe_heatmaps(pair is not None),
            "scalars": planes.scalars(self._runs[0]),
            "head": head(own.findings, _last_loss(own)),
            "chapters": chapters,
            "left_out": left_out,
            "skipped": [[*site, why.reason, why.times, since] for site, why, since in own.skipped],
            "settings": _shorten(own.settings),
            "other": None
            if pair is None
            else {
                **pair.describe(),
                "fired": fired[1].tolist(),
                "scalars": planes.scalars(pair.second),
                "head": head(pair.b.findings, _last_loss(pair.b)),
                "chapters": chapters_of(pair.b, place)[0],
            },
        }


def _last_loss(recorded: Recorded) -> tuple[int, float] | None:
    found = recorded.scalars.get("loss")
    return (int(found[0][-1]), float(found[1][-1])) if found is not None and len(found[0]) else None


def chapters_of(recorded: Recorded, place: Mapping[Site, int]) -> tuple[list[dict[str, Any]], int]:
    """The story as JSON, and how many findings have no room in it. place: of sites."""
    chapters, kinds = story(recorded.findings)[:_FINDINGS], kinds_of(place)
    room, told = _FINDINGS - len(chapters), []
    for each in chapters:  # what stands for itself goes before what follows
        effects = [_describe_finding(effect, place, kinds) for effect in each.effects[:room]]
        told.append({"finding": _describe_finding(each.finding, place, kinds), "effects": effects})
        room -= len(effects)
    return told, len(recorded.findings) - sum(1 + len(each["effects"]) for each in told)


def _describe_finding(finding: Finding, place: Mapping[Site, int], kinds: set[str]) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "step": finding.step,
        "since": finding.since,
        "site": None if finding.site is None else place.get(finding.site),
        "kind": kind_of_rule(finding.rule, kinds) if finding.site is None else None,
        "sites": [place[site] for site in finding.sites if site in place],
        "site_count": finding.site_count,
        "severity": finding.severity,
        "sentence": finding.sentence,
        "rank": finding.rank,
        "attempt": finding.attempt,
    }


def kinds_of(sites: Iterable[Site]) -> set[str]:
    return {kind_of(site.tensor).name for site in sites}


def kind_of_rule(rule: str, kinds: set[str]) -> str | None:
    """Return what a page shows for a finding without a site: the kind of tensors, or the scalar, of its rule.

    kinds: those that were measured.
    """
    about = [kind for word, of in _ABOUT.items() if word in rule for kind in of]
    return next((kind for kind in about if kind in kinds or kind == "loss"), None)


def order_sites(sites: list[Site]) -> list[int]:
    """Sites in the order in which their modules are executed: a gradient beside what it is the gradient of."""
    forward = [site for site in sites if not kind_of(site.tensor).is_gradient and is_of_module(site.tensor)]
    backward = [site for site in sites if kind_of(site.tensor).is_gradient and is_of_module(site.tensor)][::-1]
    place: dict[str, int] = {}
    for site in [*forward, *backward]:
        place.setdefault(site.name, len(place))
    for site in sites:  # a parameter or a buffer stands where its module does
        place.setdefault(site.name, place.get(site.name.rpartition(".")[0], len(place)))
    return sorted(range(len(sites)), key=lambda i: (place[sites[i].name], i))


def _shorten(value: Any, depth: int = 0) -> Any:
    """Return JSON of which a page can show all."""
    if isinstance(value, Mapping) and depth < 6:
        return {str(key): _shorten(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and depth < 6:
        return [_shorten(each, depth + 1) for each in value[:1000]]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and np.isfinite(value):
        return value
    return str(value)[:_TEXT]
