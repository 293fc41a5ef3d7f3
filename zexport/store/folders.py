"""What lies where: kinds of things, children of folders, and folders made and removed.

Of an ``Address``, a folder is what the names of objects have in common up to a slash, and nothing
is a link. Links are followed, but for ``is_link`` and ``remove``. What is not there is no error to
ask about; what may not be looked at is an ``OSError``, as everywhere in this room.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from zexport.store import objects
from zexport.store.address import Address, place


def is_file(path: Path) -> bool:
    """Whether it is a regular file, or an object."""
    if isinstance(path, Address):
        return objects.listed(path) is not None
    return path.is_file()


def is_folder(path: Path) -> bool:
    """Whether it is a folder; of objects, whether any lie below it."""
    if isinstance(path, Address):
        return objects.is_folder(path)
    return path.is_dir()


def is_link(path: Path) -> bool:
    """Whether it is a symbolic link."""
    return not isinstance(path, Address) and path.is_symlink()


def is_mount(path: Path) -> bool:
    """Whether a file system is mounted there, or another folder of the same one."""
    if isinstance(path, Address):
        return False
    return os.path.ismount(path) or os.path.realpath(path) in _mount_points()


def _mount_points() -> set[str]:
    """Where anything is mounted, as far as the system tells (Linux, ``proc_pid_mountinfo(5)``)."""
    with suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
        names = (line.split(b" ")[4] for line in lines)
        return {os.fsdecode(_ESCAPED.sub(_byte, name)) for name in names}
    return set()


_ESCAPED = re.compile(rb"\\([0-7]{3})")


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8)])


def exists(path: Path) -> bool:
    """Whether anything is there, at the end of every link."""
    if isinstance(path, Address):
        return is_folder(path) or is_file(path)
    return path.exists()


def children(folder: Path) -> list[Path]:
    """What lies in a folder, by name."""
    if isinstance(folder, Address):
        found = objects.listing(folder)
        return [folder / name for name in sorted({*found.files, *found.folders})]
    return sorted(folder.iterdir(), key=lambda path: path.name)


def list_below(folder: Path) -> None:
    """See what lies in a folder and all below it as it is now; a disk is always seen so."""
    if isinstance(folder, Address):
        objects.list_below(folder)


def look_anew(folder: Path) -> None:
    """Have the next look at a folder show what another process has changed in it."""
    if isinstance(folder, Address):
        objects.forget_listings()


def matching(folder: Path, pattern: str) -> list[Path]:
    """What lies in a folder under names of a pattern, sorted; nothing where there is no folder."""
    if isinstance(folder, Address):
        first, _, rest = pattern.partition("/")
        found = [path for path in children(folder) if fnmatchcase(path.name, first)]
        return [p for one in found for p in (matching(one, rest) if rest else (one,))]
    return sorted(folder.glob(pattern))


def child_folders(folder: Path) -> Iterator[tuple[Path, bool]]:
    """The folders in a folder and all links in it, in no order, each with whether it is a link."""
    if isinstance(folder, Address):
        yield from ((folder / name, False) for name in objects.listing(folder).folders)
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.is_dir():
                yield Path(entry.path), entry.is_symlink()


def subfolders(folder: Path) -> Iterator[tuple[Path, bool]]:
    """A folder and those below it, each with whether anything is in it; links are not gone into."""
    if isinstance(folder, Address):
        found = objects.listing(folder)
        yield folder, bool(found.files or found.folders)
        for name in sorted(found.folders):
            yield from subfolders(folder / name)
        return

    def fail(cause: OSError) -> None:
        raise cause

    for name, folders, files in os.walk(folder, onerror=fail):
        yield Path(name), bool(folders or files)


def leaves(folder: Path) -> Iterator[Path]:
    """All that lies below a folder but folders with something in them; links are not gone into.

    Of a bucket with versions, some stores list folders in which all is deleted: these are nothing.
    """
    for path in children(folder):
        is_far = isinstance(path, Address)
        if is_folder(path) and (is_far or (not is_link(path) and children(path))):
            yield from leaves(path)
        else:
            yield path


def may_change(folder: Path) -> bool:
    """Whether names may be added to a folder and removed from it; a store says so when they are."""
    if isinstance(folder, Address):
        return True
    return os.access(folder, os.W_OK | os.X_OK)


def absolute(path: Path) -> Path:
    """The path from the root on, its links as they are, and without detours.

    Where the working directory was removed, a path from there leads nowhere, and stays as it is.
    """
    is_far = isinstance(path, Address) or not (path.is_absolute() or working_folder())
    return path if is_far else place(path.absolute())


def real(path: Path) -> Path:
    """The path that it leads to, all links followed."""
    return path if isinstance(path, Address) else Path(os.path.realpath(path))


def home() -> Path | None:
    """The user's home folder, links followed; ``None`` for a user who has none."""
    try:
        return real(Path("~").expanduser())
    except RuntimeError:
        return None


def working_folder() -> Path | None:
    """The working directory; ``None`` where it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def cache_folder() -> Path:
    """Where programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def hub_cache_folder() -> Path:
    """Where the hub's own library keeps what it fetched.

    Source: huggingface_hub 2.4, ``constants.py``.
    """
    given = map(os.environ.get, ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    hub = os.environ.get("HF_HOME") or cache_folder() / "huggingface"
    return Path(os.path.expandvars(next(filter(None, given), f"{hub}/hub"))).expanduser()


def replace_content(path: Path, content: bytes) -> None:
    """A small file holds ``content``, or what it held before; it need not last."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        make_folder(path.parent)
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def times_kept(*folders: Path) -> Iterator[None]:
    """A block after which folders have the times that they had before: some are ordered by them."""
    before = {folder: folder.stat() for folder in folders}
    yield
    for folder, status in before.items():
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))


def take_place(path: Path, old: Path) -> None:
    """Put a file in the place of an older one, whose mode and times it takes over."""
    shutil.copystat(old, path)
    path.replace(old)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are not there yet; objects need none."""
    if isinstance(path, Address):
        return
    path.mkdir(parents=True, exist_ok=True)


def move(path: Path, name: Path) -> None:
    """Give a file or folder another name on its file system."""
    path.rename(name)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if isinstance(path, Address):
        remove_all([path])
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_all(paths: Iterable[Path]) -> None:
    """Remove each of some files or folders; objects take one request together."""
    far: list[Address] = []
    for path in paths:
        if isinstance(path, Address):
            far += [path] if is_file(path) else objects.below(path)
        else:
            remove(path)
    objects.delete(far)
