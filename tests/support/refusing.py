"""A store that refuses one request of a piece of work, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count

from tests.support.buckets import BUCKET, Answer, Server
from zexport import ZexportError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.storage.bucket import forget_listings

__all__ = ["forget_listings", "refused_at_every"]

_REFUSED = Answer("403 Forbidden", "AccessDenied")


def refused_at_every(step: int, server: Server, prefix: str, act: Callable[[str], object]) -> int:
    """Refuse each request in turn, one per run, and return how many there were.

    ``act`` fills the address it is given. What is refused is an error of ours, and the same again
    then makes what was to be made; or it ended well, and lacks nothing.

    Raises:
        AssertionError: a manifest was written although the run failed, or the reverse.
    """
    server.requests.clear()
    act(f"s3://{BUCKET}/{prefix}/whole")
    whole, requests = server.get(f"{prefix}/whole").keys(), len(server.requests)
    for refused in range(0, requests, step):
        place, numbers, failed = f"{prefix}/{refused}", count(), True
        forget_listings()
        server.requests.clear()
        server.fault = lambda _, n=numbers, at=refused: _REFUSED if next(n) == at else None  # type: ignore[misc]
        with suppress(ZexportError):
            act(f"s3://{BUCKET}/{place}")
            failed = False
        server.fault = lambda _: None
        forget_listings()
        made = {name for name in server.get(place) if not name.startswith(RECEIPTS)}
        assert (MANIFEST_NAME in made) != failed, place
        if failed:
            act(f"s3://{BUCKET}/{place}")
            made = {*server.get(place)}
        assert made == whole, place
    return len(range(0, requests, step))
