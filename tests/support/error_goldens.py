"""Every error message as a user gets it, kept in ``golden/errors`` so that wording is reviewed.

A message is known by where it is made: the module, the function, and the how-manieth error of that
function. While a test runs, the first message of every place is noted; where the goldens name that
test as the one that causes an error, the message has to be the golden one. So each golden example
is the message of a test that really causes it, and no error is caused twice.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from zexport.errors import ZexportError
from zexport.facts.adapters import AdapterFact
from zexport.facts.model import Fact
from zexport.facts.rows import AnyFact
from zexport.facts.statements import Disagreement
from zexport.facts.training import TrainingFact

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "zexport"
GOLDENS = REPOSITORY / "tests" / "golden" / "errors"

_ERRORS = PACKAGE / "errors.py"
_FACTS: tuple[AnyFact, ...] = (*TrainingFact, *Fact, *AdapterFact)

Site = str
"""``export/commit.py _check_target 2``: module, function, number of the error in it."""


@dataclass(frozen=True)
class Golden:
    """One message, and the test that causes it."""

    kind: str
    test: str
    message: str

    @property
    def has_test(self) -> bool:
        """Whether there is a test of that name."""
        path, *_, name = self.test.split("::")
        file = REPOSITORY / path
        return file.is_file() and f"def {name.partition('[')[0]}(" in file.read_text("utf-8")


def error_classes(root: type[ZexportError] = ZexportError) -> Iterator[type[ZexportError]]:
    """The whole tree."""
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


# --- where errors are made ---


@cache
def sites() -> Mapping[tuple[str, int, int], Site]:
    """Every place that makes an error, by file, line and column of the call."""
    found: dict[tuple[str, int, int], Site] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != _ERRORS:
            module = path.relative_to(PACKAGE).as_posix()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for (line, column), (function, number) in _calls(tree):
                found[str(path), line, column] = f"{module} {function} {number}"
    rows = {("facts", number, 0): _site_of_fact(fact) for number, fact in enumerate(_FACTS)}
    return found | rows


def _site_of_fact(fact: AnyFact) -> Site:
    """Where statements of a fact disagree, its row makes the error."""
    *_, module = type(fact).__module__.split(".")
    return f"facts/{module}.py {fact.name} 1"


def _calls(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[str, int]]]:
    """Line and column of every call that makes an error, its function, and its number there."""
    counts: Counter[str] = Counter()
    found = _calls_below(tree, "", frozenset(kind.__name__ for kind in error_classes()))
    for place, function in sorted(found):
        counts[function] += 1
        yield place, (function, counts[function])


def _calls_below(
    node: ast.AST, function: str, names: frozenset[str]
) -> Iterator[tuple[tuple[int, int], str]]:
    for child in ast.iter_child_nodes(node):
        inside, known = function, names
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{function}.{child.name}" if function else child.name
        if isinstance(child, ast.FunctionDef):
            known = names | _error_arguments(child, names)
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Name)
            and child.func.id in known
        ):
            yield (child.lineno, child.col_offset), inside or "module"
        yield from _calls_below(child, inside, known)


def _error_arguments(function: ast.FunctionDef, names: frozenset[str]) -> frozenset[str]:
    """Its arguments that are handed a kind of error."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return frozenset(
        argument.arg
        for argument in arguments
        if argument.annotation is not None
        and names & set(re.findall(r"type\[(\w+)\]", ast.unparse(argument.annotation)))
    )


def _site_of(frame: FrameType | None) -> Site | None:
    """The place in the package that is just making an error."""
    while frame is not None and frame.f_code.co_filename in (str(_ERRORS), __file__):
        frame = frame.f_back
    if frame is None:
        return None
    if frame.f_code is Disagreement.error.__code__:
        return _site_of_fact(frame.f_locals["self"].fact)
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, _, column, _ = positions
    return sites().get((frame.f_code.co_filename, line or 0, column or 0))


# --- what a test causes ---


