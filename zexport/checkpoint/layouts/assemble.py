"""From the states of all ranks to whole tensors, by whichever parallelism there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zexport.checkpoint.contents import Inventory
from zexport.checkpoint.layouts.structure import Structure
from zexport.checkpoint.layouts.zero import commonest_dtype, module_dtype, take_inventory
from zexport.checkpoint.rank_files import RankFile, RankFileKind
from zexport.checkpoint.ranks import RankStates, is_zero0, no_first_model
from zexport.checkpoint.states import ModelStates
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType


@dataclass(frozen=True, slots=True)
class Assembled:
    """Every tensor, and what is known beside the rank states.

    Attributes:
        inventory: the tensors.
        files: files that hold some of them and are no rank's states.
        module_dtype: the element type the module trained in.
    """

    inventory: Inventory
    files: tuple[TorchFile, ...] = ()
    module_dtype: DType | None = None


def assemble(
    tag_dir: Path,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    structure: Structure,
) -> Assembled:
    """Every tensor of a checkpoint, whole."""
    try:
        return _by_structure(tag_dir, files, cells, structure)
    except LayoutError as error:
        raise DamagedCheckpointError(
            error.problem,
            path=tag_dir,
            found=error.found,
            expected=error.expected,
            hint=_HINTS.get(structure, "Copy all rank files of one save again"),
        ) from error


_HINTS = {
    Structure.TENSOR: "Copy the rank files of all tensor ranks again",
    Structure.PIPELINE: "Copy the rank files and layer files of all stages again",
    Structure.UNIVERSAL: "Convert the checkpoint again with DeepSpeed's ds_to_universal, or export "
    "its source",
}
"""What to do where the numbers of a layout contradict each other."""


def _by_structure(
    tag_dir: Path,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    structure: Structure,
) -> Assembled:
    match structure:
        case Structure.UNIVERSAL:
            return _universal(tag_dir, cells)
        case Structure.PIPELINE:
            return _pipeline(tag_dir, files, cells)
        case Structure.EXPERTS:
            return _experts(tag_dir, files, cells)
        case Structure.TENSOR:
            return _tensor(cells)
        case Structure.DATA:
            inventories = _take_each(cells)
            inventory = next(iter(inventories.values()), Inventory((), {}, ()))
            return Assembled(inventory, (), _module_dtype(cells))


# Each structure imports its own code: data parallelism alone, the commonest, starts without it.


def _universal(tag_dir: Path, cells: Mapping[int, RankStates]) -> Assembled:
    from zexport.checkpoint.layouts.universal import take_universal_inventory  # noqa: PLC0415

    universal = take_universal_inventory(tag_dir, cells)
    inventory = _without_the_lost(universal.inventory)
    return Assembled(inventory, universal.files, _module_dtype(cells))


def _pipeline(
    tag_dir: Path, files: Sequence[RankFile], cells: Mapping[int, RankStates]
) -> Assembled:
    from zexport.checkpoint.layouts.pipeline import join_stages  # noqa: PLC0415
    from zexport.checkpoint.layouts.pipeline_files import read_layers  # noqa: PLC0415

    layers = read_layers(file for file in files if file.kind is RankFileKind.PIPELINE_LAYER)
    weights = [tensor for layer in layers for tensor in layer.tensors.values()]
    inventory = join_stages(tag_dir, cells, layers)
    return Assembled(inventory, tuple(la.file for la in layers), commonest_dtype(weights))


def _experts(
    tag_dir: Path, files: Sequence[RankFile], cells: Mapping[int, RankStates]
) -> Assembled:
    """Each model-parallel index has experts of its own: those of a pipeline's stages.

    Source: DeepSpeed 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint``): with experts a stage's
    dense weights are in its model file, not in layer files, and its MoE layers are counted anew.
    """
    from zexport.checkpoint.layouts.pipeline import merge_stages  # noqa: PLC0415

    if not cells:
        raise no_first_model(tag_dir)
    models = [cell.first_model for cell in cells.values() if cell.first_model is not None]
    if len(cells) > 1 or any(model.tensor_parallel > 1 for model in models):
        _check_is_pipeline(tag_dir, cells, models)
    taken = [
        _experts_of(cells[index], [file for file in files if file.mp_rank == index])
        for index in sorted(cells)
    ]
    inventories = [inventory for inventory, _ in taken]
    inventory = inventories[0] if len(taken) == 1 else merge_stages(inventories)
    return Assembled(inventory, tuple(f for _, read in taken for f in read), _module_dtype(cells))


def _experts_of(
    ranks: RankStates, files: Sequence[RankFile]
) -> tuple[Inventory, tuple[TorchFile, ...]]:
    """What one model-parallel index holds, and its files beside the rank states."""
    from zexport.checkpoint.layouts.expert_layers import (  # noqa: PLC0415
        read_expert_optimizers,
        read_expert_states,
    )
    from zexport.checkpoint.layouts.experts import take_expert_inventory  # noqa: PLC0415

    if ranks.first_model is None:
        return Inventory((), {}, ()), ()
    experts = read_expert_states(file for file in files if file.kind is RankFileKind.EXPERT)
    masters = [file for file in files if file.kind is RankFileKind.EXPERT_OPTIMIZER]
    optimizers = read_expert_optimizers(masters) if is_zero0(ranks) else {}
    inventory = take_expert_inventory(ranks, ranks.first_model, experts, optimizers)
    return inventory, (*(states.file for states in experts), *optimizers.values())


def _check_is_pipeline(
    tag_dir: Path, cells: Mapping[int, RankStates], models: Sequence[ModelStates]
) -> None:
    """Refuse experts of several model-parallel indices unless these are a pipeline's stages."""
    from zexport.checkpoint.grid import check_cells  # noqa: PLC0415

    grid = models[0].grid if models else None
    if grid is None or grid.tensor > 1:
        raise UnsupportedError(
            "combines experts with tensor parallelism, or does not say with what",
            path=tag_dir,
            found=f"{len(cells)} model-parallel ranks, {grid.tensor} of them tensor ranks"
            if grid
            else f"{len(cells)} model-parallel ranks",
            expected="stages of a pipeline, in checkpoint_parallel_dimensions",
            hint="Resume the run without tensor parallelism, with DeepSpeed 0.19 or later, save "
            "once more, and export that",
        )
    check_cells(cells, grid.stages, "pipeline stages")


