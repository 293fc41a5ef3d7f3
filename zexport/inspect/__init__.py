"""Summarize a checkpoint without exporting it."""
