"""Universal checkpoints: every trained weight whole in a file of its own, the rest in model files.

The files under ``zero/`` are believed for trained weights alone. What else the converter writes
there is not exact: buffers and frozen weights turned to fp32, tied weights made from 16-bit values.
Those come from the copied model files, as they do from the checkpoint that was converted.

Source: DeepSpeed 0.19, ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor
from zexport.checkpoint.layouts.zero import bind_trained, rounded_copy, with_untrained
from zexport.checkpoint.layouts.zero3 import stripe_numel
from zexport.checkpoint.module_names import names_in_state_dict, with_parameter_names
from zexport.checkpoint.rank_files import name_ranks
from zexport.checkpoint.ranks import WORLD_SIZE_MAX, RankStates
from zexport.checkpoint.states import ModelStates
from zexport.checkpoint.untrusted import Value
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsafeError,
    UnsupportedError,
)
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.copies import CastReplica, Replica
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import Window
from zexport.store.folders import child_folders, exists, is_file

FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state"
STEP = "step"
"""Files of what is no parameter's own, and of the steps that each has taken."""

_FROZEN_LOST = (
    "frozen weights, if there were any, are in no file: a pipeline keeps them in layer files, "
    "which the conversion to universal leaves behind"
)


_COPY_AGAIN = "Convert the checkpoint again with DeepSpeed's ds_to_universal, or export its source"


def take_universal(tag_dir: Path, cells: Mapping[int, RankStates]) -> Inventory:
    """The tensors of a universal checkpoint."""
    if not cells or any(0 not in ranks.model for ranks in cells.values()):
        raise IncompleteCheckpointError(
            "lacks the model file of rank 0, which names and shapes come from",
            path=tag_dir,
            hint="Copy *_model_states.pt from where the checkpoint was converted, or convert it "
            "again",
        )
    models = {cell: ranks.model[0] for cell, ranks in cells.items()}
    for model in models.values():
        _refuse_spoiled(tag_dir, model)
    parts = [_take_cell(tag_dir, cells[cell], models[cell]) for cell in sorted(cells)]
    names = {tensor.name for part in parts for tensor in part.tensors}
    folders = _folders(tag_dir / FOLDER)
    known = names.union(
        *(m.module for m in models.values()),
        *map(names_in_state_dict, models.values()),  # --inject_missing_state has weights made of it
        *(part.aliases for part in parts),
    )
    _check_no_surplus(tag_dir, folders, known)
    _check_all_trained_are_named(tag_dir, folders, cells)
    weights = [
        _read_weight(tag_dir, name, shards, models, folders)
        for name, shards in _shards(parts).items()
    ]
    _check_one_type(weights)
    rest, replicas = _merge_rest(tag_dir, parts)
    copies = [c for tensor, _ in weights for c in _copies(tensor, models)]
    joined = Inventory.joined(parts)
    warnings = () if any(model.module for model in models.values()) else (_FROZEN_LOST,)
    if joined.left_out:  # what the converter dropped is told, not missed
        lost = f"the conversion to universal lost the values of {', '.join(joined.left_out)}"
        warnings = (*warnings, lost)
    return replace(
        joined,
        tensors=(*(tensor for tensor, _ in weights), *rest),
        aliases={alias: name for alias, name in joined.aliases.items() if alias not in names},
        left_out=(),
        replicas=(*replicas, *copies),
        warnings=warnings,
        files=tuple(file for _, file in weights),
    )


def names_its_groups(said: Value) -> bool:
    """Whether what is said in ``optimizer_state.pt`` names the parameters of every group.

    So ``zexport reshard`` does, with round robin undone; the converter leaves the numbers in it of
    the flat groups that there were.
    """
    params = [one.need("params").items() for one in said.get("param_groups").items()]
    return any(params) and all(isinstance(one.value, str) for own in params for one in own)


