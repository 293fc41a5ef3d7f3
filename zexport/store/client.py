"""The client of a bucket, set up once from options, environment and logins; what it refuses."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zexport.errors import UsageError
from zexport.store.address import Address

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RETRIES: Any = {
    "max_retries": 8,
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
    "retry_timeout": timedelta(minutes=3),
}
"""How often the library tries again; all in all it waits less than a minute."""

_TIMEOUTS = {"connect_timeout": "10s", "timeout": "120s"}
_ENDPOINTS = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ENDPOINT",
)
_OWN_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
"""Variables by which the library itself finds the credentials of S3."""

_CLIENT_KEYS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "read_timeout",
        "timeout",
        "user_agent",
    }
)
"""The settings that are about connections and not about a store."""

_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")

_SENTENCES = (
    (r"NoSuchBucket|ContainerNotFound", errno.ENOENT, "there is no such bucket"),
    (r"169\.254\.|metadata\.google|CredentialProvider", errno.EACCES, "there are no credentials"),
    (r"incorrectly configured region", errno.EIO, "the bucket is in another region"),
    (r"not found: Error performing P(UT|OST) ", errno.ENOENT, "the store answers"),
    (r"^Object at location .* not found", errno.ENOENT, "there is no such object"),
    (r"^Object at location .* already exists", errno.EEXIST, "it is there already"),
    (r"status code: 412", errno.EBADMSG, "it was replaced meanwhile"),
    (r"status code: 40[13]", errno.EACCES, "the store refuses access"),
    (r"status code", errno.EIO, "the store answers"),
    (r"error sending request", errno.EIO, "the store cannot be reached"),
    (r"list response body|invalid list response", errno.EAGAIN, "the store's listing was cut off"),
    (r"HTTP error", errno.EIO, "the store's answer was cut off"),
)
"""What the library's words mean; the first that fits. ``the store ...`` goes on with the answer."""

_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
}
_AZURE_KEYS = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run az login"
_CURES = {
    "there is no such bucket": "Check its name, the endpoint and the region",
    "there are no credentials": "Set {keys}",
    "the bucket is in another region": "Set AWS_REGION or --storage-option region=REGION",
    "the store cannot be reached": "Check the network, the region and the endpoint "
    "(--storage-option endpoint=URL)",
}

_options: dict[str, str] = {}


def use_storage_options(options: Mapping[str, str]) -> None:
    """Have these settings of object storage count in this process, before the environment's.

    They are for every address (``s3://``, ``gs://``, ``az://``) that is named from now on, and take
    the place of those given before.

    Args:
        options: settings of the store library (obstore 0.12) by name, such as ``endpoint``,
            ``region`` or ``access_key_id``.
    """
    _options.clear()
    _options.update(options)
    store_of.cache_clear()


def options_in_use() -> Mapping[str, str]:
    """The settings that were given."""
    return _options


@cache
def store_of(root_url: str) -> ObjectStore:
    """The client of a bucket, with the credentials that its users have set up."""
    from obstore import store as stores  # noqa: PLC0415
    from obstore.exceptions import BaseError  # noqa: PLC0415 - for addresses alone

    from_url: Any = stores.from_url
    client: dict[str, Any] = {**_TIMEOUTS, "allow_http": True} if _is_plain() else {**_TIMEOUTS}
    client |= {key: _options[key] for key in _options.keys() & _CLIENT_KEYS}
    config: dict[str, Any] = {k: v for k, v in _options.items() if k not in client}
    provider = _logged_in(root_url, config)
    try:
        made: ObjectStore = from_url(
            root_url,
            config=config,
            client_options=client,
            retry_config=RETRIES,
            **({} if provider is None else {"credential_provider": provider}),
        )
    except (BaseError, ValueError) as cause:
        raise UsageError(
            f"the store cannot be set up: {first_line(cause)}",
            path=Address(root_url),
            hint="Check the options given with --storage-option, and the environment",
        ) from cause
    return made


def _is_plain() -> bool:
    """Whether the endpoint is one without encryption, which only its own address says."""
    options = (
        v for k, v in _options.items() if k.endswith(("endpoint", "endpoint_url", "base_url"))
    )
    return next(filter(None, (*options, *map(os.getenv, _ENDPOINTS))), "").startswith("http://")


def _logged_in(root_url: str, config: dict[str, Any]) -> object | None:
    """What gives the credentials of a login that the library does not know; it has those of gcloud.

    AWS profiles and SSO are read by boto3; az's login by its own program.
    """
    if root_url.startswith("s3:"):
        return None if _has_own_keys(config) else _of_profile(config)
    if root_url.startswith(("az:", "abfs")) and not any(n.startswith("AZURE_") for n in os.environ):
        config.setdefault("use_azure_cli", "true")
    return None


def _has_own_keys(config: Mapping[str, object]) -> bool:
    given = {key.removeprefix("aws_") for key in config}
    has_options = bool(given & {"access_key_id", "skip_signature", "web_identity_token_file"})
    return has_options or any(map(os.getenv, _OWN_KEYS))


def _of_profile(config: dict[str, Any]) -> object | None:
    """boto3's view of the user's profile; ``None`` where there is none, or no boto3."""
    home = Path("~/.aws").expanduser()
    named = any(map(os.getenv, ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")))
    if not (named or (home / "credentials").exists() or (home / "config").exists()):
        return None
    try:
        import boto3  # noqa: PLC0415 - takes long, and few need it
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError:
        return None
    try:
        session = boto3.Session()
        if session.region_name:
            config.setdefault("region", session.region_name)
        return Boto3CredentialProvider(session) if session.get_credentials() else None
    except BotoCoreError as cause:
        raise UsageError(
            f"the AWS profile cannot be used: {first_line(cause)}",
            hint="Check AWS_PROFILE, or log in again with aws sso login",
        ) from cause


def first_line(cause: Exception) -> str:
    """The first line of what a library says, without a full stop."""
    return str(cause).partition("\n")[0].rstrip(".")


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


def cure_of(cause: OSError) -> str:
    """Return what to do about a refusal that concerns a whole bucket or store; else nothing."""
    if not isinstance(cause.filename, Address):
        return ""
    scheme = cause.filename.root_url.partition(":")[0]
    return _CURES.get(cause.strerror or "", "").format(keys=_KEYS.get(scheme, _AZURE_KEYS))


def _told(text: str) -> tuple[int, str] | None:
    """The number and the sentence for what the library said."""
    found = ((n, words) for pattern, n, words in _SENTENCES if re.search(pattern, text))
    number, words = next(found, (0, ""))
    status, code = _STATUS.search(text), _CODE.search(text)
    if words.startswith("the store ") and status is not None:
        words += f" {status[1]}" + (f", {code[1]}" if code else "")
    return (number, words) if words else None
