"""Measuring a model while it trains: attach, the hooks, their memory, the Monitor."""
