"""The folders that a checkpoint's files may lie in: what a symbolic link in it may lead to.

A checkpoint comes from somewhere, and a link in it may name any file of the machine that reads it:
an export would copy that file into a folder that is then given away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from zexport.errors import UnsafeError
from zexport.store.address import Address
from zexport.store.folders import absolute, is_folder, is_link, real

_CACHE_FOLDER = "models--"
_SNAPSHOTS = "snapshots"
_BLOBS = "blobs"


class Boundary(Struct, frozen=True):
    """Folders, by their real paths, that links may lead into; anywhere, if the user has said so."""

    folders: tuple[Path, ...]
    follow: bool = False

    @classmethod
    def of(cls, *folders: Path, follow: bool = False) -> Boundary:
        """The boundary of folders that the user has named; links on the way to them are his own.

        A snapshot in huggingface_hub's cache is of links into the ``blobs`` beside it, which are
        within.
        """
        found = [real(folder) for folder in folders]
        blobs = [blob for folder in (*found, *folders) for blob in _blobs_of(folder)]
        return cls((*found, *blobs), follow)

    def including(self, *folders: Path) -> Boundary:
        """The same with more folders."""
        return Boundary((*self.folders, *Boundary.of(*folders).folders), self.follow)

    def holds(self, path: Path) -> bool:
        """Whether ``path`` leads to somewhere within."""
        if self.follow:
            return True
        place = real(path)
        return any(place.is_relative_to(folder) for folder in self.folders)

    def check(self, path: Path) -> None:
        """Refuse a path that leads outside."""
        if not self.holds(path):
            link = next((one for one in (path, *path.parents) if is_link(one)), path)
            put = "Put the file itself there"
            if is_folder(link):  # a path that the user gives may lead anywhere
                put = f"Give {real(link)} itself"
            raise UnsafeError(
                "is a link that leads outside the folder it lies in",
                path=path,
                found=real(path),
                expected=f"something within {self.folders[0]}",
                hint=f"{put}, or pass --follow-symlinks if you trust the link",
            )

    def check_tree(self, folder: Path) -> None:
        """Refuse a folder that leads outside, or holds at any depth a link that does."""
        self.check(folder)
        if not (self.follow or isinstance(folder, Address)):
            for link in _links(folder):
                self.check(link)


def _blobs_of(folder: Path) -> Iterator[Path]:
    """The blobs of a snapshot's model in the cache of huggingface_hub; none for another folder.

    Source: huggingface_hub 1.0, ``file_download.py``: ``models--ORG--NAME/snapshots/COMMIT/FILE``
    is a link to ``../../blobs/DIGEST``.
    """
    parts = absolute(folder).parts
    for index, (name, below) in enumerate(pairwise(parts)):
        if name.startswith(_CACHE_FOLDER) and below == _SNAPSHOTS:
            yield Path(os.path.realpath(Path(*parts[: index + 1], _BLOBS)))


def _links(folder: Path) -> Iterator[Path]:
    """The symbolic links below a folder; what they lead to is not gone into."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
