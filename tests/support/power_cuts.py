"""What a power cut may leave of a folder, from a log of the calls that changed it.

The model, as ALICE and CrashMonkey have it for a POSIX file system that orders nothing:

- Content, size and times of a file last once it is synced. Before, each 4096-byte block of each
  write may be missing on its own, and size and times be those after any of the calls since.
- A name (creation, link, rename, removal) lasts once its folder is synced; to sync the file does
  not help. Before, each change may be missing on its own, whatever happened after it.
- A rename is atomic, between folders too: a sync of either keeps both names. It is not kept
  without the creation or rename that gave the file its old name.
- ``fdatasync`` is ``fsync``. A sync that returned is true. What was there at first lasts.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Lock
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.torture.faults import RENAMES, SYNCS
from zexport.storage.files import open_output

_BLOCK = 4096
_NAMES = ("open", "mkdir", "link", "unlink", "rmdir", *RENAMES)

Pair = tuple[int, int]  # device and inode; or modification and change time


@dataclass(frozen=True)
class Change:
    """A call, the file or folder that it changed or synced, and what folders name since.

    Files and folders are inodes in the log, numbers in a ``Disk``. ``offset`` is also a new size.
    """

    call: str
    node: Any
    names: tuple[tuple[Any, str, Any], ...] = ()
    offset: int | None = None
    data: bytes = b""
    times: Pair = (0, 0)


@dataclass(frozen=True)
class Cut:
    """What is left of ``end`` changes: not those of names in ``lost``, and only some blocks."""

    end: int
    lost: set[int]
    sizes: dict[int, int]  # after which change a file has its size and times
    blocks: dict[int, frozenset[int]]


def inode(status: os.stat_result) -> Pair:
    return status.st_dev, status.st_ino


def _found(path: Path) -> tuple[bytes | None, Pair]:
    """Return the content of a file, ``None`` for a folder, and its times."""
    return None if path.is_dir() else path.read_bytes(), _times(path.stat())


def _times(status: os.stat_result) -> Pair:
    return status.st_mtime_ns, status.st_ctime_ns


def _entry(path: Any, folder: int | None = None) -> tuple[Pair, str]:
    above, name = os.path.split(os.fspath(path))
    return inode(Path(above).stat() if folder is None else os.fstat(folder)), name


def _changed(name: str, call: Callable[..., Any], args: Any, named: Any) -> tuple[Any, Any]:
    """Call; return also the change, if any."""
    if name in ("unlink", "rmdir"):
        folder = named.get("dir_fd")
        node = inode(os.stat(args[0], dir_fd=folder, follow_symlinks=False))
        change = Change(name, node, ((*_entry(args[0], folder), None),))
        return call(*args, **named), change
    is_old = name == "open" and not (args[1] & os.O_CREAT and not os.path.lexists(args[0]))
    result = call(*args, **named)
    if is_old:
        return result, None
    path = args[1] if name in (*RENAMES, "link") else args[0]
    status = os.stat(path)  # noqa: PTH116 - or a descriptor
    change = Change(name, inode(status), times=_times(status))
    if name in _NAMES:
        gone = ((*_entry(args[0]), None),) if name in RENAMES else ()
        change = replace(change, names=(*gone, (*_entry(path), change.node)))
    elif name in ("pwrite", "ftruncate"):
        data = bytes(memoryview(args[1]).cast("B")[:result]) if name == "pwrite" else b""
        change = replace(change, offset=args[-1], data=data)
    return result, change


def _write_bytes(path: Path, data: bytes) -> None:
    with open_output(path, is_new=False) as file:  # by calls of ``os``
        file.write(data, 0)


@contextmanager
def _logging(log: Path) -> Iterator[None]:
    """Append to a log what this process and its forks change."""
    lock = Lock()

    def logged(name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with lock, log.open("ab") as file:
            result, change = _changed(name, call, args, named)
            if change is not None:
                pickle.dump(change, file)
        return result

    with pytest.MonkeyPatch.context() as patch:
        for name in (*_NAMES, "pwrite", "ftruncate", "utime", *SYNCS):
            patch.setattr(os, name, partial(logged, name, getattr(os, name)))
        patch.setattr(Path, "write_bytes", _write_bytes)
        yield


class Disk:
    """A folder, and how a command changed it."""

    def __init__(self, root: Path, act: Callable[[], object]) -> None:
        """Log what ``act`` changes."""
        self.root = root
        self.changes: list[Change] = []
        self._first = [_found(root)]
        self._names: dict[tuple[int, str], int] = {}
        numbers = {inode(root.stat()): 0}
        for path in sorted(root.rglob("*")):
            number = numbers.setdefault(inode(path.stat()), len(self._first))
            self._first += [_found(path)] * (number == len(self._first))
            self._names[numbers[inode(path.parent.stat())], path.name] = number
        log = root.with_name(f"{root.name}.log")
        with _logging(log):
            act()
        with log.open("rb") as file, suppress(EOFError):
            while one := pickle.load(file):  # noqa: TID251 - our own
                self._add(one, numbers)
        self._follow()
        tree = self._tree(cut := Cut(len(self.changes), set(), {}, {}))
        found = {str(path.relative_to(root)): _found(path)[0] for path in root.rglob("*")}
        assert found == {name: self._file(n, cut)[0] for name, n in tree.items()}, "log has gaps"

    def _add(self, change: Change, numbers: dict[Pair, int]) -> None:
        """Add a change of this folder. A new file may have the inode of a removed one."""
        is_here = all(folder in numbers for folder, _, _ in change.names)
        if change.call in ("open", "mkdir"):
            numbers.pop(change.node, None)
            if is_here:
                numbers[change.node] = len(self._first)
                self._first.append((b"" if change.call == "open" else None, change.times))
        if is_here and change.node in numbers:
            names = ((numbers[f], n, None if o is None else numbers[o]) for f, n, o in change.names)
            self.changes.append(replace(change, node=numbers[change.node], names=(*names,)))

    def _follow(self) -> None:
        """Find when each change lasts, what writes to each file, and what a rename needs."""
        self._lasts = [len(self.changes) + 1] * len(self.changes)
        self._needs = [{at} for at in range(len(self.changes))]
        self._writes = defaultdict[int, list[int]](list)
        waiting, named = defaultdict[int, list[int]](list), dict[tuple[int, str], int]()
        for at, one in enumerate(self.changes):
            if one.call in SYNCS:
                for before in {at}.union(*(self._needs[n] for n in waiting.pop(one.node, ()))):
                    self._lasts[before] = min(self._lasts[before], at + 1)
            elif not one.names:
                self._writes[one.node].append(at)
                waiting[one.node].append(at)
            for folder, name, node in one.names:
                waiting[folder].append(at)
                if one.call in RENAMES and node is None:
                    self._needs[at] |= self._needs[named.get((folder, name), at)]
                named[folder, name] = at

    def cuts(self, count: int | None = None) -> Iterator[Cut]:
        """Yield cuts that differ in what is left: all, or ``count`` and those that find the most,
        which lack a single change as late as it can be lacking.
        """
        chance = Random(0)  # noqa: S311 - nothing secret
        found = [one for end in range(len(self.changes) + 1) for one in self._cuts(end, chance)]
        if count is not None:
            found = [one for one in found if one[0]] + chance.sample(found, count)
            chance.shuffle(found)
        seen = set()
        for _, cut in found:
            tree = self._tree(cut)
            writes = ((n, at) for n in {*tree.values()} for at in self._writes[n] if at < cut.end)
            files = ((at, at <= cut.sizes.get(n, at), cut.blocks.get(at)) for n, at in writes)
            mark = hash((cut.end == len(self.changes), *tree.items(), *files))
            if mark not in seen:
                yield cut
            seen.add(mark)

    def _cuts(self, end: int, chance: Random, more: int = 2) -> Iterator[tuple[bool, Cut]]:
        """Yield cuts after ``end`` changes, and whether it is the last moment for each."""
        waiting = [at for at in range(end) if self._lasts[at] > end]
        late = {at for at in waiting if end in (self._lasts[at] - 1, len(self.changes))}
        names = {at for at in waiting if self.changes[at].names}
        none = {at: frozenset[int]() for at in waiting if at not in names}
        old = {self.changes[at].node: at - 1 for at in reversed(none)}
        for lost in (set[int](), names):
            for blocks, sizes in (({}, {}), (none, {}), (none, old)):
                yield False, Cut(end, lost, sizes, blocks)
        for at in names:
            yield at in late, Cut(end, {n for n in names if at in self._needs[n]}, {}, {})
            yield False, Cut(end, names - self._needs[at], old, none)
        for node, size in old.items():
            own = {at: none[at] for at in none if self.changes[at].node == node}
            yield max(own) in late, Cut(end, set(), {}, own)
            yield max(own) in late, Cut(end, set(), {node: size}, own)
        for _ in range(more if waiting else 0):
            share = chance.random()
            kept = {at for one in names if chance.random() < share for at in self._needs[one]}
            size = {node: chance.randrange(first, end) for node, first in old.items()}
            some = {at: self._some(at, chance, share) for at in none}
            yield False, Cut(end, names - kept, size, some)

    def _some(self, at: int, chance: Random, share: float) -> frozenset[int]:
        return frozenset(one for one in self._blocks(at) if chance.random() < share)

    def _blocks(self, at: int) -> range:
        begin, nbytes = self.changes[at].offset or 0, len(self.changes[at].data)
        return range(begin // _BLOCK, -(-(begin + nbytes) // _BLOCK))

    def _tree(self, cut: Cut) -> dict[str, int]:
        """Return the files and folders that are left, by path."""
        entries = defaultdict[int, dict[str, int]](dict)
        for (folder, name), node in self._names.items():
            entries[folder][name] = node
        for at, one in enumerate(self.changes[: cut.end]):
            for folder, name, new in one.names if at not in cut.lost else ():
                entries[folder].pop(name, None)
                entries[folder] |= {} if new is None else {name: new}

        def below(folder: int, above: str) -> Iterator[tuple[str, int]]:
            for name, node in sorted(entries[folder].items()):
                yield above + name, node
                yield from below(node, f"{above}{name}/")

        return dict(below(0, ""))

    def _file(self, node: int, cut: Cut) -> tuple[bytes | None, Pair]:
        first, times = self._first[node]
        content, size = bytearray(first or b""), len(first or b"")
        for at in filter(cut.end.__gt__, self._writes[node]):
            one, begin = self.changes[at], self.changes[at].offset or 0
            stop = begin + len(one.data)
            if at <= cut.sizes.get(node, at):
                times = one.times
                if one.offset is not None:
                    size = max(size, stop) if one.data else stop
                    del content[size:]
            content.extend(bytes(max(0, stop - len(content))))
            for block in cut.blocks.get(at, self._blocks(at)):
                low, high = max(begin, block * _BLOCK), min(stop, (block + 1) * _BLOCK)
                content[low:high] = one.data[low - begin : high - begin]
        content.extend(bytes(max(0, size - len(content))))
        return None if first is None else bytes(content[:size]), times

    def put(self, cut: Cut) -> dict[Pair, Pair]:
        """Make the folder be what is left; return ctimes by inode: real, and before the cut."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        paths = dict[int, tuple[Path, int]]()
        for name, node in self._tree(cut).items():
            (content, times), path = self._file(node, cut), self.root / name
            if content is None:
                path.mkdir()
            elif node in paths:
                path.hardlink_to(paths[node][0])
            else:
                path.write_bytes(content)
                os.utime(path, ns=(times[0], times[0]))
                paths[node] = path, times[1]
        put = ((path.stat(), ctime) for path, ctime in paths.values())
        return {inode(now): (now.st_ctime_ns, ctime) for now, ctime in put}
