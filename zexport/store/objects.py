"""Object storage: what lies where, read and written whole, and its refusals in a sentence.

What the store refuses is an ``OSError`` about the address, as the system's refusals are about
paths. The library (obstore) tries again by itself what may pass: answers of 429 and 5xx, broken
connections.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from zexport.store.address import Address
from zexport.store.client import store_of
from zexport.store.refusals import refusals
from zexport.store.versions import Version

if TYPE_CHECKING:
    from obstore import ObjectMeta

_LISTING_SECONDS = 1.0


class Listing(Struct, frozen=True):
    """What lies in a folder: objects by name as the store lists them, and the names of folders.

    A listed version is to be compared with listed ones alone: some stores list an ETag without the
    quotes that it has else.
    """

    files: Mapping[str, Version]
    folders: frozenset[str]


_listings: dict[Address, tuple[float, Listing]] = {}


def forget_listings() -> None:
    """Have the next question about a folder asked of the store."""
    _listings.clear()


def head(address: Address) -> Version:
    """The version of an object as it is now."""
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
    import obstore

    options: Any = {"range": (start, stop)} | ({"if_match": etag} if etag else {})
    with refusals(address):
        result = obstore.get(store_of(address.root_url), address.key, options=options)
        return version_of_meta(result.meta), memoryview(result.bytes())


def put(address: Address, content: bytes, *, is_new: bool = False) -> None:
    """Write a small object, at once; with ``is_new`` only where there is none."""
    import obstore

    store = store_of(address.root_url)
    forget_listings()
    with refusals(address):
        mode: Any = "create" if is_new else "overwrite"
        obstore.put(store, address.key, content, mode=mode, use_multipart=False)


def delete(addresses: list[Address]) -> None:
    """Remove objects."""
    import obstore

    forget_listings()
    if addresses:
        with refusals(addresses[0]):
            store = store_of(addresses[0].root_url)
            obstore.delete(store, [address.key for address in addresses])


def listing(folder: Address) -> Listing:
    """What lies in a folder; nothing where there is none.

    What was listed counts for a second, unless something is written: the many names of one
    folder that are asked for take one request.
    """
    if (known := _listed_lately(folder)) is not None:
        return known
    import obstore

    with refusals(folder):
        found = obstore.list_with_delimiter(store_of(folder.root_url), folder.key or None)
    files = {_name(one["path"]): version_of_meta(one) for one in found["objects"]}
    fresh = Listing(files, frozenset(map(_name, found["common_prefixes"])))
    _listings[folder] = time.monotonic(), fresh
    return fresh


def _listed_lately(folder: Address) -> Listing | None:
    at, found = _listings.get(folder, (0.0, None))
    return found if time.monotonic() - at < _LISTING_SECONDS else None


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def below(folder: Address) -> Iterator[Address]:
    """Every object below a folder, at any depth, sorted."""
    import obstore

    top = Address(folder.root_url)
    with refusals(folder):
        pages = obstore.list(store_of(folder.root_url), folder.key or None)
        keys = sorted(one["path"] for page in pages for one in page)
    yield from (top / key for key in keys)


def listed(address: Address) -> Version | None:
    """An object as its folder lists it; ``None`` where there is no such object."""
    return listing(address.parent).files.get(address.name) if address.key else None


def is_folder(address: Address) -> bool:
    """Whether anything lies below it; a bucket is one."""
    if (above := _listed_lately(address.parent)) is not None:
        return address.name in above.folders
    here = listing(address)  # what is above may not be for this user to list
    return bool(here.files or here.folders or not address.key)
