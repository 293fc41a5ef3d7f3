"""The console that results are printed on: colours on a terminal, plain text in a pipe."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from zexport.report.text import PlainConsole

if TYPE_CHECKING:
    from zexport.report.text import Console


def console() -> Console:
    """Standard output; ``NO_COLOR`` and ``TERM=dumb`` are honoured, and long lines are not cut."""
    if not sys.stdout.isatty() and not {"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys():
        return PlainConsole(sys.stdout)
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, markup=False)
