"""How a model's tensors in memory become those of its files; runs where torch is loaded anyway."""
