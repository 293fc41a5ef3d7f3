"""FSDP checkpoints: which files of a folder contain the model and the optimizer.

Layouts: one DCP folder with both (torch, torchtitan); a DCP folder, file or rank files for each
(Accelerate, Trainer); rank files (verl, SkyRL); sharded safetensors next to an optimizer's DCP
folder (transformers).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from zexport.checkpoint.adapter_folder import with_adapter_name
from zexport.checkpoint.boxes import replicas_of
from zexport.checkpoint.fsdp.dcp import METADATA, read_dcp
from zexport.checkpoint.fsdp.rank_files import SHARD, read_rank_files, read_shards
from zexport.checkpoint.fsdp.tree import NO_TREE, Joined, Keys, Tree, damaged, leaves
from zexport.checkpoint.state import (
    MASTER,
    MODULE,
    Cell,
    CheckpointFile,
    Copy,
    FileKind,
    Parameter,
    Role,
    StoredTensor,
    Structure,
    TrainingState,
    by_role,
    stored_tensors,
)
from zexport.checkpoint.zero.records import scalar
from zexport.errors import (
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
    ZexportError,
    layout_of,
)
from zexport.formats.pickle_view import view
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.storage.files import children, is_file, is_folder
from zexport.storage.json import read_json_object
from zexport.text import some

if TYPE_CHECKING:
    from zexport.checkpoint.resolve import Location
    from zexport.ranges.reader import ReadableFile
    from zexport.storage.symlink_policy import Boundary

_NUMBER = r"(0|[1-9]\d{0,5})"
_VERL = re.compile(rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt", re.ASCII)
_ACCELERATE = re.compile(
    rf"(pytorch_model_fsdp|optimizer)(?:_{_NUMBER})?(?:_rank{_NUMBER})?(?:\.bin)?", re.ASCII
)
_STEP = re.compile(r"(?:global_)?step[-_]?(\d{1,18})", re.ASCII)
_RANK = re.compile(r"(?:rank_?|__|shard-)(\d{1,6})", re.ASCII)
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


def fsdp_step(folder: Path, boundary: Boundary) -> int | None:
    """Return the step in the Trainer's state, or in a name such as ``global_step_100``."""
    with suppress(ZexportError, OSError):
        for holder in (folder, folder.parent):
            path = holder / "trainer_state.json"
            if is_file(path) and boundary.holds(path):
                step = read_json_object(path).get("global_step")
                return step if isinstance(step, int) else None
            if match := _STEP.fullmatch(holder.name):
                return int(match[1])
    return None


def open_fsdp(locations: Sequence[Location]) -> TrainingState:
    """Return the training state in a folder; what prevents using it is in ``problems``."""
    location, folder = locations[0], locations[0].tag_dir
    if len(locations) > 1:
        raise UnsupportedError(
            "parts of an FSDP checkpoint in several folders cannot be joined",
            path=folder,
            hint="Copy the files of all nodes into one folder",
        )
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
        structure=Structure.FSDP,
        world_size=model.world_size,
        global_steps=fsdp_step(folder, location.boundary),
        files=tuple(_files(files.values(), {file.path for file in model.files})),
        torch_files=tuple(files.values()),  # type: ignore[arg-type] # only their records are used
        notes=whole.notes,
    )


