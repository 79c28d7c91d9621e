"""Pinned memory, into which a GPU's state is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hookstats.watch.drain import PendingScalars
from hookstats.watch.scalars import Kept


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_of_pinned_memory_what_is_small_is_copied_and_what_is_large_goes_to_the_snapshot(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pending, memory = PendingScalars(Kept()), torch.arange(size)
    key = (torch.device("cpu"), 0)
    pending.send(key, memory, None)
    pending.record_event(None)  # type: ignore[arg-type]
    array = pending.arrays()[key]
    assert array.tolist() == memory.tolist()
    assert np.shares_memory(array, memory.numpy()) == (size == 1 << 20)
