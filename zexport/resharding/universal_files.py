"""Universal checkpoints: every parameter whole, for any number of ranks.

DeepSpeed's converter writes one of two forms, for ZeRO-3 or for all other stages. These files have
in one form what the loaders of every stage require.

Source: DeepSpeed 0.14.5 to 0.19.8, ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``: every
parameter has a folder, whatever stage has it), ``runtime/base_optimizer.py``
(``load_hp_checkpoint_state_from_checkpoint_dir``), ``checkpoint/universal_checkpoint.py``
(``load_hp_checkpoint_state``), ``runtime/zero/stage3.py`` (``_load_universal_checkpoint``) and
``runtime/engine.py`` (``_get_all_ckpt_names``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.state import Cell, FileKind, Group, Parameter, Recorded, TrainingState
from zexport.checkpoint.zero.expert_layers import autoep_weights, join_experts, native_name
from zexport.checkpoint.zero.file_names import rank_file_name
from zexport.checkpoint.zero.records import ZERO3, ModelStates
from zexport.checkpoint.zero.tensor_parallel import (
    FUSED,
    HALVES,
    REFUSED,
    ROWS,
    VOCABULARY,
    TensorRanks,
    tensor_ranks,
)
from zexport.checkpoint.zero.universal import FOLDER, OPTIMIZER_STATE, STEP
from zexport.errors import UnsafeError, UnsupportedError
from zexport.export.plan import FilePlan, plan_torch_file
from zexport.formats.pickle_values import TensorLeaf
from zexport.resharding.rank_files import ModelFiles, Place, inner_of, scaling_of, version_in
from zexport.resharding.target import TargetSettings, UniversalSettings, models_of
from zexport.resharding.values import (
    copied_files,
    records_of,
    slots_of,
    source_of,
    with_leaves,
    written,
)

_HINT = "Reshard to rank files with --world-size"
_NAME_MAX = 255
"""Bytes of a file name that file systems allow."""

_SIZE = "name"
"""Setting with the expert-parallel size of a group of AutoEP's experts, which may change."""


class Whole(Struct, frozen=True):
    """Parameters and groups of all ranks.

    ``keys`` are the further entries of the files of split parameters, by parameter.
    """

    parameters: Mapping[str, Parameter]
    groups: tuple[Group, ...]
    keys: Mapping[str, Mapping[object, object]]


