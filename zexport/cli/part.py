"""``--part`` and ``--ray``: which part a process writes, or which cluster writes all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import click
from msgspec import Struct

from zexport.options import Share

_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_AUTO = re.compile(r"auto(/\d{1,9})?", re.ASCII)


class _Launcher(Struct, frozen=True):
    """The environment variables of a launcher: number of this process, and count.

    ``first`` and ``step`` describe numbers that do not count from 0 by 1; a launcher without
    ``count`` does not provide it.
    """

    name: str
    number: str
    count: str = ""
    first: str = ""
    step: str = ""


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE"),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("MPI", "PMI_RANK", "PMI_SIZE"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    _Launcher(
        "a Slurm array",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_COUNT",
        "SLURM_ARRAY_TASK_MIN",
        "SLURM_ARRAY_TASK_STEP",
    ),
    _Launcher("Kubernetes", "JOB_COMPLETION_INDEX"),
)
"""Source: torch 2.13 (``distributed/run.py``), Open MPI 5, Slurm 23 (``sbatch``, output environment
variables), Kubernetes 1.24 (indexed jobs, without their count)."""


class Part(click.ParamType[Share]):
    """A part such as ``3/8``, or ``auto`` for the launcher's numbers."""

    name = "i/n"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Share:
        if isinstance(value, Share):
            return value
        number, _, count = str(value).partition("/")
        is_typed = bool(_NUMBER.fullmatch(number) and _NUMBER.fullmatch(count))
        if not is_typed and not _AUTO.fullmatch(str(value)):
            self.fail(f"{value!r} is not a part; write 1/8 to 8/8, auto, or auto/8", param, ctx)
        try:
            if is_typed:
                return _checked(int(number), int(count))
            return launched(os.environ, int(count) if count else None)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def launched(variables: Mapping[str, str], count: int | None) -> Share:
    """Return the part by the launcher's variables; ``count`` if it does not provide that.

    A launcher of a single process is ignored, such as Slurm around torchrun.

    Raises:
        ValueError: launchers disagree, or there is none.
    """
    found = [*_told(variables, count)]
    shares = {share for _, share in found if share.count > 1} or {share for _, share in found}
    if len(shares) == 1:
        return shares.pop()
    told = ", ".join(f"{share} by {name}" for name, share in found)
    names = ", ".join(launcher.number for launcher in _LAUNCHERS)
    raise ValueError(
        f"auto is ambiguous ({told}). Pass the part, such as --part 1/8"
        if found
        else f"auto needs the number of this process in one of {names}"
        + (", and their count; or pass it, as in auto/8" * (not count))
    )


def _told(variables: Mapping[str, str], count: int | None) -> Iterator[tuple[str, Share]]:
    """Yield each launcher that set its variables, and the part."""
    for launcher in _LAUNCHERS:
        number = variables.get(launcher.number)
        total = str(count or "") or variables.get(launcher.count, "")
        if number is None or not total:
            continue
        first, step = (
            variables.get(name, d) for name, d in ((launcher.first, "0"), (launcher.step, "1"))
        )
        if not all(word.isascii() and word.isdigit() for word in (number, total, first, step)):
            raise ValueError(f"auto: {launcher.number}={number!r} and the like are not numbers")
        place = (int(number) - int(first)) // max(int(step), 1)
        yield launcher.name, _checked(place + 1, int(total))


def _checked(number: int, count: int) -> Share:
    if not 1 <= number <= count:
        raise ValueError(f"part {number}/{count} is not one of 1/{count} to {count}/{count}")
    return Share(number, count)


part_option = click.option(
    "--part",
    type=Part(),
    help="Write one part of OUT: 3/8, or auto (Slurm, torchrun, MPI, Kubernetes). The last part "
    "publishes OUT.",
)


def _address(_ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    """Return the address, unless the option has no value and took the next one."""
    if given is not None and (not given or given.startswith("-")):
        raise click.BadParameter(f"{given!r} is not a cluster; write local, auto or HOST:6379")
    return given


ray_option = click.option(
    "--ray",
    metavar="CLUSTER",
    callback=_address,
    help="Write OUT on a Ray cluster whose nodes all see CKPT and OUT: local (this machine), auto "
    "(a running one), or HOST:6379.",
)
