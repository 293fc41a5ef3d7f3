"""Addresses: places in object storage that are named as paths are, and never taken for one."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path, PosixPath
from typing import NoReturn

from zexport.errors import MissingExtraError, UsageError

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "abfs", "abfss": "abfs"}
"""What addresses may begin with, and the one way in which one place is named."""

_NODE = "node"
"""What the address of a file on the disk of a cluster's node begins with; no user writes one."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""What the store library takes for no part of a name."""

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)


class Address(PosixPath):
    """A place in object storage, such as ``s3://bucket/run/global_step10``.

    It has what paths are asked for that needs no disk (``name``, ``parent``, ``/``, ...); the
    functions of ``zexport.store`` do the rest. To take it to this machine's disk is a
    ``TypeError``.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """The address as users write it; a part of one, as of a path."""
        text = super().__str__()
        return text.replace(":/", "://", 1) if _ADDRESS.match(text) else text

    def __fspath__(self) -> NoReturn:
        """Refused: it is nowhere on this machine."""
        raise TypeError(f"{self} is an address, not a path on this machine")

    @property
    def is_on_node(self) -> bool:
        """Whether it is a file on a node of a cluster, and not an object."""
        return self.parts[0] == f"{_NODE}:"

    @property
    def root_url(self) -> str:
        """The bucket's own address."""
        scheme, bucket = self.parts[:2]
        return f"{scheme}//{bucket}"

    @property
    def key(self) -> str:
        """Its name in the bucket."""
        return "/".join(self.parts[2:])


def place(given: str | os.PathLike[str]) -> Path:
    """A path on this machine, or an ``Address``, as it was given and without detours.

    A scheme that is not known is refused: as a path it would be a folder ``hf:``. So is the ``~``
    of a home folder, which nothing but a shell takes for one. A detour such as
    ``x/..`` stays where it leads elsewhere, ``x`` being a link.
    """
    if isinstance(given, Address):
        return given
    if not os.fspath(given):  # as a path, nothing at all would be the working directory
        raise UsageError("a path may not be empty")
    path = Path(given)
    first = str(path).partition("/")[0]
    if os.path.expanduser(first) != first:  # noqa: PTH111 - Path's raises for what is no user
        raise UsageError(
            f"{str(given)!r} begins with {first}, which only a shell takes for a home folder: "
            "write the path in full"
        )
    if found := _ADDRESS.match(str(given)) or _ADDRESS.match(str(path)):
        return _address(str(given), str(path), found[1])
    direct = Path(re.sub("^//+", "/", os.path.normpath(path)))
    same = ".." not in path.parts or os.path.realpath(direct) == os.path.realpath(path)
    return direct if same else path


def on_node(node: str, path: Path) -> Address:
    """The address of what a node of a cluster has at a path of its own."""
    return Address(f"{_NODE}:/{node}{path}")


def local_path(given: str | os.PathLike[str]) -> Path:
    """The same for what has to be on this machine."""
    if isinstance(path := place(given), Address):
        raise UsageError(
            f"{str(path)!r} is an address, and this has to be a path on this machine",
            hint="Give a folder of this machine, and copy it there afterwards",
        )
    return path


def last_names(folder: Path) -> str:
    """The last two names of a folder, which tell it wherever it lies: no root, and no bucket."""
    parts = folder.parts[2 if isinstance(folder, Address) else 1 :]
    return "/".join(parts[-2:]) or folder.name


def _address(given: str, text: str, scheme: str) -> Address:
    """The address; one slash of the two is left in ``text``, as in every path."""
    if scheme == _NODE:  # of a request that is handed on
        return Address(text)
    if scheme.lower() not in SCHEMES:
        raise UsageError(
            f"{given!r} is an address, and {scheme}: is no place that zexport knows: "
            "give a path on this machine, or an address that begins with s3://, gs:// or az://"
        )
    address = Address(SCHEMES[scheme.lower()] + text[len(scheme) :])
    has_bucket = len(address.parts) > 1 and not given.startswith(f"{scheme}:///")
    if not has_bucket or ".." in address.parts or _CONTROL.search(str(address)):
        raise UsageError(f"{given!r} is no address", expected=f"{scheme}://BUCKET/FOLDER")
    if find_spec("obstore") is None:
        raise MissingExtraError(
            "addresses need obstore, which is not installed",
            path=address,
            hint="Type pip install '.[cloud]' in a clone of zexport",
        )
    return address
