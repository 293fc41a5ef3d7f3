"""``--part`` and ``--ray``: who does the work, one process, one of several, or a cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click
from msgspec import Struct

from zexport.errors import UsageError
from zexport.run.shares import Share

if TYPE_CHECKING:
    from zexport.run.execute import ExportReport, PartReport

_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_AUTO = re.compile(r"auto(/\d{1,9})?", re.ASCII)


class _Launcher(Struct, frozen=True):
    """The variables by which a launcher tells a process which it is, and of how many.

    ``first`` has the number that the first of them gets, ``step`` the distance to the next; a
    launcher without ``count`` does not say how many there are.
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
variables), Kubernetes 1.24 (indexed jobs, which do not tell their number)."""


class Part(click.ParamType[Share]):
    """A share such as ``3/8``, or ``auto`` for the launcher's own numbers."""

    name = "i/n"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Share:
        """The share that it means."""
        if isinstance(value, Share):
            return value
        number, _, count = str(value).partition("/")
        is_typed = bool(_NUMBER.fullmatch(number) and _NUMBER.fullmatch(count))
        if not is_typed and not _AUTO.fullmatch(str(value)):
            self.fail(f"{value!r} is no part; write 1/8 to 8/8, auto, or auto/8", param, ctx)
        try:
            if is_typed:
                return _checked(int(number), int(count))
            return launched(os.environ, int(count) if count else None)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def launched(variables: Mapping[str, str], count: int | None) -> Share:
    """The share that the launcher's variables mean; ``count`` where it does not say how many.

    A launcher that started one process alone says nothing, such as Slurm around torchrun. Raises
    ``ValueError`` where two disagree, or none says it.
    """
    found = [*_told(variables, count)]
    shares = {share for _, share in found if share.count > 1} or {share for _, share in found}
    if len(shares) == 1:
        return shares.pop()
    told = ", ".join(f"{share} by {name}" for name, share in found)
    names = ", ".join(launcher.number for launcher in _LAUNCHERS)
    raise ValueError(
        f"auto could be several parts ({told}); write the one that is meant, such as --part 1/8"
        if found
        else f"auto needs the number of this process in one of {names}"
        + (", and how many there are; where the launcher does not say that: auto/8" * (not count))
    )


def _told(variables: Mapping[str, str], count: int | None) -> Iterator[tuple[str, Share]]:
    """What each launcher says whose variables are there."""
    for launcher in _LAUNCHERS:
        number = variables.get(launcher.number)
        total = str(count or "") or variables.get(launcher.count, "")
        if number is None or not total:
            continue
        first, step = (
            variables.get(name, d) for name, d in ((launcher.first, "0"), (launcher.step, "1"))
        )
        if not all(word.isascii() and word.isdigit() for word in (number, total, first, step)):
            raise ValueError(f"auto: {launcher.number}={number!r} and the like are no numbers")
        place = (int(number) - int(first)) // max(int(step), 1)
        yield launcher.name, _checked(place + 1, int(total))


def _checked(number: int, count: int) -> Share:
    if not 1 <= number <= count:
        raise ValueError(f"part {number}/{count} is none of 1/{count} to {count}/{count}")
    return Share(number, count)


part_option = click.option(
    "--part",
    type=Part(),
    help="Write one share of OUT: 3/8, or auto for what Slurm, torchrun, MPI or Kubernetes says. "
    "The last one publishes OUT.",
)


def _address(_ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    """A cluster's address; the next option in its place was left without a value."""
    if given is not None and (not given or given.startswith("-")):
        raise click.BadParameter(f"{given!r} is no cluster; write local, auto or HOST:6379")
    return given


ray_option = click.option(
    "--ray",
    metavar="CLUSTER",
    callback=_address,
    help="Have OUT written by the nodes of a Ray cluster: local (this machine), auto (the one that "
    "runs here), or its address.",
)


Execute: TypeAlias = "Callable[..., ExportReport | PartReport]"
"""Has a plan done, of which a request can be made; else as ``run_export``."""


@contextmanager
def executing(
    paths: Sequence[Path],
    out: Path,
    part: Share | None,
    ray: str | None,
    confirm: Callable[[], object],
    beside: Callable[[], Sequence[Path]] = tuple,
) -> Iterator[tuple[Sequence[Path], Execute]]:
    """A block in which those are there who do the work.

    Where the checkpoint lies for them, and what has them do it; ``confirm`` is for one alone, and
    ``beside``, which says what else is read, for those of a cluster.
    """
    if ray is not None:
        if part is not None:
            raise UsageError("--ray has all parts written, and --part one", hint="Leave one out")
        from zexport.cluster.export import gathered

        with gathered(ray, paths, out, beside()) as crew:
            yield crew.checkpoint, lambda plan, request, **how: crew.run(plan, request(), **how)
    elif part is not None:
        from zexport.api.parts import run_part

        yield paths, lambda plan, request, **how: run_part(plan, part, request(), **how)
    else:
        from zexport.api.export import run_export

        yield paths, lambda plan, _, **how: run_export(plan, confirm=confirm, **how)
