"""Files on the disks of a cluster's nodes (``node://ID/path``): each is read on its own node.

What such an address is asked for is asked on the node, by a function of this module. How that is
done is the cluster's to say (``use``); without it the node cannot be reached.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from zexport.store.address import Address
from zexport.store.versions import Version

Ask: TypeAlias = "Callable[..., Any]"
"""Has a node (by its id) call a function, and gives what that returns or raises an ``OSError``."""

_asks: list[Ask] = []


def use(ask: Ask) -> None:
    """Reach nodes in this way from now on."""
    _asks[:] = [ask]


@contextmanager
def used(ask: Ask) -> Iterator[None]:
    """A block in which nodes are reached in this way."""
    use(ask)
    try:
        yield
    finally:
        _asks.clear()


def _asked(address: Address, function: Callable[..., Any], *args: object) -> Any:
    if not _asks:
        raise OSError(errno.EHOSTUNREACH, "it is on a node of a cluster, which --ray alone reaches")
    _, node, *parts = address.parts
    return _asks[-1](node, function, "/" + "/".join(parts), *args)


def head(address: Address) -> Version:
    """The version of a file as it is now."""
    found: Version = _asked(address, _version)
    return found


def get(address: Address, start: int, stop: int) -> tuple[Version, memoryview]:
    """Bytes ``start`` to ``stop`` of a file, or what there is of them, and its version."""
    version, data = _asked(address, _range, start, stop)
    return version, memoryview(data)


def listing(folder: Address) -> tuple[Mapping[str, Version], frozenset[str]]:
    """The files in a folder, and the names of folders; nothing where there is none."""
    found: tuple[Mapping[str, Version], frozenset[str]] = _asked(folder, _listing)
    return found


def below(folder: Address) -> list[str]:
    """The keys of all files below a folder, sorted."""
    found: list[str] = _asked(folder, _below)
    return found


def _version(path: str) -> Version:
    status = Path(path).stat()
    return Version(status.st_size, status.st_mtime_ns)


def _range(path: str, start: int, stop: int) -> tuple[Version, bytes]:
    with Path(path).open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        parts, at = [], start
        while at < stop and (data := os.pread(file.fileno(), stop - at, at)):
            parts.append(data)
            at += len(data)
        return Version(status.st_size, status.st_mtime_ns), b"".join(parts)


def _listing(folder: str) -> tuple[Mapping[str, Version], frozenset[str]]:
    try:
        with os.scandir(folder) as found:
            entries = [*found]
    except (FileNotFoundError, NotADirectoryError):
        return {}, frozenset()
    files = {
        entry.name: _version(entry.path)
        for entry in entries
        if entry.is_file(follow_symlinks=False)
    }
    return files, frozenset(e.name for e in entries if e.is_dir(follow_symlinks=False))


def _below(folder: str) -> list[str]:
    return sorted(
        f"{above}/{name}".lstrip("/") for above, _, files in os.walk(folder) for name in files
    )
