"""What is said of the batch where a training goes on with other ranks."""

from __future__ import annotations

import pytest

from zexport.resharding.changes import Batch, batch_of, describe_batch_change


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, Batch(2, 2, 3)),
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 12}, Batch(2, 2, 3)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, Batch(2, 2, 3)),
        ({"train_micro_batch_size_per_gpu": 2}, Batch(2, 2, 1)),
        ({"train_batch_size": 12}, Batch(2, 6, 1)),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3}, None),
        ({"train_batch_size": -4}, None),
        ({}, None),
    ],
)
def test_the_batch_follows_from_what_the_configuration_says(
    config: dict[str, object], batch: Batch | None
) -> None:
    assert batch_of(config, 2) == batch


@pytest.mark.parametrize(
    ("config", "sequence"),
    [
        ({"sequence_parallel_size": 2}, 2),
        ({"sequence_parallel_size": 2, "data_parallel_size": 4}, 1),  # a mesh: of these ranks each
        ({"gradient_accumulation_steps": 3, "train_batch_size": 12}, 2),  # as Accelerate leaves it
        ({"gradient_accumulation_steps": 3, "train_batch_size": 24}, 1),
        ({"gradient_accumulation_steps": 3, "train_batch_size": 9}, 1),  # no size fits
        ({}, 1),
    ],
)
def test_ranks_that_share_a_sequence_have_the_same_rows(
    config: dict[str, object], sequence: int
) -> None:
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3} | config
    found = batch_of(given, 4)
    assert found == Batch(4, 2, 3, sequence)
    assert found.rows == 24 // sequence


@pytest.mark.parametrize(
    ("sequence", "ranks", "advice"),
    [
        (1, 3, "keep it with 12 (3 ranks x micro-batch 2 x accumulation 2)"),
        (1, 1, "keep it with 12 (1 rank x micro-batch 2 x accumulation 6)"),
        (1, 4, "keep it with 12 (4 ranks x micro-batch 1 x accumulation 3)"),
        (1, 5, "Closest: 10 (5 ranks x micro-batch 2 x accumulation 1)"),
        (1, 24, "Closest: 48 (24 ranks x micro-batch 2 x accumulation 1)"),
        (2, 6, "keep it with 6 (6 ranks (2 to a sequence) x micro-batch 2 x accumulation 1)"),
        (2, 1, "keep it with 6 (1 rank x micro-batch 2 x accumulation 3)"),
        (2, 8, "Closest: 8 (8 ranks (2 to a sequence) x micro-batch 2 x accumulation 1)"),
    ],
)
def test_other_ranks_are_told_how_to_keep_the_batch(sequence: int, ranks: int, advice: str) -> None:
    ((warns, told),) = describe_batch_change(Batch(2, 2, 3, sequence), ranks, None)
    assert not warns
    assert told.endswith(advice)


def test_a_configuration_that_changes_the_batch_is_warned_of_and_one_that_keeps_it_is_not() -> None:
    kept = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert list(describe_batch_change(Batch(2, 2, 3), 3, kept)) == []
    assert list(describe_batch_change(Batch(2, 2, 3), 2, None)) == []
    changed = kept | {"gradient_accumulation_steps": 3}
    ((warns, told),) = describe_batch_change(Batch(2, 2, 3), 3, changed)
    assert warns
    assert told.endswith("to 18 (3 ranks x micro-batch 2 x accumulation 3)")
