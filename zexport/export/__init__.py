"""From a checkpoint to a model folder: planned, run, proven."""
