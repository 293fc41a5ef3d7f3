"""Running a plan: written, read back, published, and verified at any later time."""
