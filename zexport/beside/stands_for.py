"""What an export holds of a checkpoint that it is to stand for, and what else lies with that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from msgspec import structs

from zexport.beside.prunable import OF_A_RESUME, Place
from zexport.checkpoint.contents import Role, ZeroCheckpoint, whole_tensor
from zexport.checkpoint.pruned import NOTES
from zexport.checkpoint.rank_files import parse_rank_file
from zexport.checkpoint.untrusted import Value
from zexport.compare.diff import diff_tensors
from zexport.compare.folder import ModelWeights, open_weights
from zexport.compare.tensor import Outcome
from zexport.errors import CheckpointError, OutputError, VerificationError, ZexportError
from zexport.filenames import CONFIG, MANIFEST_NAME, README, SOURCE_SIDECAR
from zexport.formats.torch_file import read_torch_file
from zexport.model.card import is_unfilled
from zexport.options import AdapterMode, ExportDType, ExportOptions
from zexport.plan.plan import SourceFile
from zexport.printable import some
from zexport.ranges.digests import digest_file
from zexport.run.manifest import Manifest
from zexport.run.output_files import is_safetensors
from zexport.store.contents import read_json_object
from zexport.store.files import version
from zexport.store.folders import is_folder, is_link, leaves, matching
from zexport.store.json import Json

_WEIGHTS = re.compile(r"(adapter_|pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)")
"""Weights that frameworks write beside the rank files, which hold the same; so may others."""

_OF_THE_STATE = re.compile(
    r"(adapter_|pytorch_)?model\.(safetensors|bin)\.index\.json"
    r"|trainer_state\.json|training_args\.bin|zero_to_\w+\.py|latest(_universal)?"
)
"""What frameworks write with every save: words on the state and on the weights.

What a program has a framework save for it (``custom_checkpoint_0.pkl``) may be found nowhere else.
Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_copy_recovery_script``: two scripts).
"""

_OWN_FILES = (*NOTES, MANIFEST_NAME, SOURCE_SIDECAR)
_UNIVERSAL, _UNIVERSALS_OWN = "zero", "optimizer_state.pt"
_OF_A_WEIGHT = ("fp32.pt", "step.pt", "exp_avg.pt", "exp_avg_sq.pt")
_RESTATED = frozenset({"dtype", "torch_dtype", "inference_mode"})
"""Keys by which an export says of itself what its weights are, whatever the checkpoint said."""

_HELD = (Outcome.EQUAL, Outcome.CAST_EQUAL, Outcome.ONLY_IN_B)


def check_nothing_else(place: Place, out: Path, manifest: Manifest) -> None:
    """Refuse to remove a folder with files that are no training's, and that no export holds.

    Raises:
        OutputError: with their names.
    """
    tag = place.tag_dir.relative_to(place.folder)
    files = [path for path in leaves(place.folder) if not (is_folder(path) or is_link(path))]
    more = [path for path in files if not _is_accounted_for(path, place, out, manifest)]
    if more:
        named = (path.relative_to(place.folder) for path in more)
        tops = (one if one.parent in (tag, Path()) else f"{one.parts[0]}/" for one in named)
        raise OutputError(
            "is not removed: it holds what is no part of a training's state, and what "
            f"{out} lacks or has otherwise",
            path=place.folder,
            found=some([*dict.fromkeys(map(str, tops))], 5),
            hint="Move it elsewhere first; what belongs to the model: export the checkpoint again",
        )


def _is_accounted_for(path: Path, place: Place, out: Path, manifest: Manifest) -> bool:
    """Whether a file is of the training's state, or the export holds what it says."""
    if path.parent == place.tag_dir and parse_rank_file(path) is not None:
        return True
    if path.is_relative_to(place.tag_dir / _UNIVERSAL):
        return _is_universals(path, place.tag_dir / _UNIVERSAL)
    above = (place.tag_dir, place.folder)
    names = [path.relative_to(one).as_posix() for one in above if path.is_relative_to(one)]
    if any(_is_held(path, name, out, manifest) for name in names):
        return True
    own = (OF_A_RESUME, _OF_THE_STATE)
    is_own = any(one.fullmatch(path.name) for one in own) or path.name in _OWN_FILES
    return is_own and path.parent in above


def _is_universals(path: Path, zero: Path) -> bool:
    """Whether it is a state of a weight in a universal checkpoint: more than one weight has it."""
    if path.parent == zero:
        return path.name == _UNIVERSALS_OWN
    is_state = path.suffix == ".pt" and path.parent.parent == zero
    return is_state and (path.name in _OF_A_WEIGHT or len(matching(zero, f"*/{path.name}")) > 1)


def _is_held(path: Path, name: str, out: Path, manifest: Manifest) -> bool:
    """Whether an export has a file, its weights, or one of the same name that was made of it."""
    entry = manifest.files.get(name)
    if _WEIGHTS.fullmatch(path.name) and (entry is not None or "/" not in name):
        return _has_weights(path, PurePosixPath(name).parent, out, manifest)
    if entry is None:
        return False
    is_same = (entry.nbytes, entry.blake3) == (version(path).nbytes, digest_file(path))
    return is_same or _is_made_of(out / name, path, manifest)


