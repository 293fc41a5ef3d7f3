"""A folder by several workers, each of which makes the same plan and writes its share of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from msgspec import Struct

from zexport.api.export import OnProgress, plan_folder
from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.errors import UsageError
from zexport.export.plan import ExportPlan
from zexport.model.hub_cache import model_folder
from zexport.options import ExportOptions, ReshardOptions, checks_arguments, chosen
from zexport.run import workers
from zexport.run.execute import ExportReport, PartReport, VerifyMode
from zexport.run.shares import Share
from zexport.store.address import place
from zexport.store.folders import absolute
from zexport.store.json import decoded, values_of


class Request(Struct, frozen=True):
    """What a plan is made of, so that whoever completes its parts can make it again.

    The options are those of what was asked for: an export, or a resharding.
    """

    checkpoint: tuple[str, ...]
    tag: str | None
    follow_symlinks: bool
    export: ExportOptions | None = None
    reshard: ReshardOptions | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        options: ExportOptions | ReshardOptions,
        tag: str | None,
        *,
        follow: bool,
    ) -> Request:
        """That of a checkpoint and options as they are given, wherever that is."""
        given = [checkpoint] if isinstance(checkpoint, Path | str) else checkpoint
        paths = tuple(str(absolute(place(path))) for path in given)
        if isinstance(options, ReshardOptions):
            config = options.ds_config and absolute(options.ds_config)
            return cls(paths, tag, follow, reshard=replace(options, ds_config=config))
        base = options.base and absolute(model_folder(options.base))
        adapter = options.adapter_config and absolute(options.adapter_config)
        options = replace(options, base=base, adapter_config=adapter)
        return cls(paths, tag, follow, export=options)

    @property
    def beside(self) -> tuple[Path, ...]:
        """What else is read by the options: a base, an adapter's or DeepSpeed's configuration."""
        named: tuple[Path | None, ...] = ()
        if self.reshard is not None:
            named = (self.reshard.ds_config,)
        elif self.export is not None:
            named = (self.export.base, self.export.adapter_config)
        return tuple(one for one in named if one is not None)

    def plan(self, out_dir: Path) -> ExportPlan:
        """The plan, made again."""
        opened = open_checkpoint(
            self.checkpoint, tag=self.tag, follow_symlinks=self.follow_symlinks
        )
        return plan_folder(opened, out_dir, self.reshard or self.export or ExportOptions())


def check_engine(plan: ExportPlan) -> None:
    """Refuse parts of what DeepSpeed's own converter is to rebuild, which takes it whole."""
    if plan.reference is not None:
        raise UsageError("parts are written by the native engine alone", found="deepspeed")


def run_part(
    plan: ExportPlan,
    part: Share,
    request: Request,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport | PartReport:
    """Write one worker's share of a plan; the worker that completes the set publishes it."""
    verify = chosen("verify", VerifyMode, verify)
    check_engine(plan)
    return workers.run_part(
        plan, part, request=values_of(request), verify=verify, progress=progress
    )


@checks_arguments
def consolidate_part(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    part: Share,
    options: ExportOptions | None = None,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport | PartReport:
    """Write one worker's share of an export; the worker that completes the set publishes it.

    The folder is byte for byte the one that ``consolidate`` makes. Workers run side by side or one
    after another, on any machine that sees both folders.

    Args:
        checkpoint: as for ``consolidate``, and the same for every worker.
        out_dir: the folder that will appear; until then all work beside it.
        part: which worker this is, and how many there are.
        options: the same for every worker.
        tag: which checkpoint, where there are several.
        follow_symlinks: read what a link leads to, wherever that is.
        verify: how what was written is read again.
        progress: told of every step.

    Raises:
        OutputError: the folder was begun for another plan or another number of workers, or another
            process writes this part.
        ZexportError: as ``consolidate`` does.
    """
    began = time.monotonic()
    request = Request.of(checkpoint, options or ExportOptions(), tag, follow=follow_symlinks)
    plan = request.plan(place(out_dir))
    done = run_part(plan, part, request, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)


@checks_arguments
def reshard_part(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    part: Share,
    options: ReshardOptions,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport | PartReport:
    """Write one worker's share of a resharding; the worker that completes the set publishes it.

    As ``consolidate_part`` does of an export: the folder is byte for byte that of ``reshard``.
    """
    began = time.monotonic()
    request = Request.of(checkpoint, options, tag, follow=follow_symlinks)
    plan = request.plan(place(out_dir))
    done = run_part(plan, part, request, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)


def finish_export(
    out_dir: Path | str,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Complete a folder all of whose parts are written, where no worker was left to do it.

    Raises:
        OutputError: there are no parts of ``out_dir``, or some are missing.
        ZexportError: as ``consolidate`` or ``reshard`` does; the plan is made again.
    """
    began = time.monotonic()
    verify = chosen("verify", VerifyMode, verify)
    out_dir = place(out_dir)
    done = workers.finish_left(out_dir, progress)
    if done is None:
        request = decoded(json.dumps(workers.requested(out_dir)), Request)
        done = workers.finish_parts(request.plan(out_dir), verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)
