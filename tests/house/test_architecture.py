"""Rules for the whole package: who may read and write files, and what no file contains."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "zexport"
MODULES = sorted(PACKAGE.rglob("*.py"))
LIMIT_S = 120


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``node`` that run; ``TYPE_CHECKING`` blocks do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from runtime_nodes(child)


@cache
def called(path: Path) -> set[str]:
    """Return the called expressions of a module as source text."""
    nodes = runtime_nodes(tree_of(path))
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


_CHANGES = re.compile(
    r"os\.(f?chmod|f?chown|fdatasync|fsync|f?truncate|link|makedirs|mkdir|pwritev?|remove|removedirs"
    r"|rename|replace|rmdir|symlink|unlink|utime)"
    r"|shutil\.(copy\w*|move|rmtree)|tempfile\.Named\w+"
    r"|.+\.(chmod|hardlink_to|mkdir|rename|rmdir|symlink_to|touch|unlink|write_(bytes|text))"
)
_READS = re.compile(
    r"open|os\.(access|fstat|listdir|l?stat|open|preadv?|scandir|statvfs|walk)"
    r"|os\.path\.(exists|getsize|is\w+|lexists|realpath)"
    r"|.+\.(exists|iterdir|is_(dir|file|mount|symlink)|lstat|open|read_(bytes|text)|readlink|resolve"
    r"|r?glob|samefile|stat)"
)


def test_only_one_module_changes_the_file_system() -> None:
    """Write, truncate, fsync, rename, link, remove; elsewhere, only libraries write."""
    found = {
        path.relative_to(PACKAGE).as_posix(): calls
        for path in MODULES
        if (calls := sorted(set(_changes(path))))
    }
    assert len(found.pop("storage/local.py")) > 10
    assert found == {}


def _changes(path: Path) -> Iterator[str]:
    for node in runtime_nodes(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        modes = [*node.args[:2], *(k.value for k in node.keywords if k.arg == "mode")]
        written = any(isinstance(m, ast.Constant) and str(m.value)[:1] in "wax" for m in modes)
        # pathlib's replace has one argument, str.replace has two, dataclasses.replace keywords
        renamed = call.endswith(".replace") and len(node.args) == 1 and not node.keywords
        opened = call.split(".")[-1] == "open" and written and "webbrowser" not in call
        created = call == "os.open" and "O_CREAT" in ast.unparse(node)
        if _CHANGES.fullmatch(call) or renamed or opened or created:
            yield call


def test_files_are_read_through_storage() -> None:
    """Any input may be in a bucket; only the command line and training use local files."""
    local_only = re.compile(
        r"(storage|cli|train)/|compat\.py|model/names_process|export/destination"
    )
    found = {
        path.relative_to(PACKAGE).as_posix(): calls
        for path in MODULES
        if not local_only.match(path.relative_to(PACKAGE).as_posix())
        if (calls := {call for call in called(path) if _READS.fullmatch(call)})
    }
    assert found == {"monitor/jobs.py": {"os.fstat", "os.pread"}}


def test_no_file_contains_paths_or_names_of_this_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, timeout=LIMIT_S, check=True
    )
    paths = [REPOSITORY / name for name in listed.stdout.decode().split("\0") if name]
    assert paths
    private = re.compile("|".join(_private()).encode())
    found = {
        path.relative_to(REPOSITORY).as_posix(): match[0]
        for path in paths
        if path.is_file() and (match := private.search(path.read_bytes()))
    }
    assert not found


def _private() -> Iterator[str]:
    """Yield patterns of home folders and of the host name unless it is an ordinary word."""
    yield r"(?<![\w.~})>-])/(?:work|root|home)/\w"
    name = socket.gethostname()
    if re.search(r"\d", name) and re.search("[a-z]", name) and len(name) > 5:
        yield rf"\b{re.escape(name)}\b"