def _is_made_of(own: Path, path: Path, manifest: Manifest) -> bool:
    """Whether a file of an export says all that one of the checkpoint does."""
    if own.name == README:
        return is_unfilled(path)
    if own.name == CONFIG and manifest.provenance.get("mended"):
        return True  # it tells what was mended
    try:
        one, other = read_json_object(path), read_json_object(own)
    except CheckpointError:
        return False
    return _plain(one) == _plain({key: other[key] for key in one if key in other})


def _plain(value: Json) -> Json:
    """A value of JSON without what an export says of itself."""
    if not isinstance(value, dict):
        return value
    return {key: _plain(one) for key, one in value.items() if key not in _RESTATED}


def _has_weights(path: Path, folder: PurePosixPath, out: Path, manifest: Manifest) -> bool:
    """Whether every tensor of a file is in a folder of an export, as it is or not yet rounded."""
    names = [name for name in manifest.files if is_safetensors(name)]
    sides = [open_weights(out / name) for name in names if PurePosixPath(name).parent == folder]
    tensors = {name: one for side in sides for name, one in side.tensors.items()}
    export = ModelWeights(out, tensors, tuple(file for side in sides for file in side.files))
    try:
        own = _weights_in(path)
        found = diff_tensors((path, out), (own, export), jobs=ExportOptions().jobs)
    except ZexportError:  # nobody can tell what it is
        return False
    return all(one.outcome in _HELD for one in found.tensors)


def _weights_in(path: Path) -> ModelWeights:
    """The tensors of a file that have elements: ZeRO-3 leaves placeholders without."""
    found = open_weights(path) if is_safetensors(path.name) else _weights_in_pickle(path)
    tensors = {name: one for name, one in found.tensors.items() if 0 not in one.shape}
    return structs.replace(found, tensors=tensors)


def _weights_in_pickle(path: Path) -> ModelWeights:
    file = read_torch_file(path)
    named = Value(path, "the weights", file.value).entries()
    placed = {name: whole_tensor(file, name, one.tensor(), Role.FROZEN) for name, one in named}
    return ModelWeights(path, placed, (SourceFile.of(file),))


def check_stands_for(out: Path, manifest: Manifest, whole: ZeroCheckpoint | None) -> None:
    """Refuse an export that lacks something of a checkpoint, or was made in spite of a finding.

    Args:
        out: its folder.
        manifest: what that says.
        whole: the checkpoint, where nothing else will be left of it.

    Raises:
        OutputError: with the reason.
        VerificationError: the manifest is none of an export.
    """
    told = manifest.provenance
    try:
        options = ExportOptions.from_recorded(told.get("options"))
    except ValueError as cause:
        raise VerificationError(
            "is not the manifest of an export", path=out / MANIFEST_NAME, found=cause
        ) from cause
    lost = () if whole is None else _lost(manifest, options, whole)
    for reason, hint in (*_lacking(manifest, options), *lost):
        raise OutputError(f"cannot stand for the checkpoint: {reason}", path=out, hint=hint)


def _lacking(manifest: Manifest, options: ExportOptions) -> Iterator[tuple[str, str]]:
    hint = "Export it again without that"
    if options.exclude_frozen:
        yield "it was exported without frozen weights", hint
    if options.allow or any(one.accepted for one in manifest.findings):
        yield "it was exported with --allow", hint


def _lost(
    manifest: Manifest, options: ExportOptions, whole: ZeroCheckpoint
) -> Iterator[tuple[str, str]]:
    """What an export does not hold of a checkpoint, as that has it, and what to do."""
    if options.dtype is not ExportDType.FP32:
        rounded = f"its weights are rounded ({options.dtype.value}), the checkpoint's are fp32"
        yield rounded, "Export it again as fp32"
    if options.only:
        yield f"it holds {options.only} of the module alone", "Export it again without --only"
    if options.adapter is AdapterMode.MERGE:
        merged = "the adapter is worked into its base there, and what was trained is not in it"
        yield merged, "Export it again with --adapter keep"
    untrained = [one.name for one in whole.tensors if one.role is not Role.TRAINABLE]
    if options.adapter is AdapterMode.KEEP and untrained:
        yield (
            f"it holds the adapter, and not {len(untrained):,} weights of the base that lie in the "
            f"checkpoint ({some(untrained, 3)})",
            "Export it again with --layout memory, which has all; without --delete they stay",
        )
    accounting = manifest.provenance.get("accounting")
    if not isinstance(accounting, dict) or accounting.get("left_out") != 0:
        of = "" if options.adapter_name is None else f": it is of {options.adapter_name} alone"
        yield f"trained weights were left out of it{of}", "Export the whole of it"
