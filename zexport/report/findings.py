"""Findings in lines, no more of them than can be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zexport.report.text import plural

if TYPE_CHECKING:
    from zexport.findings import Finding

_SHOWN = 20


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each finding; after twenty, how many more there are."""
    for found in findings[:_SHOWN]:
        where = f"{found.tensor}: " if found.tensor else ""
        count = f" ({plural(found.count, 'element')})" if found.count else ""
        detail = f": {found.detail}" if found.detail else ""
        yield f"{where}{found.kind}{count}{detail}{', allowed' if found.accepted else ''}"
    if len(findings) > _SHOWN:
        yield f"and {len(findings) - _SHOWN:,} more; --json lists all of them"
