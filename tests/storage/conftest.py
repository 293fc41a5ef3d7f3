"""Storages for tests: a local folder, or a prefix of a bucket."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import obstore
import obstore.store
import pytest

import zexport
from tests.support.buckets import BUCKET, EMULATORS, REFUSED, Request, Server, serving
from tests.support.refusing import forget_listings
from zexport.storage import os_errors


def files(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, by their paths in it."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


class Local:
    """A local folder; faults are failures of ``os.pwrite``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def at(self, name: str) -> str:
        return str(self.root / name)

    def files(self, name: str) -> dict[str, bytes]:
        return files(self.root / name)

    def put(self, folder: Path, name: str) -> str:
        shutil.copytree(folder, self.root / name, dirs_exist_ok=True)
        return self.at(name)

    def write(self, name: str, content: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(content)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    @contextmanager
    def full_after(self, writes: int) -> Iterator[None]:
        """Refuse writes after the first few."""
        left, pwrite = [None] * writes, os.pwrite

        def refuse(*args: Any) -> int:
            if not left:
                raise OSError(28, "No space left on device")
            left.pop()
            return pwrite(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            yield


class Bucket:
    """A prefix of a bucket; faults are answers to requests."""

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix

    def at(self, name: str) -> str:
        return self.server.address(f"{self.prefix}/{name}")

    def files(self, name: str) -> dict[str, bytes]:
        return self.server.get(f"{self.prefix}/{name}")

    def put(self, folder: Path, name: str) -> str:
        return self.server.put(folder, f"{self.prefix}/{name}")

    def write(self, name: str, content: bytes) -> None:
        obstore.put(self.server.store, f"{self.prefix}/{name}", content)
        forget_listings()

    def remove(self, name: str) -> None:
        obstore.delete(self.server.store, f"{self.prefix}/{name}")
        forget_listings()

    @contextmanager
    def full_after(self, writes: int) -> Iterator[None]:
        """Refuse writes after the first few."""
        left = [None] * writes

        def refuse(one: Request) -> Any:
            if one.method not in ("PUT", "POST"):
                return None
            return left.pop() if left else REFUSED

        self.server.fault = refuse
        yield
        self.server.fault = lambda _: None


Place = Local | Bucket
Running = Callable[[str], Server]


@pytest.fixture(scope="package")
def running() -> Iterator[Running]:
    """Return an emulator by name, started when it is first needed."""
    with ExitStack() as stack:

        @cache
        def started(name: str) -> Server:
            moto = started("s3").plan.upstream if name == "gs" else ""
            return stack.enter_context(serving(name, moto))

        yield started


def _used(server: Server, patch: pytest.MonkeyPatch) -> Server:
    """Let zexport use a server without faults, and give up soon, after two retries."""
    for name, value in server.environment.items():
        patch.setenv(name, value)
    from_url: Any = obstore.store.from_url

    def impatient(*args: Any, **named: Any) -> Any:
        if "retry_config" in named:
            backoff = {"init_backoff": timedelta(milliseconds=1)}
            named["retry_config"] = {"max_retries": 2, "backoff": backoff}
        return from_url(*args, **named)

    patch.setattr(obstore.store, "from_url", impatient)
    patch.setattr(os_errors, "_PAUSES_SECONDS", (0.001, 0.001, 0.001, 0.001))
    server.fault = lambda _: None
    server.plan.page = 1000
    server.requests.clear()
    zexport.use_storage_options({})  # creates new clients
    return server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A prefix of the test's own."""
    return re.sub(r"\W+", "-", request.node.name).strip("-") + "/at"


@pytest.fixture
def server(running: Running, monkeypatch: pytest.MonkeyPatch) -> Server:
    """An emulator of S3."""
    return _used(running("s3"), monkeypatch)


@pytest.fixture
def out(prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture(params=["local", *EMULATORS])
def place(
    request: pytest.FixtureRequest,
    running: Running,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    """Each kind of storage in turn."""
    if request.param == "local":
        (root := tmp_path / "place").mkdir()
        return Local(root)
    return Bucket(_used(running(request.param), monkeypatch), prefix)
