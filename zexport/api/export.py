"""Export or reshard a checkpoint: plan, run, or both; whole, in parts, or on Ray."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.checkpoint.resolve import NEWEST, locate
from zexport.checkpoint.state import TrainingState
from zexport.errors import UsageError
from zexport.export.gather import gather
from zexport.export.job import Job, load
from zexport.export.overwrite import with_warnings
from zexport.export.plan import ExportPlan, SideFile, share_memory
from zexport.export.plan_file import Request, seal, unseal
from zexport.export.planner import decide
from zexport.export.report import (
    ExportReport,
    OnProgress,
    PartReport,
    VerifyMode,
)
from zexport.export.run import export_part, run_export
from zexport.model.hub_cache import model_folder
from zexport.options import (
    SHARD_NBYTES_MIN,
    Engine,
    ExportOptions,
    ReshardOptions,
    Share,
    checks_arguments,
    chosen,
)
from zexport.storage.files import absolute, is_local, version
from zexport.storage.json import values_of
from zexport.storage.location import place
from zexport.storage.os_errors import reading


def plan_export(
    checkpoint: TrainingState, out_dir: Path | str, options: ExportOptions | None = None
) -> ExportPlan:
    """Return the complete plan of an export; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or lacks weights.
        UnsupportedError: its layout cannot be exported.
        UsageError: an option is invalid.
        OutputError: training would resume from the output, which is among checkpoints.
    """
    if options is not None and options.max_shard_nbytes < SHARD_NBYTES_MIN:
        raise UsageError(
            "max_shard_nbytes is too small for a file of weights",
            found=f"{options.max_shard_nbytes} bytes",
            expected=f"{SHARD_NBYTES_MIN} bytes or more",
        )
    return with_warnings(plan_anywhere(checkpoint, out_dir, options))


def plan_anywhere(
    checkpoint: TrainingState, out_dir: Path | str, options: ExportOptions | None = None
) -> ExportPlan:
    """Return the plan of an export without looking at its output folder."""
    if options is not None and options.engine is Engine.DEEPSPEED:
        if not checkpoint.location.is_zero:
            raise UsageError(
                "--engine deepspeed only reads ZeRO checkpoints",
                path=checkpoint.location.tag_dir,
                hint="Leave out --engine",
            )
        for path in (checkpoint.location.root, place(out_dir), options.base):
            if path is not None and not is_local(path):
                raise UsageError(
                    "--engine deepspeed only reads and writes local files",
                    path=path,
                    hint="Copy the checkpoint to this machine, or leave --engine out",
                )
    return _with_versions(decide(gather(checkpoint, options), out_dir))


def plan_reshard(
    checkpoint: TrainingState, out_dir: Path | str, options: ReshardOptions
) -> ExportPlan:
    """Return the complete plan of a resharding, for ``run_export``; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or lacks what resuming needs.
        UnsupportedError: a state cannot be resharded.
        UnsafeError: a value cannot be copied safely.
        UsageError: an option is invalid.
    """
    from zexport.resharding import plan  # noqa: PLC0415 - exports do not need it

    return with_warnings(_with_versions(plan.plan_reshard(checkpoint, out_dir, options)))


def plan_folder(
    checkpoint: TrainingState, out_dir: Path | str, options: ExportOptions | ReshardOptions
) -> ExportPlan:
    if isinstance(options, ReshardOptions):
        return plan_reshard(checkpoint, out_dir, options)
    return plan_export(checkpoint, out_dir, options)


def _with_versions(plan: ExportPlan) -> ExportPlan:
    """Return the plan with the versions of the files to copy, so that changes are refused."""

    def one(side: SideFile) -> SideFile:
        if side.origin is None:
            return side
        with reading(side.origin):
            return structs.replace(side, version=version(side.origin))

    return structs.replace(plan, side_files=tuple(map(one, plan.side_files)))


_OWN = ("jobs", "max_memory_nbytes", "overwrite", "base", "adapter_config", "ds_config")
"""Options that may differ between parts: resources, and where a machine sees a path."""


def shared_job(
    checkpoint: Checkpoint,
    out_dir: Path,
    options: ExportOptions | ReshardOptions,
    *,
    verify: VerifyMode,
    parts: int | None = None,
    progress: OnProgress | None = None,
    tag: str | None = None,
    follow_symlinks: bool = False,
) -> Job:
    """Return the job of several parts: its sealed plan is loaded, or made by the first.

    Every part resolves path and tag: ``latest`` may name another checkpoint by now. Ray has no
    fixed number of ``parts``.
    """
    if isinstance(options, ExportOptions) and options.engine is Engine.DEEPSPEED:
        raise UsageError("--part and --ray need --engine native", found="deepspeed")
    how: dict[str, Any] = {"tag": tag, "follow_symlinks": follow_symlinks}
    given = [checkpoint] if isinstance(checkpoint, Path | str) else checkpoint
    paths = [place(one) for one in given]
    is_newest = tag == NEWEST
    location = open_checkpoint(paths, **how).location if is_newest else locate(paths[0], **how)
    more = [getattr(options, name, None) for name in ("base", "adapter_config", "ds_config")]
    if more[0] is not None:
        more[0] = model_folder(more[0])
    anchors = (location.root, *paths[1:], *(place(one) for one in more if one is not None))
    choices = {name: one for name, one in values_of(options).items() if name not in _OWN}
    choices |= {"checkpoint": location.name, "parts": parts}
    request = Request(tuple(str(absolute(one)) for one in anchors), choices, follow_symlinks)
    if (sealed := load(out_dir, request)) is None:
        opened = open_checkpoint(checkpoint, **how)
        content = seal(plan_folder(opened, out_dir, options), request)
        sealed = unseal(content, out_dir, out_dir, request)
        return Job.of(sealed, verify, progress)
    threads, chunk = share_memory(options, sealed.plan.shards)
    own = structs.replace(
        sealed.plan, jobs=threads, chunk_nbytes=chunk, overwrite=options.overwrite
    )
    return Job.of(structs.replace(sealed, plan=own), verify, progress)


@checks_arguments
def consolidate_part(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    part: Share,
    options: ExportOptions | ReshardOptions | None = None,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport | PartReport:
    """Write one part of an export or a resharding; the last part publishes the output.

    The output is byte for byte that of ``consolidate``. Parts run at the same time or one after
    another, on any machine that sees both folders.

    Args:
        part: number and count; all else as for ``consolidate``, and the same for all parts.

    Raises:
        OutputError: the folder was begun for another plan, or another process writes this part.
        ZexportError: as ``consolidate``.
    """
    began = time.monotonic()
    how: dict[str, Any] = {"tag": tag, "follow_symlinks": follow_symlinks, "progress": progress}
    mode, options = chosen("verify", VerifyMode, verify), options or ExportOptions()
    job = shared_job(checkpoint, place(out_dir), options, verify=mode, parts=part.count, **how)
    return structs.replace(export_part(job, part), seconds=time.monotonic() - began)


reshard_part = consolidate_part


def export_by_ray(
    address: str,
    checkpoint: Checkpoint,
    out_dir: Path,
    options: ExportOptions | ReshardOptions,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    **how: Any,
) -> tuple[ExportPlan, ExportReport]:
    """Write an output on a Ray cluster (``local``, ``auto`` or an address).

    ``how`` are ``tag`` and ``follow_symlinks``.

    Raises:
        UsageError: Ray is not installed, there is no cluster, or a node has no zexport.
        ZexportError: as ``consolidate`` or ``reshard``.
    """
    from zexport.export.ray import connected, export_on_cluster  # noqa: PLC0415 - only for --ray

    with connected(address):
        job = shared_job(checkpoint, absolute(place(out_dir)), options, verify=verify, **how)
        return job.plan, export_on_cluster(job, options.jobs, progress)


@checks_arguments
def consolidate(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ExportOptions | None = None,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    **choices: Any,
) -> ExportReport:
    """Export a checkpoint as a Hugging Face model folder.

    Args:
        checkpoint: any level of the checkpoint's folders; several for a node-local checkpoint.
        out_dir: the output folder; it appears complete or not at all.
        options: dtype, names, sizes; see ``ExportOptions``.
        tag: which checkpoint, if there are several.
        follow_symlinks: read links that lead outside the input folders.
        verify: how files are read back before publishing.
        progress: called at every step.
        **choices: fields of ``options`` by name, such as ``dtype="bf16"``.

    Raises:
        TypeError: no option has such a name.
        ZexportError: one of its kinds; see ``exit_code`` and ``kind``.
    """
    how = {"tag": tag, "follow_symlinks": follow_symlinks}
    options = replace(options or ExportOptions(), **choices)
    return _run(checkpoint, out_dir, options, how, verify, progress)


@checks_arguments
def reshard(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ReshardOptions | None = None,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    **choices: Any,
) -> ExportReport:
    """Write a ZeRO checkpoint for another world size or stage, to resume training.

    ``out_dir`` has the same layout as the checkpoint's folder, such as a Trainer's
    ``checkpoint-N``. ``options`` are world size, stage and more, each also by name, such as
    ``world_size=3``. All else as for ``consolidate``.
    """
    how = {"tag": tag, "follow_symlinks": follow_symlinks}
    options = replace(options or ReshardOptions(), **choices)
    return _run(checkpoint, out_dir, options, how, verify, progress)


def _run(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ExportOptions | ReshardOptions,
    how: dict[str, Any],
    verify: VerifyMode | str,
    progress: OnProgress | None,
) -> ExportReport:
    began = time.monotonic()
    plan = plan_folder(open_checkpoint(checkpoint, **how), out_dir, options)
    done = run_export(plan, verify=verify, progress=progress)
    return structs.replace(done, seconds=time.monotonic() - began)
