"""An export by several workers, each of which makes the same plan and writes its share of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from msgspec import Struct

from zexport.api.export import OnProgress, plan_export
from zexport.checkpoint.opening import Checkpoint, open_checkpoint
from zexport.errors import UsageError
from zexport.model.hub_cache import model_folder
from zexport.options import ExportOptions, RecordedOptions, chosen
from zexport.plan.plan import ExportPlan
from zexport.run import parts
from zexport.run.execute import ExportReport, VerifyMode
from zexport.run.parts import PartReport
from zexport.run.shares import Share
from zexport.store.folders import absolute, local_path
from zexport.store.json import decoded, values_of


class Request(Struct, frozen=True):
    """What a plan is made of, so that whoever completes its parts can make it again."""

    checkpoint: tuple[str, ...]
    tag: str | None
    follow_symlinks: bool
    options: RecordedOptions
    base: str | None
    adapter_config: str | None
    overwrite: bool

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, options: ExportOptions, tag: str | None, *, follow: bool
    ) -> Request:
        """That of a checkpoint and options as they are given, wherever that is."""
        paths = [checkpoint] if isinstance(checkpoint, Path | str) else checkpoint
        base, adapter = options.base and model_folder(options.base), options.adapter_config
        return cls(
            tuple(str(absolute(local_path(path))) for path in paths),
            tag,
            follow,
            options.recorded(),
            str(absolute(base)) if base else None,
            str(absolute(adapter)) if adapter else None,
            options.overwrite,
        )

    def plan(self, out_dir: Path) -> ExportPlan:
        """The plan, made again."""
        base, adapter = (local_path(p) if p else None for p in (self.base, self.adapter_config))
        options = ExportOptions.from_recorded(values_of(self.options))
        options = replace(options, base=base, adapter_config=adapter, overwrite=self.overwrite)
        opened = open_checkpoint(
            self.checkpoint, tag=self.tag, follow_symlinks=self.follow_symlinks
        )
        return plan_export(opened, out_dir, options)


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
    if plan.reference is not None:
        raise UsageError("parts are written by the native engine alone", found="deepspeed")
    return parts.run_part(plan, part, request=values_of(request), verify=verify, progress=progress)


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
    options = options or ExportOptions()
    opened = open_checkpoint(checkpoint, tag=tag, follow_symlinks=follow_symlinks)
    plan = plan_export(opened, out_dir, options)
    request = Request.of(checkpoint, options, tag, follow=follow_symlinks)
    done = run_part(plan, part, request, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)


def finish_export(
    out_dir: Path | str,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Complete an export all of whose parts are written, where no worker was left to do it.

    Raises:
        OutputError: there are no parts of ``out_dir``, or some are missing.
        ZexportError: as ``consolidate`` does; the plan is made again.
    """
    began = time.monotonic()
    verify = chosen("verify", VerifyMode, verify)
    out_dir = local_path(out_dir)
    request = decoded(json.dumps(parts.requested(out_dir)), Request)
    done = parts.finish_parts(request.plan(out_dir), verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)