def _refuse_spoiled(tag_dir: Path, model: ModelStates) -> None:
    """Refuse what ``ds_to_universal`` (DeepSpeed 0.10 to 0.19) is known to write wrongly.

    With round-robin gradients the weights lie in a shuffled order, and ``param_slice_mappings``, by
    which the converter cuts them, tells of the order before. A single rank shuffles nothing. Errs
    towards refusing: BF16_Optimizer does not shuffle, but leaves no trace in the model files.
    """
    stage = model.zero_options.get("stage")
    if not (model.is_round_robin and stage in (1, 2) and model.dp_world_size != 1):
        return
    path = tag_dir / FOLDER / f"{OPTIMIZER_STATE}.pt"
    said = Value(path, "optimizer state", read_torch_file(path).value if is_file(path) else {})
    if not names_its_groups(said):
        raise UnsupportedError(
            "was converted from a run with round_robin_gradients, and the converter mixed up the "
            "weights' values",
            path=model.file.path,
            hint="Export the checkpoint that it was converted from",
        )


def _take_cell(tag_dir: Path, ranks: RankStates, model: ModelStates) -> Inventory:
    """One model-parallel index by its model files alone: trained weights are without source."""
    world_size = model.dp_world_size or len(ranks.model)
    if not 0 < world_size <= WORLD_SIZE_MAX:
        raise DamagedCheckpointError(
            "model states['dp_world_size'] is an impossible number of ranks",
            path=model.file.path,
            found=world_size,
            hint="Copy the file again from where it was written",
        )
    model = with_parameter_names(model)
    trained = bind_trained((), model, is_zero3=ranks.is_zero3)
    inventory = with_untrained(trained, ranks, model, world_size)
    if model.has_experts:
        inventory = _without_unrecorded(inventory, model)
    if any(t.source is None and t.role is Role.FROZEN for t in inventory.tensors):
        missing = set(range(world_size)) - ranks.model.keys()
        raise IncompleteCheckpointError(
            f"lacks the model files of {name_ranks(missing)}, and parts of frozen weights",
            path=tag_dir,
            found=f"{len(ranks.model)} of {world_size} model files",
            hint="Copy them from the checkpoint that was converted",
        )
    return inventory


def _without_unrecorded(inventory: Inventory, model: ModelStates) -> Inventory:
    """Less the 16-bit weights that nothing accounts for, which may be stale.

    AutoEP keeps a module that it replaced, under its old name beside the new one, and never updates
    the old one's weights (DeepSpeed 0.19: ``mlp.gate.gate.weight`` for ``mlp.router.gate.weight``).
    """
    unrecorded = [
        tensor.name
        for tensor in inventory.tensors
        if tensor.role is Role.FROZEN and tensor.name not in (model.frozen_shapes or {})
    ]
    return replace(
        inventory,
        tensors=tuple(t for t in inventory.tensors if t.name not in set(unrecorded)),
        left_out=(*inventory.left_out, *unrecorded),
    )


def _shards(parts: list[Inventory]) -> dict[str, list[Shape]]:
    """The shapes that every trained weight has in the model-parallel ranks."""
    shards: dict[str, list[Shape]] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.role is Role.TRAINABLE:
                shards.setdefault(tensor.name, []).append(tensor.shape)
    return shards


def _folders(zero: Path) -> dict[str, Path]:
    """The folders of weights, by name: plain ones directly in ``zero``."""
    folders = {}
    for folder, is_link in child_folders(zero):
        if is_link:
            raise UnsafeError(
                "is a link, where a folder of a weight should be",
                path=folder,
                hint="Put the folder itself there",
            )
        folders[folder.name] = folder
    return folders


def _check_no_surplus(tag_dir: Path, folders: Mapping[str, Path], known: set[str]) -> None:
    surplus = sorted(folders.keys() - known)
    if surplus:
        raise DamagedCheckpointError(
            f"holds weights that no model file names, such as {surplus[0]!r}",
            path=tag_dir / FOLDER,
            found=f"{len(surplus)} such folders",
            expected="the weights of one conversion",
            hint=_COPY_AGAIN,
        )


