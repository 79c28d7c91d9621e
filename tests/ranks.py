"""Ranks for a test: processes of torch.distributed on this machine, with a time limit.

They are forked from one process that has imported torch, what `hookstats.attach` imports, and the modules of the tests,
so that all ranks cost no more than one import. A module whose ranks compile says ``COMPILES = True``: the rest of the
compiler is imported once, too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent


def until(condition: Callable[[], object]) -> None:
    """Waits for an event, a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "expected it within a minute"
        time.sleep(0.002)


class Outcome(NamedTuple):
    """A rank's end: exit status and output."""

    result: Any  # what its function returned; None if it did not
    code: int  # of its exit; -9: killed, by itself or at the time limit
    output: str


def run(function: Callable[..., Any], world: int, *args: Any, timeout: float = 180, init: str = "file") -> list[Any]:
    """``function(rank, world, *args)`` of a test module's top level, in `world` processes. Returns what they returned.

    init: "file", torch.distributed is initialised with gloo and a FileStore before the function, and destroyed behind
    it; "env", with the environment that torchrun gives, and a TCPStore that rank 0 owns; "": it is the function's
    business, with that environment and ``file://`` + HOOKSTATS_RENDEZVOUS. AssertionError, with the output of all
    ranks, where one of them does not end with exit code 0 within `timeout` seconds.
    """
    ended = _ask(function, world, args, timeout, init, True)
    if any(each.code for each in ended):
        told = "\n".join(f"--- rank {rank}: exit code {each.code}\n{each.output}" for rank, each in enumerate(ended))
        raise AssertionError(f"{function.__name__}: expected exit code 0 of all ranks within {timeout} s\n{told}")
    return [each.result for each in ended]


def outcomes(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 180, init: str = "file"
) -> list[Outcome]:
    """Run ranks that are meant to die, like `run`, and return how each ended.

    They take the interpreter apart in their end, as real ones do, where a thread may abort it; that takes each of them
    about half a second.
    """
    return _ask(function, world, args, timeout, init, False)


def _ask(
    function: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: float, init: str, is_quick: bool
) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        asked = pickle.dumps((folder, world, function.__module__, function.__name__, args, timeout, init, is_quick))
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        pickle.dump(asked, server.stdin)
        server.stdin.flush()
        codes = pickle.load(server.stdout)
        ended = []
        for rank, code in enumerate(codes):
            result = Path(folder, f"{rank}.pickle")
            returned = pickle.loads(result.read_bytes()) if result.exists() else None
            ended.append(Outcome(returned, code, Path(folder, f"{rank}.txt").read_text(errors="replace")))
        return ended


@cache
def _server() -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        # A pool of compilers has threads, which a fork does not keep.
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    atexit.register(server.terminate)
    return server


def serve() -> None:
    """Forks ranks until nobody asks for more. Returns in the ranks, too, when they are done and not quick."""
    for module in ("torch.distributed", "torch._dynamo", "hookstats.attaching"):  # each rank would, in a second or two
        importlib.import_module(module)
    _be_patient()
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        folder, world, module, name, args, timeout, init, is_quick = pickle.loads(asked)
        functions = importlib.import_module(module)
        if getattr(functions, "COMPILES", False):
            importlib.import_module("torch._inductor.compile_fx")
        gc.freeze()  # what is here is not looked through by each rank, and so not copied
        pids: list[int] = []
        with socket.socket() as held:  # until the ranks have ended, or another process might be given the port
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the store to listen at it all the same
            held.bind(("127.0.0.1", 0))
            for rank in range(world):
                pid = os.fork()
                if not pid:
                    _enter(rank, world, folder, held.getsockname()[1])
                    _be_rank(rank, world, folder, getattr(functions, name), args, timeout, init)
                    if is_quick:
                        atexit._run_exitfuncs()
                        sys.stdout.flush()
                        os._exit(0)
                    return
                pids.append(pid)
            codes = _ended(pids, time.monotonic() + timeout)
        pickle.dump(codes, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _be_patient() -> None:
    """No rank is given up because its machine is busy."""
    from hookstats.watch import monitor

    monitor._JOIN_SECONDS = 60.0


def _ended(pids: list[int], deadline: float) -> list[int]:
    """The exit codes, of processes that are killed at the deadline."""
    codes: dict[int, int] = {}
    try:
        while len(codes) < len(pids) and time.monotonic() < deadline:
            time.sleep(0.005)
            for pid in set(pids) - set(codes):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
    finally:
        for pid in set(pids) - set(codes):
            os.kill(pid, signal.SIGKILL)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


def _enter(rank: int, world: int, folder: str, port: int) -> None:
    out = os.open(f"{folder}/{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((0, nothing), (1, out), (2, out)):
        os.dup2(new, old)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HOOKSTATS_RENDEZVOUS=f"{folder}/rendezvous")


def _be_rank(
    rank: int, world: int, folder: str, function: Callable[..., Any], args: Any, timeout: float, init: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if init:
        method = "env://" if init == "env" else f"file://{folder}/rendezvous"
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=limit)
    try:
        result = function(rank, world, *args)
    except BaseException:
        traceback.print_exc()
        raise
    written = Path(folder, f"{rank}.part")
    written.write_bytes(pickle.dumps(result))
    written.rename(Path(folder, f"{rank}.pickle"))
    if init and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    serve()
