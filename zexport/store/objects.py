"""Object storage: what lies where, read and written whole, and its refusals in a sentence.

What the store refuses is an ``OSError`` about the address, as the system's refusals are about
paths. The library (obstore) tries again by itself what may pass: answers of 429 and 5xx, broken
connections.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import asdict

from zexport.store import node_files
from zexport.store.address import Address
from zexport.store.client import refusals, store_of
from zexport.store.retries import CUT_SHORT, steadily
from zexport.store.versions import Version

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta

_LISTING_SECONDS = 1.0
_NOTE = "zexportversions"  # Azure takes letters only


class Listing(Struct, frozen=True):
    """What lies in a folder: objects by name as the store lists them, and the names of folders.

    A listed version is to be compared with listed ones alone: some stores list an ETag without the
    quotes that it has else.
    """

    files: Mapping[str, Version]
    folders: frozenset[str]


class _Recent:
    """What was listed lately, by folder, and when; what is forgotten is another table from then on.

    So a listing that was on its way is lost with those before it.
    """

    listings: ClassVar[dict[Address, tuple[float, Listing]]] = {}


def forget_listings() -> None:
    """Have the next question about a folder asked of the store."""
    _Recent.listings = {}


def head(address: Address) -> Version:
    """The version of an object as it is now."""
    if address.is_on_node:
        return node_files.head(address)
    import obstore

    with refusals(address):
        return version_of_meta(obstore.head(store_of(address.root_url), address.key))


def version_of_meta(meta: ObjectMeta) -> Version:
    """A version as the library tells it."""
    mtime_ns = int(meta["last_modified"].timestamp()) * 1_000_000_000
    return Version(meta["size"], mtime_ns, meta["e_tag"] or "")


def get(address: Address, start: int, stop: int, etag: str = "") -> tuple[Version, memoryview]:
    """Bytes ``start`` to ``stop`` of an object, or what there is of them, and its version.

    With ``etag``, of this very content: another is refused.
    """
    if address.is_on_node:
        return node_files.get(address, start, stop)
    import obstore

    options: Any = {"range": (start, stop)} | ({"if_match": etag} if etag else {})
    with refusals(address):
        result = obstore.get(store_of(address.root_url), address.key, options=options)
        version, data = version_of_meta(result.meta), memoryview(result.bytes())
    if data.nbytes != max(min(stop, version.nbytes) - start, 0):
        raise OSError(errno.EIO, "the store's answer is too short", address)
    return version, data


def put(address: Address, content: bytes, *, is_new: bool = False, note: str = "") -> None:
    """Write a small object, at once; with ``is_new`` only where there is none.

    ``note`` goes into its metadata, for ``read_note``.

    One with this very content is ours: the library asks again where an answer was lost.
    """
    import obstore

    how: Any = {"mode": "create" if is_new else "overwrite", "use_multipart": False}
    how |= {"attributes": {_NOTE: note}} if note else {}
    with refusals(address), _changing():
        store = store_of(address.root_url)
        try:
            obstore.put(store, address.key, content, **how)
        except obstore.exceptions.AlreadyExistsError:
            if bytes(obstore.get(store, address.key).bytes()) != content:
                raise


def read_note(address: Address) -> str:
    """Return the note that an object was written with; empty if there is none."""
    import obstore

    with refusals(address):
        found = obstore.get(store_of(address.root_url), address.key, options={"head": True})
        return found.attributes.get(_NOTE, "")


class Edition(Struct, frozen=True):
    """Which content of an object it is, in the words that a store compares: of gs the number."""

    e_tag: str | None
    version: str | None


def read_edition(address: Address) -> tuple[bytes, Edition]:
    """A small object whole, and which edition of it that is."""
    import obstore

    with refusals(address):
        found = obstore.get(store_of(address.root_url), address.key)
        return bytes(found.bytes()), Edition(found.meta["e_tag"], found.meta["version"])


def replace(address: Address, content: bytes, known: Edition | None) -> Edition:
    """Write a small object where this edition of it is, or where it is not; the new edition.

    Raises:
        FileExistsError: another is there.
    """
    import obstore

    mode: Any = "create" if known is None else {n: w for n, w in asdict(known).items() if w}
    with refusals(address), _changing():
        store = store_of(address.root_url)
        try:
            put = obstore.put(store, address.key, content, mode=mode, use_multipart=False)
        except obstore.exceptions.PreconditionError as cause:
            raise FileExistsError(errno.EEXIST, "it was replaced meanwhile", address) from cause
    return Edition(put["e_tag"], put["version"])


def delete(addresses: list[Address]) -> None:
    """Remove objects; a list of them is posted, which the library does not send a second time."""
    if addresses:
        steadily(lambda: _delete(addresses))


def _delete(addresses: list[Address]) -> None:
    import obstore

    with refusals(addresses[0]), _changing():
        store = store_of(addresses[0].root_url)
        obstore.delete(store, [address.key for address in addresses])


@contextmanager
def _changing() -> Iterator[None]:
    """What is listed before and meanwhile is not what there is afterwards."""
    try:
        yield
    finally:
        forget_listings()


def listing(folder: Address) -> Listing:
    """What lies in a folder; nothing where there is none.

    What was listed counts for a second, unless something is written: the many names of one
    folder that are asked for take one request.
    """
    if (known := _listed_lately(folder)) is not None:
        return known
    fresh = Listing(*node_files.listing(folder)) if folder.is_on_node else _listing(folder)
    _Recent.listings[folder] = time.monotonic(), fresh
    return fresh


def _listing(folder: Address) -> Listing:
    import obstore

    def ask() -> ListResult[Sequence[ObjectMeta]]:
        with refusals(folder):
            return obstore.list_with_delimiter(store_of(folder.root_url), folder.key or None)

    found = steadily(ask, on=CUT_SHORT)
    files = {_name(one["path"]): version_of_meta(one) for one in found["objects"]}
    return Listing(files, frozenset(map(_name, found["common_prefixes"])))


def list_below(folder: Address) -> None:
    """Have the listings of a folder and of all below it at hand, for one request together."""
    found: dict[Address, tuple[dict[str, Version], set[str]]] = {folder: ({}, set())}
    top, recent = Address(folder.root_url), _Recent.listings
    for meta in _metas(folder):
        path = top / meta["path"]
        files, _ = found.setdefault(path.parent, ({}, set()))
        files[path.name] = version_of_meta(meta)
        while path.parent != folder:
            path = path.parent
            found.setdefault(path.parent, ({}, set()))[1].add(path.name)
    now = time.monotonic()
    for one, (files, folders) in found.items():
        recent[one] = now, Listing(files, frozenset(folders))


def _listed_lately(folder: Address) -> Listing | None:
    at, found = _Recent.listings.get(folder, (0.0, None))
    return found if time.monotonic() - at < _LISTING_SECONDS else None


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def below(folder: Address) -> Iterator[Address]:
    """Every object below a folder, at any depth, sorted."""
    top = Address(folder.root_url)
    if folder.is_on_node:
        yield from (top / key for key in node_files.below(folder))
        return
    yield from (top / key for key in sorted(meta["path"] for meta in _metas(folder)))


def _metas(folder: Address) -> list[ObjectMeta]:
    """All below a folder; a page that is cut off is not asked for again by the library."""
    import obstore

    def ask() -> list[ObjectMeta]:
        with refusals(folder):
            pages = obstore.list(store_of(folder.root_url), folder.key or None)
            return [*chain.from_iterable(pages)]

    return steadily(ask, on=CUT_SHORT)


def listed(address: Address) -> Version | None:
    """An object as its folder lists it; ``None`` where there is no such object."""
    return listing(address.parent).files.get(address.name) if address.key else None


def is_folder(address: Address) -> bool:
    """Whether anything lies below it; a bucket is one."""
    if (above := _listed_lately(address.parent)) is not None:
        return address.name in above.folders
    here = listing(address)  # what is above may not be for this user to list
    return bool(here.files or here.folders or not address.key)
