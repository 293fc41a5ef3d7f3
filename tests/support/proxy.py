"""An HTTP server between zexport and an emulator that fails as a test plans it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Headers = list[tuple[str, str]]
_OWN_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass(frozen=True)
class Request:
    """A request: ``key`` begins with the bucket, ``count`` is the number of equal ones before.

    ``sha256`` is the digest of the body that the client signed.
    """

    method: str
    key: str
    range: str
    query: str
    count: int
    sha256: str

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and ("list-type" in self.query or "comp=list" in self.query)

    @property
    def is_part(self) -> bool:
        """Whether it uploads a part of an object."""
        return "partNumber=" in self.query or "comp=block&" in f"{self.query}&"

    def writes(self, ending: str) -> bool:
        """Whether it uploads an object whose name ends so, whole or in parts."""
        return self.method == "PUT" and self.key.endswith(ending)


@dataclass(frozen=True)
class Answer:
    """What the proxy answers: an error status, or the emulator's answer cut or delayed.

    ``cut`` bytes are sent before the connection is closed; with ``is_short`` the headers say so.
    With ``is_closed`` there is no answer. With ``is_done`` the emulator has done what it was asked.
    """

    status: str = "503 Service Unavailable"
    code: str = "SlowDown"
    headers: tuple[tuple[str, str], ...] = ()
    cut: int | None = None
    is_short: bool = False
    is_closed: bool = False
    is_done: bool = False
    after_s: float = 0.0


REFUSED = Answer("403 Forbidden", "AccessDenied")
Fault = Callable[[Request], Answer | None]


@dataclass
class Plan:
    """What the proxy has seen, and what it does.

    ``asked`` changes the headers of a request, ``answered`` returns those of an answer: how the
    client's protocol differs from the emulator's. ``page`` limits the names in a list of S3's.
    """

    upstream: str = ""
    account: str = ""
    asked: Callable[[dict[str, str]], None] = lambda _: None
    answered: Callable[[Headers], Headers] = lambda headers: headers
    fault: Fault = lambda _: None
    page: int = 1000
    requests: list[Request] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    plan: Plan

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.plan.fault(self._noted())
        if answer is None:
            self._send(*self._forward(body))
            return
        time.sleep(answer.after_s)
        is_right = answer.cut is not None or answer.after_s
        forwarded = self._forward(body) if is_right or answer.is_done else None
        self.close_connection = answer.is_closed or answer.cut is not None
        if is_right and forwarded is not None:
            status, reason, headers, content = forwarded
            declared = None if answer.is_short else len(content)
            self._send(status, reason, headers, content[: answer.cut], declared)
        elif not answer.is_closed:
            number, _, reason = answer.status.partition(" ")
            refusal = f"<Error><Code>{answer.code}</Code></Error>".encode()
            self._send(int(number), reason, [*answer.headers], refusal)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - http.server's names

    def _noted(self) -> Request:
        parts, seen = urlsplit(self.path), self.plan.requests
        key = unquote(parts.path).removeprefix(self.plan.account).lstrip("/")
        count = sum((one.method, one.key) == (self.command, key) for one in [*seen])
        wanted = self.headers.get("Range") or self.headers.get("x-ms-range") or ""
        digest = self.headers.get("x-amz-content-sha256", "")
        seen.append(Request(self.command, key, wanted, parts.query, count, digest))
        return seen[-1]

    def _forward(self, body: bytes) -> tuple[int, str, Headers, bytes]:
        """Return the emulator's status, reason, headers and body."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        headers.pop("connection", None)
        self.plan.asked(headers)
        link = HTTPConnection(urlsplit(self.plan.upstream).netloc)
        try:
            paged = f"&max-keys={self.plan.page}" if "list-type" in self.path else ""
            link.putrequest(
                self.command, self.path + paged, skip_host=True, skip_accept_encoding=True
            )
            for name, value in headers.items():
                link.putheader(name, value)
            link.endheaders(body)
            found = link.getresponse()
            answered = self.plan.answered(found.getheaders())
            return found.status, found.reason, answered, found.read()
        finally:
            link.close()

    def _send(
        self, status: int, reason: str, headers: Headers, body: bytes, declared: int | None = None
    ) -> None:
        nbytes = len(body) if declared is None else declared
        if self.command == "HEAD":  # the length of what a GET would return
            lengths = [value for name, value in headers if name.lower() == "content-length"]
            nbytes, body = int(lengths[0]) if lengths else 0, b""
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in _OWN_HEADERS:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(nbytes))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was killed, or gave up
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def proxied(plan: Plan) -> Iterator[str]:
    """Run a proxy; yield its URL."""
    handler = type("Handler", (_Handler,), {"plan": plan})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