def _check_all_trained_are_named(
    tag_dir: Path, folders: Mapping[str, Path], cells: Mapping[int, RankStates]
) -> None:
    """Refuse model files that leave trained weights out of ``param_shapes``: those of another run.

    The converter writes moments for the names in the ``param_shapes`` of the model files that it
    copies, and for no others; buffers, frozen and tied weights have ``fp32.pt`` alone (DeepSpeed
    0.10 to 0.19, ``ds_to_universal.py``, ``main``).
    """
    models = [model for ranks in cells.values() for model in ranks.model.values()]
    named = {name for model in models for shapes in model.param_shapes for name in shapes}
    unnamed = sorted(name for name in folders.keys() - named if _has_moments(folders[name]))
    if unnamed:
        raise DamagedCheckpointError(
            f"holds trained weights that no model file names as such, for one {unnamed[0]!r}",
            path=tag_dir / FOLDER,
            found=f"moments of {len(unnamed)} weights that are not in param_shapes",
            expected="the model files of the run that was converted",
            hint="Copy *_model_states.pt from where the checkpoint was converted, or convert it "
            "again",
        )


def _has_moments(folder: Path) -> bool:
    """Whether an optimizer stepped the weight of this folder."""
    return exists(folder / "exp_avg.pt")


def _read_weight(
    tag_dir: Path,
    name: str,
    shards: list[Shape],
    models: Mapping[int, ModelStates],
    folders: Mapping[str, Path],
) -> tuple[StoredTensor, TorchFile]:
    """A trained weight out of its ``fp32.pt``."""
    if name not in folders or not is_file(folders[name] / "fp32.pt"):
        raise DamagedCheckpointError(
            f"lacks the file of the weight {name!r}",
            path=tag_dir / FOLDER,
            expected=f"{name}/fp32.pt",
            hint=_COPY_AGAIN,
        )
    file = read_torch_file(folders[name] / "fp32.pt")
    content = Value(file.path, "the file", file.value)
    if isinstance(file.value, TensorRef):
        tensor = file.value
        world_size = models[min(models)].dp_world_size
        shape = shape_of_flat(name, tensor.numel, shards, world_size)
    else:
        tensor = content.need("param").tensor()
        shape = tensor.shape
        experts = content.get("ep_num_experts").number() if content.has("ep_num_experts") else None
        check_whole(name, shape, shards, experts=experts, cut=content.has("vocab_tensor"))
        _refuse_rounded(content, name, models)
    if not tensor.dtype.is_floating:
        content.fail("does not hold a floating-point weight", tensor.dtype.torch_name)
    source = Window(file.source(tensor), 0, prod(shape) * tensor.dtype.itemsize)
    return StoredTensor(name, shape, tensor.dtype, Role.TRAINABLE, source), file


def _refuse_rounded(content: Value, name: str, models: Mapping[int, ModelStates]) -> None:
    """Refuse a weight that was made from 16-bit values, for want of optimizer state.

    The converter then writes ``param`` alone and no moments (``ds_to_universal.py``, ``main``).
    """
    made = [model.module[name] for model in models.values() if name in model.module]
    is_rounded = any(tensor.numel and tensor.dtype in (DType.BF16, DType.F16) for tensor in made)
    is_stepped = _has_moments(content.path.parent)
    if is_rounded and not is_stepped and content.mapping().keys() == {"param"}:
        raise UnsupportedError(
            f"holds no master of the weight {name!r}: the converter made it from 16-bit values",
            path=content.path,
            hint="Export the checkpoint that it was converted from",
        )


def _check_one_type(weights: Iterable[tuple[StoredTensor, TorchFile]]) -> None:
    """Refuse a weight that was rounded: all masters of a run are of one floating-point type.

    Left out is what no optimizer stepped, which the converter turns to fp32 whatever the type of
    the masters (``ds_to_universal.py``, ``main``).

    Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``, which clone
    all groups as fp32 or, with 16-bit master weights, all in the one 16-bit type.
    """
    stepped = [(one, file) for one, file in weights if one.numel and _has_moments(file.path.parent)]
    counts = Counter(one.dtype for one, _ in stepped).most_common()
    if len(counts) < 2:  # noqa: PLR2004 - a second type
        return
    usual = counts[0][0]
    odd, file = next((one, file) for one, file in stepped if one.dtype is not usual)
    raise DamagedCheckpointError(
        f"holds the weight {odd.name!r} in another element type than the others",
        path=file.path,
        found=odd.dtype.torch_name,
        expected=usual.torch_name,
        hint=_COPY_AGAIN,
    )


