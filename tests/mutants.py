"""Mutation tests of the modules that prove and remove; prints each change that no test notices.

``python -m tests.mutants [MODULE ...]``, such as ``ranges/coverage``. mutmut changes one operator,
number, condition, option or statement of a function, but no message. Each mutant runs in a fork of
one pytest session: quick tests that reach it, until one fails. ``equivalent.txt`` lists the changes
that need no test, and why.
"""

from __future__ import annotations

import difflib
import gc
import inspect
import os
import select
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from types import CodeType, FunctionType
from typing import Any, NoReturn

import libcst as cst
import pytest
from _pytest.runner import runtestprotocol
from coverage import Coverage
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_if_exp

from tests.support import fsdp_checkpoints

HERE = Path(__file__).parent
ZEXPORT = HERE.parent / "zexport"
VERIFY = "export/test_base_model.py job/test_verify.py"
TESTS = {
    **dict.fromkeys(["ranges/coverage", "ranges/digest", "ranges/reader"], "ranges"),
    "export/checked_reader": "export/test_checked_reader.py job/test_checks.py",
    "export/verify": f"{VERIFY} whole/test_frozen.py",
    "api/verify": f"{VERIFY} adapters/test_adapter_config.py storage/test_local.py",
    "checkpoint/zero/flat_groups": "checkpoint export/test_proof.py resharding/test_refusals.py "
    "resharding/test_states_kept.py whole/test_cases.py",
    "checkpoint/boxes": "checkpoint/test_boxes.py",
    **dict.fromkeys(
        ["checkpoint/fsdp/dcp", "checkpoint/fsdp/rank_files"], "checkpoint/test_fsdp.py"
    ),
    "monitor/policy": "monitor/test_policy.py",
    **dict.fromkeys(["monitor/prune", "monitor/strip"], "monitor/test_prune.py"),
}
PROCESSES, HANGS_S, TESTS_S = 3, 30, 20.0
"""When a test hangs, and how long the tests of one mutant may take."""

ENDS = {b".": "hung", b"k": "killed", b"s": "survived", b"x": "not run"}

EQUIVALENT = {
    (heading.partition(":")[0], change.strip("\n"))
    for heading, _, changes in (
        part.partition("\n") for part in f"\n{(HERE / 'equivalent.txt').read_text()}".split("\n# ")
    )
    for change in f"\n{changes}".split("\n@@ ")[1:]
}
"""Modules, and a function of them with lines before and after: changes that need no test."""


