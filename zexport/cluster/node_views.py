"""What the nodes of a cluster see of the checkpoint and of OUT, and who therefore does what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from zexport import __version__
from zexport.cluster.connection import Node, ask_all
from zexport.errors import CheckpointError, OutputError, UsageError
from zexport.printable import some
from zexport.store.address import Address, on_node
from zexport.store.files import changed_ns, reading, version
from zexport.store.folders import is_file, is_folder, leaves
from zexport.store.versions import Version

Listing: TypeAlias = "Mapping[str, Version]"
"""The files below a folder, by their paths in it; of a file itself, by no name."""

Stamps: TypeAlias = "Mapping[str, tuple[Version, int | None]]"
"""The same, each with when it last changed in any way, which no copy can set."""


class Sight(Struct, frozen=True):
    """What a machine sees: whether a mark is there, and what lies below each of some folders.

    ``also`` is of the other paths that a plan is made of.
    """

    has_mark: bool
    listings: tuple[Listing, ...]
    also: tuple[Stamps, ...] = ()


class Places(Struct, frozen=True):
    """Where the checkpoint lies for those who read it, and the nodes that write.

    Where nodes see all of it, ``checkpoint`` is what was given, and others are ``left_out``. Else
    it has an address for each of ``nodes``, which alone has the files there.
    """

    checkpoint: tuple[Path, ...]
    nodes: tuple[Node, ...]
    left_out: tuple[Node, ...] = ()


def look(paths: Sequence[Path], mark: Path, also: Sequence[Path] = ()) -> Sight:
    """What this machine sees."""
    return Sight(is_file(mark), tuple(map(_listing, paths)), tuple(map(_stamps, also)))


def _listing(place: Path) -> Listing:
    if isinstance(place, Address):
        return {}  # what is in object storage is there for all
    with reading(place):
        if not is_folder(place):
            return {"": version(place)} if is_file(place) else {}
        files = (path for path in leaves(place) if is_file(path))
        return {path.relative_to(place).as_posix(): version(path) for path in files}


def _stamps(place: Path) -> Stamps:
    return {name: (one, changed_ns(place / name)) for name, one in _listing(place).items()}


def survey(paths: Sequence[Path], mark: Path, also: Sequence[Path] = ()) -> Places:
    """Ask every node what it sees, and say from that who does the work.

    Raises:
        UsageError: a node has another zexport, or none.
        OutputError: a node does not see the folder that ``mark`` lies in.
        CheckpointError: no node sees ``paths``, or one that has to write does not see ``also``.
    """
    told = ask_all(look, tuple(paths), mark, tuple(also))
    if others := [f"{node.host} has {one}" for node, one in told.items() if isinstance(one, str)]:
        raise UsageError(
            "nodes of the cluster have another zexport",
            found=some(others, 8),
            expected=__version__,
            hint="Install the same version with the same extras on all of them",
        )
    sights = {node: one for node, one in told.items() if isinstance(one, Sight)}
    if blind := [node for node, one in sights.items() if not one.has_mark]:
        raise OutputError(
            "is not the same folder on all nodes of the cluster",
            path=mark.parent,
            found=f"another or none on {_hosts(blind)}",
            hint="Mount its file system there under this path, or choose a folder that all nodes "
            "see, and copy the result from there",
        )
    return _places(paths, also, look(paths, mark, also), sights)


def _places(
    paths: Sequence[Path], also: Sequence[Path], here: Sight, sights: Mapping[Node, Sight]
) -> Places:
    lists = (here.listings, *(one.listings for one in sights.values()))
    every = tuple(_union(seen) for seen in zip(*lists, strict=True))
    is_able = {n: (one.listings, one.also) == (every, here.also) for n, one in sights.items()}
    able = tuple(node for node in sights if is_able[node])
    if here.listings == every and able:
        return Places(tuple(paths), able, tuple(node for node in sights if not is_able[node]))
    holding = {node: one for node, one in sights.items() if any(one.listings)}
    for number, path in enumerate(also):
        seen = {node: one.also[number] for node, one in (holding or sights).items()}
        if blind := [node for node, one in seen.items() if one != here.also[number]]:
            raise _unseen(path, blind)
    if not holding:
        raise _unseen(next(compress(paths, every)), sights)
    return _apart(paths, here.listings, every, holding)


def _apart(
    paths: Sequence[Path],
    here: Sequence[Listing],
    every: Sequence[Listing],
    sights: Mapping[Node, Sight],
) -> Places:
    """Each path where it is whole; where it is not, an address for each node that has some."""
    folders: list[Path] = []
    nodes: list[Node] = []
    for number, path in enumerate(paths):
        seen = {node: one.listings[number] for node, one in sights.items()}
        if all(one == every[number] for one in (here[number], *seen.values())):
            folders.append(path)
            continue
        own = [*_holding(seen)]
        nodes += own
        folders += [on_node(node.id, path) for node in own]
    return Places(tuple(folders), tuple(dict.fromkeys(nodes)))


def _union(listings: Iterable[Listing]) -> Listing:
    found: dict[str, Version] = {}
    for one in listings:
        found |= one
    return found


def _holding(listings: Mapping[Node, Listing]) -> Iterable[Node]:
    """Nodes that have all files between them: none has only what those before it have.

    The order is that of their files' names, so that rank 0 comes first, wherever it ran.
    """
    seen: set[tuple[str, Version]] = set()
    for node in sorted(listings, key=lambda node: (sorted(listings[node]), node.id)):
        files = {*listings[node].items()}
        if not files <= seen:
            seen |= files
            yield node


def _hosts(nodes: Iterable[Node]) -> str:
    return some([node.host for node in nodes], 8)


def _unseen(path: Path, blind: Iterable[Node]) -> CheckpointError:
    return CheckpointError(
        "is not the same on the nodes of the cluster that have to read it",
        path=path,
        found=f"another or none on {_hosts(blind)}",
        hint="Mount its file system there under this path, or copy it to where all nodes see it",
    )
