"""Runs in a browser while they grow: ``hookstats serve``. Reads records, writes nothing, and imports no torch."""
