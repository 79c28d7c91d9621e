"""Recorded runs on the command line. Knows `records`, `rules` and `numbers`; no torch."""
