"""One module per command: parse options, call the API, print the report."""