@contextmanager
def noted() -> Iterator[dict[Site, tuple[str, str]]]:
    """Kind and message of the first error that is made at each place meanwhile."""
    seen: dict[Site, tuple[str, str]] = {}
    plain = ZexportError.__init__

    def note(self: ZexportError, *args: object, **named: object) -> None:
        plain(self, *args, **named)  # type: ignore[arg-type]
        site = _site_of(sys._getframe(1))
        if site is not None:
            seen.setdefault(site, (self.kind, self.sentence()))

    ZexportError.__init__ = note  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        ZexportError.__init__ = plain  # type: ignore[method-assign]


def departures(
    test: str, told: Mapping[Site, tuple[str, str]], goldens: Mapping[Site, Golden]
) -> Iterator[str]:
    """Where a test's messages are not the golden ones that it stands for."""
    for site, golden in goldens.items():
        if golden.test == test and told.get(site) != (golden.kind, golden.message):
            yield f"{site}: {told.get(site, 'no error')}, golden: {golden.message}"


def normalised(message: str, basetemp: Path) -> str:
    """The message without what differs from machine to machine and from run to run."""
    for path, word in (
        (rf"{re.escape(str(basetemp))}/\w+", "<tmp>"),
        (re.escape(str(REPOSITORY)), "<repository>"),
        (re.escape(sys.prefix), "<python>"),
    ):
        message = re.sub(path, word, message)
    message = re.sub(r"modified at \d+ ns", "modified at <time> ns", message)
    message = re.sub(r"\d+ bytes free", "<space> bytes free", message)
    message = re.sub(r"storage '\d{9,}'", "storage '<address>'", message)  # torch's old container
    message = re.sub(
        r"unknown variant .*? at line \d+ column \d+", "<the library's words>", message
    )
    return message.replace("\n", "\\n")


# --- the files ---


def read_goldens() -> dict[Site, Golden]:
    """Every golden message, by its place."""
    found = {}
    for path in sorted(GOLDENS.glob("*.txt")):
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            head, test, message = block.strip().split("\n", 2)
            found[head.removeprefix("## ")] = Golden(path.stem, test, message)
    return found


def write_goldens(goldens: Mapping[Site, Golden]) -> None:
    """One file a kind, in the order of the modules."""
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for path in GOLDENS.glob("*.txt"):
        path.unlink()
    for kind in sorted({golden.kind for golden in goldens.values()}):
        blocks = [
            f"## {site}\n{golden.test}\n{golden.message}\n"
            for site, golden in sorted(goldens.items(), key=lambda item: _natural(item[0]))
            if golden.kind == kind
        ]
        (GOLDENS / f"{kind}.txt").write_text("\n".join(blocks), encoding="utf-8")


def _natural(site: Site) -> tuple[str, str, int]:
    module, function, number = site.split(" ")
    return module, function, int(number)


class Update:
    """What ``--update-goldens`` gathers from the tests that run, and writes at the end."""

    def __init__(self) -> None:
        self._old = read_goldens()
        self._ran: set[str] = set()
        self._seen: dict[Site, list[Golden]] = {}

    def add(self, test: str, seen: Mapping[Site, tuple[str, str]]) -> None:
        """Note what a test caused."""
        self._ran.add(test)
        for site, (kind, message) in seen.items():
            self._seen.setdefault(site, []).append(Golden(kind, test, message))

    def write(self) -> None:
        """Keep the test that each place had, where it still causes the error; forget the gone."""
        there = set(sites().values())
        kept = {
            site: golden
            for site, golden in self._old.items()
            if site in there and golden.has_test and golden.test not in self._ran
        }
        for site, candidates in self._seen.items():
            if site not in kept:
                old = self._old.get(site)
                same = [g for g in candidates if old is not None and g.test == old.test]
                kept[site] = (same or sorted(candidates, key=_simplicity))[0]
        write_goldens(kept)


def _simplicity(golden: Golden) -> tuple[int, str]:
    """The shorter message is the better example."""
    return len(golden.message), golden.test
