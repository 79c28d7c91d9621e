"""The end of a training process: what it says itself, and what it leaves for whoever comes after it."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hookstats.records.files import NO_LINK

CLOSED = "closed"
_LONGEST = 400  # characters
_WITHOUT_DETACH = "ended: without monitor.detach()"
_WITHOUT_A_WORD = "died: without a word (SIGKILL, out of memory, a crash in native code, or os._exit)"
_FRAME = re.compile(rb'^  File "([^"]*)", line (\d+) in (.*)$', re.MULTILINE)


def is_death(ended: str | None) -> bool:
    """Tell whether an attempt ended before its training did."""
    return ended is not None and not ended.startswith(("closed", "ended"))


def ending_of(error: BaseException | None) -> str:
    """Describe the end of training by an exception; None: it ended by itself."""
    if error is None or isinstance(error, GeneratorExit):
        return CLOSED
    if isinstance(error, SystemExit):
        if not error.code:
            return f"ended: sys.exit({'' if error.code is None else error.code})"
        cause = error.__context__ if isinstance(error.__context__, Exception) else None  # as torch's spawn raises it
        return f"died: sys.exit({error.code!r:.100})" + (
            f" after {_describe_error(cause)}" if cause is not None else ""
        )
    return f"died: {_describe_error(error)}"


def _describe_error(error: BaseException) -> str:
    text = ""
    with suppress(Exception):  # it is somebody else's
        text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:_LONGEST]


class Exits:
    """Observes the end of a process that does not close its recordings.

    An uncaught exception is left in `sys.last_value` by the interpreter, whatever hooks there are. Of `sys.exit`
    nothing is left, so it is replaced by one that notes its code and calls it.
    """

    def __init__(self) -> None:
        self._before = getattr(sys, "last_value", None)
        self._exit: Any = sys.exit
        self._code: SystemExit | None = None
        sys.exit = self._note_exit

    def _note_exit(self, status: Any = None) -> Any:
        if threading.current_thread() is threading.main_thread():
            self._code = SystemExit() if status is None else SystemExit(status)
        return self._exit(status)

    def forget(self) -> None:
        """Somebody has caught the exit: training goes on."""
        self._code = None

    def describe_ending(self) -> str:
        """Describe how the process ends, as far as is known now."""
        raised = sys.exc_info()[1]  # of a process of multiprocessing
        error = raised or getattr(sys, "last_value", None)
        if hasattr(sys, "ps1") or error is self._before:  # of an interactive session it is any that came before
            error = None
        error = error or self._code
        return _WITHOUT_DETACH if error is None else ending_of(error)

    def close(self) -> None:
        if sys.exit == self._note_exit:  # else somebody has replaced it since, and calls it
            sys.exit = self._exit


class Signals:
    """SIGTERM, which ends a process without a word of its own: C code notes where it was, and lets it die.

    It does so in a process that hangs as well. Where the program has a handler of its own, that alone is in force. All
    recordings of a process share the file in which it is noted.
    """

    shared: ClassVar[Signals | None] = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._users = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK, 0o644)
        if _is_default():
            faulthandler.register(signal.SIGTERM, self._file, all_threads=False, chain=True)

    @classmethod
    def begin(cls, path: Path) -> Signals:
        """path: of the file, unless there is one already."""
        if cls.shared is None:
            cls.shared = cls(path)
        cls.shared._users += 1
        return cls.shared

    def end(self) -> None:
        self._users -= 1
        if not self._users and self is Signals.shared:
            self.leave()
            self.path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Note nothing more."""
        Signals.shared = None
        if _is_default():  # else a handler has been set since, which is not ours to take away
            faulthandler.unregister(signal.SIGTERM)
        os.close(self._file)


def _leave_in_child() -> None:
    """A forked process dies alone."""
    if Signals.shared is not None:
        Signals.shared.leave()


os.register_at_fork(after_in_child=_leave_in_child)


def _is_default() -> bool:
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def describe_death(noted: str) -> str:
    """Describe the end of a process that said nothing. noted: the file of its `Signals`, removed if it is empty."""
    try:
        with open(noted, "rb") as file:
            told = file.read(1 << 16)
        if not told and noted.endswith(".sigterm"):
            os.unlink(noted)
    except (OSError, ValueError):
        return _WITHOUT_A_WORD
    if not told:
        return _WITHOUT_A_WORD
    frame = _FRAME.search(told)
    where = f" in {os.fsdecode(frame[1])}, line {int(frame[2])}" if frame else ""
    return f"died: SIGTERM{where}"
