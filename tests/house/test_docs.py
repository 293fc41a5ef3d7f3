"""The pages say what is so: commands, errors, links, examples and the tests they name."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

import zexport
from zexport import ZexportError
from zexport.cli.main import cli

_ROOT = click.Context(cli)
COMMANDS = {name: cli.get_command(_ROOT, name) for name in cli.list_commands(_ROOT)}

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
CHOICES = [one.name for one in fields(zexport.ExportOptions)]
OURS = re.compile(r"zexport(\.\w+)+")
LINES = re.DOTALL | re.MULTILINE
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted(REPOSITORY.glob("*/README.md")),
]

each_page = pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.relative_to(REPOSITORY).as_posix()) for page in PAGES]
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    fenced = re.findall(r"^```(\w+)\n(.*?)^```$", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [body for language, body in fenced if language in languages]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


# --- pages that are made ---


def test_the_generator_says_what_is_stale_and_mends_nothing_when_it_only_checks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.generate", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_command_and_every_option_is_documented() -> None:
    sections = dict(
        re.findall(r"^## zexport ?(\w*)\n(.*?)(?=^## |\Z)", text_of(DOCS / "cli.md"), LINES)
    )
    assert set(sections) == {"", *COMMANDS}
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, parameter.opts
                assert all(opt in sections[name] for opt in parameter.opts), parameter.opts


# --- errors ---


def errors(root: type[ZexportError] = ZexportError) -> Iterator[type[ZexportError]]:
    """The whole tree."""
    yield root
    for child in root.__subclasses__():
        yield from errors(child)


def test_every_kind_of_error_has_its_code_its_cause_and_its_cure() -> None:
    found = re.findall(
        r"^\| `(\w+)` \| (\d) \| (.+?) \| (.*?) ?\|$", text_of(DOCS / "errors.md"), re.MULTILINE
    )
    rows = {kind: (int(code), cause, cure) for kind, code, cause, cure in found}
    assert {kind: row[0] for kind, row in rows.items()} == {e.kind: e.exit_code for e in errors()}
    assert all(cause for _, cause, _ in rows.values())
    assert [kind for kind, row in rows.items() if not row[2]] == ["internal"]


def test_every_exit_code_is_explained() -> None:
    section = text_of(DOCS / "interfaces.md").partition("## Exit codes")[2].partition("##")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert codes == {0, 130, *(error.exit_code for error in errors())}


# --- links, names, examples ---


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are linked by, as the usual renderers make it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", text_of(page)))
    code = "\n".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert named <= {*re.findall(r"^def (test_\w+)", code, re.MULTILINE)}
    assert named or page.name != "format-notes.md"


@each_page
def test_commands_in_examples_are_understood(page: Path) -> None:
    for block in blocks(page, "sh", "bash", "console"):
        for line in block.splitlines():
            words = shlex.split(line.removeprefix("$ ").partition("&&")[0], comments=True)
            if words[:1] == ["zexport"] and words[1:]:
                root = cli.make_context("zexport", words[1:])
                COMMANDS[words[1]].make_context(words[1], words[2:], parent=root)


@each_page
def test_python_examples_compile_and_use_what_there_is(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            check_example(node)
    assert blocks(page, "python") or page != README


def check_example(node: ast.AST) -> None:
    """Names of the library exist, and its functions take the keywords that they are given."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "zexport":
        module = __import__(node.module or "", fromlist=["_"])
        assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
    if isinstance(node, ast.Attribute) and OURS.fullmatch(ast.unparse(node)):
        assert named(ast.unparse(node)) is not None
    if isinstance(node, ast.Call) and OURS.fullmatch(ast.unparse(node.func)):
        keywords = inspect.signature(named(ast.unparse(node.func))).parameters  # type: ignore[arg-type]
        takes_choices = any(one.kind is one.VAR_KEYWORD for one in keywords.values())
        known = {*keywords, *(CHOICES if takes_choices else ())}
        assert {keyword.arg for keyword in node.keywords} <= known, ast.unparse(node)


def named(dotted: str) -> object:
    """What a dotted name under ``zexport`` is."""
    found: object = zexport
    for name in dotted.split(".")[1:]:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=["README.md", "index.md"])
def test_the_first_python_example_of_ours_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = REPOSITORY / "fixtures" / "z3_w2_bf16" / "ckpt"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-100").symlink_to(fixture)
    monkeypatch.chdir(tmp_path)
    example = next(block for block in blocks(page, "python") if "import zexport\n" in block)
    exec(compile(example, str(page), "exec"), {})  # noqa: S102 - our own page
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_first_page_shows_the_commands_of_the_demo() -> None:
    found = re.search(r"<!-- demo -->\n(.*?)<!-- /demo -->", text_of(DOCS / "index.md"), re.DOTALL)
    assert found, "the markers of the demo are gone"
    shown = re.findall(r"^\$ (.+)$", found[1], re.MULTILINE)
    run = re.findall(r"^say (.+)$", text_of(REPOSITORY / "examples" / "demo.sh"), re.MULTILINE)
    assert run
    assert [shlex.split(line) for line in shown] == [shlex.split(line) for line in run]


# --- the first page and the site ---


def test_the_readme_is_one_screen() -> None:
    assert len(text_of(README).split()) <= 700


def test_the_site_is_built_and_every_link_on_it_leads_somewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("index.html")}
    pages = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    assert made == {"index.html", *(f"{page.as_posix()}/index.html" for page in pages)} - {
        "index/index.html"
    }