def _changes(node: Any, *, is_inside: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield nodes of functions and what each may become."""
    code = cst.Module([]).code_for_node
    called = code(node.func) if isinstance(node, cst.Call) else ""
    is_string = isinstance(node, cst.SimpleString)
    is_expression = isinstance(node, cst.Expr)
    if (
        called.endswith(("Error", "damaged", "missing", "unsafe"))
        or (is_string and " " in node.value)
        or (is_expression and isinstance(node.value, cst.BaseString | cst.Ellipsis))
        or (isinstance(node, cst.Arg) and getattr(node.keyword, "value", "") == "strict")
        or isinstance(node, cst.FormattedString | cst.Annotation)
    ):
        return
    if is_inside and called not in {"len", "isinstance"}:
        for kind, operator in mutation_operators:
            if isinstance(node, kind) and operator is not operator_arg_removal:
                yield from ((node, new) for new in islice(operator(node), 1 if is_string else None))
        if isinstance(node, cst.If | cst.CompIf):
            yield from ((node, new) for new in operator_if_exp(node))  # type: ignore[arg-type]
        if (is_expression and "super()" not in code(node)) or isinstance(node, cst.Raise):
            yield node, cst.Pass()
        for at, one in enumerate(node.args if called else ()):
            if one.keyword is not None and one.keyword.value != "strict":
                yield node, node.with_changes(args=[*node.args[:at], *node.args[at + 1 :]])
    is_function = isinstance(node, cst.FunctionDef)
    for child in [node.body] if is_function else node.children:
        yield from _changes(child, is_inside=is_inside or is_function)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions of a module and of its classes."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from [one] if one.co_flags & inspect.CO_OPTIMIZED else _functions(one)


class Runner:
    """A pytest plugin."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.kills, self.survived = paths, Counter[pytest.Item](), 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        watched = Coverage(include=[*map(str, self.paths)], data_file=None, config_file=False)
        watched.start()
        self.session, self.seconds = session, dict[pytest.Item, float]()
        for item in session.items:
            watched.switch_context(item.nodeid)
            begun = sum(os.times()[:4])
            for one in runtestprotocol(item, False, session):  # type: ignore[arg-type]
                if one.failed:
                    pytest.exit(f"{one.longreprtext}\nfails without a mutant", 2)
            self.seconds[item] = sum(os.times()[:4]) - begun
        watched.stop()
        live = [one for one in gc.get_objects() if type(one) is FunctionType]
        gc.freeze()
        for path in self.paths:
            self.functions = [one for one in live if one.__code__.co_filename == str(path)]
            self.reached = watched.get_data().contexts_by_lineno(str(path))
            self._run(path)
        if self.survived:
            pytest.exit(f"no test notices {self.survived} changes", 1)
        return True

    def _run(self, path: Path) -> None:
        self.path, wrapper = path, MetadataWrapper(cst.parse_module(path.read_text()))
        self.module, self.places = wrapper.module, wrapper.resolve(PositionProvider)
        self.parents, every = wrapper.resolve(ParentNodeProvider), [*_changes(wrapper.module)]
        module = path.relative_to(ZEXPORT).with_suffix("").as_posix()
        files = tuple(f"tests/{one}" for one in TESTS[module].split())
        self.own = [item for item in self.seconds if item.nodeid.startswith(files)]
        ends, before = Counter[str](), self.module.code.splitlines()
        with ThreadPoolExecutor(PROCESSES) as pool:
            for change, end in zip(every, pool.map(self._end, every), strict=True):
                if end not in {"killed", "hung"}:
                    after = self.module.deep_replace(*change).code.splitlines()
                    lines = [*difflib.unified_diff(before, after, lineterm="", n=0)][3:]
                    shown = "\n".join([self._function(change[0]), *lines])
                    if (module, shown) in EQUIVALENT:
                        ends["equivalent"] += 1
                        continue
                    print(f"@@ {shown}", flush=True)
                ends[end] += 1
        self.survived += ends["survived"]
        print(f"{module}: {len(every)} mutants, {dict(ends)}", flush=True)
        statement = self.module.body[-1]
        assert self._end((statement, statement)) == "survived", "tests fail without a mutant"

    def _function(self, node: Any) -> str:
        while not isinstance(node, cst.FunctionDef):
            node = self.parents[node]
        return str(node.name.value)

    def _chosen(self, node: Any) -> list[pytest.Item]:
        """Return tests that reach a node: first those that are quick and killed others."""
        while not isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            node = self.parents[node]
        is_block = isinstance(node, cst.BaseCompoundStatement)
        last = self.places[node.body].start if is_block else self.places[node].end
        lines = range(self.places[node].start.line, last.line + 1)
        names, spent, chosen = {n for at in lines for n in self.reached.get(at, ())}, 0.0, []
        for item in sorted(self.own, key=lambda i: self.seconds[i] / (1 + self.kills[i])):
            if item.nodeid in names and spent + self.seconds[item] < TESTS_S:
                spent += self.seconds[item]
                chosen.append(item)
        return chosen

    def _end(self, change: tuple[Any, Any]) -> str:
        """Run a mutant in a fork; return how it ended."""
        items, (ours, theirs), begun, end = self._chosen(change[0]), os.pipe(), 0, b"."
        if not (pid := os.fork()):
            self._become(change, items, theirs)
        with suppress(OSError):
            os.setpgid(pid, pid)
        while end == b"." and select.select([ours], [], [], HANGS_S)[0]:
            end = os.read(ours, 1)
            begun += end == b"."
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)
        os.close(theirs)
        shutil.rmtree(_basetemp(pid), ignore_errors=True)
        if end in b".k" and begun:
            self.kills[items[begun - 1]] += 1
        return ENDS[end]

    def _become(self, change: tuple[Any, Any], items: list[pytest.Item], pipe: int) -> NoReturn:
        """Run the tests of a mutant to the first that fails, and exit."""
        end = b"x"
        try:
            os.setpgid(0, 0)
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            factory = self.session.config._tmp_path_factory  # type: ignore[attr-defined]
            cache_folder, factory._basetemp = (
                factory.getbasetemp() / "cache",
                _basetemp(os.getpid()),
            )
            factory._basetemp.mkdir()
            (factory._basetemp / "cache").symlink_to(cache_folder)
            sources = (self.module.code, self.module.deep_replace(*change).code)
            codes = (_functions(compile(one, self.path, "exec")) for one in sources)
            changed = dict(zip(*codes, strict=True))
            for one in self.functions:
                one.__code__ = changed.get(one.__code__, one.__code__)
            for value in self.functions[0].__globals__.values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
            end = b"s"
            for item, following in zip(items, [*items[1:], self.session], strict=True):
                os.write(pipe, b".")
                if any(one.failed for one in runtestprotocol(item, False, following)):  # type: ignore[arg-type]
                    end = b"k"
                    break
        finally:
            os.write(pipe, end)
            os._exit(0)


def _basetemp(pid: int) -> Path:
    return Path(gettempdir()) / f"mutant-{pid}"


if __name__ == "__main__":
    make = fsdp_checkpoints.made
    made = cache(lambda *kinds: make(Path(mkdtemp()), *kinds))
    fsdp_checkpoints.made = lambda _, *kinds: made(*kinds)  # once, not in every fork
    fsdp_checkpoints.shared = lambda _: made()
    names = [name.removesuffix(".py") for name in sys.argv[1:]] or [*TESTS]
    folders = sorted({str(HERE / one) for name in names for one in TESTS[name].split()})
    options = ["-qs", "-p", "no:cacheprovider"]
    options += [] if all("fsdp" in name for name in names) else ["-m", "not slow"]
    sys.exit(pytest.main([*options, *folders], [Runner([ZEXPORT / f"{n}.py" for n in names])]))
