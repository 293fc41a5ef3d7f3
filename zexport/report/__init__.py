"""What users see: every result once as text for people and once as JSON for programs."""