def _tensor(cells: Mapping[int, RankStates]) -> Assembled:
    from zexport.checkpoint.layouts.tensor_parallel import join_tensor_ranks  # noqa: PLC0415

    return Assembled(join_tensor_ranks(cells, _take_each(cells)), (), _module_dtype(cells))


def _take_each(cells: Mapping[int, RankStates]) -> dict[int, Inventory]:
    """The tensors of every model-parallel index whose names are known."""
    models = {index: cell.first_model for index, cell in cells.items()}
    whole = {index: model for index, model in models.items() if model and is_zero0(cells[index])}
    sharded = {
        index: take_inventory(cells[index], model)
        for index, model in models.items()
        if model is not None and index not in whole
    }
    return sharded | (_take_zero0(whole) if whole else {})


def _take_zero0(models: Mapping[int, ModelStates]) -> dict[int, Inventory]:
    """Each rank's tensors; a weight without a master on one rank goes without on all of them."""
    from zexport.checkpoint.layouts.zero0 import (  # noqa: PLC0415
        lacking_masters,
        take_zero0_inventory,
    )

    taken = {index: take_zero0_inventory(model) for index, model in models.items()}
    lacking = {name for one in taken.values() for name in lacking_masters(one)}
    uneven = {
        index
        for index, one in taken.items()
        if any(replica.name in lacking for replica in one.replicas)
    }
    return taken | {
        index: take_zero0_inventory(models[index], unmastered=lacking) for index in uneven
    }


def _module_dtype(cells: Mapping[int, RankStates]) -> DType | None:
    model = next((c.first_model for c in cells.values() if c.first_model is not None), None)
    return module_dtype(model) if model is not None else None


def _without_the_lost(inventory: Inventory) -> Inventory:
    """The inventory of a converted checkpoint: what the converter dropped is told, not missed."""
    if not inventory.left_out:
        return inventory
    lost = f"the conversion to universal lost the values of {', '.join(inventory.left_out)}"
    return replace(inventory, left_out=(), notes=(*inventory.notes, lost))
