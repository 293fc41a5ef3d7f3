"""Chat templates of two model folders, as `zexport diff` compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zexport.facts.statements import judge
from zexport.model.chat_template import template_statements
from zexport.model.sidecars import BASE, Sidecars, stating_files

ONE, OTHER = "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ messages }}"


def put(folder: Path, *, jinja: str = "", config: object = None) -> Path:
    """A folder with a template in a file of its own, or in the tokenizer's config."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {} if config is None else {"chat_template": config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    if jinja:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def told(a: Path, b: Path) -> str:
    files = stating_files(a), stating_files(b)
    sides = Sidecars(None, None, files[0], (), base=None, folders={BASE: files[1]})
    return "".join(judge(template_statements(sides), None).notes)


def test_another_template_is_a_difference_wherever_it_is(tmp_path: Path) -> None:
    note = told(put(tmp_path / "a", jinja=ONE), put(tmp_path / "b", config=OTHER))
    assert "the export's chat_template.jinja" in note
    assert "--base's tokenizer_config.json" in note
    assert "none in the export" in told(put(tmp_path / "none"), tmp_path / "b")


@pytest.mark.parametrize("config", [ONE, f"{ONE}\n", [{"name": "default", "template": ONE}], None])
def test_templates_that_are_the_same_are_no_difference(tmp_path: Path, config: object) -> None:
    assert not told(put(tmp_path / "a", jinja=ONE), put(tmp_path / "b", config=config))


@pytest.mark.parametrize("is_file", [True, False])
def test_templates_by_name_are_compared_too(tmp_path: Path, is_file: bool) -> None:
    for name, text in (("a", ONE), ("b", OTHER)):
        config = None if is_file else [{"name": "default", "template": ONE}]
        config = config and [*config, {"name": "tool_use", "template": text}]
        folder = put(tmp_path / name, jinja=ONE, config=config)
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / f"{'tool_use' if is_file else 'rag'}.jinja").write_text(text if is_file else ONE)
    assert "the template 'tool_use':" in told(tmp_path / "a", tmp_path / "b")
