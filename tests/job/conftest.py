from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stopping import Job, four_shards


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """An export of four shards that share their records."""
    return four_shards(tmp_path)


@pytest.fixture
def whole(job: Job) -> dict[str, bytes]:
    """The files of an export that nothing stopped."""
    return job.made()
