"""FSDP checkpoints: which files of a folder contain the model and the optimizer.

Layouts: one DCP folder with both (torch, torchtitan); a DCP folder, file or rank files for each
(Accelerate, Trainer); rank files (verl, SkyRL); sharded safetensors next to an optimizer's DCP
folder (transformers).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.boxes import replicas_of
from zexport.checkpoint.fsdp.dcp import METADATA, read_dcp
from zexport.checkpoint.fsdp.names import cell_of
from zexport.checkpoint.fsdp.rank_files import read_rank_files
from zexport.checkpoint.fsdp.sharded_safetensors import NAME as SHARD
from zexport.checkpoint.fsdp.sharded_safetensors import read_shards
from zexport.checkpoint.fsdp.tree import NO_TREE, Tree, damaged, leaves
from zexport.checkpoint.resolve import Location
from zexport.checkpoint.state import Cell, StoredTensor, TrainingState, stored_tensors
from zexport.checkpoint.zero.records import scalar
from zexport.errors import ZexportError, layout_of
from zexport.formats.pickle_view import view
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.storage.files import children, is_file, is_folder

_NUMBER = r"(0|[1-9]\d{0,5})"
_VERL = re.compile(rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt", re.ASCII)
_ACCELERATE = re.compile(
    rf"(pytorch_model_fsdp|optimizer)(?:_{_NUMBER})?(?:_rank{_NUMBER})?(?:\.bin)?", re.ASCII
)
_WHOLE = -1
"""In place of a rank: a DCP folder, or a file that one rank gathered."""


def holds_fsdp(folder: Path) -> bool:
    """Return whether a folder contains an FSDP checkpoint, and not only its optimizer."""
    if re.fullmatch(r"optimizer(_\d+)?|optim", folder.name):
        return False
    names = [child.name for child in children(folder)]
    kinds = [kind for kind, _ in _state_dicts(folder)]
    return (
        any(name == METADATA or name.endswith(".distcp") or SHARD.fullmatch(name) for name in names)
        or "model" in kinds
        or kinds.count("pytorch_model_fsdp") == 1
    )


def open_fsdp(locations: Sequence[Location]) -> TrainingState:
    """Return the training state in a folder; what prevents using it is in ``problems``."""
    location, folder = locations[0], locations[0].tag_dir
    model, optimizer, whole = NO_TREE, NO_TREE, Cell({})
    tensors: tuple[StoredTensor, ...] = ()
    problems: list[ZexportError] = []
    try:
        with layout_of(folder):
            location.boundary.check_tree(folder)
            model, optimizer = _trees(folder)
            whole = cell_of(model, optimizer, folder)
            tensors = stored_tensors(whole)
    except ZexportError as error:
        problems = [error]
    files = {one.path: one for one in (*model.files, *optimizer.files)}
    return TrainingState(
        location=location,
        layout=model.form,
        whole=whole,
        tensors=tensors,
        replicas=() if problems else tuple(replicas_of(whole)),
        problems=tuple(problems),
        world_size=model.world_size,
        torch_files=tuple(files.values()),  # type: ignore[arg-type] # only their records are used
        notes=whole.notes,
    )


def _trees(folder: Path) -> tuple[Tree, Tree]:
    """Return the state dicts of model and optimizer: the same tree twice if one contains both."""
    paths = children(folder)
    if any(path.name == METADATA or path.name.endswith(".distcp") for path in paths):
        tree = read_dcp(folder)
        # Accelerate's folder of the model itself may be passed
        other = folder.parent / folder.name.replace("pytorch_model_fsdp", "optimizer")
        return tree, read_dcp(other) if other != folder and is_file(other / METADATA) else tree
    if shards := [path for path in paths if SHARD.fullmatch(path.name)]:
        model = read_shards(shards)
        optimizers = [path for path in paths if is_file(path / METADATA)]
        if len(optimizers) != 1:
            return model, NO_TREE
        return replace(model, notes=()), read_dcp(optimizers[0])  # which records the whole shapes
    return _read_rank_files(folder)


def _state_dicts(folder: Path) -> dict[tuple[str, str], dict[int, Path]]:
    """Return paths by rank, by kind and by number of the model (verl: by world size)."""
    found: dict[tuple[str, str], dict[int, Path]] = {}
    for path in children(folder):
        if match := _VERL.fullmatch(path.name) or _ACCELERATE.fullmatch(path.name):
            kind, number, rank = match.groups()
            found.setdefault((kind, number or "0"), {})[int(rank or _WHOLE)] = path
    return found


def _read_rank_files(folder: Path) -> tuple[Tree, Tree]:
    """Return the state dicts of a model and its optimizer in files of ranks (or of all ranks)."""
    files = _state_dicts(folder)
    kind, number = next(key for key in files if key[0] in ("model", "pytorch_model_fsdp"))
    is_verl = kind == "model"
    if is_verl and len(worlds := {world for _, world in files}) > 1:
        raise damaged("files of runs with different world sizes", folder, ", ".join(worlds))
    world_size = int(number) if is_verl else None
    model = _read_form(files[kind, number], world_size)
    optimizers = files.get(("optim" if is_verl else "optimizer", number), {})
    optimizer = _read_form(optimizers, world_size, of_optimizer=True)
    extra = files.get(("extra_state", number), {}).values()
    _check_one_step((file for file in optimizer.files if isinstance(file, TorchFile)), "step")
    _check_one_step(map(read_torch_file, extra), "last_epoch")
    return model, optimizer


def _check_one_step(files: Iterable[TorchFile], key: str) -> None:
    """Raise if ranks differ in a step: nothing else in rank files identifies the checkpoint."""
    steps: dict[float, Path] = {}
    for file in files:
        values = leaves(view(file, "state dict")).items()
        step = scalar(file, next((one for keys, one in values if keys[-1:] == (key,)), None))
        if step is not None:
            steps.setdefault(step, file.path)
    if len(steps) > 1:
        problem = f"rank files come from different checkpoints: {key} differs"
        raise damaged(problem, [*steps.values()][-1], [*steps])


def _read_form(
    paths: Mapping[int, Path], world_size: int | None, *, of_optimizer: bool = False
) -> Tree:
    """Return a state dict from rank files, a DCP folder, or one file that a rank gathered."""
    if not paths:
        return NO_TREE
    if path := paths.get(_WHOLE):
        return read_dcp(path) if is_folder(path) else read_rank_files({0: path}, 1, "gathered file")
    return read_rank_files(paths, world_size, "rank files", of_optimizer=of_optimizer)