def _files(files: Iterable[ReadableFile], needed: Container[Path]) -> Iterator[CheckpointFile]:
    for file in files:
        rank = _RANK.search(file.path.name)
        yield CheckpointFile(
            path=file.path,
            kind=FileKind.SHARD,
            rank=int(rank[1]) if rank else 0,
            nbytes=file.version.nbytes,
            needed=file.path in needed,
            unknown_globals=(),
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


States = Mapping[str, Mapping[str, Joined]]
"""Tensors of an optimizer, without ``step``, by its name (or number) of a parameter, and by key."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP1 and activation checkpointing insert."""


def cell_of(model: Tree, optimizer: Tree, path: Path) -> Cell:
    """Return the parameters of a model's state dict with the states of an optimizer's.

    The two may be one tree. ``path`` is the folder, for messages.
    """
    states, groups, prefix = _states(optimizer)
    top, trees = _model_tree(model, prefix if optimizer is model else None, path)
    names = _names(trees[top])
    aliases = {names[k]: names[o] for k, o in model.aliases.items() if k in names and o in names}
    path_of = {name: keys for keys, name in names.items() if name not in aliases}
    weights = {name: model.tensors[keys][0] for name, keys in path_of.items()}
    notes, owners = [*model.notes], None
    if others := [".".join(keys) or "the top level" for keys in trees if keys != top]:
        notes.append(f"Not part of the model: tensors in {some(others)}.")
    if optimizer.is_sharded or not model.is_sharded or not states:  # else FSDP1 flattened them
        owners = _owners(states, groups, weights, aliases)
    if owners is None:
        notes.append(
            "Optimizer states are left out: FSDP1 flattened them, or their numbers are ambiguous."
        )
    copies: list[Copy] = []
    parameters = []
    for name, weight in weights.items():
        copies += model.tensors[path_of[name]][1]
        is_floating = weight.dtype.is_floating
        is_trainable = name in owners if owners else is_floating
        role = Role.TRAINABLE if is_trainable else Role.FROZEN if is_floating else Role.BUFFER
        stored = {MASTER if is_trainable else MODULE: weight.stored[MASTER]}
        for slot, (one, more) in states[owners[name]].items() if owners and is_trainable else ():
            if one.shape != weight.shape or slot in (MASTER, MODULE):
                problem = f"optimizer state {slot!r} does not have the shape of {name!r}"
                raise LayoutError(problem, list(one.shape), list(weight.shape))
            stored[slot] = one.stored[MASTER]
            for copy in more:
                pair = (one.stored[MASTER] for one in (copy.kept, copy.other))
                copies.append(
                    Copy(*(replace(copy.kept, name=name, stored={slot: own}) for own in pair))
                )
        parameters.append(Parameter(name, weight.shape, role, stored))
    return Cell(by_role(parameters), aliases=aliases, copies=tuple(copies), notes=tuple(notes))


def _states(tree: Tree) -> tuple[States, list[list[str]], Keys]:
    """Return the states of the optimizer in a tree, the names in each group, and their path.

    That is the part with ``param_groups``. torchtitan's is flat: ``state.<name>.<key>`` is one key
    (torch 2.13, ``checkpoint/state_dict.py``, ``flatten_optimizer_state_dict``).
    """
    everything = {**tree.others, **tree.tensors}
    prefixes = [
        keys[:depth]
        for keys in everything
        for depth, key in enumerate(keys)
        if key.partition(".")[0] == "param_groups"
    ]
    prefix = min(prefixes, key=len, default=("no optimizer",))
    found: dict[str, dict[str, Joined]] = {}
    groups: dict[str, list[str]] = {}
    for keys in everything:
        below = keys[len(prefix) :] if keys[: len(prefix)] == prefix else ()
        if len(below) == 1 and below[0].startswith("state."):
            below = ("state", *below[0].removeprefix("state.").rpartition(".")[::2])
        match below:
            case ("state", name, slot) if keys in tree.tensors:
                found.setdefault(name, {})[slot] = tree.tensors[keys]
            case ("param_groups", number, *setting):
                group, one = groups.setdefault(number, []), tree.others.get(keys)
                if setting[:1] == ["params"] and isinstance(one, int | str):
                    group.append(str(one))
    for own in found.values():
        own.pop("step", None)  # 0-dim for every parameter
    return found, [*groups.values()], prefix


def _model_tree(
    tree: Tree, optimizer: Keys | None, path: Path
) -> tuple[Keys, dict[Keys, list[Keys]]]:
    """Return the path of the model's state dict, and all state dicts with their tensors."""
    trees: dict[Keys, list[Keys]] = {}
    for keys in tree.tensors:
        if optimizer is None or keys[: len(optimizer)] != optimizer:
            trees.setdefault(keys[:-1], []).append(keys)
    named = [keys for keys in trees if keys and keys[-1] == "model"]
    chosen = named or [keys for keys in trees if not keys] or [*trees]
    if not chosen:
        hint = "Pass the folder that contains the model"
        raise IncompleteCheckpointError("contains no weights", path=path, hint=hint)
    if len(chosen) > 1:
        raise UnsupportedError(
            "several state dicts could be the model",
            path=path,
            found=some([".".join(keys) for keys in chosen]),
            hint="Save the model's state dict as model",
        )
    return chosen[0], trees


def _names(paths: Iterable[Keys]) -> dict[Keys, str]:
    """Return the names of weights without the parts that wrappers insert."""
    names = {keys: with_adapter_name(_unwrapped(keys[-1])) for keys in paths}
    if all(name.startswith("module.") for name in names.values()):  # DDP
        names = {keys: name.removeprefix("module.") for keys, name in names.items()}
    if (distinct := len({*names.values()})) < len(names):
        raise LayoutError(
            "weights have the same name once wrappers such as module. are removed",
            distinct,
            len(names),
        )
    return names


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain(name: str) -> str:
    """Return a name without wrappers and PEFT's ``.default``."""
    return _unwrapped(name).removeprefix("module.").replace(".default.", ".")


def _owners(
    states: States,
    groups: Sequence[Sequence[str]],
    weights: Mapping[str, Parameter],
    aliases: dict[str, str],
) -> dict[str, str] | None:
    """Return the optimizer's name for each weight that it has states of; ``None`` if ambiguous.

    These are names, with or without wrappers, or numbers in the order of the module's parameters.
    """
    if states and all(map(str.isdecimal, states)):
        return _numbered(states, groups, weights)
    exact, plain = {one: one for one in weights} | aliases, {_plain(one): one for one in weights}
    found: dict[str, str] = {}
    for own in states:
        name = exact.get(own) or plain.get(_plain(own))
        if name is None or name in found:
            raise LayoutError("optimizer has states of no weight, or twice", own, "a weight")
        found[name] = own
    return found


def _numbered(
    states: States, groups: Sequence[Sequence[str]], weights: Mapping[str, Parameter]
) -> dict[str, str] | None:
    """Return the number for each weight by the order and shapes of those in each group."""
    from zexport.checkpoint.zero.stage0 import match_in_order  # noqa: PLC0415 - needs numpy

    if sorted(number for own in groups for number in own) != sorted(states):
        if len(groups) > 1:
            return None
        groups = [sorted(states, key=lambda number: (len(number), number))]
    numbers = {(g, at): one for g, own in enumerate(groups) for at, one in enumerate(own)}
    shapes = {at: next((o.shape for o, _ in states[n].values()), ()) for at, n in numbers.items()}
    floating = [name for name, one in weights.items() if one.dtype.is_floating]
    spans = match_in_order([weights[name].shape for name in floating], shapes)
    if not spans or any(first != last for first, last in spans.values()):
        return None
    return {floating[first]: numbers[place] for place, (first, _) in spans.items()}
