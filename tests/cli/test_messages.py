"""Errors that no other test causes in its own process: one cause each, and what is said of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zexport
from tests.support.checkpoints import Run, save, small_model
from tests.support.expert_checkpoints import rewrite
from zexport.checkpoint.open import open_checkpoint
from zexport.errors import (
    CheckpointError,
    DamagedCheckpointError,
    OutputError,
    UsageError,
)
from zexport.train import launch
from zexport.train.options import TrainOptions, TrainSummary

FIXTURES = Path(__file__).parents[2] / "fixtures"
TAG = "global_step2"


def copied(case: str, tmp_path: Path) -> Path:
    """The tag folder of a copy of a fixture's checkpoint."""
    return shutil.copytree(FIXTURES / case / "ckpt", tmp_path / "run") / TAG


# --- checkpoints ---


def test_a_tag_that_no_checkpoint_of_a_run_has_is_told_with_those_there_are(tmp_path: Path) -> None:
    for step in (1, 2):
        save(small_model(), Run(stage=3), tmp_path / "run" / f"checkpoint-{step}")
    with pytest.raises(CheckpointError, match="checkpoint-1, checkpoint-2"):
        open_checkpoint(tmp_path / "run", tag="checkpoint-3")


def test_the_newest_of_several_folders_is_not_guessed(zero3: Path) -> None:
    with pytest.raises(UsageError, match="newest"):
        open_checkpoint([zero3, zero3], tag="newest")


def test_masters_without_names_that_are_not_the_weights_they_are_like_are_refused(
    tmp_path: Path,
) -> None:
    tag = copied("z0_w2_bf16", tmp_path)

    def change(state: dict[str, Any]) -> None:
        weight = state["module"]["lm_head.weight"].clone()
        weight.view(-1)[1000] += 0.5
        state["module"]["lm_head.weight"] = weight

    rewrite(tag / "mp_rank_00_model_states.pt", change)
    with pytest.raises(DamagedCheckpointError, match="do not match its module weights"):
        zexport.consolidate(tag, tmp_path / "out")


def test_a_tokenizer_that_vanishes_is_told(tmp_path: Path) -> None:
    root = shutil.copytree(FIXTURES / "z3_w2_bf16" / "ckpt", tmp_path / "run")
    (root / "tokenizer.json").write_text("{}")
    plan = zexport.plan_export(zexport.open_checkpoint(root), tmp_path / "out")
    (root / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        zexport.run_export(plan)


# --- training ---


def options(tmp_path: Path, **chosen: Any) -> TrainOptions:
    return TrainOptions(out=tmp_path / "run", **chosen)


def quiet(_: str) -> None:
    """Progress that nobody follows."""


def test_a_last_save_that_failed_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = TrainSummary(
        out=tmp_path,
        tag="global_step2",
        steps=4,
        first_loss=1.0,
        last_loss=1.0,
        checkpoints=("global_step2",),
        world_size=2,
        stage=3,
        save_error="No space left on device",
    )
    monkeypatch.setattr(launch, "_run_launched", lambda *_: summary)
    with pytest.raises(OutputError, match="The last good one is global_step2"):
        launch.train(options(tmp_path), progress=quiet)


def test_texts_that_cannot_be_trained_on_are_refused(tmp_path: Path) -> None:
    from zexport.train.text import make_corpus, make_tokenizer, read_text

    (tmp_path / "latin").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="UTF-8"):
        read_text(tmp_path / "latin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no tokenizer"):
        make_tokenizer(options(tmp_path, tokenizer=tmp_path / "empty"), "text")
    chosen = options(tmp_path, seq_len=64)
    with pytest.raises(UsageError, match="shorter than one sequence"):
        make_corpus(make_tokenizer(chosen, "a few words"), "a few words", chosen)


def test_another_text_or_tokenizer_than_a_run_noted_is_refused(tmp_path: Path) -> None:
    from zexport.train.text import check_same, make_corpus, make_tokenizer

    chosen, text = options(tmp_path, seq_len=4), "a few words more than one sequence " * 4
    tokenizer = make_tokenizer(chosen, text)
    corpus = make_corpus(tokenizer, text, chosen)
    noted = replace(chosen, digests=check_same(chosen, tokenizer, text, corpus))
    assert check_same(noted, make_tokenizer(chosen, text), text, corpus) == noted.digests
    with pytest.raises(UsageError, match="the text is another than the run began with"):
        check_same(noted, tokenizer, text.upper(), corpus)
    with pytest.raises(UsageError, match="the tokenizer is another than the run began with"):
        check_same(noted, make_tokenizer(chosen, "xyzzy " * 40), text, corpus)
