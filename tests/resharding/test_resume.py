"""DeepSpeed resumes resharded runs with equal state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.resharding import departures, some_moves


@pytest.mark.deepspeed
def test_resumed_runs_equal_the_source_on_other_ranks_and_stages(
    tmp_path: Path,
) -> None:
    """Module, groups, steps, scheduler and client state; saved again, every state bit for bit."""
    assert departures(list(some_moves()), tmp_path) == {}
