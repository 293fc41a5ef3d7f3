"""Object storage for tests: an emulator of S3, Google Cloud Storage or Azure, behind a proxy.

No emulator implements the XML protocol by which obstore uses Google Cloud Storage (fake-gcs-server
and gcp-storage-emulator refuse its uploads): moto's S3 stands in, and the proxy translates headers.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import boto3
import obstore
from botocore.exceptions import BotoCoreError, ClientError
from obstore.store import from_url

from tests.support.proxy import REFUSED, Answer, Fault, Headers, Plan, Request, proxied

__all__ = ["BUCKET", "EMULATORS", "REFUSED", "Answer", "Fault", "Request", "Server", "serving"]

BUCKET = "training"
EMULATORS = tuple(os.environ.get("ZEXPORT_EMULATORS", "s3").split())
"""``s3`` by moto; ``seaweedfs`` (S3) and ``az`` (Azurite) for ``make test-buckets``."""

_START_S = 60
_NODE_MODULES = Path(__file__).parents[2] / "build" / "emulators" / "node_modules" / ".bin"
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's documented account and key."""

_AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=u/20260101/us-east-1/s3/aws4_request"
_AWS = {
    "AWS_ACCESS_KEY_ID": "user",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


@dataclass
class Server:
    """An emulator with one bucket. Methods ask the emulator; zexport is given the proxy's URL."""

    url: str
    name: str = "s3"
    plan: Plan = field(default_factory=Plan)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Use S3's variables for a server that another process has started."""
        self.environment = self.environment or {"AWS_ENDPOINT_URL": self.url, **_AWS}

    @property
    def requests(self) -> list[Request]:
        return self.plan.requests

    @property
    def fault(self) -> Fault:
        return self.plan.fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self.plan.fault = fault

    @cached_property
    def store(self) -> Any:
        """The bucket, without the proxy."""
        options: Any = {"endpoint": (self.plan.upstream or self.url) + self.plan.account}
        if self.name == "az":
            options |= {"account_name": _ACCOUNT, "account_key": _KEY}
        else:
            options |= {"access_key_id": "user", "secret_access_key": "secret"}
        scheme = "az" if self.name == "az" else "s3"
        return from_url(f"{scheme}://{BUCKET}", client_options={"allow_http": True}, **options)

    def address(self, prefix: str) -> str:
        return f"{'s3' if self.name == 'seaweedfs' else self.name}://{BUCKET}/{prefix}"

    def put(self, folder: Path, prefix: str) -> str:
        """Upload a folder's files; return its address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                obstore.put(self.store, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return self.address(prefix)

    def get(self, prefix: str) -> dict[str, bytes]:
        """Return the objects below a prefix, by name."""
        store = self.store
        found = [one["path"] for page in obstore.list(store, prefix) for one in page]
        return {k.removeprefix(f"{prefix}/"): bytes(obstore.get(store, k).bytes()) for k in found}

    def of(self, method: str) -> list[Request]:
        return [one for one in self.requests if one.method == method]


class _Google:
    """Google's XML protocol on S3's: a number for each content of an object.

    Source: cloud.google.com, "HTTP headers for the XML API" (``x-goog-if-generation-match``).
    """

    def __init__(self) -> None:
        self._etags: dict[str, str] = {}

    def asked(self, headers: dict[str, str]) -> None:
        headers["authorization"] = _AUTHORIZATION  # moto takes the service from it
        wanted = headers.pop("x-goog-if-generation-match", None)
        if wanted == "0":
            headers["if-none-match"] = "*"
        elif wanted is not None:
            headers["if-match"] = self._etags.get(wanted, '"none"')

    def answered(self, headers: Headers) -> Headers:
        for etag in [value for name, value in headers if name.lower() == "etag"]:
            number = str(int(etag.strip('"')[:12], 16) + 1)
            self._etags[number] = etag
            headers = [*headers, ("x-goog-generation", number)]
        return headers


@contextmanager
def serving(name: str = "s3", upstream: str = "") -> Iterator[Server]:
    """Run a proxy, and the emulator that it asks unless one runs at ``upstream``."""
    with TemporaryDirectory(prefix="zexport-emulator-") as folder, ExitStack() as stack:
        upstream = upstream or stack.enter_context(_emulated(name, folder))
        plan = Plan(upstream, f"/{_ACCOUNT}" if name == "az" else "")
        if name == "gs":
            plan.asked, plan.answered = (google := _Google()).asked, google.answered
        with proxied(plan) as url:
            yield Server(url, name, plan, _environment(name, url, Path(folder)))


@contextmanager
def _emulated(name: str, folder: str) -> Iterator[str]:
    port = _free_port()
    process = subprocess.Popen(
        _command(name, port, folder),
        cwd=folder,
        env=os.environ | _AWS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _make_bucket(name, upstream := f"http://127.0.0.1:{port}", process)
        yield upstream
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _command(name: str, port: int, folder: str) -> list[str]:
    if name == "az":
        azurite = [str(_NODE_MODULES / "azurite-blob"), "--silent", "--skipApiVersionCheck"]
        return [*azurite, "--location", folder, "--blobPort", str(port)]
    if name == "seaweedfs":
        at = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
        words = [which("weed", path=at) or "weed", "server", "-dir", folder, "-s3"]
        words += ["-ip=127.0.0.1", "-master.telemetry=false", f"-s3.port={port}"]
        parts = ("master", "volume", "filer")
        ports = [f"-{one}.port={_free_port()}" for one in parts]
        ports += [f"-{one}.port.grpc={_free_port()}" for one in (*parts, "s3")]
        return [*words, *ports, "-s3.port.iceberg=0", "-s3.port.lance=0"]
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def _environment(name: str, url: str, folder: Path) -> dict[str, str]:
    """Return the variables by which a store's users name it."""
    if name == "az":
        names = {"AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": _KEY}
        return names | {"AZURE_STORAGE_ENDPOINT": f"{url}/{_ACCOUNT}"}
    if name == "gs":
        key = {"gcs_base_url": url, "disable_oauth": True, "client_email": ""}
        (file := folder / "key.json").write_text(
            json.dumps(key | {"private_key": "", "private_key_id": ""})
        )
        return {"GOOGLE_SERVICE_ACCOUNT": str(file), "GOOGLE_BASE_URL": url}
    return {"AWS_ENDPOINT_URL": url, **_AWS}


def _make_bucket(name: str, upstream: str, process: subprocess.Popen[bytes]) -> None:
    """Make the bucket once the emulator answers."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(ConnectionError, BotoCoreError, ClientError):
            return _make_container(upstream) if name == "az" else _make_s3_bucket(upstream)
        time.sleep(0.1)
    raise AssertionError(f"{name} does not start: {process.poll()}")


def _make_s3_bucket(upstream: str) -> None:
    keys = {"aws_access_key_id": "user", "aws_secret_access_key": "secret"}
    client = boto3.client("s3", endpoint_url=upstream, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=BUCKET)


def _make_container(upstream: str) -> None:
    said = formatdate(usegmt=True)
    own = f"x-ms-date:{said}\nx-ms-version:2021-08-06\n"
    path = f"/{_ACCOUNT}/{BUCKET}"
    signed = "PUT" + "\n" * 12 + own + f"/{_ACCOUNT}{path}\nrestype:container"
    digest = hmac.digest(base64.b64decode(_KEY), signed.encode(), "sha256")
    authorization = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers = {"x-ms-date": said, "x-ms-version": "2021-08-06", "Authorization": authorization}
    with closing(HTTPConnection(urlsplit(upstream).netloc)) as link:
        link.request("PUT", f"{path}?restype=container", headers=headers)
        assert link.getresponse().status == 201
