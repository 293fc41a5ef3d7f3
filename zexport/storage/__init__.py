"""Local folders and buckets: list, read, write, publish, lock."""
