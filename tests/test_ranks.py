"""The processes that tests of many ranks run in."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import outcomes, run


def summed(rank: int, world: int, factor: int) -> float:
    x = torch.tensor([float(rank * factor)])
    dist.all_reduce(x)
    return x.item()


def test_ranks_give_back_what_they_computed_together() -> None:
    for init in ("file", "env"):
        assert run(summed, 3, 10, init=init) == [30.0] * 3


def binds_its_port(rank: int, world: int) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))


def test_the_port_of_the_store_is_given_to_no_other_process() -> None:
    run(binds_its_port, 1, init="")


def ends_in_its_own_way(rank: int, world: int) -> int:
    print("here is", rank, flush=True)
    atexit.register(lambda: print("the interpreter ended", rank, flush=True))
    if rank == 1:
        raise ValueError("broken")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hangs(rank: int, world: int) -> None:
    time.sleep(600)


def test_each_rank_tells_how_it_ended_and_one_that_hangs_is_killed() -> None:
    ended = outcomes(ends_in_its_own_way, 3, init="")
    assert [each.code for each in ended] == [0, 1, -9]
    assert [each.result for each in ended] == [0, None, None]
    assert "the interpreter ended 0" in ended[0].output
    assert "ValueError: broken" in ended[1].output
    with pytest.raises(AssertionError, match=r"(?s)within 180 s.*rank 1: exit code 1.*here is 1.*ValueError: broken"):
        run(ends_in_its_own_way, 2, init="")
    assert outcomes(hangs, 1, timeout=0.1, init="")[0].code == -9
