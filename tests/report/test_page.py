"""Pages: whole, escaped, without a network, and small; how they look is for tests/browser."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import zexport
from tests.support.checkpoints import Model, Run, save
from tests.support.exports import invoke
from zexport import OutputError
from zexport.cli.main import cli

FIXTURES = Path(__file__).parents[2] / "fixtures"
HOSTILE = "a.</script><img src=x onerror=alert(1)>.weight\x1b[31m"


class Read(HTMLParser):
    """What a browser without JavaScript has of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.data = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        is_data = tag == "script" and dict(attrs).get("id") == "data"
        self._inside = "data" if is_data else tag

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in {"script", "style"}:
            self.text.append(data)


def names_of(read: Read) -> list[str]:
    """The names of all rows, put together as the script does it."""
    data: dict[str, Any] = json.loads(read.data)
    found = []
    for pattern, numbers in zip(data["pattern"], data["numbers"], strict=True):
        parts, holes = data["patterns"][pattern].split("\x01"), numbers.split(",")
        found.append(parts[0] + "".join(h + p for h, p in zip(holes, parts[1:], strict=False)))
    return found


def page(folder: Path, *words: object) -> str:
    """The page that a command writes."""
    file = folder / "page.html"
    line = [*map(str, words), "--html", str(file), "-q"]
    CliRunner().invoke(cli, line, catch_exceptions=False)
    return file.read_text(encoding="utf-8")


def test_a_page_needs_no_network_and_lets_nothing_run_but_its_own_script(tmp_path: Path) -> None:
    read = Read(page(tmp_path, "inspect", FIXTURES / "z3_w2_bf16_frozen" / "ckpt", "--stats"))
    policy = next(str(a["content"]) for tag, a in read.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not [tag for tag, _ in read.tags if tag in {"link", "img", "iframe", "base", "form"}]
    for _, attributes in read.tags:
        assert not attributes.keys() & {"src", "style", "onload", "onclick", "onerror"}
        assert str(attributes.get("href", "#")).startswith("#")


def test_without_its_script_a_page_has_the_verdict_and_every_tensor(tmp_path: Path) -> None:
    path = FIXTURES / "z2_w2_bf16_tied" / "ckpt"
    text = " ".join(Read(page(tmp_path, "inspect", path)).text)
    found = invoke("inspect", path, "--tensors")
    assert found["verdict"]["sentence"] in text
    for tensor in found["checkpoint"]["tensors"]:
        assert tensor["name"] in text
    for alias in zexport.open_checkpoint(path).aliases:
        assert f"tied: {alias}" in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    weights = {HOSTILE: torch.zeros(3), "b": torch.tensor([float("nan")])}
    root = save(Model([weights]), Run(2, 1), tmp_path / "run")
    read = Read(page(tmp_path, "inspect", root, "--stats"))
    assert "img" not in {tag for tag, _ in read.tags}
    shown = HOSTILE.replace("\x1b", "\\x1b")
    assert names_of(read) == [shown, "b"]
    assert shown in "".join(read.text)
    assert "all zero" in read.text
    assert "1 NaN" in read.text


def test_the_page_of_a_difference_tells_each_tensor_on_the_partitions_of_a(tmp_path: Path) -> None:
    a, b = (FIXTURES / name / "ckpt" for name in ("z3_w2_bf16_frozen", "z3_w2_bf16"))
    report = invoke("diff", a, b, "--all")
    read = Read(page(tmp_path, "diff", a, b))
    rows = names_of(read)
    assert rows == [tensor["a_name"] or tensor["b_name"] for tensor in report["tensors"]]
    names = [tensor.name for tensor in zexport.open_checkpoint(a).tensors]
    assert [rows[row] for row in json.loads(read.data)["rowOf"]] == names
    assert report["verdict"]["sentence"] in " ".join(read.text)


def test_the_command_writes_a_page_and_replaces_only_a_page(tmp_path: Path) -> None:
    checkpoint, page = str(FIXTURES / "z3_w2_bf16" / "ckpt"), tmp_path / "page.html"
    for _ in range(2):
        assert not CliRunner().invoke(cli, ["inspect", checkpoint, "--html", str(page)]).exception
    assert "zexport consolidate" in page.read_text()
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<p>mine</p>")
    ended = CliRunner().invoke(cli, ["diff", checkpoint, checkpoint, "--html", str(thesis)])
    assert isinstance(ended.exception, OutputError)
    assert ended.exception.problem == "exists and is no page of zexport"
    assert thesis.read_text() == "<p>mine</p>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "thesis.html"]
