"""A store to test against: moto's server in this process, asked over real HTTP, that can falter."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store, from_url
from werkzeug.serving import make_server

BUCKET = "training"
_AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=u/20260101/us-east-1/s3/aws4_request"
Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]
Fault = Callable[["Request"], "Answer | None"]


@dataclass(frozen=True)
class Request:
    """What was asked, and which one of those alike; what the body's SHA-256 was said to be."""

    method: str
    key: str
    range: str
    query: str
    count: int
    sha256: str


@dataclass(frozen=True)
class Answer:
    """What is answered instead: a status, or the right answer cut after some bytes.

    With ``is_short`` a cut answer says of itself that it is whole; with ``is_done`` the server has
    done what it was asked for before.
    """

    status: str = "503 Service Unavailable"
    code: str = "SlowDown"
    headers: tuple[tuple[str, str], ...] = ()
    cut: int | None = None
    is_short: bool = False
    is_done: bool = False


@dataclass
class Server:
    """A server with one bucket."""

    url: str
    requests: list[Request] = field(default_factory=list)
    fault: Fault = lambda _: None

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which its users name it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def as_google(self, folder: Path) -> dict[str, str]:
        """The variables by which users of Google's protocol name it; their key file is made."""
        key = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": ""}
        (folder / "key.json").write_text(
            json.dumps(key | {"private_key": "", "private_key_id": ""})
        )
        return {
            "GOOGLE_SERVICE_ACCOUNT": str(folder / "key.json"),
            "GOOGLE_BASE_URL": self.url,
        }

    @property
    def store(self) -> S3Store:
        """The bucket, by the library itself."""
        store = from_url(
            f"s3://{BUCKET}",
            endpoint=self.url,
            access_key_id="user",
            secret_access_key="secret",  # noqa: S106 - the server asks for none
            client_options={"allow_http": True},
        )
        assert isinstance(store, S3Store)
        return store

    def put(self, folder: Path, prefix: str) -> str:
        """Put a folder's files into the bucket; its address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                obstore.put(self.store, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def get(self, prefix: str) -> dict[str, bytes]:
        """What lies below a prefix, by name."""
        found = [one["path"] for page in obstore.list(self.store, prefix) for one in page]
        store = self.store
        return {
            key.removeprefix(f"{prefix}/"): bytes(obstore.get(store, key).bytes()) for key in found
        }

    def of(self, method: str) -> list[Request]:
        """The requests of one kind."""
        return [one for one in self.requests if one.method == method]


class _Google:
    """What Google's XML protocol has otherwise than S3's: each content of an object has a number.

    Source: cloud.google.com, "HTTP headers for the XML API" (``x-goog-if-generation-match``).
    """

    def __init__(self, application: Wsgi) -> None:
        self._application = application
        self._etags: dict[str, str] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = _AUTHORIZATION  # by which moto knows what is asked
        wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if wanted == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        elif wanted is not None:
            environ["HTTP_IF_MATCH"] = self._etags.get(wanted, '"none"')

        def respond(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            for etag in [value for name, value in headers if name.lower() == "etag"]:
                number = str(int(etag.strip('"')[:12], 16) + 1)
                self._etags[number] = etag
                headers = [*headers, ("x-goog-generation", number)]
            return start_response(status, headers, *more)

        return self._application(environ, respond)


class _Faltering:
    """The server's application, with what goes wrong before it."""

    def __init__(self, application: Wsgi) -> None:
        self._application = application
        self._lock = threading.Lock()
        self.server: Server | None = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        server = self.server
        assert server is not None
        with self._lock:
            method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"].lstrip("/")
            count = sum((one.method, one.key) == (method, key) for one in server.requests)
            wanted, query = environ.get("HTTP_RANGE", ""), environ.get("QUERY_STRING", "")
            digest = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
            request = Request(method, key, wanted, query, count, digest)
            server.requests.append(request)
        answer = server.fault(request)
        if answer is None:
            return self._application(environ, start_response)
        if answer.cut is not None:
            return self._cut(environ, start_response, answer)
        body = f"<Error><Code>{answer.code}</Code></Error>".encode()
        if answer.is_done:
            b"".join(self._application(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(answer.status, [*answer.headers, ("Content-Length", str(len(body)))])
        return [b"" if method == "HEAD" else body]

    def _cut(self, environ: dict[str, Any], start_response: Any, answer: Answer) -> Iterable[bytes]:
        """Less than the body; what the headers say of it is true only if it ``is_short``."""
        told: list[Any] = []
        body = b"".join(self._application(environ, lambda *args: told.append(args)))
        (status, headers, *_) = told[0]
        body = body[: answer.cut]
        if answer.is_short:
            headers = [one for one in headers if one[0].lower() != "content-length"]
            headers.append(("Content-Length", str(len(body))))
        start_response(status, headers)
        return [body]


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs while the block does."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Faltering(_Google(DomainDispatcherApplication(create_backend_app)))
    httpd = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    application.server = server = Server(f"http://127.0.0.1:{httpd.server_port}")
    try:
        _make_bucket(server.url)
        yield server
    finally:
        httpd.shutdown()
        thread.join()


def _make_bucket(url: str) -> None:
    from urllib.request import Request as Plain
    from urllib.request import urlopen

    headers = {"Authorization": _AUTHORIZATION}
    urlopen(Plain(f"{url}/{BUCKET}", method="PUT", headers=headers)).close()  # noqa: S310 - ours
