"""Byte ranges: read, cast, compare, digest; coverage."""
