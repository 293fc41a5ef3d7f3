"""The public functions that do work: plan an export, run, verify or compare it, or all in one.

Nothing here prints or exits; progress goes to a callback, and errors are ``ZexportError``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.opening import Checkpoint, open_checkpoint, open_recorded
from zexport.collect import collect
from zexport.decide import decide
from zexport.errors import NoSuchTagError, OtherTagError, UsageError, VerificationError
from zexport.model.hub_cache import model_folder
from zexport.model.sidecars import CONFIG
from zexport.options import CheckMode, ExportOptions, RecordedOptions, ReshardOptions, chosen
from zexport.plan.plan import ExportPlan
from zexport.run import execute, parts, verify
from zexport.run.execute import ExportReport, Progress, VerifyMode
from zexport.run.manifest import MANIFEST_NAME, Manifest, read_manifest
from zexport.run.parts import PartReport
from zexport.run.shares import Share
from zexport.run.verify import VerifyReport
from zexport.store.boundary import Boundary
from zexport.store.files import reading
from zexport.store.folders import absolute, exists, is_folder, local_path
from zexport.store.json import decoded, values_of

if TYPE_CHECKING:
    from zexport.compare.diff import DiffReport

OnProgress = Callable[[Progress], None]


def plan_export(
    checkpoint: ZeroCheckpoint, out_dir: Path | str, options: ExportOptions | None = None
) -> ExportPlan:
    """The whole plan of an export; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or weights were left out of it.
        UnsupportedError: its layout is not one that can be exported.
        UsageError: an option cannot be meant.
    """
    return decide(collect(checkpoint, options), out_dir)


def plan_reshard(
    checkpoint: ZeroCheckpoint, out_dir: Path | str, options: ReshardOptions
) -> ExportPlan:
    """The whole plan of a resharding, which ``run_export`` runs; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or lacks what a training goes on from.
        UnsupportedError: a state cannot be cut for other ranks.
        UnsafeError: a value to be carried along cannot be written safely.
        UsageError: an option cannot be meant.
    """
    from zexport.resume.plan import plan_reshard as plan  # noqa: PLC0415 - an export needs none

    return plan(checkpoint, out_dir, options)


def reshard(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ReshardOptions,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Turn a ZeRO checkpoint into one that the same training goes on from on other ranks.

    Args:
        checkpoint: any level of the checkpoint's folders; several where nodes kept their own parts.
        out_dir: the folder to make, of the same arrangement as the checkpoint's (a Trainer's
            ``checkpoint-N``, say); it appears complete or not at all.
        options: number of ranks, stage and more; see ``ReshardOptions``.
        tag: which checkpoint, where there are several.
        follow_symlinks: read what a link leads to, wherever that is.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step.

    Raises:
        ZexportError: one of its kinds; ``exit_code`` and ``kind`` tell which.
    """
    began = time.monotonic()
    opened = open_checkpoint(checkpoint, tag=tag, follow_symlinks=follow_symlinks)
    plan = plan_reshard(opened, out_dir, options)
    done = run_export(plan, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)


