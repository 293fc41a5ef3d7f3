"""The model around the weights: its names, its config, and the files that go along."""
