"""From a TrainingState to a published, verified folder: gather, decide, write, verify."""
