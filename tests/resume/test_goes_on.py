"""A training goes on elsewhere as it would have gone on here: real DeepSpeed is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

import zexport
from tests.support.moves import some_moves
from tests.support.resharding import departures
from tests.support.sharded_runs import Spec


def reshard(checkpoint: Path, out: Path, target: Spec, ds_config: Path) -> None:
    options = zexport.ReshardOptions(
        world_size=target.world, stage=target.stage, ds_config=ds_config
    )
    zexport.reshard(checkpoint, out, options)


@pytest.mark.deepspeed
def test_trainings_go_on_with_other_ranks_and_stages_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    """Module, groups, steps, scheduler and client state; saved again, every state bit for bit."""
    assert departures(list(some_moves()), tmp_path, reshard) == {}
