"""Kills, refusals of the system, full disks: at length by ``python -m tests.torture``."""
