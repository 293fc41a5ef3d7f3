"""Tokens that have no row in the embedding are told, of tokenizers that the library wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Model, Unigram, WordLevel, WordPiece

from tests.support import checkpoints
from tests.support.checkpoints import Run, save
from tests.support.live_models import checkpoint_of, live_model
from zexport import consolidate
from zexport.facts.model import Fact
from zexport.facts.statements import judge
from zexport.model.sidecars import find_sidecars
from zexport.model.token_numbers import config_numbers, stated_rows, token_numbers, token_statements


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
    rows = stated_rows(sidecars.config)
    numbers = (*token_numbers(sidecars.copied), *config_numbers(sidecars.config))
    said = token_statements(Fact.TOKENS, rows, "its rows", numbers)
    return "".join(judge(said, None).warnings)


@pytest.mark.parametrize("pretty", [True, False])
@pytest.mark.parametrize(("rows", "is_told"), [(11, True), (12, False), (64, False)])
def test_an_added_token_beyond_the_last_row_is_told(
    rows: int, is_told: bool, pretty: bool, tmp_path: Path
) -> None:
    _tokenizer(tmp_path, words=10, added=2, pretty=pretty)
    told = _told(tmp_path, {"vocab_size": rows})
    assert bool(told) == is_told
    assert (
        "added tokens up to 11 in tokenizer.json, expected below 11, its rows" in told
    ) == is_told


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
    assert any("added tokens up to" in warning for warning in report.warnings) == is_told


@pytest.mark.parametrize(
    "model",
    [
        WordLevel({f"w{number}": number for number in range(12)}),
        BPE({f'"w{number}:': number for number in range(12)}, []),
        Unigram([(f'\\"{number}', -1.5) for number in range(12)]),
        WordPiece({f"\\{number}\\": number for number in range(12)}),
    ],
    ids=["WordLevel", "BPE", "Unigram", "WordPiece"],
)
@pytest.mark.parametrize("pretty", [True, False])
def test_a_vocabulary_beyond_the_last_row_is_told(
    model: Model, pretty: bool, tmp_path: Path
) -> None:
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"), pretty=pretty)
    assert "vocabulary up to 11 in tokenizer.json" in _told(tmp_path, {"vocab_size": 11})
    assert not _told(tmp_path, {"vocab_size": 12})


def test_the_vocabulary_of_a_tokenizer_without_the_library_counts(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 11}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<c>": 12}))
    told = _told(tmp_path, {"vocab_size": 11})
    assert "vocabulary up to 11 in vocab.json, added tokens up to 12 in added_tokens.json" in told
    assert not _told(tmp_path, {"vocab_size": 13})


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {"21": {"content": "<a>"}}}},
        {"added_tokens": {"<a>": 21}},
    ],
)
def test_tokens_beside_the_tokenizer_need_rows_too(
    files: dict[str, object], tmp_path: Path
) -> None:
    _tokenizer(tmp_path, words=10, added=2)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert "21 in " in _told(tmp_path, {"vocab_size": 21})
    assert not _told(tmp_path, {"vocab_size": 22})


@pytest.mark.parametrize("content", [5, [], {"added_tokens_decoder": {"x": 1, "2": [], "3": "a"}}])
def test_files_of_another_form_name_no_tokens(content: object, tmp_path: Path) -> None:
    _tokenizer(tmp_path, words=10, added=2)
    for name in ("tokenizer_config", "added_tokens", "generation_config"):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert not _told(tmp_path, {"vocab_size": 12})


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("ids", [11, [3, 11]])
def test_tokens_that_configs_name_are_told(key: str, ids: object, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: ids}))
    assert f"{key} 11 in generation_config.json" in _told(tmp_path, {"vocab_size": 11})
    assert not _told(tmp_path, {"vocab_size": 12, "pad_token_id": -1})
    told = _told(tmp_path, {"text_config": {"vocab_size": 12, key: 40}})
    assert f"{key} 40 in config.json, expected below 12" in told


def test_the_rows_that_count_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Not the number in a config that is not mended, since nothing tells what its model is."""
    tensors = {"model.embed_tokens.weight": torch.ones(48, 4), "out.weight": torch.ones(50, 4)}
    root = save(checkpoints.Model([tensors]), Run(), tmp_path / "run")
    config = {"model_type": "of_nobody", "vocab_size": 50, "eos_token_id": 49}
    (root / "config.json").write_text(json.dumps(config))
    report = consolidate(root, tmp_path / "out")
    assert any("eos_token_id 49 in config.json, expected below 48" in w for w in report.warnings)
