"""What is said of the batch where a training goes on with other ranks."""

from __future__ import annotations

import pytest

from zexport.resharding.changes import Batch, batch_of, told_of_batch


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
        (1, 3, "keep it by 3 ranks x micro-batch 2 x accumulation 2 = 12 rows"),
        (1, 1, "keep it by 1 rank x micro-batch 2 x accumulation 6 = 12 rows"),
        (1, 4, "keep it by 4 ranks x micro-batch 1 x accumulation 3 = 12 rows"),
        (1, 5, "5 ranks cannot share that evenly: near it is 5 ranks x micro-batch 2 x "
               "accumulation 1 = 10 rows"),
        (1, 24, "24 ranks cannot share that evenly: near it is 24 ranks x micro-batch 2 x "
                "accumulation 1 = 48 rows"),
        (2, 6, "keep it by 6 ranks (2 to a sequence) x micro-batch 2 x accumulation 1 = 6 rows"),
        (2, 1, "keep it by 1 rank x micro-batch 2 x accumulation 3 = 6 rows"),
        (2, 8, "8 ranks cannot share that evenly: near it is 8 ranks (2 to a sequence) x "
               "micro-batch 2 x accumulation 1 = 8 rows"),
    ],
)  # fmt: skip
def test_other_ranks_are_told_how_to_keep_the_batch(sequence: int, ranks: int, advice: str) -> None:
    source = Batch(2, 2, 3, sequence)
    told = (False, f"an update was {source}; {advice}")
    assert list(told_of_batch(source, ranks, None)) == [told]


def test_a_configuration_that_changes_the_batch_is_warned_of_and_one_that_keeps_it_is_not() -> None:
    kept = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert list(told_of_batch(Batch(2, 2, 3), 3, kept)) == []
    assert list(told_of_batch(Batch(2, 2, 3), 2, None)) == []
    ((warns, told),) = told_of_batch(Batch(2, 2, 3), 3, kept | {"gradient_accumulation_steps": 3})
    assert warns
    assert told.endswith("to 3 ranks x micro-batch 2 x accumulation 3 = 18 rows by --ds-config")


@pytest.mark.parametrize(
    ("sequence", "given", "is_told"),
    [
        (1, {"train_batch_size": 12}, False),
        (1, {"train_batch_size": 13}, True),
        (1, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, False),
        (1, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2,
             "gradient_accumulation_steps": 1}, True),
        (2, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2,
             "gradient_accumulation_steps": 3}, False),
    ],
)  # fmt: skip
def test_numbers_with_which_deepspeed_does_not_start_are_warned_of(
    sequence: int, given: dict[str, object], *, is_told: bool
) -> None:
    told = told_of_batch(Batch(4, 2, 12 * sequence // 8, sequence), 4, given)
    assert any("does not start" in text for _, text in told) == is_told
