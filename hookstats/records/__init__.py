"""Keeping a run: what `hookstats.record` writes and `hookstats.load` reads. Knows `numbers` and `rules`; no torch."""
