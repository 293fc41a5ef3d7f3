"""Made-up checkpoints with experts, in the layouts that DeepSpeed 0.19 writes; padding is NaN."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from tests.support.checkpoints import deepspeed_names, values

Tensors = dict[str, torch.Tensor]

EXPERT_SHAPES = {"up.weight": (3, 2), "up.bias": (3,)}
FUSED_SHAPES = {"w1": (3, 2), "w2": (2, 3), "w3": (3, 2)}


@dataclass(frozen=True)
class MoeRun:
    """How a model of ``layers`` layers of ``experts`` experts was trained.

    ``recorded``: whether the files say what each partition holds; ``configured``: whether they keep
    the configuration; ``held``: for AutoEP, which experts each expert-parallel rank holds.
    """

    stage: int = 2
    world: int = 4
    ep: int = 2
    experts: int = 4
    layers: int = 2
    blocks: bool = False
    recorded: bool = True
    configured: bool = True
    autoep: bool = False
    held: Sequence[Sequence[int]] | None = None

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        count = self.experts // self.ep
        return self.held or [range(e * count, (e + 1) * count) for e in range(self.ep)]

    def sharing(self, ep_rank: int) -> list[int]:
        """The ranks that hold the experts of ``ep_rank``."""
        count = self.world // self.ep
        if self.blocks:
            return [ep_rank * count + i for i in range(count)]
        return [ep_rank + i * self.ep for i in range(count)]

    def ep_rank(self, rank: int) -> int:
        return next(e for e in range(self.ep) if rank in self.sharing(e))


def prefix(layer: int) -> str:
    return f"moes.{layer}.deepspeed_moe.experts.deepspeed_experts"


def truth(run: MoeRun) -> Tensors:
    """Every tensor of the whole model, in fp32."""
    tensors = {"emb.weight": values((7, 3), 1), "head.bias": values((5,), 2)}
    seed = 100
    for layer in range(run.layers):
        if run.autoep:
            tensors[f"m.{layer}.router.gate.weight"] = values((run.experts, 2), seed)
        shapes = FUSED_SHAPES if run.autoep else EXPERT_SHAPES
        for expert in range(1 if run.autoep else run.experts):
            for name, shape in shapes.items():
                seed += 1
                if run.autoep:
                    tensors[f"m.{layer}.experts.{name}"] = values((run.experts, *shape), seed)
                else:
                    tensors[f"{prefix(layer)}.{expert}.{name}"] = values(shape, seed)
    return tensors


def is_expert(name: str) -> bool:
    return "experts." in name


def local_experts(run: MoeRun, ep_rank: int) -> Tensors:
    """What one expert-parallel rank holds, under its own names."""
    whole, share = truth(run), run.shares[ep_rank]
    found = {}
    for layer in range(run.layers):
        if run.autoep:
            for name in FUSED_SHAPES:
                found[f"m.{layer}.experts.{name}"] = whole[f"m.{layer}.experts.{name}"][list(share)]
            continue
        for local, expert in enumerate(share):
            for name in EXPERT_SHAPES:
                found[f"{prefix(layer)}.{local}.{name}"] = whole[f"{prefix(layer)}.{expert}.{name}"]
    return found


def save_moe(run: MoeRun, folder: Path) -> Path:
    """Write one tag; the folder itself."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = {name: value for name, value in truth(run).items() if not is_expert(name)}
    for rank in range(run.world):
        ep_rank = run.ep_rank(rank)
        places = [
            (dense, list(range(run.world))),
            (local_experts(run, ep_rank), run.sharing(ep_rank)),
        ]
        state = _zero3(run, rank, places) if run.stage == 3 else _zero12(run, rank, places)
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        _save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, folder / name)
        if run.stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_" if run.stage == 3 else ""
            model = _model(run, ep_rank, dense)
            _save(model, folder / f"{name}mp_rank_00_model_states.pt")
    if run.stage != 3:
        _save_expert_files(run, folder)
    return folder


def expert_file(folder: Path, layer: int, expert: int) -> Path:
    return folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def _save_expert_files(run: MoeRun, folder: Path) -> None:
    whole = truth(run)
    for layer in range(run.layers):
        for expert in range(run.experts):
            if run.autoep:
                names = [f"m.{layer}.experts.{name}" for name in FUSED_SHAPES]
                state = {f"{name}.{expert}": whole[name][expert].clone() for name in names}
            else:
                names = [f"{prefix(layer)}.{expert}.{name}" for name in EXPERT_SHAPES]
                state = {name: whole[name] for name in names}
            low = {name: value.bfloat16() for name, value in state.items()}
            _save(low, expert_file(folder, layer, expert))


