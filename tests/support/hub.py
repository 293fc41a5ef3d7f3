"""A server that stands in for the Hugging Face hub: logins, repositories, LFS uploads, commits."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret"  # noqa: S105

_Reply = tuple[int, Any]


@dataclass
class Hub:
    """One repository at the most: whether it is private, its files, and what each commit added.

    ``failing`` is in the paths that are refused.
    """

    url: str = ""
    private: bool | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[set[str]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    failing: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which its users name it; it does not speak the protocol of chunks."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> _Reply:
        """A status, and what is said."""
        if token != f"Bearer {TOKEN}" and not path.startswith("/put/"):
            return 401, {"error": "Invalid username or password."}
        if self.failing and self.failing in path:
            return 403, {"error": "You have no right to write."}
        if method == "PUT":
            self.objects[sha256(body).hexdigest()] = body
            return 200, {}
        if method == "GET":
            return self.paths_info(path)
        kind = next(word for word in _ANSWERS if word in path)
        body = body if kind == "/commit/" else json.loads(body)
        return 200, getattr(self, _ANSWERS[kind])(body)

    def paths_info(self, path: str) -> _Reply:
        if path.startswith("/api/whoami"):
            return 200, {"type": "user", "name": "me"}
        if self.private is None:
            return 404, {"error": "Repository not found"}
        items = self.files.items()
        return 200, [
            {"type": "file", "path": name, "size": len(data), "oid": ""} for name, data in items
        ]

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.private is None:
            self.private = bool(body.get("private") or body.get("visibility") == "private")
        return {"url": f"{self.url}/{body['organization']}/{body['name']}"}

    def validate(self, _body: dict[str, Any]) -> dict[str, Any]:
        return {"errors": [], "warnings": []}

    def modes(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "files": [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in body["files"]
            ]
        }

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Where each object is put; nothing for one that is there."""
        objects = []
        for one in body["objects"]:
            actions = {"upload": {"href": f"{self.url}/put/{one['oid']}", "header": {}}}
            objects.append(one if one["oid"] in self.objects else one | {"actions": actions})
        return {"transfer": "basic", "objects": objects}

    def commit(self, lines: bytes) -> dict[str, Any]:
        added: dict[str, bytes] = {}
        for line in map(json.loads, lines.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
        self.files |= added
        self.commits.append({*added})
        oid = "1" * 40
        return {"commitUrl": f"{self.url}/org/model/commit/{oid}", "commitOid": oid}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that is asked over real HTTP."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = self.headers.get("Authorization")
            status, found = hub.answer(self.command, self.path, token, body)
            data = json.dumps(found).encode()
            self.send_response(status)
            if status == HTTPStatus.NOT_FOUND:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_ANSWERS = {
    "/repos/create": "create",
    "/validate-yaml": "validate",
    "/preupload/": "modes",
    "/objects/batch": "batch",
    "/commit/": "commit",
}
