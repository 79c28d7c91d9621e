"""`hookstats watch`: a run while it is recorded. A screen that renews itself, or lines where the output is a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO

from hookstats.numbers.snapshot import Snapshot
from hookstats.rules import Finding, story
from hookstats.terminal.following import WINDOW, Followed, RunState
from hookstats.terminal.formatting import escape_controls, sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

_SECONDS = 1.0  # between two looks
_COLOURS = {"critical": "bold red", "warning": "yellow", "note": "cyan"}
_KINDS = {"recording": "green", "ended": "cyan", "died": "bold red", "waiting": "yellow"}


def watch(followed: Followed, output: TextIO, wait: Callable[[float], None] = time.sleep) -> int:
    """Show a run, which may not have begun, until it has ended: 0; or its training process has died: 1."""
    has_screen = output.isatty() and find_spec("rich") is not None
    told, is_over = "", False
    with _open_screen() if has_screen else nullcontext() as screen:
        while not is_over:
            state = followed.state()  # before what it had written is read
            snapshots, found = followed.look()
            is_over = state.kind in ("ended", "died")
            if screen is not None:
                screen.update(picture(followed, state, screen.console.height, screen.console.width), refresh=True)
            else:
                _print(lines(followed, snapshots, found), output)
                if not is_over and followed.run is None and state.sentence != told:
                    told = state.sentence
                    _print([told], output)
            if not is_over:
                wait(_SECONDS)
    _print([*summary(followed), *([] if has_screen else [state.sentence])], output)
    return int(state.kind == "died")


def _print(lines: list[str], output: TextIO) -> None:
    for line in lines:
        print(escape_controls(line), file=output, flush=True)


def _open_screen() -> Live:
    from rich.live import Live

    return Live(auto_refresh=False, vertical_overflow="crop")


def lines(followed: Followed, snapshots: list[Snapshot], found: list[Finding]) -> list[str]:
    """Return what is new, a line each: steps with scalars, the last one with its worst site, and findings if news."""
    result = []
    for snapshot in snapshots:
        scalars = "".join(f"  {name} {value:.6g}" for name, value in snapshot.scalars.items())
        result.append(f"step {snapshot.step}{scalars}")
    if snapshots:
        result[-1] += "".join(
            f"  worst: {each.site} "
            + (f"rms {each.rms[-1]:.3g} (x {each.change:.3g})" if isfinite(each.rms[-1]) else "is not finite")
            for each in followed.find_worst(1)
        )
    return result + [str(finding) for finding in found if finding.is_news]


def summary(followed: Followed) -> list[str]:
    """A run that is over, in a few sentences; none where no step was recorded."""
    return followed.run.head if followed.run is not None and followed.steps else []


def picture(followed: Followed, state: RunState, height: int, width: int) -> Group:
    """A screen of at most `height` lines: the state, scalars, findings, and below them the worst sites."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        return Text(escape_controls(text), style, no_wrap=True, overflow="ellipsis")

    sentence = escape_controls(state.sentence)  # whole, for a command may stand in it
    parts: list[Any] = [line(str(followed.path), "bold"), Text(sentence, _KINDS[state.kind]), line(_about(followed))]
    names = max(20, width // 3)
    bars = max(8, min(WINDOW, width - names - 42))  # beside tensor and numbers
    for name, latest in list(followed.steps[-1].scalars.items())[:4] if followed.steps else []:
        parts.append(line(f"{name:<10.20} {latest:<12.6g} {sparkline(followed.values(name, bars))}"))
    chapters = story(followed.findings)
    shown = chapters[: max(3, height // 4)]
    if shown:
        left = len(chapters) - len(shown)
        more = f", {left} of them not shown" if left else ""
        parts += [Text(), Text(f"findings: {len(chapters)}{more}", "bold")]
    for chapter in shown:
        parts.append(line(str(chapter), _COLOURS[chapter.finding.severity]))
    rows = height - len(parts) - len(sentence) // width - 3
    worst = followed.find_worst(max(rows, 1))
    if worst:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("worst sites", no_wrap=True, overflow="ellipsis", max_width=names)
        table.add_column("tensor", no_wrap=True)
        table.add_column("rms", justify="right", no_wrap=True)
        table.add_column("x its past", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for each in worst:
            style = _COLOURS.get(each.severity or "", "")
            numbers = [f"{each.rms[-1]:.3g}", f"{each.change:.3g}"] if isfinite(each.rms[-1]) else ["!", "!"]
            cells = [each.site.name or "(model)", each.site.tensor, *numbers]
            table.add_row(
                *(Text(escape_controls(cell)) for cell in cells), Text(sparkline(each.rms[-bars:])), style=style
            )
        parts += [Text(), table]
    return Group(*parts)


def _about(followed: Followed) -> str:
    if followed.run is None or not followed.steps:
        return "waiting for the first steps; they are written every 10 seconds"
    attempts = followed.run.attempts
    last = attempts[-1]
    records = sum(attempt["records"] for attempt in attempts)
    model = last["settings"].get("model", "a model")
    again = f", attempt {last['attempt']}" if last["attempt"] > 1 else ""
    missing = f", {last['dropped']} dropped" if last["dropped"] else ""
    sites = len(followed.run.sites)
    return f"{model}: step {followed.steps[-1].step}, {records} steps recorded{missing}, {sites} sites{again}"
