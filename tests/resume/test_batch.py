"""What is said of the batch where a training goes on with other ranks."""

from __future__ import annotations

import pytest

from zexport.resume.changes import Batch, batch_of, told_of_batch


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
    ("ranks", "advice"),
    [
        (3, "keep it by 3 ranks x micro-batch 2 x accumulation 2 = 12 rows"),
        (1, "keep it by 1 rank x micro-batch 2 x accumulation 6 = 12 rows"),
        (4, "keep it by 4 ranks x micro-batch 1 x accumulation 3 = 12 rows"),
        (5, "5 ranks cannot share that evenly: near it is 5 ranks x micro-batch 2 x accumulation "
            "1 = 10 rows"),
        (24, "24 ranks cannot share that evenly: near it is 24 ranks x micro-batch 2 x "
             "accumulation 1 = 48 rows"),
    ],
)  # fmt: skip
def test_other_ranks_are_told_how_to_keep_the_batch(ranks: int, advice: str) -> None:
    was = "an update was 2 ranks x micro-batch 2 x accumulation 3 = 12 rows"
    assert list(told_of_batch(Batch(2, 2, 3), ranks, None)) == [(False, f"{was}; {advice}")]


def test_a_configuration_that_changes_the_batch_is_warned_of_and_one_that_keeps_it_is_not() -> None:
    assert list(told_of_batch(Batch(2, 2, 3), 3, Batch(3, 2, 2))) == []
    assert list(told_of_batch(Batch(2, 2, 3), 2, None)) == []
    ((warns, told),) = told_of_batch(Batch(2, 2, 3), 3, Batch(3, 2, 3))
    assert warns
    assert told.endswith("to 3 ranks x micro-batch 2 x accumulation 3 = 18 rows by --ds-config")
