"""Making a folder of a checkpoint: its plan shown, or run, and what came of that told."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
from msgspec import Struct
from msgspec.structs import replace

from zexport.cli.options import (
    PATH,
    F,
    json_option,
    links_option,
    progress_option,
    storage_option,
    together,
)
from zexport.cli.part import part_option, ray_option
from zexport.cli.streams import put_out
from zexport.errors import NotACheckpointError, UsageError
from zexport.options import ExportOptions, ReshardOptions, Share
from zexport.storage.files import exists, is_local
from zexport.text import shell_word

if TYPE_CHECKING:
    from zexport.export.job import OnProgress
    from zexport.export.plan import ExportPlan
    from zexport.export.report import ExportReport, PartReport
    from zexport.export.write import VerifyMode
    from zexport.storage.json import Json


_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Ends of names that look like a file's."""

_M_MMAP_THRESHOLD, _LARGE_NBYTES = -3, 2 << 20

output_option = click.option("-o", "--output", type=PATH, metavar="OUT", help="OUT, by name.")
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="No progress, no report and no notes; warnings stay."
)


def making_options(overwrite: str) -> Callable[[F], F]:
    """The options of every command that makes a folder; ``overwrite`` says what is replaced."""
    return together(
        links_option,
        storage_option,
        part_option,
        ray_option,
        click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
        click.option("--overwrite", is_flag=True, help=overwrite),
        json_option,
        progress_option,
        quiet_option,
    )


