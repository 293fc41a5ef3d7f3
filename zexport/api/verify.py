"""A folder that was made, held against its manifest and the checkpoint it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from zexport.api.export import OnProgress, plan_anywhere
from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.checkpoint.resolve import Location, list_run_checkpoints
from zexport.checkpoint.state import TrainingState
from zexport.errors import (
    FrozenLeftOutError,
    NoSuchTagError,
    OtherTagError,
    UsageError,
    VerificationError,
)
from zexport.export.plan import ExportPlan
from zexport.filenames import ADAPTER_CONFIG, CONFIG, MANIFEST_NAME
from zexport.findings import FindingKind
from zexport.model.hub_cache import GivenBase, cached_snapshot
from zexport.options import CheckMode, ExportOptions, checks_arguments
from zexport.printable import shell_word
from zexport.run import verify
from zexport.run.manifest import Manifest, read_manifest
from zexport.run.verify import VerifyReport
from zexport.store.address import place
from zexport.store.boundary import Boundary
from zexport.store.contents import read_json_object
from zexport.store.files import reading
from zexport.store.folders import exists, is_file, is_folder
from zexport.store.json import as_table
from zexport.store.publish import check_finished

_GIVE_BASE = "Name the model that the export was given, as in --base MODEL"


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
    """What is wrong with an export, if anything.

    Args:
        out_dir: a folder that ``consolidate`` made.
        against: the checkpoint it came from; every tensor is then made again from it. Several
            folders where nodes kept their own parts.
        base: the base model, where weights came from one: a folder, or the hub's name of a model
            in its cache on this machine. Without it, the one that the manifest names is looked for.
        adapter_config: the adapter's configuration, where the export was given one.
        follow_symlinks: read what a link leads to, wherever that is.
        check: how much of the masters is held against the module's own copy of them.
        progress: told of every step.

    Raises:
        VerificationError: there is no such folder, it cannot be read, or it has no readable
            manifest to hold ``against`` against.
        CheckpointError: ``against`` cannot be opened or read, is damaged, or does not have the tag
            that the export was made from.
        UsageError: the export's names come from a base model, and ``base`` is not given; or it is
            another model.
        UnsafeError: a link leads outside the folder that it lies in.
    """
    out_dir = place(out_dir)
    base = place(base) if base is not None else None
    _check_folder(out_dir, follow_symlinks=follow_symlinks)
    if against is None:
        found = verify.verify_export(out_dir, progress=progress)
        is_full = check is not CheckMode.SAMPLED
        named = {"--base": base, "--adapter-config": adapter_config, "--check": is_full or None}
        vain = [name for name, value in named.items() if value is not None]
        without_effect = (f"{name} changes nothing without --against" for name in vain)
        return replace(found, notes=(*found.notes, *without_effect))
    manifest = read_manifest(out_dir)
    made_from = manifest.provenance.get("checkpoint")
    checkpoint = _open_source(against, made_from, follow_symlinks=follow_symlinks)
    base = base or _recorded_base(manifest, checkpoint.location, out_dir.parent)
    adapter_config = place(adapter_config) if adapter_config is not None else None
    given = ExportOptions(base=base, adapter_config=adapter_config, check=check)
    plan = _plan_again(checkpoint, out_dir, manifest, given)
    if base is None:
        _check_names(plan, manifest)
    return verify.verify_export(out_dir, plan=plan, progress=progress)


def _check_folder(out_dir: Path, *, follow_symlinks: bool) -> None:
    """Refuse what is no folder that can be read whole; without a manifest, it is not gone into."""
    hint = "Check its permissions, and that nothing is writing there"
    with reading(out_dir, VerificationError, hint):
        check_finished(out_dir, VerificationError)
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
        elif is_file(out_dir / "latest") or list_run_checkpoints(out_dir):  # to read it takes long
            raise VerificationError(
                "is a checkpoint, and no export",
                path=out_dir,
                hint="Name the export first, as in: zexport verify model --against "
                f"{shell_word(out_dir)}",
            )


def _open_source(against: Checkpoint, made_from: object, *, follow_symlinks: bool) -> TrainingState:
    """The checkpoint that an export was made from, by the tag in its manifest."""
    tag = as_table(made_from).get("tag")
    tag = tag if isinstance(tag, str) else None
    try:
        return open_checkpoint(against, tag=tag, follow_symlinks=follow_symlinks)
    except (NoSuchTagError, OtherTagError) as cause:
        raise NoSuchTagError(
            "is not the checkpoint that the export was made from",
            path=cause.path,
            found=cause.found if isinstance(cause, NoSuchTagError) else None,
            expected=f"the tag {tag}",
            hint="Give the checkpoint that it was made from, or the run with it",
        ) from cause


def _recorded_base(manifest: Manifest, location: Location, above: Path) -> Path | None:
    """Return the base that a manifest names, if it is where an adapter says, or in the Hub cache.

    Of a folder it has the last two names: the working folder and those of the export and of the
    checkpoint are looked into.
    """
    base = GivenBase.recorded(manifest.provenance.get("base"))
    if base is None:
        return None
    config = location.root / ADAPTER_CONFIG
    location.boundary.check(config)
    named = read_json_object(config).get("base_model_name_or_path") if is_file(config) else None
    folders = (Path(), above, location.root, location.root.parent)
    names = (base.name, base.name.rpartition("/")[2])
    places = [Path(str(named)), *(folder / name for folder in folders for name in names)]
    cached = cached_snapshot(base.name, base.commit or "main")
    places += [cached] if cached is not None else []
    return next((one for one in places if is_folder(one) and GivenBase.of(one) == base), None)


def _plan_again(
    checkpoint: TrainingState,
    out_dir: Path,
    manifest: Manifest,
    given: ExportOptions,
) -> ExportPlan:
    """The plan that a folder was made by, for what the checkpoint holds today.

    Of what is ``given`` all counts that is not recorded.
    """
    from zexport.resharding.plan import plan_again, recorded_settings  # noqa: PLC0415 - verify's alone

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
            again = partial(plan_anywhere, checkpoint, out_dir, options)
    except ValueError as cause:
        raise VerificationError(
            "records options that no export can have",
            path=out_dir / MANIFEST_NAME,
            found=cause,
        ) from cause
    try:
        return again()
    except (FrozenLeftOutError, UsageError) as cause:
        if isinstance(cause, UsageError) and cause.finding is not FindingKind.BASE_MISMATCH:
            raise
        raise type(cause)(
            cause.problem,
            path=cause.path,
            found=cause.found,
            expected=cause.expected,
            hint=_GIVE_BASE,
        ) from cause


def _check_names(plan: ExportPlan, manifest: Manifest) -> None:
    """Refuse to compare names that only a config tells which does not lie with the checkpoint."""
    planned = {tensor.name for shard in plan.shards for tensor in shard.tensors}
    had_config = CONFIG in manifest.files and plan.form.weights_only
    if had_config and planned != manifest.tensors.keys():
        raise UsageError(
            "the export's names are those of a base model, and without it cannot be compared",
            path=plan.out_dir,
            hint=_GIVE_BASE,
        )
