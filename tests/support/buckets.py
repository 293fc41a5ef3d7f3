"""A store to test against: moto's server in this process, asked over real HTTP, that can falter."""

from __future__ import annotations

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
Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]
Fault = Callable[["Request"], "Answer | None"]


@dataclass(frozen=True)
class Request:
    """What was asked, and which one of those alike."""

    method: str
    key: str
    range: str
    query: str
    count: int


@dataclass(frozen=True)
class Answer:
    """What is answered instead: a status, or the right answer cut after some bytes."""

    status: str = "503 Service Unavailable"
    code: str = "SlowDown"
    headers: tuple[tuple[str, str], ...] = ()
    cut: int | None = None


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
            request = Request(method, key, wanted, query, count)
            server.requests.append(request)
        answer = server.fault(request)
        if answer is None:
            return self._application(environ, start_response)
        if answer.cut is not None:
            return [b"".join(self._application(environ, start_response))[: answer.cut]]
        body = f"<Error><Code>{answer.code}</Code></Error>".encode()
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(answer.status, [*answer.headers, ("Content-Length", str(len(body)))])
        return [b"" if method == "HEAD" else body]


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs while the block does."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Faltering(DomainDispatcherApplication(create_backend_app))
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

    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=u/20260101/us-east-1/s3/aws4_request"}
    urlopen(Plain(f"{url}/{BUCKET}", method="PUT", headers=headers)).close()  # noqa: S310 - ours
