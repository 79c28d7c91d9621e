"""What a model's layers are given, gathered over any number of batches, for quantisation and pruning after training."""
