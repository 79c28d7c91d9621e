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

_EPILOG = """\
A RUN is the directory that hookstats.record("runs/a") was given. Exit status: 0; 1 where compare found a difference
that rounding does not explain, watch a run that died, doctor something to be mended; 2 for errors, which are one line.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`; what is left in the buffer must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        said = " ".join(_plain(str(text)).split()).removeprefix(f"{options.command}: ")
        print(f"hookstats {options.command}: {said}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hookstats",
        description="What happened inside a model while it trained: looks at recorded runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=_version, command="")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, run: object, about: str, more: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}. {more}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, command=name)
        return command

    show = add("show", _show, "print the table of one step")
    show.add_argument("path", metavar="RUN")
    show.add_argument("--step", type=int, help="its number; without, the last one")
    show.add_argument("--site", action="append", metavar="GLOB", help="sites by name, 'layers.*'; may be repeated")
    show.add_argument("--sort", metavar="STATISTIC", help="rms, abs_max, ...: largest first; without, as they ran")
    _add_rank(show)

    compare = add(
        "compare",
        _compare,
        "say where two runs part by more than rounding explains",
        "Prints nothing where they are equal.",
    )
    compare.add_argument("a", metavar="RUN")
    compare.add_argument("b", metavar="RUN")
    compare.add_argument(
        "--dtype",
        help="whose rounding is allowed: float32, bfloat16, tfloat32, ...; without, told from the values",
    )
    _add_rank(compare)

    report = add("report", _report, "write a run as one HTML page that opens offline")
    report.add_argument("path", metavar="RUN")
    report.add_argument("other", nargs="?", metavar="OTHER", help="a second run, on the same page")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")

    watch = add(
        "watch",
        _watch,
        "follow a run while it is recorded",
        "A screen in a terminal, a line for each step in a pipe. Waits for a run to begin; ends when it ends.",
    )
    watch.add_argument("path", metavar="RUN")
    _add_rank(watch)

    serve = add(
        "serve",
        _serve,
        "show runs in a browser, also while they grow",
        "DIR is a run, or a directory with runs below it. Reads records, and ends with Ctrl-C.",
    )
    serve.add_argument("path", metavar="DIR")
    serve.add_argument("--port", type=int, default=8470, help="default: 8470, or another one where that is taken")
    serve.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, which this machine alone can ask"
    )
    serve.add_argument("--no-token", action="store_true", help="whoever can ask sees all runs")

    recover = add("recover", _recover, "write what is left of a run that was killed together with its writer")
    recover.add_argument("path", metavar="RUN")

    rule = add("rule", _rule, "explain a rule: what it finds, what else looks like it, what to do")
    rule.add_argument("name", nargs="?", metavar="NAME", help="as findings have it, dead-channels; without, all names")

    add("doctor", _doctor, "say what is installed, what is missing, and the command that mends it")
    return parser


def _add_rank(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rank", type=int, default=0, metavar="N", help="of a distributed run; default: 0")


def _plain(text: str) -> str:
    from hookstats.terminal.formatting import plain

    return plain(text)


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
    print(_plain(f"step {snapshot.step}{scalars}\n\n{snapshot.table(options.sort)}"))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from hookstats import compare, load

    a, b = (load(path, ranks=options.rank) for path in (options.a, options.b))
    found = compare(a, b, dtype=options.dtype)
    if str(found):
        print(_plain(str(found)))
    return int(found.first is not None)


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
    print(_plain("\n".join(server.told())), flush=True)
    os.nice(10)  # those who train go first; at 19 a machine that is busy would hardly draw a page
    with server:
        server.serve_forever()
    return 0


def _recover(options: argparse.Namespace) -> int:
    from hookstats import recover
    from hookstats.records.errors import NO_STEP
    from hookstats.records.manifest import read

    if not Path(options.path).is_dir():
        raise ValueError(f"{options.path}: expected the directory of a run, got none")
    for rank, attempts in recover(options.path).items():
        numbers = ", ".join(map(str, attempts))
        has_steps = any(each.records for each in read(Path(options.path) / rank).attempts)
        left = f"recovered what was left of attempt {numbers}" if attempts else "nothing was left"
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


if __name__ == "__main__":
    sys.exit(main())
