"""What a number means: statistics, bins, histograms, snapshots. numpy alone; knows nothing of torch."""