def run_export(
    plan: ExportPlan,
    *,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Make the plan's output folder, whole and on the disk, or nothing at all.

    Args:
        plan: from ``plan_export``.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step.

    Raises:
        OutputError: the folder cannot be made.
        CheckpointError: a source cannot be read, is damaged, or was changed since the plan.
        UnsupportedError: the reference engine cannot rebuild this checkpoint.
        UnsafeError: the reference engine would have to run unknown code.
        VerificationError: what was written is not what was meant.
    """
    verify = chosen("verify", VerifyMode, verify)
    with ExitStack() as stack:
        reader = None
        if plan.reference is not None:
            from zexport.run.deepspeed_engine import open_reference  # noqa: PLC0415 - imports DeepSpeed

            one = plan.reference
            reader = stack.enter_context(open_reference(one.root, one.tag, one.tensors))
        return execute.run_plan(plan, reader=reader, verify=verify, progress=progress)


def verify_export(
    out_dir: Path | str,
    *,
    against: Checkpoint | None = None,
    base: Path | str | None = None,
    adapter_config: Path | str | None = None,
    check: CheckMode = CheckMode.SAMPLED,
    follow_symlinks: bool = False,
    progress: OnProgress | None = None,
) -> VerifyReport:
    """What is wrong with an export, if anything.

    Args:
        out_dir: a folder that ``consolidate`` made.
        against: the checkpoint it came from; every tensor is then made again from it. Several
            folders where nodes kept their own parts.
        base: the base model, where weights came from one: a folder, or the hub's name of a model
            in its cache on this machine.
        adapter_config: the adapter's configuration, where the export was given one.
        follow_symlinks: read what a link leads to, wherever that is.
        check: how much of the masters is held against the module's own copy of them.
        progress: told of every step.

    Raises:
        VerificationError: there is no such folder, it cannot be read, or it has no readable
            manifest to hold ``against`` against.
        CheckpointError: ``against`` cannot be opened or read, is damaged, or does not have the tag
            that the export was made from.
        UsageError: the export's names come from a base model, and ``base`` is not given.
        UnsafeError: a link leads outside the folder that it lies in.
    """
    out_dir = local_path(out_dir)
    base = local_path(base) if base is not None else None
    _check_folder(out_dir, follow_symlinks=follow_symlinks)
    if against is None:
        return verify.verify_export(out_dir, progress=progress)
    manifest = read_manifest(out_dir)
    made_from = manifest.provenance.get("checkpoint")
    checkpoint = _open_source(against, made_from, follow_symlinks=follow_symlinks)
    adapter_config = local_path(adapter_config) if adapter_config is not None else None
    given = ExportOptions(base=base, adapter_config=adapter_config, check=check)
    plan = _plan_again(checkpoint, out_dir, manifest, given)
    if base is None:
        _check_names(plan, manifest)
    return verify.verify_export(out_dir, plan=plan, progress=progress)


def _check_names(plan: ExportPlan, manifest: Manifest) -> None:
    """Refuse to compare names that only a config tells which does not lie with the checkpoint."""
    planned = {tensor.name for shard in plan.shards for tensor in shard.tensors}
    had_config = CONFIG in manifest.files and plan.form.weights_only
    if had_config and planned != manifest.tensors.keys():
        raise UsageError(
            "the export's names are those of a base model, and without it cannot be compared",
            path=plan.out_dir,
            hint="Name the model that the export was given, as in --base MODEL",
        )


def _open_source(
    against: Checkpoint, made_from: object, *, follow_symlinks: bool
) -> ZeroCheckpoint:
    """The checkpoint that an export was made from, by the tag and step in its manifest."""
    recorded = made_from if isinstance(made_from, dict) else {}
    tag, step = recorded.get("tag"), recorded.get("global_steps")
    tag = tag if isinstance(tag, str) else None
    step = step if isinstance(step, int) else None
    try:
        return open_recorded(against, tag, step, follow_symlinks=follow_symlinks)
    except (NoSuchTagError, OtherTagError) as cause:
        raise NoSuchTagError(
            f"does not have the tag {tag!r}, which the export was made from",
            path=cause.path,
            found=cause.found if isinstance(cause, NoSuchTagError) else None,
            hint="Give the checkpoint that it was made from, or the run with it",
        ) from cause


def _check_folder(out_dir: Path, *, follow_symlinks: bool) -> None:
    """Refuse what is no folder that can be read whole; without a manifest, it is not gone into."""
    hint = "Check its permissions, and that nothing is writing there"
    with reading(out_dir, VerificationError, hint):
        if not is_folder(out_dir):
            raise VerificationError(
                "is not a folder" if exists(out_dir) else "does not exist",
                path=out_dir,
                hint="Name a folder that zexport consolidate has written",
            )
        boundary = Boundary.of(out_dir, follow=follow_symlinks)
        boundary.check(out_dir / MANIFEST_NAME)
        if exists(out_dir / MANIFEST_NAME):
            boundary.check_tree(out_dir)


def diff_models(
    a: Path | str,
    b: Path | str,
    *,
    jobs: int | None = None,
    progress: OnProgress | None = None,
) -> DiffReport:
    """How the weights of two model folders differ, tensor by tensor, and what made the difference.

    Tied weights that one side holds under one name and the other under another are compared with
    each other. Memory does not grow with the models; neither folder is changed.

    Args:
        a: a model folder or safetensors file, such as an export.
        b: what to compare it with, such as the model that training began from. Either may be the
            hub's name of a model in its cache on this machine.
        jobs: worker threads; by default one a core, up to 4.
        progress: told of every step.

    Raises:
        CheckpointError: a side has no safetensors weights, or they cannot be read.
        UnsafeError: an index leads outside its folder.
        UnsupportedError: an element type that zexport does not know.
    """
    jobs = ExportOptions().jobs if jobs is None else jobs
    if jobs < 1:
        raise UsageError("jobs are too few", found=jobs, expected="1 or more")
    from zexport.compare.diff import diff_weights  # noqa: PLC0415 - an export compares no models

    one, other = (model_folder(local_path(side)) for side in (a, b))
    return diff_weights(one, other, jobs=jobs, progress=progress)


def diff_states(
    a: Path | str,
    b: Path | str,
    *,
    jobs: int | None = None,
    progress: OnProgress | None = None,
) -> DiffReport:
    """How the trainings in two checkpoints differ: masters, every optimizer state, and the rest.

    Stage, number of ranks and layout do not matter. Memory does not grow with the model.

    Args:
        a: a checkpoint, at any level of its folders.
        b: another one, such as what ``reshard`` has made of it.
        jobs: worker threads; by default one a core, up to 4.
        progress: told of every step.

    Raises:
        CheckpointError: a side is no checkpoint, has problems, or lacks states.
        UnsupportedError: a state cannot be told apart by name.
    """
    from zexport.compare import states  # noqa: PLC0415 - an export compares no trainings

    jobs = ExportOptions().jobs if jobs is None else jobs
    one, other = local_path(a), local_path(b)
    opened = open_checkpoint(one), open_checkpoint(other)
    return states.diff_states((one, other), opened, jobs=jobs, progress=progress)


def consolidate(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ExportOptions | None = None,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Turn a ZeRO checkpoint into a Hugging Face model folder.

    Args:
        checkpoint: any level of the checkpoint's folders; several where nodes kept their own parts.
        out_dir: the folder to make; it appears complete or not at all.
        options: element type, names, sizes; see ``ExportOptions``.
        tag: which checkpoint, where there are several.
        follow_symlinks: read what a link leads to, wherever that is.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step.

    Raises:
        ZexportError: one of its kinds; ``exit_code`` and ``kind`` tell which.
    """
    began = time.monotonic()
    opened = open_checkpoint(checkpoint, tag=tag, follow_symlinks=follow_symlinks)
    plan = plan_export(opened, out_dir, options)
    done = run_export(plan, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)


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


def _plan_again(
    checkpoint: ZeroCheckpoint,
    out_dir: Path,
    manifest: Manifest,
    given: ExportOptions,
) -> ExportPlan:
    """The plan that a folder was made by, for what the checkpoint holds today.

    Of what is ``given`` all counts that is not recorded.
    """
    from zexport.resume.plan import plan_again, recorded_settings  # noqa: PLC0415 - verify's alone

    again: Callable[[], ExportPlan]
    try:
        if "settings" in manifest.provenance:
            settings = recorded_settings(manifest.provenance)
            again = partial(plan_again, checkpoint, out_dir, manifest, settings, given.check)
        else:
            recorded = manifest.provenance.get("options")
            options = replace(
                ExportOptions.from_recorded(recorded),
                base=given.base,
                adapter_config=given.adapter_config,
                check=given.check,
            )
            again = partial(plan_export, checkpoint, out_dir, options)
    except ValueError as cause:
        raise VerificationError(
            "records options that no export can have",
            path=out_dir / MANIFEST_NAME,
            found=cause,
        ) from cause
    return again()
