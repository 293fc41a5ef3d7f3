"""Second names of files, under which they stay when the first one is removed."""

from __future__ import annotations

import os
from pathlib import Path


def keep(path: Path, target: Path) -> None:
    """Hard-link a file.

    Raises:
        OSError: it is missing, or ``target`` is on a file system that cannot link it.
    """
    os.link(path, target)


def point(path: Path, target: Path) -> None:
    """Make a symbolic link to ``path``."""
    target.symlink_to(path)
