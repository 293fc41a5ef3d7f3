"""Verify an export by itself or against its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from zexport.api.export import plan_anywhere
from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.checkpoint.resolve import Location
from zexport.checkpoint.state import TrainingState
from zexport.errors import (
    AmbiguousTagError,
    FrozenLeftOutError,
    NoSuchTagError,
    OtherTagError,
    UsageError,
    VerificationError,
)
from zexport.export import verify
from zexport.export.manifest import Manifest, read_manifest
from zexport.export.plan import ExportPlan
from zexport.export.report import OnProgress
from zexport.export.verify import VerifyReport
from zexport.filenames import ADAPTER_CONFIG, MANIFEST_NAME
from zexport.findings import FindingKind
from zexport.model.hub_cache import GivenBase, cached_snapshot
from zexport.options import CheckMode, ExportOptions, checks_arguments
from zexport.storage.files import exists, is_file, is_folder
from zexport.storage.json import as_table, read_json_object
from zexport.storage.location import place
from zexport.storage.locks import check_finished
from zexport.storage.os_errors import reading
from zexport.storage.symlink_policy import Boundary

_HINT_BASE = "Pass the base model of the export, as in --base MODEL"


@checks_arguments
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
    """Return everything that is wrong with an export.

    Args:
        out_dir: a folder that ``consolidate`` or ``reshard`` wrote.
        against: the checkpoint it came from; every tensor is computed again from it and compared.
            Several folders if the checkpoint is node-local.
        base: the base model, if the export has weights of one: a folder or the Hub id of a cached
            model. By default zexport looks for the one that the manifest records.
        adapter_config: the adapter's configuration, if the export was given one.
        check: how many fp32 master weights are compared with the module weights.
        follow_symlinks: follow symlinks that point outside the input folders.
        progress: called at every step.

    Raises:
        VerificationError: the folder is missing or cannot be read; or ``against`` was given, and
            there is no readable manifest.
        CheckpointError: ``against`` cannot be read, is damaged, or does not have the export's tag.
        UsageError: ``base`` is needed and missing, or is another model.
        UnsafeError: a symlink points outside its folder.
    """
    out_dir, base = place(out_dir), None if base is None else place(base)
    _check_folder(out_dir, follow_symlinks=follow_symlinks)
    if against is None:
        return verify.verify_export(out_dir, progress=progress)
    manifest = read_manifest(out_dir)
    checkpoint = _open_source(against, manifest, follow_symlinks=follow_symlinks)
    given = {
        "base": base or _recorded_base(manifest, checkpoint.location, out_dir),
        "adapter_config": None if adapter_config is None else place(adapter_config),
        "check": check,
    }
    plan = _plan_again(checkpoint, out_dir, manifest, given)
    planned = {tensor.name for shard in plan.shards for tensor in shard.tensors}
    is_missing = given["base"] is None and "base" in manifest.provenance
    if is_missing and planned != manifest.tensors.keys():
        raise UsageError(
            "the export has other tensor names, and its base model was not found",
            path=out_dir,
            hint=_HINT_BASE,
        )
    return verify.verify_export(out_dir, plan=plan, progress=progress)


def _check_folder(out_dir: Path, *, follow_symlinks: bool) -> None:
    """Raise unless the folder can be read; without a manifest, only its top level is read."""
    hint = "Check its permissions, and that nothing is writing there"
    with reading(out_dir, VerificationError, hint):
        check_finished(out_dir, VerificationError)
        if not is_folder(out_dir):
            raise VerificationError(
                "is not a folder" if exists(out_dir) else "does not exist",
                path=out_dir,
                hint="Pass a folder that zexport consolidate has written",
            )
        if exists(out_dir / MANIFEST_NAME):
            Boundary.of(out_dir, follow=follow_symlinks).check_tree(out_dir)


def _open_source(
    against: Checkpoint, manifest: Manifest, *, follow_symlinks: bool
) -> TrainingState:
    recorded = as_table(manifest.provenance.get("checkpoint"))
    tag, folder = recorded.get("tag"), recorded.get("folder")
    tag = tag if isinstance(tag, str) else None
    try:
        return open_checkpoint(against, tag=tag, follow_symlinks=follow_symlinks)
    except AmbiguousTagError:  # verl: each checkpoint has the tag `actor`
        runs = [against] if isinstance(against, Path | str) else against
        steps = [place(run) / Path(str(folder)).parent.name for run in runs]
        if not all(is_folder(step / str(tag)) for step in steps):
            raise
        return open_checkpoint(steps, tag=tag, follow_symlinks=follow_symlinks)
    except (NoSuchTagError, OtherTagError) as cause:
        raise NoSuchTagError(
            "is not the checkpoint that the export was made from",
            path=cause.path,
            found=cause.path and cause.path.name if cause.found == tag else cause.found,
            expected=f"the tag {tag}",
            hint="Pass the checkpoint that it was made from, or its run",
        ) from cause


def _recorded_base(manifest: Manifest, location: Location, out_dir: Path) -> Path | None:
    """Return the base model that the manifest records, if it is on this machine.

    The manifest has the last two names of its folder. They are looked up in the working directory
    and in the parent folders of export and checkpoint.
    """
    base = GivenBase.recorded(manifest.provenance.get("base"))
    if base is None:
        return None
    folders = (Path(), out_dir.parent, location.root, location.root.parent)
    names = (base.name, Path(base.name).name)
    places = [folder / name for folder in folders for name in names]
    config = location.model_dir / ADAPTER_CONFIG
    location.boundary.check(config)
    if is_file(config):
        places.insert(0, Path(str(read_json_object(config).get("base_model_name_or_path"))))
    if base.commit and (cached := cached_snapshot(base.name, base.commit)):
        places.append(cached)
    return next((one for one in places if is_folder(one) and GivenBase.of(one) == base), None)


def _plan_again(
    checkpoint: TrainingState, out_dir: Path, manifest: Manifest, given: dict[str, Any]
) -> ExportPlan:
    """Return the plan of the export for the checkpoint's present content.

    Options come from the manifest; ``given`` has those that it does not record.
    """
    from zexport.resharding.plan import plan_again, recorded_settings  # noqa: PLC0415 - rarely used

    try:
        if "settings" in manifest.provenance:
            settings = recorded_settings(manifest.provenance)
            return plan_again(checkpoint, out_dir, manifest, settings, given["check"])
        options = replace(ExportOptions.from_recorded(manifest.provenance.get("options")), **given)
        return plan_anywhere(checkpoint, out_dir, options)
    except msgspec.ValidationError as cause:
        raise VerificationError(
            "records options that no export can have", path=out_dir / MANIFEST_NAME, found=cause
        ) from cause
    except (FrozenLeftOutError, UsageError) as cause:
        if isinstance(cause, FrozenLeftOutError) or cause.finding is FindingKind.BASE_MISMATCH:
            cause.hint = _HINT_BASE
        raise
