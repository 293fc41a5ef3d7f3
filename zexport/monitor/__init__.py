"""Export and prune checkpoints while a run is training."""
