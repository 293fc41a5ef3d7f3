"""From the names and tensors of a checkpoint to those of the model that is written."""
