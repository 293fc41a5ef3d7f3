"""Where files lie: opened, listed, read by range, written and published, in one place."""
