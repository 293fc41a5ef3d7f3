"""Whether two plans are the same: a digest of frozen values, made of all that they compare by."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache

from blake3 import blake3


def fingerprint(*values: object) -> str:
    """The same for the same plan, of frozen dataclasses, tuples, enums, paths and plain values.

    Dataclasses in a tuple that many others share, such as the partitions below ten thousand
    tensors, are looked into once. So equal plans may differ if their parts are shared in another
    way; that errs towards doing work again.
    """
    text = _Text()
    for value in values:
        text.write(value)
    text.flush()
    return text.digest.hexdigest()


class _Text:
    """Values written out one after another, each part with its length or its brackets."""

    _FLUSH_PARTS = 4096

    def __init__(self) -> None:
        self.digest = blake3()
        self._parts: list[bytes] = []
        self._known: dict[int, int] = {}

    def write(self, value: object) -> None:
        """Add a value; a tuple of dataclasses that came before, by identity, as its number."""
        if isinstance(value, tuple):
            self._write_tuple(value)
        elif is_dataclass(value) and not isinstance(value, type):
            self._parts.append(f"{type(value).__name__}(".encode())
            for name in _fields(type(value)):
                self.write(getattr(value, name))
            self._parts.append(b")")
        elif isinstance(value, bytes):
            self._parts.append(b"bytes %d:%s" % (len(value), value))
        else:
            plain = repr(value).encode(errors="backslashreplace")
            self._parts.append(b"%d:%s" % (len(plain), plain))
        if len(self._parts) > self._FLUSH_PARTS:
            self.flush()

    def _write_tuple(self, values: tuple[object, ...]) -> None:
        if id(values) in self._known:
            self._parts.append(b"#%d" % self._known[id(values)])
            return
        if values and is_dataclass(values[0]):
            self._known[id(values)] = len(self._known)
        self._parts.append(b"(%d," % len(values))
        for value in values:
            self.write(value)
        self._parts.append(b")")

    def flush(self) -> None:
        """Take what was written into the digest."""
        self.digest.update(b"".join(self._parts))
        self._parts.clear()


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.compare)
