"""Measuring a model while it trains: the hooks, their memory, the Monitor."""
