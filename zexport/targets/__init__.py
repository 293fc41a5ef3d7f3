"""What a folder is to be: which weights it has, in which files, and what completes it."""
