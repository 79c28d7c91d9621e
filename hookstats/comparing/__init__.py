"""Comparison of two runs: where they differ by more than rounding explains, and how far they diverge. No torch."""
