"""Where the files of a recording lie."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hookstats._locks import Lock, is_locked
from hookstats.records.decoding import AttemptNumber, decode, load, require
from hookstats.records.files import NO_LINK

RING = "ring."  # and the number of the attempt; with ".json", what a writer must know of it
_DESCRIPTION = re.compile(r"ring\.(\d+)\.json")
_WATCHED = "watched"  # touched in a rank's folder by whoever looks at the run while it grows
_WATCHED_SECONDS = 15.0  # since then somebody still looks
_DEEPEST = 5  # folders below a directory in which runs are looked for
_MOST = 1000  # runs
_FOLDERS = 20_000  # that are looked at
_NAMED = 20  # runs, in an error
_MOUNTS = Path("/proc/self/mountinfo")
_FAR = ("nfs", "lustre", "cifs", "smb", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs", "fuse")


def rank_folder(run: Path, rank: int) -> Path:
    return run / f"rank={rank}"


def runs_below(directory: Path) -> list[Path]:
    """List folders with a rank's folder in them, the nearest first. Links are not followed."""
    found: list[Path] = []
    waiting, looked = [(directory, 0)], 0
    while waiting and looked < _FOLDERS and len(found) < _MOST:
        path, depth = waiting.pop(0)
        looked += 1
        try:
            with os.scandir(path) as entries:
                folders = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
        except OSError:
            continue
        if any(name.startswith("rank=") for name in folders):
            found.append(path)
        elif depth < _DEEPEST:
            waiting += [(path / name, depth + 1) for name in folders if not name.startswith(".")]
    return found


def no_run(path: Path) -> str:
    """Say what is where the directory of a run was expected, naming the runs below it."""
    names = [str(each.relative_to(path)) for each in runs_below(path)] if path.is_dir() else []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    got = f"one with runs below it: {', '.join(names[:_NAMED])}{more}" if names else "none"
    return f"{path}: expected the directory of a run, with rank=0 in it; got {got}"


def descriptions(folder: Path) -> dict[int, Path]:
    """Of the attempts that are not finished, by number, ascending: what a writer must know of them."""
    found = ((_DESCRIPTION.fullmatch(path.name), path) for path in folder.glob(f"{RING}*.json"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def watch(folder: Path) -> None:
    """Says that somebody looks: what is measured is then written each 2 seconds. Where that fails, nothing happens."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | NO_LINK
    with suppress(OSError):
        descriptor = os.open(folder / _WATCHED, flags, 0o666)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def is_watched(folder: Path) -> bool:
    """Whether somebody has looked in the last seconds."""
    try:
        return abs(time.time() - os.lstat(folder / _WATCHED).st_mtime) < _WATCHED_SECONDS
    except OSError:
        return False


@dataclass(frozen=True)
class Description:
    """What an attempt's process leaves for the one that writes, as JSON: ``ring.0001.json``."""

    attempt: AttemptNumber
    ring: Annotated[str, re.compile(r"[^\0]*")]  # its path
    host: str
    boot: str  # see `machine`
    pid: Annotated[int, range(1, 2**31)]
    started: int | None  # see `started_at`
    settings: dict[str, Any]
    rules: list[dict[str, Any]]  # see `rule_to_json`


def described(path: Path) -> Description:
    """What an attempt's process left to be known. RunError where it is anything else, FileNotFoundError without it."""
    body = load(path)
    if isinstance(body, dict):  # what else stands in it is not looked at
        body = {name: value for name, value in body.items() if name in Description.__dataclass_fields__}
    found = decode(Description, body, path)
    require(type(found.settings.get("rank")) is int, path, "settings with a rank", found.settings)
    number = _DESCRIPTION.fullmatch(path.name)
    require(not number or int(number[1]) == found.attempt, path, "the attempt of its name", found.attempt)
    for rule in found.rules:
        is_rule = isinstance(rule.get("rule"), str) and isinstance(rule.get("arguments"), dict)
        require(is_rule, path, "a rule and its arguments", rule)
    return found


def local_folder(folder: Path, attempt: int) -> Path:
    """Where the ring of an attempt lies: in its folder, but on this machine's own disk where that is a network's.

    A mapping of a file on a network is slow, and may end the process that writes to it.
    """
    if not _kind_of_disk(folder).startswith(_FAR):
        return folder
    name = re.sub(r"\W+", "-", f"{folder}").strip("-")[-100:]
    ours = _ours()
    ours.mkdir(exist_ok=True, mode=0o700)
    if ours.is_symlink() or ours.stat().st_uid != os.getuid():
        raise PermissionError(f"{ours}: expected a folder of this user's, got one that somebody else has made")
    local = ours / f"{name}-{attempt:04d}"
    local.mkdir(exist_ok=True, mode=0o700)
    return local


def _ours() -> Path:
    return Path(tempfile.gettempdir()) / f"hookstats-{os.getuid()}"


def ring_of(folder: Path, attempt: int, told: str) -> Path:
    """Where the ring of an attempt is now: in its folder, also if that was moved, or where `local_folder` puts it.

    told: what its description says. ValueError for any other file: it may be another run's.
    """
    here, there = folder / f"{RING}{attempt:04d}", Path(told)
    if here.exists() or not there.exists():
        return here
    if there.name != here.name or there.parent.parent != _ours() or ".." in there.parts:
        raise ValueError(f"{folder}: expected the ring {here.name} in it, or in {_ours()}, got {told[:300]!r}")
    return there


def _kind_of_disk(folder: Path) -> str:
    """The type of the file system that a folder is on; "" where that is not told."""
    path, best, kind = os.fsencode(folder.resolve()), b"", b""
    try:
        mounts = _MOUNTS.read_bytes().strip().split(b"\n")
    except OSError:
        return ""
    for line in mounts:
        left, _, right = line.partition(b" - ")
        point = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), left.split(b" ")[4])  # blanks: \040
        inside = path == point or path.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return os.fsdecode(kind)


def machine() -> dict[str, str]:
    """What tells this machine from others: its name, and what its kernel drew when it started.

    A container has a name of its own, and another one each time it is made anew; its kernel is that of its machine.
    """
    return {"host": socket.gethostname(), "boot": _boot()}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_of_this_machine(told: Description) -> bool:
    return told.host == socket.gethostname() or told.boot == _boot() != ""


def keep_locked(description: Path) -> Lock:
    """Until this process closes it or ends, others see that it lives: a process's number says nothing in a container.

    BlockingIOError where another one holds it.
    """
    return Lock(os.open(description, os.O_RDWR | NO_LINK))


def is_training(description: Path, told: Description | None) -> bool:
    """Whether the process that left a description lives. told: what stands in it; None: that cannot be read."""
    if told and is_of_this_machine(told) and told.started == started_at(told.pid) is not None:
        return True
    try:
        file = os.open(description, os.O_RDONLY | NO_LINK)
    except OSError:
        return False
    try:
        return is_locked(file)
    finally:
        os.close(file)


def started_at(pid: int) -> int | None:
    """When a process started, in ticks since the machine did, which tells it from a later one. None: it is gone."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if told[0] in "ZX" else int(told[19])  # one that its parent has not asked for runs no more
    except (OSError, ValueError, IndexError):
        return None
