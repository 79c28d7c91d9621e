"""The first losses of a run and its last ones."""

from __future__ import annotations

import numpy as np

from hookstats.rules.history import middle
from hookstats.rules.memory import Memory
from hookstats.rules.step import Step


def note_losses(step: Step, memory: Memory) -> None:
    """Keep the first five losses of a run and the last ten."""
    firsts, losses = memory.setdefault("losses", []), step.read_scalar("loss").values()
    firsts += list(losses)[: 5 - len(firsts)]
    memory.last("last losses", 10).extend(losses)


def has_fallen(memory: Memory, share: float = 0.02) -> bool | None:
    """Return whether the loss has come down by this share since the run began; None where that is not known."""
    if len(memory["last losses"]) < 10:
        return None
    first, now = middle(np.array(memory["losses"])), middle(np.array(memory["last losses"]))
    return bool(now < first - share * abs(first))
