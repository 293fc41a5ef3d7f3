"""Byte ranges: what a tensor is made of, and how its bytes are read, cast, compared and proved."""
