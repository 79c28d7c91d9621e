"""The story of a run's findings: a problem is told once, its cause first, with what follows from it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hookstats.numbers.fields import Site
from hookstats.numbers.kinds import kind_of
from hookstats.rules.engine import depth, is_cause
from hookstats.rules.finding import MOST_SITES, SEVERITIES, Cause, Finding
from hookstats.rules.formatting import number, times

_REASSURES = re.compile(r"[Nn]othing (needs to be|is|is to be) (done|wrong)")
_STANDING = 20  # measured steps, for which a problem that is not seen any more still explains what begins
_KNOWN = 200  # measured steps, for which it is remembered: what began then may be certain much later


@dataclass
class Chapter:
    """A finding that stands for itself, and what follows from it, in order of steps."""

    finding: Finding
    effects: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        of, count = self.finding, len(self.effects)
        followed = f" (and {count} that follow{'s' if count == 1 else ''})" if count else ""
        return f"step {of.step}, {of.severity}, {of.rule}{followed}: {of.sentence}"


class Plot:
    """Names the cause of each finding as it comes: of an earlier one that still stands, or of one in the same step.

    A later finding follows from an earlier one unless it looks nearer to the beginning of the chain than this; then it
    stands for itself, and `story` gives it what came since it began. A note explains notes of the same step alone.
    """

    def __init__(self) -> None:
        self._told: list[_Standing] = []
        self._steps = 0  # measured

    def tell(self, number: int, found: Sequence[Finding], going_on: set[str]) -> list[Finding]:
        """The findings of one measured step: those of one kind as one, cause before effect, each with its cause.

        number: of the step. going_on: the rules that have seen their problem in it.
        """
        self._steps += 1
        for each in self._told:
            if each.finding.rule in going_on:
                each.last = self._steps
            if self._steps - each.last <= _STANDING:
                each.until = number
        self._told = [each for each in self._told if self._steps - each.last <= _KNOWN]
        result = []
        for finding in order_findings(merge_findings(found)):
            cause, is_critical = self._cause(finding), finding.severity == "critical"
            if cause is None:
                self._told.append(_Standing(finding, self._steps, number, is_critical))
            else:
                finding = replace(
                    finding, because=cause.finding.as_cause, is_news=is_critical and not cause.has_critical
                )
                cause.has_critical |= is_critical
            result.append(finding)
        return result

    def state(self) -> dict[str, Any]:
        """Return what is remembered, for json.dumps."""
        told = [[each.finding.to_json(), each.last, each.until, each.has_critical] for each in self._told]
        return {"steps": self._steps, "told": told}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._steps = state["steps"]
        self._told = [_Standing(Finding.from_json(finding), *others) for finding, *others in state["told"]]

    def _cause(self, finding: Finding) -> _Standing | None:
        began = _find_start(finding)
        standing = [
            each
            for each in self._told
            if began <= each.until
            and explains(each.finding, finding)
            and (each.finding.rule == finding.rule or _find_start(each.finding) <= began)
        ]
        return min(standing, key=lambda each: (depth(each.finding.rule), each.finding.step)) if standing else None


@dataclass
class _Standing:
    """A finding that stands for itself."""

    finding: Finding
    last: int  # the measured step in which its problem was seen
    until: int  # the number of the step up to which what begins may follow from it
    has_critical: bool  # whether it is critical, or anything that followed from it


def _find_start(finding: Finding) -> int:
    return finding.step if finding.since is None else finding.since


def explains(cause: Finding, effect: Finding) -> bool:
    """Return whether one that was told before may be the cause of another."""
    if cause.rule == effect.rule:
        return SEVERITIES.index(cause.severity) >= SEVERITIES.index(effect.severity)
    if not is_cause(cause.rule):
        return False
    if cause.severity == "note":  # in which nothing needs to be wrong
        at_once = effect.since == cause.step and is_cause(effect.rule)
        return effect.severity == "note" and at_once and depth(cause.rule) <= depth(effect.rule)
    return depth(cause.rule) <= depth(effect.rule)


def merge_findings(found: Iterable[Finding]) -> list[Finding]:
    """The findings of one step: those of one rule, kind of tensor and severity become the first of them.

    It lists the sites of all; its sentence says how many there are. Of several at one site each is told: the firsts of
    all sites become one, and so do the seconds.
    """
    groups: dict[tuple[str, str, str, int], list[Finding]] = defaultdict(list)
    seen: Counter[tuple[str, str, Site]] = Counter()
    result: list[Finding] = []
    for each in found:
        if each.site is None or each.site_count > 1:
            result.append(each)
        else:
            kind = kind_of(each.site.tensor).name
            groups[each.rule, kind, each.severity, seen[each.rule, each.severity, each.site]].append(each)
            seen[each.rule, each.severity, each.site] += 1
    for first, *others in groups.values():
        if others:
            sites = [first.site, *(each.site for each in others)]
            names = ", ".join(dict.fromkeys(site.name or "the model" for site in sites[1:4] if site is not None))
            more = "" if len(others) <= 3 else f" and {len(others) - 3} more"
            sentence = f"{first.sentence} The same holds at {times(len(others), 'other site')}: {names}{more}."
            kept = tuple(site for site in sites[:MOST_SITES] if site is not None)
            since = min(map(_find_start, (first, *others)))
            first = replace(first, sentence=sentence, sites=kept, site_count=len(sites), since=since)
        result.append(first)
    return result


def order_findings(found: Iterable[Finding]) -> list[Finding]:
    """Findings of one step, causes before effects; the graver one first where both look at the same."""
    return sorted(found, key=lambda each: (depth(each.rule), -SEVERITIES.index(each.severity)))


def story(findings: Iterable[Finding]) -> list[Chapter]:
    """All findings of a run as chapters: the gravest first, and of these the earliest.

    What was told before its cause was certain belongs to that cause here, if it came since the cause began.
    """
    chapters: dict[tuple[int, int, Cause], Chapter] = {}
    effects: list[Finding] = []
    for each in findings:
        if each.because is None:
            chapters.setdefault((each.attempt, each.rank, each.as_cause), Chapter(each))
        else:
            effects.append(each)
    for each in effects:
        assert each.because is not None
        chapter = chapters.get((each.attempt, each.rank, each.because))
        if chapter is None:  # its cause is not among these findings
            chapters.setdefault((each.attempt, each.rank, each.as_cause), Chapter(each))
        else:
            chapter.effects.append(each)
    told = [_raise_severity(chapter) for chapter in _adopt_effects(list(chapters.values()))]
    return sorted(told, key=lambda each: (-_rank_severity(each), each.finding.step))


def _raise_severity(chapter: Chapter) -> Chapter:
    """A chapter whose beginning is as grave as what followed from it, and does not say that nothing is wrong."""
    finding, rank = chapter.finding, SEVERITIES.index
    worst = max(chapter.effects, key=lambda each: rank(each.severity), default=finding)
    if rank(worst.severity) <= rank(finding.severity):
        return chapter
    sentences = [each for each in re.split(r"(?<=\.) ", finding.sentence) if not _REASSURES.search(each)]
    sentences.append(f"It led to {worst.rule} in step {worst.step}, which is {worst.severity}.")
    return Chapter(replace(finding, severity=worst.severity, sentence=" ".join(sentences)), chapter.effects)


def _adopt_effects(chapters: list[Chapter]) -> list[Chapter]:
    """Make effects of those that began after a deeper cause had begun, which was told later."""
    causes: dict[int, Chapter] = {}
    ordered = sorted(chapters, key=lambda each: (depth(each.finding.rule), each.finding.step))
    found = [each.finding for each in ordered]
    began, seen = np.array([_find_start(each) for each in found]), np.array([each.step for each in found])
    depths = np.array([depth(each.rule) for each in found])
    codes: dict[object, int] = {}
    same = np.array([codes.setdefault((each.rule, each.site), len(codes)) for each in found])
    for i, chapter in enumerate(ordered):  # arrays first: of many findings each would be compared with each
        start = _find_start(chapter.finding)
        fits = (began <= start) & (start <= seen) & ((depths < depths[i]) | (same == same[i]))
        for j in np.flatnonzero(fits).tolist():
            if j != i and _comes_first(found[j], chapter.finding):
                causes[id(chapter)] = ordered[j]
                break
    for chapter in chapters:
        first = chapter
        while id(first) in causes:  # which looks deeper each time
            first = causes[id(first)]
        if first is not chapter:
            first.effects += [replace(chapter.finding, because=first.finding.as_cause), *chapter.effects]
    left = [chapter for chapter in chapters if id(chapter) not in causes]
    for chapter in left:
        chapter.effects.sort(key=lambda each: (each.step, depth(each.rule)))
    return left


def _comes_first(cause: Finding, effect: Finding) -> bool:
    """Return whether a finding that was told later names what the other one follows from."""
    if (cause.attempt, cause.rank) != (effect.attempt, effect.rank):
        return False
    began, seen = _find_start(cause), _find_start(effect)
    is_same = (cause.rule, cause.site) == (effect.rule, effect.site) and began <= effect.step  # which became graver
    is_deeper = depth(cause.rule) < depth(effect.rule) or (is_same and cause.severity != effect.severity)
    return is_deeper and explains(cause, effect) and began <= seen <= cause.step


def _rank_severity(chapter: Chapter) -> int:
    return max(SEVERITIES.index(each.severity) for each in (chapter.finding, *chapter.effects))


def head(findings: Iterable[Finding], loss: tuple[int, float] | None = None) -> list[str]:
    """Sum up a run in at most five sentences; one where nothing was found.

    loss: the last step with a loss, and that loss. A divergence that it has come back from is told as the past.
    """
    chapters = story(findings)
    grave = [each for each in chapters if _rank_severity(each) > 0]
    notes = len(chapters) - len(grave)
    if not grave:
        said = times(notes, "note") if notes else ""
        return [f"No rule found anything wrong{'; ' + said if said else ''}."]
    sentences = []
    for chapter in grave[:3]:
        finding = chapter.finding
        came_back = loss is not None and finding.rule == "loss-spike" and loss[1] <= finding.threshold < finding.value
        if loss is not None and came_back and finding.severity == "critical":
            rose = f"Since step {finding.since}: the loss rose to {number(finding.value)} by step {finding.step}"
            sentences.append(f"{rose}; it is {number(loss[1])} in step {loss[0]}{_say_consequences(chapter.effects)}.")
            continue
        since = f"Since step {finding.since}" if finding.since != finding.step else f"In step {finding.step}"
        first = re.sub(rf" (since|of) step {finding.since}\b", "", _first_sentence(finding.sentence), count=1)
        sentences.append(f"{since}: {first}{_say_consequences(chapter.effects)}.")
    if len(grave) > 3:
        sentences.append(f"{times(len(grave) - 3, 'other problem')} {'is' if len(grave) == 4 else 'are'} listed below.")
    if notes:
        sentences.append(f"{times(notes, 'note')}: nothing is wrong there.")
    return sentences


def _first_sentence(text: str) -> str:
    """Return the first sentence without its point."""
    return text.partition(". ")[0].rstrip(".")


def _say_consequences(effects: list[Finding]) -> str:
    """The rules of what follows, each once, in order."""
    if not effects:
        return ""
    by_rule = sorted(effects, key=lambda each: each.step)
    names = list(dict.fromkeys(each.rule for each in by_rule))
    return f"; what follows from it: {', '.join(names[:4])}{'' if len(names) <= 4 else ' and more'}"
