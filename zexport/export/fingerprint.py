"""Whether two plans are the same: a digest of frozen values, made of all that they compare by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from blake3 import blake3


def fingerprint(*values: object) -> str:
    """Equal for equal values, of frozen dataclasses, tuples, enums, paths and plain values.

    What a value shares with many others, such as the flat groups below ten thousand tensors, is
    looked into once.
    """
    return _digest(values, {}).hex()


def _digest(value: object, known: dict[int, bytes]) -> bytes:
    """The digest of a value; ``known`` is by identity, which holds while the caller holds it."""
    if isinstance(value, bytes):
        return blake3(value).digest()
    if isinstance(value, tuple):
        parts: Iterable[object] = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in fields(value) if field.compare)
    else:
        return repr(value).encode(errors="backslashreplace")
    if id(value) not in known:
        digest = blake3(type(value).__name__.encode())
        for part in parts:
            content = _digest(part, known)
            digest.update(len(content).to_bytes(8, "little") + content)
        known[id(value)] = digest.digest()
    return known[id(value)]
