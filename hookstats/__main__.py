"""The command line: ``hookstats`` and ``python -m hookstats``. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

_EPILOG = """\
A RUN is the directory that hookstats.record("runs/a") was given. Exit status: 0; 1 if compare found a difference
that rounding does not explain, watch followed a run that died, or doctor found something to fix; 2 for an error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = _read(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`; what is left in the buffer must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        _say(
            f"hookstats {options.command}: " + " ".join(str(text).split()).removeprefix(f"{options.command}: "),
            sys.stderr,
        )
        return 2


def _read(options: argparse.Namespace) -> int:
    """Runs it again where a file that it has come upon cannot be read: from then on that is left out."""
    while True:
        try:
            return int(options.run(options))
        except ValueError as error:
            from hookstats.records.errors import LeftOut  # pyarrow, which a wrong argument does not need

            if not isinstance(error, LeftOut):
                raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hookstats",
        description="Shows recorded runs: what happened inside a model while it trained, and what was wrong.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=_version, command="")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for run, about, more, arguments in _COMMANDS:
        name = run.__name__.removeprefix("_")
        command = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}. {more}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, command=name)
        for words, described in arguments:
            command.add_argument(*words, **described)
    return parser


def _argument(*words: str, **described: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return words, described


def _say(text: str, output: TextIO | None = None) -> None:
    """Print what may have names of somebody else's in it."""
    from hookstats.terminal.formatting import escape_controls

    if text:
        print(escape_controls(text), file=output or sys.stdout, flush=True)


def _version(options: argparse.Namespace) -> int:
    from hookstats import __version__

    if not options.version:
        _parser().print_help()
        return 2
    print(__version__)
    return 0


def _show(options: argparse.Namespace) -> int:
    from hookstats import load
    from hookstats.records.errors import NO_STEP

    run = load(options.path, sites=options.site, ranks=options.rank)
    if not run.steps:
        raise ValueError(f"{options.path}: {NO_STEP}")
    snapshot = run[run.steps[-1] if options.step is None else options.step]
    scalars = "".join(f", {name} {value:.6g}" for name, value in snapshot.scalars.items())
    _say(f"step {snapshot.step}{scalars}\n\n{snapshot.table(options.sort)}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from hookstats import compare, load

    a, b = (load(path, ranks=options.rank) for path in (options.path, options.other))
    found = compare(a, b, dtype=options.dtype)
    _say(str(found))
    return int(found.first is not None)


def _identities(options: argparse.Namespace) -> int:
    from hookstats import load

    run = load(options.path, ranks=options.rank)
    found = (run.attempts[-1]["settings"].get("options") or {}).get("identities")
    if found is None:
        raise ValueError(
            f"{options.path}: expected a run of attach(options=Options(identities=find_identities(model, forward))), "
            "got one without identities"
        )
    _say("\n".join(found))
    return 0


def _report(options: argparse.Namespace) -> int:
    from hookstats.report import write

    print(write(options.path, options.output, options.other))
    return 0


def _watch(options: argparse.Namespace) -> int:
    from hookstats.terminal.following import Followed
    from hookstats.terminal.watching import watch

    return watch(Followed(options.path, options.rank), sys.stdout)


def _serve(options: argparse.Namespace) -> int:
    from hookstats.serve.routes import Routes
    from hookstats.serve.server import open_server

    server = open_server(options.host, options.port, Routes(Path(options.path)), not options.no_token)
    _say("\n".join(server.describe()))
    os.nice(10)  # those who train go first; at 19 a machine that is busy would hardly draw a page
    with server:
        server.serve_forever()
    return 0


def _recover(options: argparse.Namespace) -> int:
    from hookstats import load, recover
    from hookstats.records.errors import NO_STEP, RunError

    if not Path(options.path).is_dir():
        raise ValueError(f"{options.path}: expected the directory of a run, got none")
    for rank, attempts in recover(options.path).items():
        numbers = ", ".join(map(str, attempts))
        left = f"recovered what was left of attempt {numbers}" if attempts else "nothing was left"
        try:
            has_steps = bool(load(options.path, ranks=int(rank.partition("=")[2])).steps)
        except RunError:
            has_steps = False
        print(f"{rank}: {left if has_steps else NO_STEP}")
    return 0


def _rule(options: argparse.Namespace) -> int:
    from hookstats.rules import book

    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    if options.name is not None:
        print(*book.page(options.name).lines(width), sep="\n")
        return 0
    for each in book.pages():
        print(*textwrap.wrap(f"{each.name:<24} {each.paragraphs[0]}", width, subsequent_indent=25 * " "), sep="\n")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from hookstats.doctor import doctor

    return doctor()


_RUN = _argument("path", metavar="RUN")
_RANK = _argument("--rank", type=int, default=0, metavar="N", help="of a distributed run; default: 0")
# What is run, what it does, more of that, and its arguments.
_COMMANDS = [
    (
        _show,
        "print the table of one step",
        "",
        [
            _RUN,
            _argument("--step", type=int, help="its number; without, the last one"),
            _argument("--site", action="append", metavar="GLOB", help="sites by name, 'layers.*'; may be repeated"),
            _argument("--sort", metavar="STATISTIC", help="rms, abs_max, ...: largest first; without, as they ran"),
            _RANK,
        ],
    ),
    (
        _compare,
        "find where two runs differ by more than rounding explains",
        "Prints nothing where they are equal.",
        [
            _RUN,
            _argument("other", metavar="RUN"),
            _argument(
                "--dtype", help="whose rounding is allowed: float32, bfloat16, ...; without, told from the values"
            ),
            _RANK,
        ],
    ),
    (
        _identities,
        "print which sums of a run's gradients must be equal in each step",
        "Those that were proved of its model.",
        [_RUN, _RANK],
    ),
    (
        _report,
        "write a run as one HTML page that opens offline",
        "",
        [
            _RUN,
            _argument("other", nargs="?", metavar="OTHER", help="a second run, on the same page"),
            _argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html"),
        ],
    ),
    (
        _watch,
        "follow a run while it is recorded",
        "A screen in a terminal, a line for each step in a pipe. Waits for a run to begin; ends when it ends.",
        [_RUN, _RANK],
    ),
    (
        _serve,
        "show runs in a browser while they are recorded",
        "DIR is a run, or a directory with runs below it. Reads records, and ends with Ctrl-C.",
        [
            _argument("path", metavar="DIR"),
            _argument("--port", type=int, default=8470, help="default: 8470, or another one where that is taken"),
            _argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine alone"),
            _argument("--no-token", action="store_true", help="whoever can ask sees all runs"),
        ],
    ),
    (_recover, "save the last steps of a run that was killed together with its writer", "", [_RUN]),
    (
        _rule,
        "explain a rule: what it finds, what else looks like it, what to do",
        "",
        [_argument("name", nargs="?", metavar="NAME", help="as findings have it, dead-channels; without, all names")],
    ),
    (_doctor, "check the installation, and print the commands that fix it", "", []),
]


if __name__ == "__main__":
    sys.exit(main())
