"""From the states of all ranks to whole tensors, by whichever parallelism there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zexport.checkpoint.assembly.expert_states import read_expert_states
from zexport.checkpoint.assembly.experts import take_expert_inventory
from zexport.checkpoint.assembly.layer_files import read_layers
from zexport.checkpoint.assembly.pipeline import join_stages
from zexport.checkpoint.assembly.structure import Structure
from zexport.checkpoint.assembly.tensor_parallel import join_tensor_ranks
from zexport.checkpoint.assembly.universal import take_universal_inventory
from zexport.checkpoint.assembly.zero0 import is_zero0, take_zero0_inventory
from zexport.checkpoint.rank_files import RankFile, RankFileKind
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.tensors import Inventory, commonest_dtype, module_dtype, take_inventory
from zexport.dtypes import DType
from zexport.torchfile.archive import TorchFile


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
    """Every tensor of a checkpoint, whole.

    Args:
        tag_dir: the tag folder.
        files: its rank files.
        cells: the states of each model-parallel index.
        structure: what ``recognise`` says.

    Raises:
        CheckpointError: files are missing, damaged, or contradict each other.
        UnsupportedError: the tensors cannot be rebuilt exactly.
    """
    if structure is Structure.UNIVERSAL:
        universal = take_universal_inventory(tag_dir, cells)
        inventory = _without_the_lost(universal.inventory)
        return Assembled(inventory, universal.files, _module_dtype(cells))
    if structure is Structure.PIPELINE:
        layers = read_layers(f for f in files if f.kind is RankFileKind.PIPELINE_LAYER)
        weights = [tensor for layer in layers for tensor in layer.tensors.values()]
        return Assembled(
            join_stages(tag_dir, cells, layers),
            tuple(layer.file for layer in layers),
            commonest_dtype(weights),
        )
    experts = read_expert_states(f for f in files if f.kind is RankFileKind.EXPERT)
    inventories = {}
    for index, ranks in cells.items():
        model = ranks.first_model
        if model is None:
            continue
        if structure is Structure.EXPERTS:
            inventories[index] = take_expert_inventory(ranks, model, experts)
        elif is_zero0(ranks):
            inventories[index] = take_zero0_inventory(model)
        else:
            inventories[index] = take_inventory(ranks, model)
    if structure is Structure.TENSOR:
        inventory = join_tensor_ranks(cells, inventories)
    else:
        inventory = next(iter(inventories.values()), Inventory((), {}, ()))
    return Assembled(inventory, tuple(states.file for states in experts), _module_dtype(cells))


def _module_dtype(cells: Mapping[int, RankStates]) -> DType | None:
    model = next((c.first_model for c in cells.values() if c.first_model is not None), None)
    return module_dtype(model) if model is not None else None


def _without_the_lost(inventory: Inventory) -> Inventory:
    """The inventory of a converted checkpoint: what the converter dropped is told, not missed."""
    if not inventory.left_out:
        return inventory
    lost = f"the conversion to universal lost the values of {', '.join(inventory.left_out)}"
    return replace(inventory, left_out=(), notes=(*inventory.notes, lost))
