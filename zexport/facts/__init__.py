"""Facts that are stated in several places: which statements must agree, and what it is if not."""
