"""Exports beside a training that goes on: what is complete is found, kept, exported and told."""
