"""Meaning of numbers: statistics, bins, histograms, snapshots. numpy alone; knows nothing of torch."""
