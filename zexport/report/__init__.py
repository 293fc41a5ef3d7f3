"""What users see: results as text, as pages, and inspect's JSON, which is no record's own form."""
