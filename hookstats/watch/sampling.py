"""Chooses which rows of activations and of their gradients a measured step reads."""

from __future__ import annotations

from hookstats import _native

# So many measured steps in a row are read in full, at the beginning, after a finding, and each so-many-th time. Rules
# that need sums over all rows (laws of gradients, losses against gradients) want ten: `probabilities_as_logits`.
WHOLE_STEPS, AGAIN = 10, 500


class Sampling:
    """Every so-many-th row is read, in each measured step from another one on."""

    def __init__(self, enabled: _native.Enabled, rows: int) -> None:
        self.rows = rows
        self._enabled = enabled
        self._closed = 0  # measured steps
        self._whole = 0  # still to come, after a finding
        self._held: int | None = None
        self._now = 1, 0
        self.begin_step()

    def begin_step(self) -> bool:
        """Says what is read from now on. Returns whether that is something else than before."""
        is_whole = self._whole or self._closed % AGAIN < WHOLE_STEPS
        every = self._held or (1 if is_whole else self.rows)
        before, self._now = self._now, (every, self._closed % every)
        if before != self._now:
            self._enabled.sampling = self._now
        return before != self._now

    def close_step(self) -> None:
        """A measured step has ended."""
        self._closed += 1
        if self._whole and self._now[0] == 1:
            self._whole -= 1

    def read_whole(self) -> None:
        """Something was found: the next measured steps are read in full, from `begin_step` on."""
        self._whole = WHOLE_STEPS

    def hold(self, rows: int) -> None:
        """Read one of so many rows from `begin_step` on, whatever is found."""
        self._held = rows

    def let_go(self, rows: int) -> None:
        """No longer; one of so many is, when all have been for some steps."""
        self.rows, self._held, self._whole = rows, None, WHOLE_STEPS
