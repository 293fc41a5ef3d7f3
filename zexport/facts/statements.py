"""Statements of facts, held against each other: where they differ, and what that leads to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import cast

from msgspec import Struct, field

from zexport.errors import UsageError, ZexportError
from zexport.facts.rows import Agreement, AnyFact, Severity
from zexport.findings import Finding, FindingKind
from zexport.printable import some

_NONE: Mapping[AnyFact, str] = MappingProxyType({})
_ABOUT_MAX = 8
_BY_MAX = 4


class Statement(Struct, frozen=True):
    """What one place says of a fact.

    Attributes:
        fact: what it is about.
        value: what is said; ``None`` says nothing, and agrees with everything.
        by: who says it, in words, or the number of a rank.
        about: what it is said of, where a fact is stated of several things: a module, a key.
    """

    fact: AnyFact
    value: object
    by: str | int
    about: str = ""


NameRanks = Callable[[Iterable[int]], str]
"""Ranks in words."""


def _number(ranks: Iterable[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


class Disagreement(Struct, frozen=True):
    """Statements of one fact that contradict each other, by what they are about."""

    fact: AnyFact
    statements: dict[str, list[Statement]]

    def found(self, named: NameRanks = _number) -> str:
        """What is said by whom, in words."""
        told = []
        for about, statements in self.statements.items():
            differing = _differing(self.fact, statements)
            *sides, last = (
                f"{one.value} {_said_by([s.by for s in differing if _same(s, one)], named)}"
                for one in _distinct(differing)
            )
            said = f"{', '.join(sides)} but {last}" if sides else last
            told.append(f"{about} {said}" if about else said)
        return some(told, _ABOUT_MAX)

    @property
    def expected(self) -> str | None:
        """What there should be."""
        if self.fact.value.agreement is not Agreement.BELOW:
            return self.fact.value.expected
        limit, *_ = next(iter(self.statements.values()))
        return f"below {limit.value}, {limit.by}"

    def error(self, path: Path | None, named: NameRanks = _number) -> ZexportError:
        """The refusal of it."""
        row = self.fact.value
        return row.error(
            row.problem,
            path=path,
            found=self.found(named),
            expected=self.expected,
            hint=row.hint,
            finding=row.kind,
        )


def disagreements(statements: Iterable[Statement]) -> Iterator[Disagreement]:
    """Facts whose statements do not agree, each once, in the order in which they are stated."""
    by_fact: dict[AnyFact, dict[str, list[Statement]]] = {}
    for one in statements:
        if one.value is not None:
            by_fact.setdefault(one.fact, {}).setdefault(one.about, []).append(one)
    for fact, by_about in by_fact.items():
        differing = {about: said for about, said in by_about.items() if _differing(fact, said)}
        if differing:
            yield Disagreement(fact, differing)


def _differing(fact: AnyFact, statements: Sequence[Statement]) -> Sequence[Statement]:
    """The statements to tell of, where they do not agree."""
    if fact.value.agreement is Agreement.BELOW:
        return _beyond(statements)
    if fact.value.agreement is Agreement.EQUAL:
        return statements if len(_distinct(statements)) > 1 else []
    first, *others = statements
    apart = [s for s in others if not {*_several(first)} & {*_several(s)}]
    return [first, *apart] if apart else []


def _several(one: Statement) -> Sequence[object]:
    return one.value if isinstance(one.value, list) else [one.value]


def _beyond(statements: Sequence[Statement]) -> list[Statement]:
    """The statements of numbers that are not below the first's."""
    limit, *others = statements
    return [s for s in others if isinstance(s.value, int) and s.value >= cast("int", limit.value)]


def _said_by(sources: Sequence[str | int], named: NameRanks) -> str:
    ranks = [one for one in sources if isinstance(one, int)]
    words = dict.fromkeys(one for one in sources if isinstance(one, str))
    told = ([f"on {named(ranks)}"] if ranks else []) + (
        [f"in {some([*words], _BY_MAX)}"] if words else []
    )
    return " and ".join(told)


def _distinct(statements: Sequence[Statement]) -> list[Statement]:
    """The first statement of each value."""
    found: list[Statement] = []
    for one in statements:
        if not any(_same(one, other) for other in found):
            found.append(one)
    return found


def _same(one: Statement, other: Statement) -> bool:
    return one.value == other.value or str(one.value) == str(other.value)  # NaN is like NaN


class Judgement(Struct, frozen=True):
    """What disagreements lead to.

    Attributes:
        refused: what ends an export.
        findings: what is told by its kind, or was allowed.
        warnings: what the user should know before using the result.
        notes: what the user may want to know.
    """

    refused: list[ZexportError] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(
    statements: Iterable[Statement],
    path: Path | None,
    *,
    chosen: Path | None = None,
    allow: Set[FindingKind] = frozenset(),
    harmless: Mapping[AnyFact, str] = _NONE,
) -> Judgement:
    """What the statements lead to where they disagree.

    Args:
        statements: in the order in which their disagreements are told.
        path: what a refusal is about.
        chosen: what one is about where what the user chose is at fault.
        allow: kinds that the user allows, which are told as findings.
        harmless: facts whose differences are warned of and not refused, each with why.
    """
    judged = Judgement()
    for found in disagreements(statements):
        row = found.fact.value
        error = found.error((issubclass(row.error, UsageError) and chosen) or path)
        if row.severity is Severity.NOTED:
            judged.notes.append(error.statement())
        elif found.fact in harmless:
            judged.warnings.append(f"{error.statement()}, but {harmless[found.fact]}")
        elif row.severity is Severity.WARNED:
            judged.warnings.append(error.statement())
        elif row.kind is None or row.kind not in allow:
            judged.refused.append(error)
        else:
            judged.findings.append(Finding(row.kind, "", 0, error.statement(), accepted=True))
    return judged
