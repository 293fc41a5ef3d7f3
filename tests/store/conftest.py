"""A store that answers over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.buckets import Server, serving
from zexport.store import client, objects


@pytest.fixture(scope="package")
def running_server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(running_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server as it is without faults, named by the environment."""
    for name, value in running_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(client.RETRIES, "max_retries", 2)
    running_server.fault = lambda _: None
    client.use_storage_options({})
    objects.forget_listings()
    running_server.requests.clear()
    return running_server