def whole_of(state: TrainingState) -> Whole:
    """Return the parameters joined from all ranks, with optimizer states.

    Raises:
        UnsupportedError: model-parallel ranks have different parameter groups, or a universal
            checkpoint cannot record how a parameter or an expert is split.
    """
    settings = [[g.settings and g.settings.values for g in one.groups] for one in state.cells]
    if any(one != settings[0] for one in settings):
        raise UnsupportedError(
            "model-parallel ranks have different parameter groups; a universal checkpoint records "
            "one rank's",
            path=state.location.tag_dir,
            hint=_HINT,
        )
    models, parameters, stages = models_of(state), dict[str, Parameter](), list[tuple[Group, ...]]()
    grid = models[0].grid  # the parallelism of a universal checkpoint is not recorded
    tensor = state.parallelism.tensor_ranks
    tensor = grid.tensor_ranks if grid is not None and len(models) > 1 else tensor
    trained = {one.name for cell in state.cells for one in cell.trained()}
    keys, count = _expert_keys(models, trained), tensor * state.cells[0].expert_ranks
    for first in range(0, len(state.cells), count):
        cells = state.cells[first : first + count]
        stages.append(_merge_groups([cell.groups for cell in cells]))
        names = [name for group in stages[-1] for name in group.names]
        parts = {name: [cell.parameters[name] for cell in cells] for name in names}
        ranks, layers = None, autoep_weights(models[first // count])
        if tensor > 1:
            shards = {name: [one.shape for one in alike] for name, alike in parts.items()}
            ranks = tensor_ranks(models[first : first + tensor], shards)
        for name, alike in parts.items():
            one = alike[0]
            if ranks is not None:
                one, keys[name] = ranks.trim(ranks.join(alike)[0]), _split_keys(ranks, name)
            elif name in layers:  # without ZeRO, only the cells have states of fp32 experts
                one = join_experts(alike, layers[name])
            parameters.setdefault(name, one)
    return Whole(parameters, tuple(map(_without_size, _merge_groups(stages))), keys)


def _merge_groups(stages: Sequence[Sequence[Group]]) -> tuple[Group, ...]:
    """Return the groups of all stages; a tied layer's parameters only in the first stage's."""
    if len({*map(len, stages)}) > 1:
        return ()
    seen: set[str] = set()
    found = []
    for alike in zip(*stages, strict=True):
        names = dict.fromkeys(n for group in alike for n in group.names if n not in seen)
        found.append(replace(alike[0], names=tuple(names)))
        seen.update(names)
    return tuple(found)


def _without_size(group: Group) -> Group:
    recorded = group.settings
    if recorded is None or not group.of_experts:
        return group
    values = {key: value for key, value in recorded.values.items() if key != _SIZE}
    return replace(group, settings=Recorded(recorded.file, values))


def _expert_keys(
    models: Sequence[ModelStates], trained: Collection[str]
) -> dict[str, Mapping[object, object]]:
    """Return the keys of the files of experts' parameters, by name."""
    known = {name: one for model in models for name, one in autoep_weights(model).items()}
    if refused := sorted({name for name in trained if native_name(name)} | known.keys() - trained):
        raise UnsupportedError(
            "a universal checkpoint cannot have experts of DeepSpeed-MoE, which every rank "
            "numbers from 0, or experts with frozen weights",
            path=models[0].file.path,
            found=repr(refused[0]),
            hint=_HINT,
        )
    return {
        name: {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": one.num_experts}
        for name, one in known.items()
    }


def _split_keys(ranks: TensorRanks, name: str) -> dict[object, object]:
    """Return the keys by which DeepSpeed splits a parameter of a universal checkpoint."""
    if ranks.recorded(FUSED, name) is not None and not ranks.record.has(REFUSED):
        raise UnsupportedError(
            f"{name!r} has fused parts, which zexport cannot record in a universal checkpoint",
            path=ranks.record.path,
            hint=f"{_HINT}, or convert with ds_to_universal",
        )
    keys: dict[object, object] = {"cat_dim": 1 if ranks.recorded(ROWS, name) else 0}
    if ranks.recorded(HALVES, name):
        keys["param_n_sub_params"] = 2
    if ranks.recorded(VOCABULARY, name):
        keys["vocab_tensor"] = True
    return keys


def plan_universal_files(
    state: TrainingState,
    whole: Whole,
    settings: UniversalSettings,
    tag: str,
    dropped: Collection[str] = (),
) -> Iterator[FilePlan]:
    """Yield every file of the tag folder, without client state that is ``dropped``.

    Layer files of a pipeline are copied for their buffers, though no loader reads them. Expert
    files are not: the folders of parameters have their values.
    """
    for cell in state.cells:
        if cell.expert_rank == 0:
            yield from _model_files(cell, tag, dropped)
    yield from copied_files(state, tag, FileKind.PIPELINE_LAYER)
    cell, is_flat = state.cells[0], settings.stage == ZERO3
    optimizer = _optimizer_state(records_of(cell)[1], whole.groups)
    yield plan_torch_file(f"{tag}/{FOLDER}/{OPTIMIZER_STATE}.pt", optimizer)
    for group in whole.groups:
        for one in map(whole.parameters.__getitem__, group.names):
            folder = f"{tag}/{FOLDER}/{_folder_name(one.name, cell)}"
            keys = whole.keys.get(one.name, {"cat_dim": 0})
            for slot, dtype in slots_of(one).items():
                shape = (prod(one.shape),) if is_flat else one.shape
                leaf = TensorLeaf(shape, dtype, source_of(one, slot), dtype)
                content: object = leaf if is_flat else {"param": leaf, **keys}
                yield plan_torch_file(f"{folder}/{slot}.pt", content)
            if STEP in group.scalars.values:  # of scalar states, DeepSpeed loads only the step
                step = with_leaves(group.scalars.values[STEP], group.scalars.file)
                yield plan_torch_file(f"{folder}/{STEP}.pt", step)


def _folder_name(name: str, cell: Cell) -> str:
    taken = ("", ".", "..", f"{OPTIMIZER_STATE}.pt")
    if name in taken or {*name} & {"/", "\\", "\0"} or len(name.encode()) > _NAME_MAX:
        raise UnsafeError(
            "a parameter name cannot be a folder name, as a universal checkpoint requires",
            path=records_of(cell)[0].file.path,
            found=repr(name),
            hint=_HINT,
        )
    return name


def _optimizer_state(recorded: Recorded, groups: Sequence[Group]) -> dict[object, object]:
    """Return the state that belongs to no parameter.

    ZeRO-3 copies the settings of the inner ``param_groups`` to every group, so these are the ones
    that all groups share. Other stages take each group's own, in order, and ignore ``params``.
    """
    inner = inner_of(recorded)
    stepped = next((g.scalars for g in groups if STEP in g.scalars.values), None)
    step = None if stepped is None else with_leaves(stepped.values[STEP], stepped.file)
    return {
        **scaling_of(inner),
        "ds_version": version_in(inner),
        "param_groups": [{**written(one.settings), "params": [*one.names]} for one in groups],
        "optimizer_state_dict": {
            "state": {} if stepped is None else {0: {STEP: step}},
            "param_groups": [{**written(shared_settings(groups)), "params": [0]}],
        },
    }


def shared_settings(groups: Sequence[Group]) -> Recorded | None:
    """Return the settings that are equal in all groups; ``None`` if they are not recorded."""
    first, *others = [one.settings for one in groups] or [None]
    if first is None:
        return None
    kept = {
        key: one
        for key, one in first.values.items()
        if all(o is not None and key in o.values and o.values[key] == one for o in others)
    }
    return Recorded(first.file, kept)


def _model_files(cell: Cell, tag: str, dropped: Collection[str]) -> Iterator[FilePlan]:
    """Yield the model states file under ZeRO-3's name and under that of all other stages.

    No loader takes weights from them, and ZeRO-3's has none.
    """
    recorded, _ = records_of(cell)
    config = with_leaves(recorded.values.get("ds_config"), recorded.file)
    kept = {"ds_config": config, "dp_world_size": recorded.values.get("dp_world_size")}
    groups = [[cell.parameters[name] for name in group.names] for group in cell.groups]
    for stage, kind, frozen in (
        (2, FileKind.MODEL, cell.frozen),
        (ZERO3, FileKind.MODEL_PER_RANK, None),
    ):
        model = ModelFiles(replace(cell, frozen=frozen), groups, TargetSettings(1, stage), dropped)
        value = model.value(Place(0, range(1), 1)) | kept
        yield plan_torch_file(f"{tag}/{rank_file_name(kind, 0, cell.index)}", value)
