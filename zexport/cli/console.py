"""The console that results are printed on: colours on a terminal, plain text in a pipe."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """Standard output; ``NO_COLOR`` and ``TERM=dumb`` are honoured, and long lines are not cut."""
    return Console(soft_wrap=True, highlight=False, markup=False)
