"""A row of the table of facts: how statements must agree, and what it is if they do not."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.findings import FindingKind


class Severity(Enum):
    """What a difference leads to."""

    REFUSED = "refused"
    WARNED = "warned of"
    NOTED = "noted"


class Agreement(Enum):
    """When statements agree."""

    EQUAL = "all are the same"
    BELOW = "all are below the first"
    SHARED = "each has one in common with the first"


class Row(Struct, frozen=True):
    """What is to be known of a fact.

    Attributes:
        name: of the fact, in words.
        problem: what is wrong where statements differ, without a full stop.
        expected: what there should be, if that says more.
        hint: the next step; empty where there is none.
        severity: what a difference leads to.
        kind: the finding that it is; a refusal is lifted by allowing it, where there is one.
        agreement: when statements agree.
        error: what it is refused as; what the user chose is at fault where that is a usage error.
    """

    name: str
    problem: str
    expected: str | None = None
    hint: str = ""
    severity: Severity = Severity.REFUSED
    kind: FindingKind | None = None
    agreement: Agreement = Agreement.EQUAL
    error: type[ZexportError] = DamagedCheckpointError


def warned_of(
    name: str, problem: str, hint: str = "", agreement: Agreement = Agreement.EQUAL
) -> Row:
    """What is right or wrong for reasons that no file tells: the user has to look."""
    return Row(name, problem, hint=hint, severity=Severity.WARNED, agreement=agreement)


def noted(name: str, problem: str) -> Row:
    """What is usual, and worth a word."""
    return Row(name, problem, severity=Severity.NOTED)


class AnyFact(Enum):
    """What may be stated more than once; each value is the fact's row."""

    _value_: Row
