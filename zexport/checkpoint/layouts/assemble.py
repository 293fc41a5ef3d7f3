"""From the states of all ranks to whole tensors, by whichever parallelism there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory
from zexport.checkpoint.layouts.structure import Structure, models_of
from zexport.checkpoint.layouts.zero import module_dtype, take_inventory
from zexport.checkpoint.rank_files import RankFile
from zexport.checkpoint.ranks import RankStates, is_zero0
from zexport.checkpoint.states import ModelStates
from zexport.errors import DamagedCheckpointError, LayoutError

_HINTS = {
    Structure.TENSOR: "Copy the rank files of all tensor ranks again",
    Structure.PIPELINE: "Copy the rank files and layer files of all stages again",
    Structure.UNIVERSAL: "Convert the checkpoint again with DeepSpeed's ds_to_universal, or export "
    "its source",
}
"""What to do where the numbers of a layout contradict each other."""


def assemble(
    tag_dir: Path,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    structure: Structure,
) -> Inventory:
    """Every tensor of a checkpoint, whole."""
    try:
        inventory = _by_structure(tag_dir, files, cells, structure)
    except LayoutError as error:
        raise DamagedCheckpointError(
            error.problem,
            path=tag_dir,
            found=error.found,
            expected=error.expected,
            hint=_HINTS.get(structure, "Copy all rank files of one save again"),
        ) from error
    model = next(iter(models_of(cells).values()), None)
    if structure is Structure.PIPELINE or model is None:
        return inventory
    return replace(inventory, module_dtype=module_dtype(model))


def _by_structure(
    tag_dir: Path,
    files: Sequence[RankFile],
    cells: Mapping[int, RankStates],
    structure: Structure,
) -> Inventory:
    """Each structure imports its own code: the commonest, data parallelism, starts without it."""
    match structure:
        case Structure.UNIVERSAL:
            from zexport.checkpoint.layouts.universal import take_universal  # noqa: PLC0415

            return take_universal(tag_dir, cells)
        case Structure.PIPELINE:
            from zexport.checkpoint.layouts.pipeline import join_stages  # noqa: PLC0415

            return join_stages(tag_dir, files, cells)
        case Structure.EXPERTS:
            from zexport.checkpoint.layouts.experts import take_experts  # noqa: PLC0415

            return take_experts(tag_dir, files, cells)
        case Structure.TENSOR:
            from zexport.checkpoint.layouts.tensor_parallel import (  # noqa: PLC0415
                join_tensor_ranks,
            )

            return join_tensor_ranks(tag_dir, cells, _take_each(cells))
        case Structure.DATA:
            return next(iter(_take_each(cells).values()), Inventory((), {}, ()))


def _take_each(cells: Mapping[int, RankStates]) -> dict[int, Inventory]:
    """The tensors of every model-parallel index whose names are known."""
    models = models_of(cells)
    whole = {index: model for index, model in models.items() if is_zero0(cells[index])}
    sharded = {
        index: take_inventory(cells[index], model)
        for index, model in models.items()
        if index not in whole
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
