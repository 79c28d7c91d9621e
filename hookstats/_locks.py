"""Locks on files that show whether the writer of a file is alive: others see one until its owner ends. Linux.

Locks of open file descriptions. POSIX's own (lockf) go as soon as this process closes any descriptor of the file, be it
that of a reader. flock would do on a local disk, but is something else on NFS, depending on its version; these are sent
to its server. A forked process shares the description and would hold on to the lock: it closes its copy at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, and no pid, as these locks ask for
_EVERYTHING = (os.SEEK_SET, 0, 0, 0)
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """The lock of an open file, and its descriptor, which is this object's from now on.

    ``descriptor`` is None when it was closed, and in a forked process. BlockingIOError where somebody else holds the
    lock: the descriptor stays the caller's. A file system without locks is taken as it is.
    """

    descriptor: int | None = None

    def __init__(self, descriptor: int) -> None:
        """descriptor: opened for writing."""
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, *_EVERYTHING))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(error.errno, "expected a file that nobody holds") from None
        self.descriptor = descriptor
        _held.add(self)

    def close(self) -> None:
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            os.close(descriptor)

    __del__ = close


def is_locked(descriptor: int) -> bool:
    """Return whether another descriptor holds the lock of an open file. The lock is not taken to find out."""
    try:
        told = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, *_EVERYTHING))
    except OSError:  # a file system without locks
        return False
    return bool(struct.unpack(_FLOCK, told)[0] != fcntl.F_UNLCK)


def _close_all() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_all)
