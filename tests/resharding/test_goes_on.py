"""A training goes on elsewhere as it would have gone on here: real DeepSpeed is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.moves import some_moves
from tests.support.resharding import departures


@pytest.mark.deepspeed
def test_trainings_go_on_with_other_ranks_and_stages_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    """Module, groups, steps, scheduler and client state; saved again, every state bit for bit."""
    assert departures(list(some_moves()), tmp_path) == {}
