"""What the nodes of a cluster see of the checkpoint and of OUT, and who therefore does what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from zexport import __version__
from zexport.cluster.connection import Node, ask_all
from zexport.errors import OutputError, UsageError
from zexport.printable import some
from zexport.store.address import Address, on_node
from zexport.store.files import reading, version
from zexport.store.folders import is_file, is_folder, leaves
from zexport.store.versions import Version

Listing: TypeAlias = "Mapping[str, Version]"
"""The files below a folder, by their paths in it."""


class Sight(Struct, frozen=True):
    """What a machine sees: whether a mark is there, and what lies below each of some folders."""

    has_mark: bool
    listings: tuple[Listing, ...]

    def has_all(self, every: Sequence[Listing]) -> bool:
        """Whether it sees all that any machine sees."""
        return all(a == b for a, b in zip(self.listings, every, strict=True))


class Places(Struct, frozen=True):
    """Where the checkpoint lies for those who read it, and the nodes that write.

    Where nodes see all of it, ``checkpoint`` is what was given, and others are ``left_out``. Else
    it has an address for each of ``nodes``, which alone has the files there.
    """

    checkpoint: tuple[Path, ...]
    nodes: tuple[Node, ...]
    left_out: tuple[Node, ...] = ()
    are_apart: bool = False


def look(paths: Sequence[Path], mark: Path) -> Sight:
    """What this machine sees."""
    return Sight(is_file(mark), tuple(map(_listing, paths)))


def _listing(folder: Path) -> Listing:
    if isinstance(folder, Address) or not is_folder(folder):
        return {}  # what is in object storage is there for all
    with reading(folder):
        files = (path for path in leaves(folder) if is_file(path))
        return {path.relative_to(folder).as_posix(): version(path) for path in files}


def survey(paths: Sequence[Path], mark: Path) -> Places:
    """Ask every node what it sees, and say from that who does the work.

    Raises:
        UsageError: a node has another zexport, or none.
        OutputError: a node does not see the folder that ``mark`` lies in.
    """
    told = ask_all(look, tuple(paths), mark)
    if others := [f"{node.host} has {one}" for node, one in told.items() if isinstance(one, str)]:
        raise UsageError(
            "nodes of the cluster have another zexport",
            found=some(others, 8),
            expected=__version__,
            hint="Install the same version with the same extras on all of them",
        )
    sights = {node: one for node, one in told.items() if isinstance(one, Sight)}
    if blind := [node.host for node, one in sights.items() if not one.has_mark]:
        raise OutputError(
            "is not the same folder on all nodes of the cluster",
            path=mark.parent,
            found=f"another or none on {some(blind, 8)}",
            hint="Mount its file system there under this path, or choose a folder that all nodes "
            "see, and copy the result from there",
        )
    return _places(tuple(paths), look(paths, mark), sights)


def _places(paths: tuple[Path, ...], here: Sight, sights: Mapping[Node, Sight]) -> Places:
    lists = (here.listings, *(one.listings for one in sights.values()))
    every = [_union(seen) for seen in zip(*lists, strict=True)]
    seeing = tuple(node for node, one in sights.items() if one.has_all(every))
    if here.has_all(every) and seeing:
        return Places(paths, seeing, tuple(node for node in sights if node not in seeing))
    holding = tuple(_holding(sights))
    folders = (on_node(node.id, path) for node in holding for path in paths)
    return Places(tuple(folders), holding, are_apart=True)


def _union(listings: Iterable[Listing]) -> Listing:
    found: dict[str, Version] = {}
    for one in listings:
        found |= one
    return found


def _holding(sights: Mapping[Node, Sight]) -> Iterable[Node]:
    """Nodes that have all files between them: none has only what those before it have.

    The order is that of their files' names, so that rank 0 comes first, wherever it ran.
    """
    seen: set[tuple[int, str, Version]] = set()
    files = {
        node: {
            (n, name, one) for n, found in enumerate(sight.listings) for name, one in found.items()
        }
        for node, sight in sights.items()
    }
    for node in sorted(files, key=lambda node: (sorted(one[:2] for one in files[node]), node.id)):
        if not files[node] <= seen:
            seen |= files[node]
            yield node
