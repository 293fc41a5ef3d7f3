"""``--part`` and ``--ray``: the part that a process writes, or the cluster that writes all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import click

from zexport.options import Share

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    ("Slurm array", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("Kubernetes", "JOB_COMPLETION_INDEX", ""),
)
"""Name, and variables with the rank and the world size.

Source: torch 2.13 (``distributed/run.py``), Open MPI 5, Slurm 23 (``sbatch``, output environment
variables), Kubernetes 1.24 (indexed jobs, which do not provide the count)."""


class Part(click.ParamType[Share]):
    """A part such as ``3/8``; ``auto`` takes it from the launcher's variables."""

    name = "i/n"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Share:
        if isinstance(value, Share):
            return value
        match = re.fullmatch(r"(auto|\d{1,9})(?:/(\d{1,9}))?", str(value), re.ASCII)
        if match is None or (match[1] != "auto" and match[2] is None):
            self.fail(f"{value!r} is not a part; write 1/8 to 8/8, auto, or auto/8", param, ctx)
        try:
            if match[1] == "auto":
                return part_of_process(os.environ, match[2])
            return _share(int(match[1]), int(match[2]))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def part_of_process(variables: Mapping[str, str], count: str | None) -> Share:
    """Return the part that the launcher's variables mean; ``count`` replaces their world size.

    A launcher of a single process is ignored, such as Slurm around torchrun.

    Raises:
        ValueError: launchers disagree, or there is none.
    """
    found: dict[str, Share] = {}
    for name, rank_variable, count_variable in _LAUNCHERS:
        rank, total = variables.get(rank_variable), count or variables.get(count_variable)
        if rank is None or not total:
            continue
        first, step = "0", "1"
        if name == "Slurm array":
            first = variables.get("SLURM_ARRAY_TASK_MIN", first)
            step = variables.get("SLURM_ARRAY_TASK_STEP", step)
        index = (int(rank) - int(first)) // max(int(step), 1)
        found[name] = _share(index + 1, int(total))
    shares = {share for share in found.values() if share.count > 1} or {*found.values()}
    if len(shares) == 1:
        return shares.pop()
    if shares:
        listed = ", ".join(f"{share} by {name}" for name, share in found.items())
        raise ValueError(f"auto is ambiguous ({listed}). Pass the part, such as --part 1/8")
    names = ", ".join(variable for _, variable, _ in _LAUNCHERS)
    more = "" if count else ", and the world size, unless passed as in auto/8"
    raise ValueError(f"auto needs the rank in one of {names}{more}")


def _share(number: int, count: int) -> Share:
    if not 1 <= number <= count:
        raise ValueError(f"part {number}/{count} is not one of 1/{count} to {count}/{count}")
    return Share(number, count)


part_option = click.option(
    "--part",
    type=Part(),
    help="Write one part of OUT, such as 3/8; auto reads it from Slurm, torchrun, MPI or "
    "Kubernetes. The last part publishes OUT.",
)
ray_option = click.option(
    "--ray",
    metavar="CLUSTER",
    help="Write OUT on a Ray cluster whose nodes all see CKPT and OUT: local (start one here), "
    "auto (find one), or HOST:6379.",
)