def _copies(weight: StoredTensor, models: Mapping[int, ModelStates]) -> Iterator[CastReplica]:
    """The module's own copies of a weight, where a model file holds it whole."""
    for model in models.values():
        copy = model.module.get(weight.name)
        if copy is not None and copy.shape == weight.shape:
            yield from (
                replace(one, advice=_COPY_AGAIN) for one in rounded_copy(weight, model.file, copy)
            )


def _merge_rest(
    tag_dir: Path, parts: list[Inventory]
) -> tuple[tuple[StoredTensor, ...], tuple[Replica, ...]]:
    """Frozen weights and buffers of all model-parallel ranks; buffers of one name must be equal."""
    rest: dict[str, StoredTensor] = {}
    replicas = []
    tensors = [tensor for part in parts for tensor in part.tensors]
    for tensor in (one for one in tensors if one.role is not Role.TRAINABLE):
        if tensor.role is Role.FROZEN and len(parts) > 1 and tensor.numel:
            raise UnsupportedError(
                f"keeps the frozen weight {tensor.name!r} in the pieces of a tensor-parallel run, "
                "which this version does not join here",
                path=tag_dir,
                hint="Export the checkpoint that it was converted from",
            )
        first = rest.setdefault(tensor.name, tensor)
        if (first.shape, first.dtype, first.role) != (tensor.shape, tensor.dtype, tensor.role):
            raise LayoutError(
                f"two model-parallel ranks hold a different {tensor.name!r}",
                f"{tensor.dtype.torch_name} {list(tensor.shape)}",
                f"{first.dtype.torch_name} {list(first.shape)}",
            )
        if first is not tensor and first.source is not None and tensor.source is not None:
            replicas.append(Replica(tensor.name, first.source, tensor.source))
    return tuple(rest.values()), tuple(replicas)


def check_whole(
    name: str, whole: Shape, shards: Sequence[Shape], *, experts: int | None, cut: bool
) -> None:
    """Hold a whole weight against its shape in each model-parallel rank's ``param_shapes``."""
    if experts is not None:
        fits = whole[:1] == (experts,) and all(shard[1:] == whole[1:] for shard in shards)
    elif cut:
        rows = sum(shard[0] for shard in shards if shard)
        fits = all(shard[1:] == whole[1:] for shard in shards) and 0 < whole[0] <= rows
    else:
        fits = all(shard == whole for shard in shards) or _is_split(whole, shards)
    if not fits:
        raise LayoutError(
            f"the weight {name!r} has another shape than the model files say",
            list(whole),
            " and ".join(str(list(shard)) for shard in shards),
        )


def _is_split(whole: Shape, shards: Sequence[Shape]) -> bool:
    """Whether shards may be pieces of the whole: none is larger, and together they suffice."""
    return (
        len(shards) > 1
        and all(len(shard) == len(whole) for shard in shards)
        and all(n <= size for shard in shards for n, size in zip(shard, whole, strict=True))
        and prod(whole) <= sum(prod(shard) for shard in shards)
    )


def shape_of_flat(
    name: str, numel: int, shards: Sequence[Shape], world_size: int | None = None
) -> Shape:
    """The shape of a weight that is stored flat, as from ZeRO-3 without tensor parallelism.

    The converter leaves behind it all stripes of padding but one, as it strips the absolute number
    of elements by which a stripe is beyond the end. Source: DeepSpeed 0.15 to 0.19.2,
    ``checkpoint/ds_to_universal.py`` (``extract_zero_shards_stage3``); 0.19.8 leaves none.
    """
    whole = prod(shards[0])
    lengths = {whole}
    if world_size:
        lengths.add(max(whole, (world_size - 1) * stripe_numel(whole, world_size)))
    if len(set(shards)) != 1 or numel not in lengths:
        raise LayoutError(
            f"the weight {name!r} has another length than the model files say",
            f"{numel} elements",
            " and ".join(str(list(shard)) for shard in shards),
        )
    return shards[0]
