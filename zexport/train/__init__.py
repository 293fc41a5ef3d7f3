"""Make a checkpoint by a short training run with DeepSpeed."""
