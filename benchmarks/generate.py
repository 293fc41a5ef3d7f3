"""Checkpoints of any size in DeepSpeed 0.19's layout, written without training a model.

Torch takes hundreds of megabytes, and a child's peak memory counts what its parent held when it was
started. The benchmark therefore runs this module as a program and never imports it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from benchmarks.llama import Llama, Parameter, fit
from benchmarks.states import (
    STEPS,
    model_state,
    shapes_of,
    zero2_optimizer_state,
    zero3_optimizer_state,
)
from benchmarks.values import Fragment, flat_data, master

SUB_GROUP_NUMEL = 10**9
_TAG = f"global_step{STEPS}"


def generate(
    folder: Path,
    *,
    numel: int,
    world_size: int,
    stage: int,
    frozen: bool = False,
    seed: int = 0,
    sub_group_numel: int = SUB_GROUP_NUMEL,
) -> Llama:
    """Write a checkpoint of bf16 training with AdamW at step 2 into ``folder``; return its model.

    One rank's data is in memory at a time: 12 bytes for each element of its partition; ZeRO-2's
    model file takes 2 bytes for each parameter of the model.

    Args:
        folder: appears complete or not at all; must not exist.
        numel: parameters wanted; the nearest model of usual proportions is taken.
        world_size: number of ranks.
        stage: 2 or 3.
        frozen: freeze embeddings and the lower half of the layers.
        seed: two seeds give two models of different values.
        sub_group_numel: ZeRO-3's ``sub_group_size``; DeepSpeed's default.
    """
    model = fit(numel)
    parameters = model.parameters(frozen=frozen)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / _TAG).mkdir(parents=True)
    if ZeroStageEnum(stage) is ZeroStageEnum.weights:
        _write_zero3(partial / _TAG, parameters, world_size, seed, sub_group_numel)
    else:
        _write_zero2(partial / _TAG, parameters, world_size, seed)
    (partial / "config.json").write_text(json.dumps(model.config(), indent=2) + "\n")
    (partial / "latest").write_text(_TAG)
    partial.rename(folder)
    return model


# ZeRO-3: every parameter is cut into equal stripes, one a rank.


def _write_zero3(
    folder: Path, parameters: Sequence[Parameter], world_size: int, seed: int, sub_group_numel: int
) -> None:
    trained = [parameter for parameter in parameters if not parameter.frozen]
    groups = list(_sub_groups(trained, world_size, sub_group_numel))
    order = {parameter.name: index for index, parameter in enumerate(parameters)}
    # DeepSpeed names a flat group after the numbers of its first and last parameter.
    ids = [f"{order[group[0].name]}_{order[group[-1].name]}" for group in groups]
    for rank in range(world_size):
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        flats = [_stripes(group, rank, world_size, seed) for group in groups]
        torch.save(
            zero3_optimizer_state(flats, ids, world_size),
            folder / f"bf16_{stem}_optim_states.pt",
        )
        del flats  # free them before the next rank
        state = _zero3_model_state(parameters, groups, rank, world_size, seed)
        torch.save(state, folder / f"{stem}_model_states.pt")


def _zero3_model_state(
    parameters: Sequence[Parameter],
    groups: Sequence[Sequence[Parameter]],
    rank: int,
    world_size: int,
    seed: int,
) -> dict[str, object]:
    frozen = [parameter for parameter in parameters if parameter.frozen]
    pieces = ((p.name, _stripes([p], rank, world_size, seed).bfloat16()) for p in frozen)
    return model_state(
        module=OrderedDict((p.name, torch.empty(0, dtype=torch.bfloat16)) for p in parameters),
        shapes=[shapes_of(group) for group in groups],
        frozen_shapes=shapes_of(frozen),
        frozen_pieces=OrderedDict(pieces),
        world_size=world_size,
        stage=ZeroStageEnum.weights,
    )


def _sub_groups(
    parameters: Sequence[Parameter], world_size: int, limit: int
) -> Iterator[list[Parameter]]:
    """Whole parameters, put together until a rank's share of them reaches ``limit`` elements."""
    group: list[Parameter] = []
    held = 0
    for parameter in parameters:
        group.append(parameter)
        held += _stripe(parameter, world_size)
        if held >= limit:
            yield group
            group, held = [], 0
    if group:
        yield group


