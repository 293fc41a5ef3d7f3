"""The Python files that a model folder brings along: found by name, copied, and never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from zexport.errors import DamagedCheckpointError
from zexport.store.contents import read_regular
from zexport.store.files import reading, version
from zexport.store.folders import is_file
from zexport.store.json import Json, as_table, several

_SOURCE_NBYTES_MAX = 4 << 20
_FILES_MAX = 256

_RELATIVE_IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]*(from[ \t]*\.[^\n(;#]*?import[ \t]*\((?:[^)#]|#[^\n]*)*\)"
    rb"|from[ \t]*\.(?:[^\n\\;#]|\\\r?\n)*)",
    re.MULTILINE,
)
"""A statement that may be a relative import. Each is parsed by itself: the tree of a whole file
can take a thousand times the memory of its text."""


def modules_named(content: Mapping[str, Json]) -> set[str]:
    """The modules of its own folder that a config names, in ``auto_map`` or as a pipeline.

    A reference into another repository (``owner/name--module.Class``) names none. Source:
    transformers 5.23, ``dynamic_module_utils.py``, ``get_class_from_dynamic_module``.
    """
    auto_map = content.get("auto_map")
    references: list[Json] = list(auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    pipelines = as_table(content.get("custom_pipelines"))
    references += [as_table(entry).get("impl") for entry in pipelines.values()]
    flat = [reference for one in references for reference in several(one)]
    modules = {r.split(".")[0] for r in flat if isinstance(r, str) and "--" not in r}
    return {module for module in modules if re.fullmatch(r"\w+", module)}


def code_files(folder: Path, config: Mapping[str, Json]) -> dict[str, Path]:
    """The modules in ``folder`` that a config names, and all that they import relatively, by name.

    What is not there, and what lies outside the folder, is left out.
    """
    found: dict[str, Path] = {}
    waiting = sorted(f"{module}.py" for module in modules_named(config))
    while waiting:
        name = waiting.pop()
        path = folder / name
        if name in found or not is_file(path):
            continue
        found[name] = path
        if len(found) > _FILES_MAX:
            raise DamagedCheckpointError(
                "imports too many modules", path=folder, expected=f"{_FILES_MAX} or fewer"
            )
        waiting += _imported(PurePosixPath(name), _source_of(path))
    return found


def _source_of(path: Path) -> bytes:
    with reading(path, DamagedCheckpointError):
        source = read_regular(path, _SOURCE_NBYTES_MAX)
    if source is None:
        raise DamagedCheckpointError(
            "is too large for a Python module",
            path=path,
            found=f"{version(path).nbytes} bytes",
            expected=f"{_SOURCE_NBYTES_MAX} or fewer",
            hint="Mend or remove the file",
        )
    return source


def _imported(name: PurePosixPath, source: bytes) -> Iterator[str]:
    """The files within the folder that the relative imports of one of its files may mean."""
    for statement in _imports(source):
        above = statement.level - 1
        if above > len(name.parent.parts):
            continue
        parts = name.parent.parts[: len(name.parent.parts) - above]
        target = PurePosixPath(*parts, *(statement.module or "").split("."))
        for path in (target, *(target / alias.name for alias in statement.names)):
            if path.parts:
                yield f"{path}.py"
            yield f"{path / '__init__.py'}"


def _imports(source: bytes) -> Iterator[ast.ImportFrom]:
    for match in _RELATIVE_IMPORT.finditer(source):
        try:
            body = ast.parse(match[1].strip()).body
        except (SyntaxError, ValueError):  # a sentence in a docstring that begins so
            continue
        yield from (node for node in body if isinstance(node, ast.ImportFrom) and node.level)
