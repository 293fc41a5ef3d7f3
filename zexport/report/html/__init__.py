"""Results as one HTML file that needs no network."""
