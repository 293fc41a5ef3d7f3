from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stopping import Job, four_shards


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    """An export of four shards, of ZeRO unless a test is parametrized with ``BOTH``."""
    return four_shards(tmp_path, fsdp=getattr(request, "param", "zero") == "fsdp")


@pytest.fixture
def whole(job: Job) -> dict[str, bytes]:
    """The files of an export that nothing stopped."""
    return job.made()
