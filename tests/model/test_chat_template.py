"""A chat template is neither lost nor replaced without a word, wherever in a run it lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import Run, save, small_model
from zexport import consolidate
from zexport.facts.statements import Judgement, judge
from zexport.model.chat_template import template_statements
from zexport.model.sidecars import find_sidecars

ONE, OTHER = "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ messages }}"


def put(folder: Path, *, jinja: str = "", config: object = None, vocabulary: bool = True) -> Path:
    """A tokenizer's folder with a template in a file of its own, or in the tokenizer's config."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {} if config is None else {"chat_template": config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    if vocabulary:
        (folder / "tokenizer.json").write_text("{}")
    if jinja:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def told(root: Path, base: Path | None = None) -> Judgement:
    return judge(template_statements(find_sidecars(root, base)), root)


def test_a_template_in_the_folder_above_is_not_lost_unsaid(tmp_path: Path) -> None:
    root = put(put(tmp_path / "out", jinja=ONE, vocabulary=False) / "checkpoint-4")
    assert "chat_template.jinja" not in find_sidecars(root).copied
    (warning,) = told(root).warnings
    assert "none in the export" in warning
    assert "the folder above's chat_template.jinja" in warning


def test_a_template_of_the_bases_is_not_lost_unsaid(tmp_path: Path) -> None:
    base = put(tmp_path / "base", config=ONE)
    (warning,) = told(put(tmp_path / "run" / "root"), base).warnings
    assert "--base's tokenizer_config.json" in warning


def test_the_template_of_a_checkpoint_is_not_replaced_unsaid(tmp_path: Path) -> None:
    """The vocabulary lies above, and what lies with it is taken."""
    above = put(tmp_path / "out", config=ONE)
    root = put(above / "checkpoint-4", config=OTHER, vocabulary=False)
    (warning,) = told(root).warnings
    assert "the export's tokenizer_config.json" in warning
    assert "the checkpoint's tokenizer_config.json" in warning


def test_a_file_that_replaces_the_template_of_the_tokenizer_is_told(tmp_path: Path) -> None:
    (warning,) = told(put(tmp_path / "run" / "root", jinja=ONE, config=OTHER)).warnings
    assert "the export's chat_template.jinja" in warning


def test_a_template_of_the_trainings_own_is_noted_beside_the_bases(tmp_path: Path) -> None:
    root = put(tmp_path / "run" / "root", jinja=ONE)
    judged = told(root, put(tmp_path / "base", config=OTHER))
    assert not judged.warnings
    assert "not the base's" in judged.notes[0]


@pytest.mark.parametrize("config", [ONE, f"{ONE}\n", [{"name": "default", "template": ONE}]])
def test_templates_that_are_the_same_are_not_told(tmp_path: Path, config: object) -> None:
    above = put(tmp_path / "out", config=config)
    root = put(above / "checkpoint-4", jinja=ONE)
    judged = told(root, put(tmp_path / "base", jinja=ONE))
    assert not [*judged.warnings, *judged.notes]


@pytest.mark.parametrize("is_file", [True, False])
def test_templates_by_name_are_compared_too(tmp_path: Path, is_file: bool) -> None:
    root, above = tmp_path / "out" / "checkpoint-4", tmp_path / "out"
    for folder, text in ((root, ONE), (above, OTHER)):
        config = None if is_file else [{"name": "default", "template": ONE}]
        config = config and [*config, {"name": "tool_use", "template": text}]
        put(folder, jinja=ONE, config=config)
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / f"{'tool_use' if is_file else 'rag'}.jinja").write_text(text if is_file else ONE)
    (warning,) = told(root).warnings
    assert "the template 'tool_use':" in warning
    assert "the folder above's" in warning


def test_a_base_without_a_template_says_nothing_of_one(tmp_path: Path) -> None:
    judged = told(put(tmp_path / "run" / "root", jinja=ONE), put(tmp_path / "base"))
    assert not [*judged.warnings, *judged.notes]


def test_an_export_tells_of_it(tmp_path: Path) -> None:
    root = put(save(small_model(), Run(), tmp_path / "run" / "root"), jinja=ONE, config=OTHER)
    report = consolidate(root, tmp_path / "out")
    assert any("files differ in the chat template" in told for told in report.warnings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for m in messages %}{{ m }}", "for: 1 in what begins but 0 in what ends"),
        ("{%- for m in messages -%}{# {% if #}{{ m if m }}{%- endfor -%}", ""),
        ("{% for m in conversation %}{{ m }}{% endfor %}", "no messages"),
    ],
)
def test_a_template_that_is_cut_off_or_of_something_else_is_told(
    tmp_path: Path, text: str, words: str
) -> None:
    warnings = told(put(tmp_path / "run" / "root", jinja=text)).warnings
    assert len(warnings) == bool(words)
    assert all(words in one for one in warnings)
