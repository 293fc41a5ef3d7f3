"""What a store refuses, as an ``OSError`` about the address with one sentence."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from zexport.store.address import Address
from zexport.store.client import first_line

_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")

_SENTENCES = (
    (r"NoSuchBucket|ContainerNotFound", errno.ENOENT, "there is no such bucket"),
    (r"169\.254\.|metadata\.google|CredentialProvider", errno.EACCES, "there are no credentials"),
    (r"^Object at location .* not found", errno.ENOENT, "there is no such object"),
    (r"^Object at location .* already exists", errno.EEXIST, "it is there already"),
    (r"status code: 412", errno.EBADMSG, "it was replaced while it was read"),
    (r"status code: 40[13]", errno.EACCES, "the store refuses access"),
    (r"status code", errno.EIO, "the store answers"),
    (r"error sending request", errno.EIO, "the store cannot be reached"),
    (r"HTTP error", errno.EIO, "the store's answer was cut off"),
)
"""What the library's words mean; the first that fits. ``the store ...`` goes on with the answer."""


@contextmanager
def refusals(address: Address) -> Iterator[None]:
    """Turn what the library raises into an ``OSError`` about the address.

    Source of the words: object_store 0.13, ``client/retry.rs`` and ``lib.rs``, in obstore 0.12.
    """
    from obstore.exceptions import BaseError  # noqa: PLC0415 - for addresses alone

    try:
        yield
    except (BaseError, OSError) as cause:
        if isinstance(cause, OSError) and cause.errno is not None:
            raise  # the system's own, or told already
        number, sentence = _told(str(cause)) or (errno.EIO, first_line(cause))
        raise OSError(number, sentence, address) from cause


def _told(text: str) -> tuple[int, str] | None:
    """The number and the sentence for what the library said."""
    found = ((n, words) for pattern, n, words in _SENTENCES if re.search(pattern, text))
    number, words = next(found, (0, ""))
    status, code = _STATUS.search(text), _CODE.search(text)
    if words.startswith("the store ") and status is not None:
        words += f" {status[1]}" + (f", {code[1]}" if code else "")
    return (number, words) if words else None
