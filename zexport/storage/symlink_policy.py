"""Refuse symbolic links that lead out of the input folders.

A link in a checkpoint may name any file of this machine, which an export would then publish.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from zexport.errors import UnsafeError
from zexport.storage.files import absolute, is_folder, is_link, is_local, real, storage_of
from zexport.storage.storage import Kind


class Boundary(Struct, frozen=True):
    """Real paths of folders that links may lead into; ``follow`` allows all."""

    folders: tuple[Path, ...]
    follow: bool = False

    @classmethod
    def of(cls, *folders: Path, follow: bool = False) -> Boundary:
        """Return the boundary of folders named by the user, plus their blobs in the Hub cache."""
        found = [real(folder) for folder in folders]
        blobs = [blob for folder in (*found, *folders) for blob in _blobs_of(folder)]
        return cls((*found, *blobs), follow)

    def including(self, *folders: Path) -> Boundary:
        """Return the boundary with more folders."""
        return Boundary((*self.folders, *Boundary.of(*folders).folders), self.follow)

    def holds(self, path: Path) -> bool:
        """Whether ``path`` leads to somewhere within."""
        return self.follow or any(real(path).is_relative_to(folder) for folder in self.folders)

    def check(self, path: Path) -> None:
        """Raise if a path leads outside."""
        if not self.holds(path):
            link = next((one for one in (path, *path.parents) if is_link(one)), path)
            # the user may name any folder
            act = f"Give {real(link)} itself" if is_folder(link) else "Put the file itself there"
            raise UnsafeError(
                "is a link that leads outside its folder",
                path=path,
                found=real(path),
                expected=f"a path within {self.folders[0]}",
                hint=f"{act}, or pass --follow-symlinks if you trust the link",
            )

    def check_tree(self, folder: Path) -> None:
        """Raise if a folder, or a link in it at any depth, leads outside."""
        self.check(folder)
        if not self.follow and is_local(folder):
            for link in _links(folder):
                self.check(link)


def _blobs_of(folder: Path) -> Iterator[Path]:
    """Yield the ``blobs`` folder for a snapshot in the Hub cache.

    Source: huggingface_hub 1.0, ``file_download.py``: ``models--ORG--NAME/snapshots/COMMIT/FILE``
    is a link to ``../../blobs/DIGEST``.
    """
    path = absolute(folder)
    for inner, outer in pairwise((path, *path.parents)):
        if inner.name == "snapshots" and outer.name.startswith("models--"):
            yield real(outer / "blobs")


def _links(folder: Path) -> Iterator[Path]:
    """Yield the symbolic links below a folder, without following them."""
    for entry in storage_of(folder).entries(folder):
        if entry.is_link:
            yield folder / entry.name
        elif entry.kind is Kind.FOLDER:
            yield from _links(folder / entry.name)
