"""Files that contradict each other in the tokens that end a text, or were added, are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import Run, save, small_model
from zexport import consolidate
from zexport.facts.statements import judge
from zexport.model.sidecars import find_sidecars
from zexport.model.special_tokens import added_statements, end_statements
from zexport.model.token_numbers import token_numbers


def put(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def tokenizer(*added: str, **vocabulary: int) -> object:
    tokens = [{"id": 20 + place, "content": token} for place, token in enumerate(added)]
    return {"added_tokens": tokens, "model": {"vocab": vocabulary or {'\\"</s>': 7, "</s>": 2}}}


def told(folder: Path) -> list[str]:
    found = find_sidecars(folder)
    ends = end_statements(found.copied, found.config)
    return judge((*added_statements(found.copied), *ends), folder).warnings


ENDS = {"model_type": "llama", "eos_token_id": 2}


@pytest.mark.parametrize("ends", [3, [3, 4]])
@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "lstrip": False}])
def test_a_tokenizer_with_another_end_than_the_model_is_told(
    ends: object, token: object, tmp_path: Path
) -> None:
    put(tmp_path, tokenizer=tokenizer(), config={**ENDS, "eos_token_id": ends})
    (warning,) = told(put(tmp_path, tokenizer_config={"eos_token": token}))
    assert "[2] in tokenizer_config.json (</s>)" in warning
    assert "in config.json" in warning


def test_the_end_of_an_added_token_is_known(tmp_path: Path) -> None:
    put(tmp_path, tokenizer=tokenizer("<|im_end|>"), config=ENDS)
    (warning,) = told(put(tmp_path, special_tokens_map={"eos_token": "<|im_end|>"}))
    assert "[20] in special_tokens_map.json (<|im_end|>)" in warning


def test_configs_without_an_end_in_common_are_told(tmp_path: Path) -> None:
    (warning,) = told(put(tmp_path, config=ENDS, generation_config={"eos_token_id": [3, 4]}))
    assert "[3, 4] in generation_config.json but [2] in config.json" in warning


def test_a_template_whose_turns_end_otherwise_is_told(tmp_path: Path) -> None:
    put(tmp_path, tokenizer=tokenizer("<|im_end|>"), config=ENDS)
    (tmp_path / "chat_template.jinja").write_text("{{ m }}<|im_end|>")
    assert "[20] in chat_template.jinja (<|im_end|>)" in told(tmp_path)[0]
    assert not told(put(tmp_path, generation_config={"eos_token_id": [2, 20]}))


@pytest.mark.parametrize(
    "files",
    [
        {"config": ENDS, "generation_config": {"eos_token_id": [2, 20]}},
        {"config": ENDS, "tokenizer_config": {"eos_token": "unknown"}},
        {"config": {**ENDS, "eos_token_id": [2, 9]}, "tokenizer_config": {"eos_token": "</s>"}},
        {"config": {"model_type": "bert"}, "tokenizer_config": {"eos_token": "</s>"}},
        {"config": {**ENDS, "eos_token_id": None}, "tokenizer_config": {"eos_token": "</s>"}},
        {"config": ENDS, "tokenizer_config": {"eos_token": None}},
    ],
)
def test_ends_that_others_have_too_are_not_told(files: dict[str, object], tmp_path: Path) -> None:
    assert not told(put(tmp_path, tokenizer=tokenizer("<|im_end|>"), **files))


def test_what_decides_may_have_the_ends_of_both(tmp_path: Path) -> None:
    put(tmp_path, tokenizer=tokenizer("<|im_end|>"), config=ENDS)
    put(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    assert not told(put(tmp_path, generation_config={"eos_token_id": [2, 20]}))


DECODER = {"added_tokens_decoder": {"21": {"content": "<a>"}}}


@pytest.mark.parametrize("files", [{"tokenizer_config": DECODER}, {"added_tokens": {"<a>": 21}}])
def test_a_token_with_two_numbers_is_told(files: dict[str, object], tmp_path: Path) -> None:
    (warning,) = told(put(tmp_path, tokenizer=tokenizer("<a>"), **files))
    assert "'<a>' 20 in tokenizer.json but 21 in " in warning


def test_tokens_with_one_number_are_not_told(tmp_path: Path) -> None:
    put(tmp_path, tokenizer=tokenizer("<b>", "<a>"), added_tokens={"<a>": 21, "<c>": 22})
    assert not told(put(tmp_path, tokenizer_config=DECODER))


@pytest.mark.parametrize("files", [{"tokenizer_config": DECODER}, {"added_tokens": {"<a>": 21}}])
def test_tokens_beside_the_tokenizer_need_rows_too(
    files: dict[str, object], tmp_path: Path
) -> None:
    put(tmp_path, tokenizer=tokenizer(), **files)
    assert 21 in {one.number for one in token_numbers(find_sidecars(tmp_path).copied)}


@pytest.mark.parametrize("content", [5, [], {"added_tokens_decoder": {"x": 1, "2": [], "3": "a"}}])
def test_files_of_another_form_tell_nothing(content: object, tmp_path: Path) -> None:
    put(tmp_path, tokenizer=content, tokenizer_config=content, added_tokens=content)
    assert not told(put(tmp_path, generation_config=content, config=ENDS))


def test_an_export_tells_of_both(tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / "run" / "root")
    put(root, tokenizer=tokenizer("<a>"), config={**ENDS, "model_type": "of_nobody"})
    put(root, tokenizer_config={**DECODER, "eos_token": "<a>"})
    report = consolidate(root, tmp_path / "out")
    assert any("give one token several numbers" in told for told in report.warnings)
    assert any("differ in the token that ends a text" in told for told in report.warnings)
