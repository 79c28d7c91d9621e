"""Runs in a browser while they grow: ``hookstats serve``. Reads records, and imports no torch."""
