"""Where an export may be written, and what ``--overwrite`` may replace."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.resolve import is_tag_dir, list_run_checkpoints, list_tags
from zexport.errors import DamagedCheckpointError, OutputError, VerificationError
from zexport.export.manifest import Manifest, read_manifest, source_entries
from zexport.export.plan import ExportPlan
from zexport.filenames import CONFIG, MANIFEST_NAME
from zexport.storage.files import children, exists, is_file, is_folder, is_local, leaves, real
from zexport.storage.json import read_json_object
from zexport.storage.location import home, is_mount, working_folder
from zexport.storage.os_errors import reading, writing
from zexport.text import some

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin")
_FILES = (
    r"[^/]+|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)"
)
"""Files of a model; in folders: chat templates (transformers), modules (sentence-transformers)."""

_TRAINER_NAME = re.compile(r"checkpoint-(\d+)")
"""A Trainer counts names with this start (``save_total_limit``) and resumes from whole names.

Source: transformers 5.23, ``trainer_utils.py`` (``sort_checkpoints``, ``get_last_checkpoint``).
"""


def real_path(out_dir: Path) -> Path:
    with writing(out_dir):
        return real(out_dir)


def check_place(target: Path, sources: Iterable[Path]) -> None:
    """Raise if the output would contain home, the working directory, or sources, or is in a tag.

    A base model (safetensors) may have an export below it.
    """
    inhabited = {"your home folder": home(), "the working directory": working_folder()}
    for what, place in inhabited.items():
        if place is not None and place.is_relative_to(target):
            raise OutputError(
                f"is or contains {what}, which an export never replaces",
                path=target,
                found=place,
                hint="Choose a new folder for the output",
            )
    for folder, is_checkpoint in {(path.parent, path.suffix == ".pt") for path in sources}:
        place = real(folder)
        is_inside = is_checkpoint and target.is_relative_to(place)
        if place.is_relative_to(target) or is_inside:
            raise OutputError(
                "would be mixed with the input files",
                path=target,
                found=f"sources in {folder}",
                hint="Choose a folder outside the checkpoint",
            )


def check_content(target: Path, *, overwrite: bool, is_checkpoint: bool) -> None:
    """Raise unless ``target`` is free, or a result that ``overwrite`` may replace.

    A resharded checkpoint (``is_checkpoint``) may replace another; nothing else replaces one.
    """
    with writing(target):
        if is_mount(target):
            raise OutputError(
                "is a mount point, and a finished folder cannot be renamed to it",
                path=target,
                hint="Choose a folder below it",
            )
        if not is_folder(target):
            if exists(target):
                raise OutputError("is not a folder", path=target, hint="Choose another name")
            return
        if is_tag_dir(target) or list_tags(target) or list_run_checkpoints(target):
            older = _manifest_in(target)
            if not is_checkpoint or older is None or "settings" not in older.provenance:
                raise OutputError(
                    "contains a checkpoint, which an export never replaces",
                    path=target,
                    hint="Choose another name; OUT is the last of the folders",
                )
        if not children(target):
            return
        if not overwrite:
            hint = "Choose another name, or pass --overwrite"
            raise OutputError("exists and is not empty", path=target, hint=hint)
        if not is_file(target / MANIFEST_NAME):
            _check_model(target)
        elif edits := _edits_of(target):
            raise OutputError(
                "was changed after zexport wrote it, so zexport does not replace it",
                path=target,
                found=some(edits, 3),
                hint="Keep what you need and remove the folder, or choose another name for the "
                "output",
            )


def _manifest_in(folder: Path) -> Manifest | None:
    with suppress(VerificationError):
        return read_manifest(folder)
    return None


def _edits_of(target: Path) -> list[str]:
    from zexport.export.verify import find_edits  # noqa: PLC0415 - only for an older export

    return [f"{one.file} {one.problem}" for one in find_edits(target) if not one.tensor]


def _check_model(target: Path) -> None:
    known = _FILES if _is_model(target) else "(?!)"
    names = (path.relative_to(target).as_posix() for path in leaves(target))
    if foreign := [name for name in names if not re.fullmatch(known, name)]:
        raise OutputError(
            "contains files of neither an export nor a model; --overwrite would remove them",
            path=target,
            found=some(sorted(foreign)),
            expected=f"{MANIFEST_NAME}, or only weights and other files of a model",
            hint="Choose another name for the output, or remove the files yourself",
        )


def _is_model(folder: Path) -> bool:
    if any(path.match(pattern) for path in children(folder) for pattern in _WEIGHTS):
        return True
    with suppress(DamagedCheckpointError):
        return "model_type" in read_json_object(folder / CONFIG)
    return False


def with_warnings(plan: ExportPlan) -> ExportPlan:
    """Return the plan, with a warning if a Trainer would count its output as a checkpoint.

    Raises:
        OutputError: training would resume from the output, which has only weights.
    """
    target = real_path(plan.out_dir)
    name = _TRAINER_NAME.match(target.name)
    if name is None or not (is_local(target) and is_folder(target.parent)):
        return plan
    with reading(target.parent):
        there = list_run_checkpoints(target.parent)
    if target.name in there or not any(map(_TRAINER_NAME.match, there)):
        return plan
    is_resumed = name[0] == target.name
    if is_resumed and not plan.form.is_checkpoint:
        raise OutputError(
            "would be taken for a checkpoint of the run in that folder; training would resume from "
            "it, and it has only weights",
            path=target,
            hint="Choose a name that does not begin with checkpoint-, or another folder",
        )
    if is_resumed and int(name[1]) == plan.origin.step:
        return plan
    resumes = "resumes from it if it has the highest number, and " * is_resumed
    warning = (
        f"{target.name} is in the folder of a run: its Trainer {resumes}counts it as a "
        "checkpoint and may remove it (save_total_limit). Choose another name or folder"
    )
    return replace(plan, warnings=(warning, *plan.warnings))


def is_complete(plan: ExportPlan, target: Path) -> bool:
    """Whether ``target`` is already the complete output of a plan, by its manifest."""
    manifest = _manifest_in(target)
    if manifest is None:
        return False
    sources = (source_entries(plan, {}), manifest.sources)
    read, recorded = ({(one.path, one.nbytes, one.mtime_ns) for one in side} for side in sources)
    tensors = {t.name: (t.dtype, t.shape, f.filename) for f in plan.shards for t in f.tensors}
    files = {*(one.filename for one in plan.shards), *(one.filename for one in plan.side_files)}
    return (
        read == recorded
        and tensors == {n: (t.dtype, t.shape, t.shard) for n, t in manifest.tensors.items()}
        and files == manifest.files.keys()
        and plan.provenance.get("checkpoint") == manifest.provenance.get("checkpoint")
        and not _edits_of(target)
    )
