"""Compare two models or two checkpoints."""
