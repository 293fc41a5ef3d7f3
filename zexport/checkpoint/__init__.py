"""Find, read and join a checkpoint into a TrainingState."""
