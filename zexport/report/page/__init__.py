"""Results as a page to look at: one file that needs no network."""
