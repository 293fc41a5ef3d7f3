"""A state as a universal checkpoint: each parameter's states whole, for any number of ranks.

DeepSpeed's converter writes one of two forms, that of ZeRO-3 or that of all other stages. The files
here have what the loaders of every stage look for, and can be read either way.

Source: DeepSpeed 0.14.5 to 0.19.8, ``runtime/base_optimizer.py``
(``load_hp_checkpoint_state_from_checkpoint_dir``), ``checkpoint/universal_checkpoint.py``
(``load_hp_checkpoint_state``), ``runtime/zero/stage3.py`` (``_load_universal_checkpoint``) and
``runtime/engine.py`` (``_get_all_ckpt_names``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from zexport.checkpoint.contents import source_of
from zexport.checkpoint.layouts.universal_weights import FOLDER, OPTIMIZER_STATE, STEP
from zexport.checkpoint.model_states import ZERO3
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.errors import UnsafeError
from zexport.formats.inert import TensorLeaf
from zexport.plan.plan import FilePlan, plan_torch_file
from zexport.resharding.model_files import ModelFiles
from zexport.resharding.optimizer_files import Place, inner_of, kept_of_run, version_in
from zexport.resharding.settings import TargetSettings, UniversalSettings
from zexport.resharding.state import CellState, Group, Parameter, Recorded, TrainingState, is_of
from zexport.resharding.values import with_leaves, written
from zexport.resharding.whole import Whole

_NAME_MAX = 255
"""Bytes of a name that file systems take."""


def universal_files(
    state: TrainingState,
    whole: Whole,
    settings: UniversalSettings,
    tag: str,
    dropped: Collection[str] = (),
) -> Iterator[FilePlan]:
    """Every file below the folder of its tag; ``dropped`` are client keys to leave out.

    Files of a pipeline's layers go along, though no loader looks for them: they have its buffers.
    Those of experts do not: what they have is in the parameters' own.
    """
    for cell in state.cells:
        if cell.expert_rank == 0:
            for name, value in _model_files(cell, dropped):
                yield plan_torch_file(f"{tag}/{name}", value)
    for file in (one for one in state.carried if not is_of(one, RankFileKind.EXPERT)):
        yield plan_torch_file(f"{tag}/{file.path.name}", with_leaves(file.value, file))
    cell = state.cells[0]
    optimizer = _optimizer_state(cell.optimizer, whole.groups)
    yield plan_torch_file(f"{tag}/{FOLDER}/{OPTIMIZER_STATE}.pt", optimizer)
    for group in whole.groups:
        for parameter in group.parameters:
            folder = f"{tag}/{FOLDER}/{_folder_name(parameter, cell)}"
            told = whole.told.get(parameter.name, {"cat_dim": 0})
            for state_name, content in _states(parameter, group, settings, told):
                yield plan_torch_file(f"{folder}/{state_name}.pt", content)


def _folder_name(parameter: Parameter, cell: CellState) -> str:
    name = parameter.name
    taken = ("", ".", "..", f"{OPTIMIZER_STATE}.pt")
    if name in taken or {*name} & {"/", "\\", "\0"} or len(name.encode()) > _NAME_MAX:
        raise UnsafeError(
            "names a parameter as no folder can be named, as a universal checkpoint has to",
            path=cell.model.file.path,
            found=repr(name),
            expected="a name without slashes",
            hint="Reshard to rank files with --world-size",
        )
    return name


def _states(
    parameter: Parameter, group: Group, settings: UniversalSettings, told: Mapping[object, object]
) -> Iterator[tuple[str, object]]:
    """Every state by the name of its file; of a group's scalars, its step is each parameter's."""
    for name, tensor in parameter.tensors.items():
        shape = (tensor.numel,) if settings.is_flat else tensor.shape
        leaf = TensorLeaf(shape, tensor.dtype, source_of(tensor), tensor.dtype)
        yield name, leaf if settings.is_flat else {"param": leaf, **told}
    if STEP in group.scalars.values:
        yield STEP, with_leaves(group.scalars.values[STEP], group.scalars.file)


def _optimizer_state(optimizer: Recorded, groups: Sequence[Group]) -> dict[object, object]:
    """What is no parameter's own.

    ZeRO-3 takes its inner part, of which it gives all groups the same settings: so it has those
    alone that are the same in all. Other stages take every group's, in order. There, parameters
    are named, which loaders pass over; the converter has numbers of flat groups.
    """
    said = inner_of(optimizer)
    stepped = next((g.scalars for g in groups if STEP in g.scalars.values), None)
    step = None if stepped is None else with_leaves(stepped.values[STEP], stepped.file)
    return {
        **kept_of_run(said),
        "ds_version": version_in(said),
        "param_groups": [
            {**written(one.settings), "params": [parameter.name for parameter in one.parameters]}
            for one in groups
        ],
        "optimizer_state_dict": {
            "state": {} if stepped is None else {0: {STEP: step}},
            "param_groups": [{**written(shared_settings(groups)), "params": [0]}],
        },
    }


def shared_settings(groups: Sequence[Group]) -> Recorded | None:
    """The settings that all groups have alike; ``None`` where they are not recorded."""
    first, *others = [one.settings for one in groups] or [None]
    if first is None:
        return None
    kept = {
        key: one
        for key, one in first.values.items()
        if all(o is not None and key in o.values and o.values[key] == one for o in others)
    }
    return Recorded(first.file, kept)


def _model_files(
    cell: CellState, dropped: Collection[str]
) -> Iterator[tuple[str, dict[object, object]]]:
    """The model file under the name that ZeRO-3 looks for, and under that of all other stages.

    The latter is whole. No loader takes weights of either, and the former is without them.
    """
    said = cell.model
    config = with_leaves(said.values.get("ds_config"), said.file)
    kept = {"ds_config": config, "dp_world_size": said.values.get("dp_world_size")}
    groups = [group.parameters for group in cell.groups]
    for stage, kind, frozen in (
        (2, RankFileKind.MODEL, cell.frozen),
        (ZERO3, RankFileKind.MODEL_PER_RANK, None),
    ):
        own = msgspec.structs.replace(cell, frozen=frozen)
        model = ModelFiles(own, groups, TargetSettings(1, stage), dropped)
        yield rank_file_name(kind, 0, cell.index), model.value(Place(0, range(1), 1)) | kept
