"""Paths as users give them: addresses in object storage, and folders of this machine."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path, PosixPath
from typing import NoReturn

from zexport.errors import MissingExtraError, UsageError

_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "abfs", "abfss": "abfs"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # obstore does not accept these in names
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)


class Address(PosixPath):
    """A place in object storage, such as ``s3://bucket/run/global_step10``.

    It has the parts of a path (``name``, ``parent``, ``/``); the functions of ``zexport.storage``
    access it. Using it as a path on this machine raises ``TypeError``.
    """

    __slots__ = ()

    def __str__(self) -> str:
        text = super().__str__()
        return text.replace(":/", "://", 1) if _ADDRESS.match(text) else text

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is an address, not a path on this machine")

    @property
    def root_url(self) -> str:
        """Address of the bucket."""
        scheme, bucket = self.parts[:2]
        return f"{scheme}//{bucket}"

    @property
    def key(self) -> str:
        """Name in the bucket."""
        return "/".join(self.parts[2:])


def place(given: str | os.PathLike[str]) -> Path:
    """Return a path on this machine or an ``Address``, with ``x/..`` removed if ``x`` is no link.

    Raises:
        UsageError: it is empty, has an unknown scheme such as ``hf://``, or begins with ``~``,
            which only a shell replaces with a home folder.
    """
    if isinstance(given, Address):
        return given
    if not os.fspath(given):
        raise UsageError("a path may not be empty")
    path = Path(given)
    first = str(path).partition("/")[0]
    if os.path.expanduser(first) != first:  # noqa: PTH111 - Path's raises for an unknown user
        raise UsageError(
            f"{str(given)!r} begins with {first}, which only a shell expands",
            hint="Write the full path",
        )
    if found := _ADDRESS.match(str(given)) or _ADDRESS.match(str(path)):
        return _address(str(given), str(path), found[1])
    direct = Path(re.sub("^//+", "/", os.path.normpath(path)))
    same = ".." not in path.parts or os.path.realpath(direct) == os.path.realpath(path)
    return direct if same else path


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return a path on this machine; raise ``UsageError`` for an address."""
    if isinstance(path := place(given), Address):
        raise UsageError(
            f"{str(path)!r} is an address",
            expected="a path on this machine",
            hint="Pass a local folder and copy it afterwards",
        )
    return path


def last_names(folder: Path) -> str:
    """Return the last two names of a folder, without root or bucket."""
    parts = folder.parts[2 if isinstance(folder, Address) else 1 :]
    return "/".join(parts[-2:]) or folder.name


def _address(given: str, text: str, scheme: str) -> Address:
    if scheme.lower() not in _SCHEMES:
        raise UsageError(
            f"{given!r} has the unknown scheme {scheme}",
            expected="a path on this machine, or s3://, gs:// or az://",
        )
    address = Address(_SCHEMES[scheme.lower()] + text[len(scheme) :])
    has_bucket = len(address.parts) > 1 and not given.startswith(f"{scheme}:///")
    if not has_bucket or ".." in address.parts or _CONTROL.search(str(address)):
        raise UsageError(f"{given!r} is not an address", expected=f"{scheme}://BUCKET/FOLDER")
    if find_spec("obstore") is None:
        raise MissingExtraError(
            "addresses need obstore, which is not installed",
            path=address,
            hint="Run pip install '.[cloud]' in a clone of zexport",
        )
    return address


def home() -> Path | None:
    """Return the home folder, links resolved; ``None`` for a user without one."""
    try:
        return Path(os.path.realpath(Path("~").expanduser()))
    except RuntimeError:
        return None


def working_folder() -> Path | None:
    """Return the working directory; ``None`` if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def cache_folder() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def hub_cache_folder() -> Path:
    """Return the folder of the Hub cache (huggingface_hub 2.4, ``constants.py``)."""
    given = map(os.environ.get, ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    hub = os.environ.get("HF_HOME") or cache_folder() / "huggingface"
    return Path(os.path.expandvars(next(filter(None, given), f"{hub}/hub"))).expanduser()


def is_mount(path: Path) -> bool:
    """Whether it is a mount point; on Linux also a bind mount (``proc_pid_mountinfo(5)``)."""
    if isinstance(path, Address):
        return False
    lines: list[bytes] = []
    with suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = (line.split(b" ")[4].decode("unicode_escape").encode("latin-1") for line in lines)
    return os.path.ismount(path) or os.fsencode(os.path.realpath(path)) in points
