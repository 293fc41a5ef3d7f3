"""What may be imported where, and what may be said and done where, for the package as a whole."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "zexport"
MODULES = sorted(PACKAGE.rglob("*.py"))
LIMIT_S = 120


def where(is_wrong: Callable[[Path], object]) -> list[str]:
    """The modules of which something is true that must not be."""
    return [path.relative_to(PACKAGE).as_posix() for path in MODULES if is_wrong(path)]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def runtime_nodes(node: ast.AST, *, functions: bool = True) -> Iterator[ast.AST]:
    """Everything below ``node`` that runs, in its functions too or not; no types-only imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.FunctionDef) and not functions:
            continue
        yield child
        yield from runtime_nodes(child, functions=functions)


def packages(path: Path, *, functions: bool = True) -> set[str]:
    """The top-level packages that a module imports."""
    names = []
    for node in runtime_nodes(tree_of(path), functions=functions):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def called(path: Path) -> set[str]:
    """The names of what a module calls, as they are written."""
    nodes = runtime_nodes(tree_of(path))
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 50
    assert "click" in packages(PACKAGE / "cli" / "main.py")
    assert "sys.exit" in called(PACKAGE / "cli" / "main.py")


def test_deepspeed_is_imported_only_to_train_and_as_the_reference() -> None:
    users = where(lambda path: packages(path) & {"deepspeed", "peft"})
    assert users
    assert not [name for name in users if not re.search(r"(^train/|\breference_engine\b)", name)]


def test_frameworks_are_imported_only_in_processes_of_their_own_or_when_needed() -> None:
    users = where(lambda path: packages(path, functions=False) & {"torch", "transformers"})
    assert users
    own_process = r"(^(train|callbacks)/|^model/(conversion|trace|names_process)\.py$)"
    assert not [name for name in users if not re.search(own_process, name)]


def test_only_the_command_line_and_the_reports_know_a_terminal() -> None:
    users = where(lambda path: packages(path) & {"click", "rich"})
    assert users
    assert not [name for name in users if not name.startswith(("cli/", "report/"))]


def test_the_library_neither_prints_nor_ends_the_process() -> None:
    speaking = {"print", "input", "exit", "quit", "sys.exit", "os._exit"}
    users = where(lambda path: called(path) & speaking)
    own_process = r"(^cli/|\bnames_process\.py$|^train/worker\.py$)"
    assert users
    assert not [name for name in users if not re.search(own_process, name)]


_OF_PATHS = re.compile(
    r"absolute|chmod|cwd|exists|expanduser|r?glob|home|is_(dir|file|mount|symlink)|iterdir|l?stat"
    r"|r?mkdir|rmdir|open|read_(bytes|text)|readlink|rename|resolve|samefile|symlink_to|touch|unlink"
    r"|walk|write_(bytes|text)"
)
_OF_OS = re.compile(
    r"(open|os\.(access|fstat|listdir|l?stat|makedirs|mkdir|open|preadv?|pwrite|re(move|name|place)"
    r"|rmdir|scandir|statvfs|unlink|walk|path\.(exists|is\w+|getsize|realpath|lexists|abspath))"
    r"|shutil\.\w+)"
)


def test_files_are_opened_listed_and_written_in_the_store_alone() -> None:
    """All others name files, so that a file may lie elsewhere than on this machine's disk.

    The command line and training use the user's own disk, DeepSpeed's own functions write as
    DeepSpeed does, and `--then` looks for its program.
    """
    apart = r"(store|cli|train)/|compat\.py|model/names_process\.py"
    found = {
        path.relative_to(PACKAGE).as_posix(): calls
        for path in MODULES
        if not re.match(apart, path.relative_to(PACKAGE).as_posix())
        if (calls := {call for call in called(path) if _is_of_files(call)})
    }
    assert found == {"beside/jobs.py": {"shutil.which"}}
    assert any(_is_of_files(call) for call in called(PACKAGE / "store" / "folders.py"))


def _is_of_files(call: str) -> bool:
    *before, name = call.split(".")
    is_method = bool(before) and before[0] != "os" and _OF_PATHS.fullmatch(name)
    return bool(is_method or _OF_OS.fullmatch(call))


def test_errors_are_caught_by_name() -> None:
    """The one exception: whatever the model or DeepSpeed raises ends a training worker's run."""
    assert where(_catches_anything) == ["train/worker.py"]


def _catches_anything(path: Path) -> bool:
    handlers = (n for n in runtime_nodes(tree_of(path)) if isinstance(n, ast.ExceptHandler))
    return not all(map(_is_narrow, handlers))


def _is_narrow(handler: ast.ExceptHandler) -> bool:
    """Whether it names its errors, or only tidies up after any and lets it go on."""
    caught = "" if handler.type is None else ast.unparse(handler.type)
    goes_on = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    if re.search(r"\bBaseException\b", caught):
        return goes_on
    return bool(caught) and not re.search(r"\bException\b", caught)


def test_imports_only_go_down() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(linter), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_tells_of_the_machine_it_was_made_on() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, timeout=LIMIT_S, check=True
    )
    paths = [REPOSITORY / name for name in listed.stdout.decode().split("\0") if name]
    assert paths
    telling = re.compile("|".join(_telling()).encode())
    found = {
        path.relative_to(REPOSITORY).as_posix(): match[0]
        for path in paths
        if path.is_file() and (match := telling.search(path.read_bytes()))
    }
    assert not found


def _telling() -> Iterator[str]:
    """Folders that only one machine has, and its name unless that is an ordinary word."""
    yield r"(?<![\w.~})>-])/(?:work|root|home)/\w"
    name = socket.gethostname()
    if re.search(r"\d", name) and re.search("[a-z]", name) and len(name) > 5:
        yield rf"\b{re.escape(name)}\b"
