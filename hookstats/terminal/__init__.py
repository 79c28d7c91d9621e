"""What the command line shows of a recorded run. Knows `records`, `rules` and `numbers`; no torch."""
