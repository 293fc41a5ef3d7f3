"""A training state as rank files of another world size or stage, for ``load_checkpoint``."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from zexport.checkpoint.state import Cell, FileKind, TrainingState
from zexport.checkpoint.zero.expert_layers import AUTOEP_WEIGHTS, autoep_layers, cut_experts
from zexport.checkpoint.zero.experts import sharing_ranks
from zexport.checkpoint.zero.file_names import rank_file_name
from zexport.checkpoint.zero.records import ZERO3, ModelStates
from zexport.errors import UsageError
from zexport.export.plan import FilePlan, plan_torch_file
from zexport.formats.pickle_values import TensorLeaf
from zexport.ranges.dtypes import DType
from zexport.resharding.model_files import ModelFiles
from zexport.resharding.optimizer_files import Place, flatten, optimizer_value
from zexport.resharding.settings import TargetSettings
from zexport.resharding.values import copied_files, records_of

_OF_ADAGRAD = "initial_accumulator_value"
"""A setting that only torch's Adagrad has."""


def native_files(
    state: TrainingState, settings: TargetSettings, tag: str, dropped: Collection[str] = ()
) -> Iterator[FilePlan]:
    """Yield every rank file below the tag folder, without client state that is ``dropped``."""
    _check_experts(state, settings)
    _check_adagrad(state, settings)
    is_zero3 = settings.stage == ZERO3
    kind = FileKind.MODEL_PER_RANK if is_zero3 else FileKind.MODEL
    prefix = "bf16_" if settings.is_bf16 else ""
    experts = () if is_zero3 else (FileKind.EXPERT,)  # ZeRO-3 has experts in the rank files
    yield from copied_files(state, tag, FileKind.PIPELINE_LAYER, *experts)
    has_expert_files = any(one.kind is FileKind.EXPERT for one in state.files)
    for cell in state.cells:
        if not (is_zero3 or has_expert_files):
            yield from _expert_files(cell, state.zero[cell.index].first, tag)
        groups = flatten(cell, settings)
        models = ModelFiles(cell, [flat.parameters for flat in groups], settings, dropped)
        # Source: DeepSpeed 0.19.8, utils/groups.py (_create_expert_and_data_parallel).
        is_blocks = settings.is_data_before_experts
        sets = sharing_ranks(cell.expert_ranks, settings.world_size, is_blocks=is_blocks)
        sharing = sets[cell.expert_rank]
        places = [Place(rank, sharing, settings.world_size) for rank in sharing]
        for place in places if is_zero3 else (one for one in places if one.rank == 0):
            name = rank_file_name(kind, place.rank, cell.index)
            yield plan_torch_file(f"{tag}/{name}", models.value(place))
        for place in places:
            name = rank_file_name(FileKind.OPTIMIZER, place.rank, cell.index, prefix=prefix)
            value = optimizer_value(cell, groups, settings, place, dropped)
            yield plan_torch_file(f"{tag}/{name}", value)


def _expert_files(cell: Cell, model: ModelStates, tag: str) -> Iterator[FilePlan]:
    """Yield the files that ZeRO-1/2 loads AutoEP's experts from, and ZeRO-3 does not write."""
    dtype = model.cast_dtype or DType.F32
    for layer in autoep_layers(model):
        weights = [cell.parameters[f"{layer.experts}.{weight}"] for weight in AUTOEP_WEIGHTS]
        for place, expert in enumerate(layer.held[cell.expert_rank]):
            content: dict[object, object] = {}
            for one in weights:
                part = cut_experts(one, [place]).source()
                content[f"{one.name}.{expert}"] = TensorLeaf(one.shape[1:], dtype, part, one.dtype)
            name = rank_file_name(FileKind.EXPERT, 0, cell.index, layer=layer.number, expert=expert)
            yield plan_torch_file(f"{tag}/{name}", content)


def _check_adagrad(state: TrainingState, settings: TargetSettings) -> None:
    """Raise for torch's Adagrad under ZeRO-3, which does not load its own states of it either.

    It creates the optimizer again from its flat groups, and adds them a second time on loading.
    Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``initialize_optimizer_states``,
    ``_rigid_load_state_dict``).
    """
    recorded = (one.settings for cell in state.cells for one in cell.groups if one.settings)
    if settings.stage == ZERO3 and any(_OF_ADAGRAD in one.values for one in recorded):
        raise UsageError(
            "DeepSpeed cannot resume torch's Adagrad under ZeRO-3: it loads none of its states",
            path=records_of(state.cells[0])[1].file.path,
            hint="Pass --stage 2, or --stage 1",
        )


def _check_experts(state: TrainingState, settings: TargetSettings) -> None:
    """Raise if the expert-parallel size does not divide the world size.

    Each expert-parallel rank keeps its experts: a partition has one rank's experts of several
    layers end to end, and with another size DeepSpeed would create other groups.
    """
    if settings.world_size % (degree := state.cells[0].expert_ranks):
        raise UsageError(
            "--world-size does not fit the expert-parallel size, which cannot change",
            path=records_of(state.cells[0])[0].file.path,
            found=settings.world_size,
            expected=f"a multiple of {degree}",
        )
