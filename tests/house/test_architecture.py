"""Rules for the whole package: who may import, print, catch and write what."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "zexport"
MODULES = sorted(PACKAGE.rglob("*.py"))
LIMIT_S = 120


def modules_where(holds: Callable[[Path], object]) -> list[str]:
    return [path.relative_to(PACKAGE).as_posix() for path in MODULES if holds(path)]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def runtime_nodes(node: ast.AST, *, functions: bool = True) -> Iterator[ast.AST]:
    """Yield the nodes below ``node`` that run; ``TYPE_CHECKING`` blocks do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.FunctionDef) and not functions:
            continue
        yield child
        yield from runtime_nodes(child, functions=functions)


def packages(path: Path, *, functions: bool = True) -> set[str]:
    """Return the top-level packages that a module imports."""
    names = []
    for node in runtime_nodes(tree_of(path), functions=functions):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def called(path: Path) -> set[str]:
    """Return the called expressions of a module as source text."""
    nodes = runtime_nodes(tree_of(path))
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def test_only_train_and_the_reference_engine_import_deepspeed() -> None:
    users = modules_where(lambda path: packages(path) & {"deepspeed", "peft"})
    assert users
    assert not [name for name in users if not re.search(r"(^train/|\bdeepspeed_engine\b)", name)]


def test_torch_is_imported_on_use_or_in_another_process() -> None:
    users = modules_where(lambda path: packages(path, functions=False) & {"torch", "transformers"})
    assert users
    own_process = r"(^(train|callbacks)/|^model/(conversion|trace|names_process)\.py$)"
    assert not [name for name in users if not re.search(own_process, name)]


def test_only_cli_and_report_import_click_and_rich() -> None:
    users = modules_where(lambda path: packages(path) & {"click", "rich"})
    assert users
    assert not [name for name in users if not name.startswith(("cli/", "report/"))]


def test_library_neither_prints_nor_exits() -> None:
    printing = {"print", "input", "exit", "quit", "sys.exit", "os._exit"}
    users = modules_where(lambda path: called(path) & printing)
    own_process = r"(^cli/|\bnames_process\.py$|^train/launch\.py$)"
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


def test_only_storage_handles_addresses() -> None:
    users = modules_where(lambda path: re.search(r"\bAddress\b", path.read_text(encoding="utf-8")))
    assert users
    assert not [name for name in users if not name.startswith(("storage/", "formats/"))]


def test_errors_are_caught_by_name() -> None:
    """Except in a training worker, where the model or DeepSpeed may raise anything."""
    assert modules_where(_catches_anything) == ["train/launch.py"]


def _catches_anything(path: Path) -> bool:
    handlers = (n for n in runtime_nodes(tree_of(path)) if isinstance(n, ast.ExceptHandler))
    return not all(map(_is_narrow, handlers))


def _is_narrow(handler: ast.ExceptHandler) -> bool:
    """Whether it names its errors, or cleans up and raises again."""
    caught = "" if handler.type is None else ast.unparse(handler.type)
    reraises = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    if re.search(r"\bBaseException\b", caught):
        return reraises
    return bool(caught) and not re.search(r"\bException\b", caught)


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
