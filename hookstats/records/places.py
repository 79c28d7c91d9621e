"""The places of a recording's files."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

RING = "ring."  # and the number of the attempt
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


def explain_missing_run(path: Path) -> str:
    """Say what is where the directory of a run was expected, naming the runs below it."""
    names = [str(each.relative_to(path)) for each in runs_below(path)] if path.is_dir() else []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    got = f"one with runs below it: {', '.join(names[:_NAMED])}{more}" if names else "none"
    return f"{path}: expected the directory of a run, with rank=0 in it; got {got}"


def local_folder(folder: Path, attempt: int) -> Path:
    """Return the folder of an attempt's ring: its own, but one on this machine's disk if that lies on a network.

    A mapping of a file on a network is slow, and may end the process that writes to it.
    """
    if not _kind_of_disk(folder).startswith(_FAR):
        return folder
    name = re.sub(r"\W+", "-", f"{folder}").strip("-")[-100:]
    ours = _own_folder()
    ours.mkdir(exist_ok=True, mode=0o700)
    if ours.is_symlink() or ours.stat().st_uid != os.getuid():
        raise PermissionError(f"{ours}: expected a folder of this user's, got one that somebody else has made")
    local = ours / f"{name}-{attempt:04d}"
    local.mkdir(exist_ok=True, mode=0o700)
    return local


def _own_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"hookstats-{os.getuid()}"


def ring_of(folder: Path, attempt: int, told: str) -> Path:
    """Find the ring of an attempt: in its folder, also if that was moved, or where `local_folder` puts it.

    told: what its attempt says. ValueError for any other file: it may be another run's.
    """
    here, there = folder / f"{RING}{attempt:04d}", Path(told)
    if here.exists() or not told or not there.exists():
        return here
    if there.name != here.name or there.parent.parent != _own_folder() or ".." in there.parts:
        raise ValueError(f"{folder}: expected the ring {here.name} in it, or in {_own_folder()}, got {told[:300]!r}")
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
