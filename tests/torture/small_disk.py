"""A real file system that is too small, where this machine lets us mount one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.stopping import files, files_of, four_shards
from zexport.errors import OutputError
from zexport.export.plan import ExportPlan
from zexport.run.execute import run_plan

_PAGE = 4096


@contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[bool]:
    """A block in which ``folder`` is a tmpfs of a size; whether the system allowed it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder))
    allowed = subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0
    try:
        yield allowed
    finally:
        if allowed:
            subprocess.run(("umount", str(folder)), check=True, timeout=30)


def every_size(folder: Path, step: int = 4) -> str:
    """Export to a disk of every size up to one that is large enough; figures, in words.

    ``step`` is in pages of the system's memory.

    Raises:
        AssertionError: a disk too small was found out late, or something was left on it.
    """
    plan = four_shards(folder / "ckpt", folder / "out")
    whole = files_of(plan)
    largest = 2 * sum(map(len, whole.values())) + (1 << 20)
    refused = 0
    sizes = range(_PAGE, largest, step * _PAGE)
    for nbytes in sizes:
        with mounted(folder / "mount", nbytes) as allowed:
            if not allowed:
                return "none: this machine lets us mount nothing"
            refused += _refused(replace(plan, out_dir=folder / "mount" / "out"), whole)
    return f"{len(sizes)} tmpfs; {refused} too small, each found out before a byte was read"


def _refused(plan: ExportPlan, whole: dict[str, bytes]) -> bool:
    """Whether there was no room; then nothing is left, else the folder is whole."""
    try:
        run_plan(plan)
    except OutputError as error:
        said = error.problem
    else:
        assert files(plan.out_dir) == whole
        shutil.rmtree(plan.out_dir)
        return False
    assert "room" in said or "No space left" in said, said
    assert not list(plan.out_dir.parent.iterdir()), "something is left"
    return True
