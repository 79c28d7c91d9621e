"""Random tensors and random trainings against float64: `python -m tests.fuzz`."""
