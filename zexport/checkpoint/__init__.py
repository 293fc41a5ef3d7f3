"""A ZeRO checkpoint: found, read, held against itself, and laid out as whole tensors."""
