"""Set up the client of a bucket, and turn its errors into ``OSError``."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zexport.errors import UsageError
from zexport.storage.location import Address
from zexport.storage.os_errors import first_line

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RETRIES: Any = {"max_retries": 8}
"""obstore waits less than a minute for these."""

_OWN_KEYS = {"AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"}
"""Variables and options of S3 credentials that obstore itself uses."""

_PROFILE_KEYS = ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
_CLIENT_OPTION = (
    r"allow_http|allow_invalid_certificates|http[12]_only"
    r"|pool_\w+|proxy_\w+|(\w+_)?timeout|user_agent"
)
"""Options of connections; obstore takes them separately from options of the store."""

_STATUS = r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)"
_CODE = r"<Code>(\w+)</Code>"

_SENTENCES = (
    (r"NoSuchBucket|ContainerNotFound", errno.ENOENT, "there is no such bucket"),
    (r"169\.254\.|metadata\.google|CredentialProvider", errno.EACCES, "there are no credentials"),
    (r"incorrectly configured region", errno.EIO, "the bucket is in another region"),
    (r"not found: Error performing P(UT|OST) ", errno.ENOENT, "the store answers"),
    (r"^Object at location .* not found", errno.ENOENT, "there is no such object"),
    (r"^Object at location .* already exists", errno.EEXIST, "the object exists"),
    (r"status code: 412", errno.EBADMSG, "the object was replaced"),
    (r"status code: 40[13]", errno.EACCES, "the store refuses access"),
    (r"status code", errno.EIO, "the store answers"),
    (r"error sending request", errno.EIO, "the store cannot be reached"),
    (r"list response body|invalid list response", errno.EAGAIN, "the store's listing was cut off"),
    (r"HTTP error", errno.EIO, "the store's answer was cut off"),
)
"""Patterns of obstore's errors, with errno and message; the first match counts.

The status is appended to ``the store ...``.
Source: object_store 0.13, ``client/retry.rs`` and ``lib.rs``, in obstore 0.12.
"""

_options: dict[str, str] = {}


def use_storage_options(options: Mapping[str, str]) -> None:
    """Set the options of object storage in this process, replacing those set before.

    They apply to every address (``s3://``, ``gs://``, ``az://``) and override the environment.

    Args:
        options: options of obstore 0.12, such as ``endpoint``, ``region`` or ``access_key_id``.
    """
    _options.clear()
    _options.update(options)
    store_of.cache_clear()


def options_in_use() -> Mapping[str, str]:
    """Return the options set with ``use_storage_options``."""
    return _options


@cache
def store_of(root_url: str) -> ObjectStore:
    """Return the client of a bucket, with the user's credentials."""
    from obstore.exceptions import BaseError  # noqa: PLC0415 - only for addresses
    from obstore.store import from_url  # noqa: PLC0415

    # Only an endpoint that the user gives is http.
    client: Any = {"connect_timeout": "10s", "timeout": "120s", "allow_http": True}
    config: Any = {}
    more: Any = {}
    for key, value in _options.items():
        (client if re.fullmatch(_CLIENT_OPTION, key) else config)[key] = value
    if root_url.startswith("s3:"):
        more = _profile(config)
    elif root_url.startswith("a") and not any(name.startswith("AZURE_") for name in os.environ):
        config.setdefault("use_azure_cli", "true")
    try:
        return from_url(
            root_url, config=config, client_options=client, retry_config=RETRIES, **more
        )
    except (BaseError, ValueError) as cause:
        raise UsageError(
            f"the store cannot be set up: {first_line(cause)}",
            path=Address(root_url),
            hint="Check --storage-option and the environment",
        ) from cause


def _profile(config: dict[str, Any]) -> dict[str, Any]:
    """Return the credentials of an AWS profile, which obstore does not read; set its region."""
    given = {f"AWS_{key.removeprefix('aws_')}".upper() for key in config} | os.environ.keys()
    files = [Path("~/.aws", name).expanduser() for name in ("credentials", "config")]
    has_profile = any(map(os.getenv, _PROFILE_KEYS)) or any(file.exists() for file in files)
    if not has_profile or given & _OWN_KEYS:
        return {}
    try:
        import boto3  # noqa: PLC0415 - slow, and few need it
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError:
        return {}
    try:
        session = boto3.Session()
        if session.region_name:
            config.setdefault("region", session.region_name)
        has_keys = session.get_credentials() is not None
        return {"credential_provider": Boto3CredentialProvider(session)} if has_keys else {}
    except BotoCoreError as cause:
        raise UsageError(
            f"the AWS profile cannot be used: {first_line(cause)}",
            hint="Check AWS_PROFILE, or log in again with aws sso login",
        ) from cause


@contextmanager
def asking(address: Address) -> Iterator[ObjectStore]:
    """Yield the client of a bucket; raise an ``OSError`` about the address for obstore's errors."""
    from obstore.exceptions import BaseError  # noqa: PLC0415 - only for addresses

    try:
        yield store_of(address.root_url)
    except (BaseError, OSError) as cause:
        if isinstance(cause, OSError) and cause.errno is not None:
            raise  # the system's own, or converted before
        raise OSError(*_explained(cause), address) from cause


def _explained(cause: Exception) -> tuple[int, str]:
    """Return errno and message of an error of obstore."""
    text = str(cause)
    found = ((n, words) for pattern, n, words in _SENTENCES if re.search(pattern, text))
    number, words = next(found, (errno.EIO, first_line(cause)))
    status, code = re.search(_STATUS, text), re.search(_CODE, text)
    if words.startswith("the store ") and status is not None:
        words += f" {status[1]}" + (f", {code[1]}" if code else "")
    return number, words
