"""Merging over ranks."""
