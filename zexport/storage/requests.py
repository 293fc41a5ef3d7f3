"""Requests to a bucket; obstore retries status 429, 5xx and lost connections."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from posixpath import basename
from typing import TYPE_CHECKING, Any, ClassVar

import obstore
from msgspec import Struct
from msgspec.structs import asdict
from obstore.exceptions import AlreadyExistsError, PreconditionError

from zexport.storage.client import asking
from zexport.storage.location import Address
from zexport.storage.retries import CUT_SHORT, steadily
from zexport.storage.storage import Version

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta

_LISTING_SECONDS = 1.0
NOTE = "zexportversions"  # Azure allows letters only


class Listing(Struct, frozen=True):
    """Objects and folders in a folder; some stores list other ETags than they send."""

    files: Mapping[str, Version]
    folders: frozenset[str]


class _Recent:
    listings: ClassVar[dict[Address, tuple[float, Listing]]] = {}


def forget_listings() -> None:
    """List again on the next look at a folder; drop listings under way, too."""
    _Recent.listings = {}


def head(address: Address) -> Version:
    """Return the version of an object now."""
    with asking(address) as store:
        return _version_of(obstore.head(store, address.key))


def _version_of(meta: ObjectMeta) -> Version:
    mtime_ns = int(meta["last_modified"].timestamp()) * 1_000_000_000
    return Version(meta["size"], mtime_ns, meta["e_tag"] or "")


def get(address: Address, start: int, stop: int, etag: str) -> memoryview:
    """Return the bytes of an object from ``start`` to ``stop``, or to its end.

    Raises:
        OSError: its ETag is not ``etag``, if not empty.
    """
    options: Any = {"range": (start, stop)} | ({"if_match": etag} if etag else {})
    with asking(address) as store:
        result = obstore.get(store, address.key, options=options)
        version, data = _version_of(result.meta), memoryview(result.bytes())
    if data.nbytes != max(min(stop, version.nbytes) - start, 0):
        raise OSError(errno.EIO, "the store's answer is too short", address)
    return data


def put(address: Address, content: bytes, *, is_new: bool = False, note: str = "") -> None:
    """Write a small object in one request; ``note`` goes into its metadata.

    Raises:
        FileExistsError: it exists with other content, and ``is_new``. With the same content,
            obstore has repeated a request whose answer was lost.
    """
    how: Any = {"mode": "create" if is_new else "overwrite", "use_multipart": False}
    how |= {"attributes": {NOTE: note}} if note else {}
    with asking(address) as store, changing():
        try:
            obstore.put(store, address.key, content, **how)
        except AlreadyExistsError:
            if bytes(obstore.get(store, address.key).bytes()) != content:
                raise


class Edition(Struct, frozen=True):
    """An object's ETag, or its generation in gs."""

    e_tag: str | None
    version: str | None


def read_edition(address: Address) -> tuple[bytes, Edition]:
    with asking(address) as store:
        found = obstore.get(store, address.key)
        return bytes(found.bytes()), Edition(found.meta["e_tag"], found.meta["version"])


def replace(address: Address, content: bytes, known: Edition | None) -> Edition:
    """Write a small object if its edition is still ``known``; return the new edition."""
    mode: Any = "create" if known is None else {n: w for n, w in asdict(known).items() if w}
    with asking(address) as store, changing():
        try:
            put = obstore.put(store, address.key, content, mode=mode, use_multipart=False)
        except PreconditionError as cause:
            raise FileExistsError(errno.EEXIST, "it was replaced meanwhile", address) from cause
    return Edition(put["e_tag"], put["version"])


@contextmanager
def changing() -> Iterator[None]:
    """Forget listings after a change."""
    try:
        yield
    finally:
        forget_listings()


def listing(folder: Address) -> Listing:
    """Return the listing of a folder, empty if it does not exist.

    It is kept for a second unless something is written: a folder is asked about many names.
    """
    recent = _Recent.listings
    at, known = recent.get(folder, (0.0, None))
    if known is not None and time.monotonic() - at < _LISTING_SECONDS:
        return known

    def ask() -> ListResult[Sequence[ObjectMeta]]:
        with asking(folder) as store:
            return obstore.list_with_delimiter(store, folder.key or None)

    found = steadily(ask, on=CUT_SHORT)
    objects = [one for one in found["objects"] if one["path"] != folder.key]  # a folder marker
    files = {basename(one["path"]): _version_of(one) for one in objects}
    fresh = Listing(files, frozenset(map(basename, found["common_prefixes"])))
    recent[folder] = time.monotonic(), fresh
    return fresh


def list_below(folder: Address) -> None:
    """List a folder and all below it in one request, for the next looks at them."""
    recent = _Recent.listings
    files: dict[Address, dict[str, Version]] = {folder: {}}
    folders: dict[Address, set[str]] = {}
    for path, version in below(folder).items():
        files.setdefault(path.parent, {})[path.name] = version
        while (path := path.parent) != folder:
            folders.setdefault(path.parent, set()).add(path.name)
    now = time.monotonic()
    for one in {*files, *folders}:
        recent[one] = now, Listing(files.get(one, {}), frozenset(folders.get(one, ())))


def below(folder: Address) -> dict[Address, Version]:
    """Return the objects below a folder at any depth."""

    def ask() -> list[ObjectMeta]:
        with asking(folder) as store:
            pages = obstore.list(store, folder.key or None)
            return [*chain.from_iterable(pages)]

    top = Address(folder.root_url)
    found = {top / one["path"]: _version_of(one) for one in steadily(ask, on=CUT_SHORT)}
    found.pop(folder, None)  # a folder marker
    return found


def listed(address: Address) -> Version | None:
    """Return the version of an object as its folder lists it; ``None`` if missing."""
    return listing(address.parent).files.get(address.name) if address.key else None
