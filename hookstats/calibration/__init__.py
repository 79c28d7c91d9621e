"""Statistics of the inputs of layers, over any number of batches, for quantisation and pruning after training."""
