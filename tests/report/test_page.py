"""HTML pages of inspect and diff: complete, escaped, without network."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

import zexport
from tests.support.checkpoints import Model, Run, save
from tests.support.cli import run
from tests.support.exports import invoke
from zexport import OutputError

FIXTURES = Path(__file__).parents[2] / "fixtures"
HOSTILE = "a.</script><img src=x onerror=alert(1)>.weight\x1b[31m"


class Parsed(HTMLParser):
    """Tags, text and data of a page, as a browser without JavaScript sees it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.data, self._inside = "", "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        is_data = tag == "script" and dict(attrs).get("id") == "data"
        self._inside = "data" if is_data else tag

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in {"script", "style"}:
            self.text += f"{data} "

    def names(self) -> list[str]:
        """Return the names of all rows, joined as the script joins them."""
        data: dict[str, Any] = json.loads(self.data)
        found = []
        for pattern, numbers in zip(data["pattern"], data["numbers"], strict=True):
            parts, holes = data["patterns"][pattern].split("\x01"), numbers.split(",")
            found.append(parts[0] + "".join(h + p for h, p in zip(holes, parts[1:], strict=False)))
        return found


def page(folder: Path, *words: object) -> Parsed:
    file = folder / "page.html"
    run(*words, "--html", file, "-q").or_raise()
    return Parsed(file.read_text(encoding="utf-8"))


def test_page_loads_nothing_and_runs_only_its_script(tmp_path: Path) -> None:
    parsed = page(tmp_path, "inspect", FIXTURES / "z3_w2_bf16_frozen" / "ckpt", "--stats")
    policy = next(str(a["content"]) for _, a in parsed.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "all weights were read" in parsed.text
    assert not {"link", "img", "iframe", "base", "form"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert not attributes.keys() & {"src", "style", "onload", "onclick", "onerror"}
        assert str(attributes.get("href", "#")).startswith("#")


def test_inspect_page_shows_verdict_and_all_tensors_without_script(tmp_path: Path) -> None:
    path = FIXTURES / "z2_w2_bf16_tied" / "ckpt"
    parsed, found = page(tmp_path, "inspect", path), invoke("inspect", path, "--tensors")
    assert found["verdict"]["sentence"] in parsed.text
    names = {tensor["name"] for tensor in found["checkpoint"]["tensors"]}
    assert all(name in parsed.text for name in names)
    for alias in zexport.open_checkpoint(path).aliases:
        assert f"tied: {alias}" in parsed.text
    assert {a["data-name"] for tag, a in parsed.tags if tag == "g" and "data-name" in a} == names


def test_hostile_names_are_text(tmp_path: Path) -> None:
    weights = {HOSTILE: torch.zeros(3), "b": torch.tensor([float("nan")])}
    root = save(Model([weights]), Run(2, 1), tmp_path / "run")
    parsed = page(tmp_path, "inspect", root, "--stats")
    assert "img" not in {tag for tag, _ in parsed.tags}
    shown = HOSTILE.replace("\x1b", "\\x1b")
    assert parsed.names() == [shown, "b"]
    assert all(words in parsed.text for words in (shown, "all zero", "1 NaN"))


def test_diff_page_shows_all_tensors_and_rank_files_of_a(tmp_path: Path) -> None:
    a, b = (FIXTURES / name / "ckpt" for name in ("z3_w2_bf16_frozen", "z3_w2_bf16"))
    parsed, report = page(tmp_path, "diff", a, b), invoke("diff", a, b, "--all")
    rows = parsed.names()
    assert rows == [tensor["a_name"] or tensor["b_name"] for tensor in report["tensors"]]
    names = [tensor.name for tensor in zexport.open_checkpoint(a).tensors]
    assert [rows[row] for row in json.loads(parsed.data)["rowOf"]] == names
    assert "63 of 63 tensors differ" in parsed.text


def test_html_replaces_only_an_older_page(tmp_path: Path) -> None:
    checkpoint, page = FIXTURES / "z3_w2_bf16" / "ckpt", tmp_path / "page.html"
    for _ in range(2):
        done = run("inspect", checkpoint, "--html", page)
        assert (done.exit_code, done.stderr) == (0, f"Page: {page}\n")
    assert "zexport consolidate" in page.read_text()
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<p>mine</p>")
    for path in (thesis, checkpoint / "global_step2" / "page.html"):
        assert isinstance(run("diff", checkpoint, checkpoint, "--html", path).error, OutputError)
    assert thesis.read_text() == "<p>mine</p>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "thesis.html"]
