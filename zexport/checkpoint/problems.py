"""What is wrong with a checkpoint: raised, told where it was allowed, or a save that goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set

from msgspec.structs import replace

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.rank_files import RankFile
from zexport.errors import CheckpointError, IncompleteCheckpointError, ZexportError, raise_all
from zexport.findings import Finding, FindingKind
from zexport.store.files import version

now = time.time
_RECENT_SECONDS = 600


def unless_unfinished(
    problems: Sequence[ZexportError], files: Sequence[RankFile]
) -> Iterator[ZexportError]:
    """The problems; that files are missing, or are not whole ones, may be a save that is going on.

    So may a copy that is; and files that were copied, whole or not, look the same (``latest`` tells
    nothing: rank 0 writes it before the other ranks are done). The clock of a storage may be ahead
    of this machine's.
    """
    times = {file.path: version(file.path).mtime_ns / 1e9 for file in files} if problems else {}
    is_recent = bool(times) and abs(now() - max(times.values())) < _RECENT_SECONDS
    for problem in problems:
        is_lacking = isinstance(problem, IncompleteCheckpointError) or problem.path in times
        if is_recent and is_lacking and isinstance(problem, CheckpointError):
            yield type(problem)(
                problem.problem,
                path=problem.path,
                found=problem.found,
                expected=problem.expected,
                hint=f"{problem.hint}; if it is still being saved or copied, wait: files "
                "changed in the last minutes",
            )
        else:
            yield problem


def raise_problems(
    checkpoint: ZeroCheckpoint, allow: Set[FindingKind] = frozenset()
) -> tuple[Finding, ...]:
    """Raise what stands in the way of an export, if anything: all of it, as the gravest kind.

    What is only told, or was allowed by name, is given back.
    """
    raise_all(
        [problem for problem in checkpoint.problems if problem.finding not in allow],
        checkpoint.location.tag_dir,
    )
    found = [finding for problem in checkpoint.problems if (finding := finding_of(problem))]
    return tuple(replace(one, accepted=one.kind in allow) for one in (*checkpoint.findings, *found))


def finding_of(problem: ZexportError) -> Finding | None:
    """A problem as what it is where it was allowed."""
    if problem.finding is None:
        return None
    return Finding(problem.finding, "", 0, problem.statement())
