"""Making checkpoints: a short sharded training run with real DeepSpeed."""
