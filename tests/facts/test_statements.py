"""Statements of facts held against each other: made-up facts, real sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from zexport.facts.statements import Statement, disagreements, judge
from zexport.facts.training import TrainingFact
from zexport.findings import FindingKind

HERE = Path("global_step2")


def test_statements_that_are_the_same_are_no_disagreement() -> None:
    said = [Statement(TrainingFact.STAGE, 2, rank) for rank in range(4)]
    assert list(disagreements(said)) == []


def test_who_says_nothing_agrees_with_everybody() -> None:
    said = [Statement(TrainingFact.STAGE, value, rank) for rank, value in enumerate((2, None, 2))]
    assert list(disagreements(said)) == []


def test_a_number_that_is_none_is_like_another_such() -> None:
    said = [Statement(TrainingFact.OPTIMIZER_STEP, float("nan"), rank) for rank in range(2)]
    assert list(disagreements(said)) == []


def test_each_value_is_told_once_with_all_who_state_it() -> None:
    said = [Statement(TrainingFact.STAGE, stage, rank) for rank, stage in enumerate((2, 3, 2))]
    (found,) = disagreements(said)
    assert found.found() == "2 on ranks 0, 2 but 3 on ranks 1"


def test_what_is_stated_of_several_things_is_held_against_each_other_thing_by_thing() -> None:
    said = [
        Statement(TrainingFact.STAGE, value, by, about)
        for about, values in {"q_proj": (8, 8), "v_proj": (8, 16)}.items()
        for by, value in zip(("adapter_config.json", "the tensors"), values, strict=True)
    ]
    (found,) = disagreements(said)
    assert found.found() == "v_proj 8 in adapter_config.json but 16 in the tensors"


def test_a_refusal_that_has_a_kind_is_lifted_by_allowing_it() -> None:
    said = [Statement(TrainingFact.GLOBAL_STEP, 10 * rank, rank) for rank in range(2)]
    assert [error.finding for error in judge(said, HERE).refused] == [FindingKind.MIXED_STEPS]
    allowed = judge(said, HERE, allow={FindingKind.MIXED_STEPS})
    assert not allowed.refused
    assert [(one.kind, one.accepted) for one in allowed.findings] == [
        (FindingKind.MIXED_STEPS, True)
    ]


@pytest.mark.parametrize("kind", FindingKind)
def test_a_refusal_without_a_kind_is_lifted_by_nothing(kind: FindingKind) -> None:
    said = [Statement(TrainingFact.STAGE, rank, rank) for rank in range(2)]
    assert judge(said, HERE, allow={kind}).refused
