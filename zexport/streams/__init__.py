"""Bytes on their way: read by range, checked, cast and digested."""
