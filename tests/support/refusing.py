"""A store that refuses one request of a piece of work, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count

from tests.support.buckets import BUCKET, Answer, Server
from zexport import ZexportError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.storage.requests import forget_listings

__all__ = ["forget_listings", "refused_at_every"]

_REFUSED = Answer("403 Forbidden", "AccessDenied")


def refused_at_every(step: int, server: Server, prefix: str, act: Callable[[str], object]) -> int:
    """Refuse one request in so many, each in work of its own; how often that was.

    ``act`` fills the address it is given. What is refused is an error of ours, and the same again
    then makes what was to be made; or it ended well, and lacks nothing.

    Raises:
        AssertionError: what looks complete is not, or was told to have failed.
    """
    server.requests.clear()
    act(f"s3://{BUCKET}/{prefix}/whole")
    whole, requests = server.get(f"{prefix}/whole").keys(), len(server.requests)
    for refused in range(0, requests, step):
        place, numbers, is_told = f"{prefix}/{refused}", count(), True
        forget_listings()
        server.requests.clear()
        server.fault = lambda _, n=numbers, at=refused: _REFUSED if next(n) == at else None  # type: ignore[misc]
        with suppress(ZexportError):
            act(f"s3://{BUCKET}/{place}")
            is_told = False
        server.fault = lambda _: None
        forget_listings()
        made = {name for name in server.get(place) if not name.startswith(RECEIPTS)}
        assert (MANIFEST_NAME in made) != is_told, place
        if is_told:
            act(f"s3://{BUCKET}/{place}")
            made = {*server.get(place)}
        assert made == whole, place
    return len(range(0, requests, step))
