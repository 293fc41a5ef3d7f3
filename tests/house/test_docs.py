"""The docs: size, generated parts, links, commands, Python examples and the tables of errors."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import zexport
from docs import generate
from zexport.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*/README.md"))]
ERRORS = [
    one
    for one in vars(zexport.errors).values()
    if isinstance(one, type) and issubclass(one, zexport.ZexportError)
]

each_page = pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in PAGES]
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in these languages."""
    fenced = re.findall(r"^```(\w+)\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    return [body for language, body in fenced if language in languages]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def test_docs_stay_within_their_word_budget() -> None:
    texts = [text_of(page) for page in DOCS.rglob("*.md")]
    by_hand = [re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.S) for text in texts]
    assert sum(len(text.split()) for text in texts) <= 25_000
    assert sum(len(text.split()) for text in by_hand) <= 16_500
    assert len(text_of(ROOT / "README.md").split()) <= 600
    assert len(text_of(ROOT / "CHANGELOG.md").splitlines()) <= 60


def test_generated_parts_are_up_to_date() -> None:
    generated = generate.generated()
    stale = [path.name for path, text in generated.items() if generate.is_stale(path, text)]
    assert stale == [], "run python -m docs.generate"


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*tmp_path.rglob("index.html")]) == len([*DOCS.rglob("*.md")])


@each_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", one.lower()).strip().replace(" ", "-") for one in headings}


@each_page
def test_commands_parse(page: Path) -> None:
    for line in "\n".join(blocks(page, "sh", "bash", "console")).splitlines():
        for command in line.removeprefix("$ ").split("&&"):
            words = shlex.split(command, comments=True)
            if words[:1] == ["zexport"] and len(words) > 1:
                root = cli.make_context("zexport", words[1:])
                found = cli.get_command(root, words[1])
                assert found, line
                found.make_context(words[1], words[2:], parent=root)


@each_page
def test_python_examples_use_existing_names_and_arguments(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zexport"):
                module = __import__(str(node.module), fromlist=["_"])
                assert all(hasattr(module, alias.name) for alias in node.names)
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("zexport."):
                called = getattr(zexport, ast.unparse(node.func).removeprefix("zexport."))
                known = set(inspect.signature(called).parameters)
                if "choices" in known:
                    known |= set(inspect.signature(zexport.ExportOptions).parameters)
                assert {keyword.arg for keyword in node.keywords} <= known, ast.unparse(node)


def test_every_error_kind_exit_code_and_finding_is_explained() -> None:
    page = text_of(DOCS / "errors.md")
    kinds = dict(re.findall(r"^\| `(\w+)` \| (\d) \|", page, re.MULTILINE))
    assert kinds == {error.kind: str(error.exit_code) for error in ERRORS}
    findings = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (reported|refused) \|$", page, re.M))
    effects = {True: "refused", False: "reported"}
    assert findings == {one.value: effects[one.is_refused] for one in zexport.FindingKind}
    codes = re.findall(r"^\| (\d+) \|", text_of(DOCS / "interfaces.md"), re.MULTILINE)
    assert {int(code) for code in codes} == {0, 130, *(error.exit_code for error in ERRORS)}


def test_modules_named_on_the_architecture_page_exist() -> None:
    table = text_of(DOCS / "architecture.md").partition("## Where to change")[2]
    named = re.findall(r"`(\w+(?:/\w+)*)`", table.partition("\n## ")[0])
    paths = [ROOT / "zexport" / name for name in named if name not in {"watch", "prune"}]
    assert [p.name for p in paths if not p.exists() and not p.with_suffix(".py").exists()] == []
