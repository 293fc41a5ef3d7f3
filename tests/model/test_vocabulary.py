"""Tokenizers of two model folders, as `zexport diff` compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram

from zexport.facts.statements import judge
from zexport.model.sidecars import BASE, stating_files
from zexport.model.vocabulary import vocabulary_statements

WORDS = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def made(folder: Path, words: dict[str, int], *added: str, merges: object = MERGES) -> Path:
    folder.mkdir()
    found = Tokenizer(BPE(words, merges))  # type: ignore[arg-type]
    found.add_tokens([AddedToken(token, special=True) for token in added])
    found.save(str(folder / "tokenizer.json"))
    return folder


def told(a: Path, b: Path) -> str:
    stated = vocabulary_statements(stating_files(a), {BASE: stating_files(b)})
    return "".join(judge(stated, None).notes)


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return made(tmp_path / "a", WORDS)


def test_other_numbers_of_tokens_are_a_difference(a: Path, tmp_path: Path) -> None:
    note = told(a, made(tmp_path / "b", {**WORDS, "a": 1, "b": 0}))
    assert "2 of 5 tokens, such as 'a', 0 in the export's tokenizer.json but 1 in " in note


def test_other_merges_are_a_difference(a: Path, tmp_path: Path) -> None:
    assert "merges 4 letters (" in told(a, made(tmp_path / "b", WORDS, merges=MERGES[::-1]))


def test_tokens_that_only_the_second_has_are_a_difference(a: Path, tmp_path: Path) -> None:
    b = made(tmp_path / "b", WORDS, "<tool>")
    assert "1 tokens, such as '<tool>', not there in the export's tokenizer.json" in told(a, b)
    assert not told(b, a)


def test_the_older_form_of_a_tokenizer_is_compared(a: Path, tmp_path: Path) -> None:
    b = tmp_path / "b"
    b.mkdir()
    (b / "vocab.json").write_text(json.dumps(WORDS))
    (b / "merges.txt").write_text("#version: 0.2\na b\nb c\n")
    assert not told(a, b)
    (b / "merges.txt").write_text("#version: 0.2\nb c\na b\n")
    assert "merges" in told(a, b)
    (b / "vocab.json").write_text(json.dumps({**WORDS, "a": 1, "b": 0}))
    assert "1 in --base's vocab.json" in told(a, b)


def test_a_vocabulary_in_bytes_is_compared_as_such(a: Path, tmp_path: Path) -> None:
    b = made(tmp_path / "b", WORDS)
    for folder, text in ((a, "one"), (b, "other")):
        (folder / "tokenizer.model").write_text(text)
    assert "bytes" in told(a, b)


def test_another_spelling_of_a_file_is_no_difference(a: Path, tmp_path: Path) -> None:
    b = made(tmp_path / "b", WORDS)
    content = json.loads((a / "tokenizer.json").read_text())
    (b / "tokenizer.json").write_text(json.dumps(content))
    assert not told(a, b)
    Tokenizer(Unigram([("a", -1.0), ("b", -2.0)])).save(str(b / "tokenizer.json"))
    assert not told(a, b)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"vocab": 5}}', "[" * 100_000])
def test_a_tokenizer_of_another_form_is_no_difference(
    a: Path, tmp_path: Path, content: str
) -> None:
    b = made(tmp_path / "b", WORDS)
    (b / "tokenizer.json").write_text(content)
    assert not told(a, b)
