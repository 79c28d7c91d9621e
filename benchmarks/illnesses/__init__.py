"""Trainings that are broken as people break them, and healthy ones: what the rules say of each.

``python -m benchmarks.illnesses`` prints the table; see benchmarks/README.md.
"""
