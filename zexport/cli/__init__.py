"""The command line: Click options in, one call of the library, a report out."""
