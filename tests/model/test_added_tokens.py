"""Tokens that have no row in the embedding are told, of tokenizers that the library wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from tests.support.live_models import checkpoint_of, live_model
from zexport.api import consolidate
from zexport.model.config import tokens_beyond
from zexport.model.sidecars import find_sidecars, last_added_token


def _tokenizer(folder: Path, words: int, added: int, *, pretty: bool = True) -> Path:
    vocabulary = {f"w{number}": number for number in range(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.add_tokens([AddedToken(f"<{number}>", special=True) for number in range(added)])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path), pretty=pretty)
    return path


def _told(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return _beyond(folder)


def _beyond(folder: Path) -> str:
    sidecars = find_sidecars(folder)
    return str(
        tokens_beyond(sidecars.config, last_added_token(sidecars.copied.get("tokenizer.json")))
        or ""
    )


@pytest.mark.parametrize("pretty", [True, False])
@pytest.mark.parametrize(("rows", "is_told"), [(11, True), (12, False), (64, False)])
def test_an_added_token_beyond_the_last_row_is_told(
    rows: int, is_told: bool, pretty: bool, tmp_path: Path
) -> None:
    _tokenizer(tmp_path, words=10, added=2, pretty=pretty)
    told = _told(tmp_path, {"vocab_size": rows})
    assert bool(told) == is_told
    assert ("up to number 11, and the embedding 11 rows" in told) == is_told


def test_the_vocabulary_of_the_language_model_counts(tmp_path: Path) -> None:
    _tokenizer(tmp_path, words=10, added=2)
    assert _told(tmp_path, {"text_config": {"vocab_size": 11}})
    assert not _told(tmp_path, {"text_config": {"vocab_size": 12}})


@pytest.mark.parametrize(
    "content",
    [
        '{"added_tokens": [',
        '{"added_tokens": 5}',
        '{"added_tokens": [5, {"id": "9"}, {"id": true}]}',
        '{"added_tokens": ' + "[" * 100_000,
        "no JSON",
        "\udcff",
        "",
    ],
)
def test_a_tokenizer_of_another_form_tells_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content, errors="surrogateescape")
    assert _told(tmp_path, {"vocab_size": 1}) == ""


def test_without_a_config_or_a_size_nothing_is_told(tmp_path: Path) -> None:
    _tokenizer(tmp_path, words=10, added=2)
    assert _beyond(tmp_path) == ""
    assert _told(tmp_path, {"vocab_size": None}) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("added", "is_told"), [(1, False), (2, True)])
def test_an_export_warns_of_tokens_that_the_trained_embedding_lacks(
    added: int, is_told: bool, tmp_path: Path
) -> None:
    model = live_model("llama")
    root = checkpoint_of(model, tmp_path / "run")
    _tokenizer(root, words=model.config.vocab_size - 1, added=added)
    report = consolidate(root, tmp_path / "out")
    assert any("cannot be embedded" in warning for warning in report.warnings) == is_told
