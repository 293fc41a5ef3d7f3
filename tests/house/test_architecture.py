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
    assert not [name for name in users if not re.search(r"(^train/|\bdeepspeed_engine\b)", name)]


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


def test_files_are_read_through_the_storage() -> None:
    """So that any of them may be in a bucket; the command line and training use local files."""
    apart = re.compile(r"(storage|cli|train)/|compat\.py|model/names_process|export/destination")
    found = {
        path.relative_to(PACKAGE).as_posix(): calls
        for path in MODULES
        if not apart.match(path.relative_to(PACKAGE).as_posix())
        if (calls := {call for call in called(path) if _READS.fullmatch(call)})
    }
    assert found == {"monitor/jobs.py": {"os.fstat", "os.pread"}}


def test_only_the_storage_knows_addresses() -> None:
    users = where(lambda path: re.search(r"\bAddress\b", path.read_text(encoding="utf-8")))
    assert users
    assert not [name for name in users if not name.startswith(("storage/", "formats/"))]


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