def _stripe(parameter: Parameter, world_size: int) -> int:
    return -(-parameter.numel // world_size)


def _stripes(
    parameters: Iterable[Parameter], rank: int, world_size: int, seed: int
) -> torch.Tensor:
    """A rank's stripe of each parameter, end to end, each padded by itself."""
    fragments, start = [], 0
    for parameter in parameters:
        stripe = _stripe(parameter, world_size)
        begin = min(rank * stripe, parameter.numel)
        count = min(stripe, parameter.numel - begin)
        fragments.append(Fragment(parameter, begin, start, count))
        start += stripe
    return flat_data(fragments, start, seed)


# ZeRO-2: the parameters are concatenated and split into equal partitions.


def _write_zero2(folder: Path, parameters: Sequence[Parameter], world_size: int, seed: int) -> None:
    trained = [parameter for parameter in parameters if not parameter.frozen]
    numel = sum(parameter.numel for parameter in trained)
    partition = -(-numel // (2 * world_size)) * 2  # the group is aligned to 2 elements a rank
    for rank in range(world_size):
        start = rank * partition
        fragments = _overlapping(trained, start, partition)
        state = zero2_optimizer_state(
            flat_data(fragments, partition, seed),
            fragments,
            padding=min(partition, max(0, start + partition - numel)),
            tensors=len(trained),
            world_size=world_size,
        )
        torch.save(state, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        del state  # free it before the next rank
    model = _zero2_model_state(parameters, partition * world_size, world_size, seed)
    torch.save(model, folder / "mp_rank_00_model_states.pt")


def _overlapping(parameters: Sequence[Parameter], start: int, numel: int) -> list[Fragment]:
    """Return elements ``start`` to ``start + numel`` of the concatenated parameters."""
    fragments, position = [], 0
    for parameter in parameters:
        begin = max(start - position, 0)
        end = min(start + numel - position, parameter.numel)
        if begin < end:
            fragments.append(Fragment(parameter, begin, position + begin - start, end - begin))
        position += parameter.numel
    return fragments


def _zero2_model_state(
    parameters: Sequence[Parameter], group_numel: int, world_size: int, seed: int
) -> dict[str, object]:
    module = _zero2_module(parameters, group_numel, seed)
    frozen = [parameter for parameter in parameters if parameter.frozen]
    return model_state(
        module=module,
        shapes=[shapes_of(p for p in parameters if not p.frozen)],
        frozen_shapes=shapes_of(frozen),
        frozen_pieces=OrderedDict((p.name, module[p.name]) for p in frozen),
        world_size=world_size,
        stage=ZeroStageEnum.gradients,
    )


def _zero2_module(
    parameters: Sequence[Parameter], group_numel: int, seed: int
) -> OrderedDict[str, torch.Tensor]:
    """The 16-bit weights: trained ones are views of one storage, frozen ones have their own."""
    module: OrderedDict[str, torch.Tensor] = OrderedDict()
    group = torch.zeros(group_numel, dtype=torch.bfloat16)
    position = 0
    for parameter in parameters:
        value = master(parameter, seed).bfloat16()
        if not parameter.frozen:
            value = group[position : position + parameter.numel].view(parameter.shape).copy_(value)
            position += parameter.numel
        module[parameter.name] = value
    return module


def main() -> None:
    """Write one checkpoint: ``python -m benchmarks.generate FOLDER --numel 1e7 --stage 3``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numel", type=float, required=True)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--stage", type=int, choices=(2, 3), required=True)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = generate(
        options.folder,
        numel=int(options.numel),
        world_size=options.world_size,
        stage=options.stage,
        frozen=options.frozen,
        seed=options.seed,
    )
    print(f"{options.folder}: {model.numel} parameters")


if __name__ == "__main__":
    main()
