"""Whether a checkpoint that is not whole may still be being written: what its files' times say."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from zexport.checkpoint.rank_files import RankFile
from zexport.errors import CheckpointError, IncompleteCheckpointError, ZexportError
from zexport.store.files import version

now = time.time
_RECENT_SECONDS = 600


def unless_unfinished(
    problems: Sequence[ZexportError], files: Sequence[RankFile]
) -> Iterator[ZexportError]:
    """The problems; that files are missing, or are not whole ones, may be a save that is going on.

    The clock of a storage may be ahead of this machine's.
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
                hint=f"{problem.hint}, or wait: files changed in the last minutes, so it may still "
                "be being written",
            )
        else:
            yield problem
