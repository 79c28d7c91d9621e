"""Arrays that ranks show each other, all at once."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hookstats.cluster import gloo

Array = npt.NDArray[Any]


class Exchange:
    """A gloo group of these ranks, each of which calls the same methods in the same order.

    RuntimeError where a rank did not come in time, or is gone. That closes the group; `exchange_among` makes the next.
    """

    def __init__(self, name: str, ranks: Sequence[int], timeout: timedelta) -> None:
        """Waits for all of them."""
        self.ranks = list(ranks)
        self.place = self.ranks.index(gloo.c10d.get_rank())
        self._of = weakref.ref(gloo.c10d.group.WORLD)
        self._store = gloo.c10d.PrefixStore(name, gloo.default_store())
        self._number = self._broken()
        self._timeout = timeout
        store = gloo.c10d.PrefixStore(str(self._number), self._store)
        with self._all_there():
            self._group = gloo.c10d.ProcessGroupGloo(store, self.place, len(self.ranks), timeout)

    def is_over(self) -> bool:
        """Whether the group broke, or torch.distributed was initialised anew."""
        return self._of() is not gloo.c10d.group.WORLD or self._broken() != self._number

    def gather(self, mine: Array) -> Array:
        """The arrays of all ranks, [ranks, ...]; they have one shape and dtype. One collective."""
        own = torch.from_numpy(np.ascontiguousarray(mine)).reshape(-1)
        everyone = [torch.empty_like(own) for _ in self.ranks]
        with self._all_there():
            self._group.allgather([everyone], [own]).wait()
        return np.stack([each.numpy() for each in everyone]).reshape(len(self.ranks), *mine.shape)

    def gather_json(self, mine: object) -> list[Any]:
        """What each of the ranks has to say, as JSON can. Two collectives."""
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        sizes = self.gather(np.array([len(text)]))
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: len(text)] = text
        texts = self.gather(padded)
        return [json.loads(bytes(each[:size])) for each, size in zip(texts, sizes[:, 0], strict=True)]

    def _broken(self) -> int:
        """How many groups of this name broke, as their members have said."""
        return int(self._store.compare_set("broken", "", "0"))

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            with suppress(RuntimeError):  # several may say so: they count once
                self._store.compare_set("broken", str(self._number), str(self._number + 1))
            raise RuntimeError(
                f"hookstats: expected the ranks {self.ranks} to come within {self._timeout.total_seconds():g} s, got: "
                f"{error}"
            ) from error


_exchanges: dict[str, Exchange] = {}


def exchange_among(purpose: str, ranks: Sequence[int], timeout: timedelta) -> Exchange:
    """That of one purpose among these ranks, of which this process is one; kept from call to call."""
    name = f"hookstats/{purpose}/{gloo.name_of(ranks)}"
    if name not in _exchanges or _exchanges[name].is_over():
        _exchanges[name] = Exchange(name, ranks, timeout)
    return _exchanges[name]