class Making(Struct, frozen=True):
    """How a folder is to be made, as typed."""

    tag: str | None
    follow_symlinks: bool
    verify: str
    part: Share | None
    ray: str | None
    dry_run: bool
    json: bool
    progress: str
    quiet: bool

    @classmethod
    def taken_from(cls, given: dict[str, Any]) -> Self:
        """Those of all options; the others are left there."""
        return cls(**{name: given.pop(name) for name in cls.__struct_fields__})

    def make(
        self,
        ckpts: tuple[Path, ...],
        out: Path,
        options: ExportOptions | ReshardOptions,
        then: Callable[[], None] | None = None,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """Plan what the options are of; then show the plan, or run it and tell what was done.

        ``confirm`` is asked before the folder gets its name; ``then`` is done once it is there.
        """
        from zexport.api.export import plan_folder, run_export
        from zexport.checkpoint.open import open_checkpoint
        from zexport.cli.progress import progress_printer
        from zexport.export.report import ExportReport
        from zexport.export.write import VerifyMode

        _check_order(ckpts, out)
        _give_back_memory()
        self._say_before(out, overwrite=options.overwrite)
        began, mode = time.monotonic(), VerifyMode(self.verify)
        done: ExportReport | PartReport | None = None
        with progress_printer(self.progress, quiet=self.quiet) as on_progress:
            if (self.part or self.ray) and not self.dry_run:
                how = {"tag": self.tag, "follow_symlinks": self.follow_symlinks}
                plan, done = self._write_parts(ckpts, out, options, how, mode, on_progress)
            else:
                follow = self.follow_symlinks
                # The opened checkpoint is freed once planned: 80 MB of 100,000 tensors.
                opened = [open_checkpoint(ckpts, tag=self.tag, follow_symlinks=follow)]
                plan = plan_folder(opened.pop(), out, options)
                if not self.dry_run:
                    done = run_export(plan, verify=mode, progress=on_progress, confirm=confirm)
        if done is None:
            self._show(plan)
            return
        if then is not None:
            then()
        done = replace(done, seconds=time.monotonic() - began)
        told = plan.provenance if isinstance(done, ExportReport) else {}
        tell(done, told, as_json=self.json, quiet=self.quiet, what=_what(plan))

    def _write_parts(
        self,
        ckpts: tuple[Path, ...],
        out: Path,
        options: ExportOptions | ReshardOptions,
        how: dict[str, Any],
        mode: VerifyMode,
        on_progress: OnProgress | None,
    ) -> tuple[ExportPlan, ExportReport | PartReport]:
        """Write one part, or all parts on a Ray cluster."""
        from zexport.api.export import export_by_ray, shared_job
        from zexport.export.run import export_part

        if self.ray is None:
            assert self.part is not None  # noqa: S101 - one of both is given
            how |= {"progress": on_progress, "parts": self.part.count}
            job = shared_job(ckpts, out, options, verify=mode, **how)
            return job.plan, export_part(job, self.part)
        if self.part is not None:
            problem = "--ray writes all parts, and --part only one"
            raise UsageError(problem, hint="Leave one out")
        return export_by_ray(
            self.ray, ckpts, out, options, verify=mode, progress=on_progress, **how
        )

    def _say_before(self, out: Path, *, overwrite: bool) -> None:
        """What of the output's place may surprise."""
        if overwrite and not is_local(out) and not (self.dry_run or self.quiet):
            told = f"What {out} holds is removed before the new folder is written: "
            click.echo(f"{told}this is not undone.", err=True)
        if out.suffix in _FILES and not self.quiet:
            click.echo(f"{out} will be a folder, as every model is.", err=True)

    def _show(self, plan: ExportPlan) -> None:
        from zexport.export.summary import side_nbytes, summarize
        from zexport.report.export import print_plan
        from zexport.storage.json import form_of

        summary, what = summarize(plan), _what(plan)
        put_out(
            lambda: form_of(summary, plan.provenance),
            lambda console: print_plan(
                console, summary, side_nbytes(plan), quiet=self.quiet, what=what
            ),
            as_json=self.json,
        )


def _give_back_memory() -> None:
    """Have the C library give large blocks back to the system as they are freed.

    By itself it keeps more of them with each: with 100,000 tensors 70 of 300 MB. Smaller ones are
    made and freed all the time. Source: glibc 2.36, ``malloc/malloc.c``, ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)


def _check_order(ckpts: tuple[Path, ...], out: Path) -> None:
    """Refuse what is given the wrong way round."""
    from zexport.checkpoint.resolve import is_tag_dir, list_tags

    if (
        len(ckpts) == 1
        and is_local(ckpts[0])
        and not exists(ckpts[0])
        and (is_tag_dir(out) or (exists(out) and list_tags(out)))
    ):
        raise NotACheckpointError(
            "does not exist",
            path=ckpts[0],
            hint=f"The checkpoint comes first: {shell_word(out)} {shell_word(ckpts[0])}",
        )


def tell(
    done: ExportReport | PartReport,
    provenance: Mapping[str, Json],
    *,
    as_json: bool,
    quiet: bool,
    what: str = "",
) -> None:
    """Tell of what was made: as JSON with its ``provenance``, for people, or of warnings alone."""
    from zexport.export.report import ExportReport
    from zexport.report.export import print_export, print_part, print_warnings
    from zexport.report.text import Console, PlainConsole
    from zexport.storage.json import form_of

    if quiet and not as_json:
        print_warnings(PlainConsole(sys.stderr), done, alone=True)
        return

    def describe(console: Console) -> None:
        if isinstance(done, ExportReport):
            print_export(console, done, what=what)
        else:
            print_part(console, done)

    put_out(lambda: form_of(done, provenance), describe, as_json=as_json)


def _what(plan: ExportPlan) -> str:
    """What is made, where the form of the files does not say it: which ranks go on from it."""
    if not plan.form.is_checkpoint:
        return ""
    from zexport.resharding.plan import recorded_settings

    return str(recorded_settings(plan.provenance))


def split(
    paths: tuple[Path, ...], output: Path | None, example: str
) -> tuple[tuple[Path, ...], Path]:
    """The checkpoint's folders, and the one to make: the last, unless an option names it."""
    if not paths or (output is None and len(paths) == 1):
        hint = "'OUT'" if paths else "'CKPT'"
        what = "Name the folder to make" if paths else "Name a checkpoint, and the folder to make"
        told = f"{what}, as in: {example}"
        raise click.MissingParameter(told, param_hint=hint, param_type="argument")
    if output is None:
        return paths[:-1], paths[-1]
    if len(paths) > 1 and not exists(paths[-1]):
        raise click.UsageError(
            f"OUT is given twice, as {str(paths[-1])!r} and with --output as {str(output)!r}."
        )
    return paths, output
