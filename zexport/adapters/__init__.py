"""Adapters (PEFT): found, kept as they are, or merged into their base."""
