"""What can be said of a checkpoint without exporting it."""
