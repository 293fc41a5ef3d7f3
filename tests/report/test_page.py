"""Pages: whole, escaped, without a network, and small; how they look is for tests/browser."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.support.checkpoints import Model, Run, save
from tests.support.pruning import trainers_run
from tests.support.sparse_checkpoint import write_sparse_zero3
from zexport.api.compare import diff_states
from zexport.checkpoint.open import open_checkpoint
from zexport.cli.main import cli
from zexport.errors import MissingExtraError, OutputError
from zexport.inspect.inspect import inspect_checkpoint
from zexport.inspect.statistics import measure
from zexport.report.page.difference import diff_page
from zexport.report.page.inspection import inspection_page
from zexport.report.page.page import check_place, page_html

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


def inspected(path: Path, *, stats: bool = False) -> str:
    found = inspect_checkpoint(path)
    assert found.checkpoint is not None
    return page_html(inspection_page(found, measure(found.checkpoint).tensors if stats else None))


def test_a_page_needs_no_network_and_lets_nothing_run_but_its_own_script() -> None:
    html = inspected(FIXTURES / "z3_w2_bf16_frozen" / "ckpt", stats=True)
    read = Read(html)
    policy = next(str(a["content"]) for tag, a in read.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not [tag for tag, _ in read.tags if tag in {"link", "img", "iframe", "base", "form"}]
    for _, attributes in read.tags:
        assert not attributes.keys() & {"src", "style", "onload", "onclick", "onerror"}
        assert str(attributes.get("href", "#")).startswith("#")


def test_without_its_script_a_page_has_the_verdict_and_every_tensor() -> None:
    path = FIXTURES / "z2_w2_bf16_tied" / "ckpt"
    text = " ".join(Read(inspected(path)).text)
    found = inspect_checkpoint(path)
    assert found.checkpoint is not None
    assert found.verdict.sentence in text
    for tensor in found.tensors:
        assert tensor.name in text
    for alias in found.checkpoint.aliases:
        assert f"tied: {alias}" in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    save(Model([{HOSTILE: torch.zeros(3), "b": torch.tensor([float("nan")])}]), Run(2, 1), tmp_path)
    read = Read(inspected(tmp_path, stats=True))
    assert "img" not in {tag for tag, _ in read.tags}
    shown = HOSTILE.replace("\x1b", "\\x1b")
    assert names_of(read) == [shown, "b"]
    assert shown in "".join(read.text)
    assert "all zero" in read.text
    assert "1 NaN" in read.text


def test_twenty_thousand_tensors_on_many_ranks_stay_below_two_megabytes(tmp_path: Path) -> None:
    shapes = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": (16, 8)
        for layer in range(64)
        for expert in range(104)
        for part in ("gate", "up", "down")
    }
    write_sparse_zero3(tmp_path, shapes, 2)
    html = inspected(tmp_path)
    assert len(html) < 2_000_000
    read = Read(html)
    assert names_of(read) == [*shapes]
    assert "model.layers.{0-63}.mlp.experts.{0-103}.up_proj.weight" in read.text


def test_the_page_of_a_difference_tells_each_tensor_on_the_partitions_of_a() -> None:
    a, b = (FIXTURES / name / "ckpt" for name in ("z3_w2_bf16_frozen", "z3_w2_bf16"))
    report = diff_states(a, b)
    read = Read(page_html(diff_page(report, open_checkpoint(a))))
    assert names_of(read) == [tensor.name for tensor in report.tensors]
    data = json.loads(read.data)
    names = [tensor.name for tensor in open_checkpoint(a).tensors]
    rows = names_of(read)
    assert [rows[row] for row in data["rowOf"]] == names
    assert report.verdict.sentence in " ".join(read.text)


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


def test_no_page_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    """A Trainer deletes the checkpoint whose folder is the oldest."""
    trainers_run(tmp_path / "run", steps=(2,))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    for folder in (checkpoint, checkpoint / "global_step2"):
        with pytest.raises(OutputError, match="lies in a checkpoint"):
            check_place(folder / "x.html")
    check_place(tmp_path / "run" / "x.html")


def test_without_jinja2_the_line_to_type_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.report.page import page

    page._parts.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    given = ["inspect", str(FIXTURES / "z3_w2_bf16" / "ckpt"), "--html", str(tmp_path / "p.html")]
    ended = CliRunner().invoke(cli, given)
    assert isinstance(ended.exception, MissingExtraError)
    assert "pip install '.[report]'" in ended.exception.hint
    assert not [*tmp_path.iterdir()]