def _model(run: MoeRun, ep_rank: int, dense: Tensors) -> dict[str, object]:
    empty = run.stage == 3
    module = {n: torch.empty(0).bfloat16() if empty else v.bfloat16() for n, v in dense.items()}
    if run.autoep:
        module |= {n.replace(".router.", ".gate."): v for n, v in module.items() if ".router." in n}
    config = {"zero_optimization": {"stage": run.stage}}
    if run.blocks:
        config["use_data_before_expert_parallelism"] = True  # type: ignore[assignment]
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [_shapes(dense), _shapes(local_experts(run, 0))],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "dp_world_size": run.world,
        "global_steps": 2,
        "ds_config": config if run.configured else None,
        "num_experts": [run.experts] * run.layers,
        "ds_autoep_layers": [_autoep_layer(run, layer, ep_rank) for layer in range(run.layers)]
        if run.autoep
        else None,
    }


def _autoep_layer(run: MoeRun, layer: int, ep_rank: int) -> dict[str, object]:
    ranks = [{"rank": e, "experts": list(share)} for e, share in enumerate(run.shares)]
    return {
        "moe_layer_id": layer,
        "module_path": f"m.{layer}",
        "num_experts": run.experts,
        "num_local_experts": run.experts // run.ep,
        "ep_size": run.ep,
        "expert_key_prefix": f"m.{layer}.experts",
        "ep_rank": ep_rank,
        "expert_placement": {"version": 1, "ranks": ranks},
    }


def _shapes(tensors: Tensors) -> OrderedDict[str, tuple[int, ...]]:
    return OrderedDict((name, tuple(value.shape)) for name, value in tensors.items())


Places = Sequence[tuple[Tensors, list[int]]]


def _zero12(run: MoeRun, rank: int, places: Places) -> dict[str, object]:
    flats, mappings = [], []
    for tensors, sharing in places:
        flat = torch.cat([value.flatten() for value in tensors.values()])
        names = [(name, i) for name, value in tensors.items() for i in range(value.numel())]
        part = -(-len(flat) // (2 * len(sharing))) * 2
        begin = sharing.index(rank) * part
        flats.append(flat[begin : begin + part].clone())
        mapping: dict[str, fragment_address] = {}
        for place, (name, _) in enumerate(names[begin : begin + part]):
            mapping.setdefault(name, fragment_address(place, 0)).numel += 1
        mappings.append(OrderedDict(mapping))
    return {
        "zero_stage": run.stage,
        "single_partition_of_fp32_groups": flats,
        "partition_count": [len(sharing) for _, sharing in places],
        **({"param_slice_mappings": mappings} if run.recorded else {}),
    }


def _zero3(run: MoeRun, rank: int, places: Places) -> dict[str, object]:
    flats = []
    for tensors, sharing in places:
        stripes = []
        for value in tensors.values():
            size = -(-value.numel() // len(sharing))
            padded = torch.full((size * len(sharing),), torch.nan)
            padded[: value.numel()] = value.flatten()
            at = sharing.index(rank) * size
            stripes.append(padded[at : at + size])
        flats.append(torch.cat(stripes))
    return {
        "zero_stage": 3,
        "partition_count": run.world,
        "fp32_flat_groups": flats,
        "ds_zero_partition_groups": [
            {"partition_count": len(s), "partition_rank": s.index(rank), "partition_ranks": s}
            for _, s in places
        ],
    }


class fragment_address:  # noqa: N801 - DeepSpeed's name, which the pickle mentions
    """Stands for DeepSpeed's class while a file is written."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


_HOME = ModuleType("deepspeed.utils.tensor_fragment")
fragment_address.__module__ = _HOME.__name__
_HOME.fragment_address = fragment_address  # type: ignore[attr-defined]


@contextmanager
def rank_file_classes() -> Iterator[None]:
    """Let pickle find the classes of rank files where DeepSpeed's own would be."""
    modules = {"deepspeed.utils": ModuleType("deepspeed.utils"), _HOME.__name__: _HOME}
    with deepspeed_names(), mock.patch.dict("sys.modules", modules):
        yield


def _save(state: object, path: Path) -> None:
    with rank_file_classes():
        torch.save(state, path)


def rewrite(path: Path, change: object) -> None:
    """Load a file, let ``change`` alter its dictionary, and write it again."""
    assert callable(change)
    with rank_file_classes():
        state = torch.load(path, weights_only=False)
    change(state)
    _save(state, path)
