"""Which weights of a checkpoint belong to experts, and what it is without them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.layouts.expert_placement import held_by, unknown_version
from zexport.checkpoint.model_states import ModelStates, ModuleFile
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.untrusted import Value
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
)
from zexport.formats.inert import TensorRef
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource, Chain, Window

_T = TypeVar("_T")
AUTOEP_WEIGHTS = ("w1", "w2", "w3")
"""The weights of an expert, by the last part of their names."""
_NATIVE = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d{1,9})\.(.+)", re.ASCII)
_PARTITIONED_VERSION = 1


class AutoEpLayer(Struct, frozen=True):
    """One layer that AutoEP replaced: number, name, that of its experts, and who holds which.

    ``ep_rank`` is that of the rank that wrote this, where it is said; ``held`` has the experts of
    each expert-parallel rank in the order of its tensors.
    """

    number: int
    module: str
    experts: str
    ep_rank: int | None
    held: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        """Number of experts in the whole layer."""
        return sum(len(experts) for experts in self.held)


class NativeName(Struct, frozen=True):
    """The name of an expert's weight in DeepSpeed-MoE: prefix, number of the expert, rest."""

    prefix: str
    number: int
    rest: str

    def renumbered(self, number: int) -> str:
        """The name of the same weight of another expert."""
        return f"{self.prefix}.{number}.{self.rest}"


def parse_native(name: str) -> NativeName | None:
    """``name`` taken apart, or ``None`` if it is no weight of a DeepSpeed-MoE expert."""
    match = _NATIVE.fullmatch(name)
    return NativeName(match[1], int(match[2]), match[3]) if match else None


def read_autoep_layers(model: ModelStates) -> tuple[AutoEpLayer, ...]:
    """The layers that AutoEP replaced; nothing where it did not run."""
    return tuple(_autoep_layer(entry) for entry in model.autoep_layers)


def autoep_weights(layers: Iterable[AutoEpLayer]) -> dict[str, AutoEpLayer]:
    """The layer of every weight that AutoEP keeps for all experts of a layer, by its name."""
    return {f"{layer.experts}.{weight}": layer for layer in layers for weight in AUTOEP_WEIGHTS}


def _autoep_layer(entry: Value) -> AutoEpLayer:
    version = entry.get("checkpoint_format_version").value
    if version not in (None, _PARTITIONED_VERSION):
        raise unknown_version(entry, "checkpoint_format_version", version)
    layer = AutoEpLayer(
        number=entry.need("moe_layer_id").number(),
        module=entry.need("module_path").text(),
        experts=entry.need("expert_key_prefix").text(),
        ep_rank=entry.get("ep_rank").number_or_none(),
        held=held_by(entry),
    )
    stated = entry.need("num_experts").number(), entry.need("ep_size").number()
    if stated != (layer.num_experts, len(layer.held)):
        entry.fail(
            "contradicts its own placement of experts", f"{stated[0]} experts on {stated[1]}"
        )
    return layer


def _runs(held: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, int]]]:
    """The experts in their own order: rank and place of those that follow each other there too."""
    places = {
        expert: (ep_rank, position)
        for ep_rank, experts in enumerate(held)
        for position, expert in enumerate(experts)
    }
    named = sorted(expert for experts in held for expert in experts)
    if named != list(range(len(named))):
        raise LayoutError("the expert placement does not name each expert once", named, "0, 1, ...")
    run: list[tuple[int, int]] = []
    for expert in named:
        ep_rank, position = places[expert]
        if run and run[-1] != (ep_rank, position - 1):
            yield run
            run = []
        run.append((ep_rank, position))
    if run:
        yield run


class ExpertLayers(Struct, frozen=True):
    """The layers with experts, found by the names of their weights.

    ``native`` has the number of experts by prefix (DeepSpeed-MoE), ``autoep`` the layer by name of
    a weight that is kept for all experts, ``files`` those of each layer in the experts' order.
    """

    native: Mapping[str, int]
    autoep: Mapping[str, AutoEpLayer]
    files: Mapping[int, Sequence[ModuleFile]]

    def has(self, name: str) -> bool:
        """Whether ``name`` is a weight of experts."""
        return name in self.autoep or parse_native(name) is not None


def find_layers(
    ranks: RankStates, model: ModelStates, experts: Sequence[ModuleFile]
) -> ExpertLayers:
    """The layers with experts."""
    by_autoep = read_autoep_layers(model)
    files = {} if ranks.is_zero3 else _files_by_layer(model, experts)
    autoep = autoep_weights(by_autoep)
    if not ranks.is_zero3:
        for layer in by_autoep:
            _check_autoep_files(layer, files.get(layer.number, ()))
    if len(autoep) != len(by_autoep) * len(AUTOEP_WEIGHTS):
        raise LayoutError("two layers have the same experts", len(by_autoep), "different layers")
    native: dict[str, int] = {}
    for number in files.keys() - {layer.number for layer in by_autoep}:
        native[_native_prefix(files[number])] = len(files[number])
        _check_alike(files[number])
    return ExpertLayers(native, autoep, files)


def _files_by_layer(
    model: ModelStates, experts: Sequence[ModuleFile]
) -> dict[int, list[ModuleFile]]:
    """The expert files of each layer, all that there should be and no other."""
    present = {(states.layer, states.expert): states for states in experts}
    counts = model.num_experts
    expected = ((layer, expert) for layer, count in enumerate(counts) for expert in range(count))
    missing = next((place for place in expected if place not in present), None)
    if missing is not None:
        layer, expert = missing
        raise IncompleteCheckpointError(
            "lacks expert files",
            path=model.file.path.parent,
            found=f"{len(present)} of {sum(counts)}",
            expected=rank_file_name(RankFileKind.EXPERT, layer=layer, expert=expert),
            hint="Copy them from the nodes that wrote them",
        )
    if len(present) > sum(counts):
        raise LayoutError(
            "there are files of more experts than the model has",
            f"{len(present)} files",
            f"{sum(counts)} experts in {len(counts)} layers",
        )
    return {
        layer: [present[layer, expert] for expert in range(count)]
        for layer, count in enumerate(counts)
    }


def _check_autoep_files(layer: AutoEpLayer, files: Sequence[ModuleFile]) -> None:
    """The files of a layer are one for each expert, and hold no other weights than AutoEP's."""
    if len(files) != layer.num_experts:
        raise LayoutError(
            f"layer {layer.number} has not as many expert files as experts",
            len(files),
            layer.num_experts,
        )
    for states in files:
        names = {f"{layer.experts}.{weight}.{states.expert}" for weight in AUTOEP_WEIGHTS}
        if states.tensors.keys() != names:
            raise LayoutError(
                f"{states.file.path.name} holds something else than its expert",
                sorted(states.tensors.keys() ^ names)[0],
                f"the weights {', '.join(AUTOEP_WEIGHTS)} of {layer.experts!r}",
            )


def _native_prefix(files: Sequence[ModuleFile]) -> str:
    """The one prefix of all names in the files of a DeepSpeed-MoE layer."""
    prefixes = set()
    for states in files:
        for name in states.tensors:
            parsed = parse_native(name)
            if parsed is None or parsed.number != states.expert:
                raise LayoutError(
                    f"{states.file.path.name} holds something else than its expert",
                    name,
                    f"names with deepspeed_experts.{states.expert}",
                )
            prefixes.add(parsed.prefix)
    if len(prefixes) != 1:
        raise LayoutError(
            f"the expert files of layer {files[0].layer} are not of one layer",
            sorted(prefixes),
            "one prefix",
        )
    return prefixes.pop()


def _check_alike(files: Sequence[ModuleFile]) -> None:
    """The files of a DeepSpeed-MoE layer hold the same weights, each under its expert's number.

    The experts are deep copies of one module, whose state dicts are saved whole, frozen weights and
    buffers included (DeepSpeed 0.10 to 0.19, ``moe/experts.py`` and ``runtime/engine.py``). What
    most of them hold is taken for right.
    """
    held = [
        {
            parsed.rest: f"{tensor.dtype.torch_name} {list(tensor.shape)}"
            for name, tensor in states.tensors.items()
            if (parsed := parse_native(name)) is not None
        }
        for states in files
    ]
    usual = dict(Counter(frozenset(own.items()) for own in held).most_common(1)[0][0])
    for states, own in zip(files, held, strict=True):
        if own != usual:
            name = min(name for name in own | usual if own.get(name) != usual.get(name))
            raise DamagedCheckpointError(
                "does not hold the weights that the other experts of its layer have",
                path=states.file.path,
                found=f"{name} as {own[name]}" if name in own else f"no {name}",
                expected=usual.get(name, f"no {name}"),
                hint="Copy this expert file of the same save again",
            )


def expert_groups(model: ModelStates, layers: ExpertLayers) -> list[int]:
    """The numbers of the flat groups that hold experts; none holds other weights as well."""
    indices = []
    for index, shapes in enumerate(model.param_shapes):
        of_experts = [name for name in shapes if layers.has(name)]
        if of_experts and len(of_experts) != len(shapes):
            raise LayoutError(
                f"flat group {index} mixes experts with other weights",
                f"{len(of_experts)} of {len(shapes)} are experts'",
                "all or none",
            )
        if of_experts:
            indices.append(index)
    return indices


def without_experts(model: ModelStates, layers: ExpertLayers) -> ModelStates:
    """The model states as if there were no experts; their flat groups are left, and empty."""
    frozen, shared = model.frozen_shapes, model.shared_params
    dense_shared = {alias: name for alias, name in shared.items() if not layers.has(alias)}
    return replace(
        model,
        module=_dense(model.module, layers),
        buffer_names=tuple(name for name in model.buffer_names if not layers.has(name)),
        param_shapes=tuple(_dense(shapes, layers) for shapes in model.param_shapes),
        frozen_shapes=None if frozen is None else _dense(frozen, layers),
        frozen_fragments=_dense(model.frozen_fragments, layers),
        shared_params={**dense_shared, **_router_aliases(model, layers)},
    )


def in_expert_order(sources: Sequence[ByteSource], layer: AutoEpLayer) -> Iterator[ByteSource]:
    """AutoEP's experts of all expert-parallel ranks, in the order of their numbers."""
    for run in _runs(layer.held):
        ep_rank, position = run[0]
        nbytes = sources[ep_rank].nbytes // len(layer.held[ep_rank])
        yield Window(sources[ep_rank], position * nbytes, len(run) * nbytes)


def stack_slices(name: str, files: Sequence[ModuleFile]) -> tuple[Shape, DType, Chain]:
    """Shape, type and bytes of a weight of all experts of a layer, one slice out of each file."""
    slices: list[tuple[TensorRef, ByteSource]] = []
    for states in files:
        tensor = states.tensors.get(f"{name}.{states.expert}")
        if tensor is None:
            raise LayoutError(
                f"{states.file.path.name} lacks its part of {name!r}", "no such weight", "one"
            )
        slices.append((tensor, states.file.source(tensor)))
    kinds = {(tensor.shape, tensor.dtype) for tensor, _ in slices}
    if len(kinds) != 1:
        raise LayoutError(f"the experts of {name!r} are not alike", sorted(map(str, kinds)), "one")
    ((shape, dtype),) = kinds
    return (len(slices), *shape), dtype, Chain(tuple(part for _, part in slices))


def _dense(by_name: Mapping[str, _T], layers: ExpertLayers) -> dict[str, _T]:
    return {name: value for name, value in by_name.items() if not layers.has(name)}


def _router_aliases(model: ModelStates, layers: ExpertLayers) -> dict[str, str]:
    """The second names that AutoEP gives its routers, which ``shared_params`` does not mention.

    Source: DeepSpeed 0.19, ``module_inject/auto_ep_layer.py``: the module ``router`` is set on its
    layer a second time, under the name that it had in the original model.
    """
    aliases: dict[str, str] = {}
    for layer in dict.fromkeys(one.module for one in layers.autoep.values()):
        children: dict[str, set[str]] = {}
        for name in model.module:
            child, dot, rest = name.removeprefix(f"{layer}.").partition(".")
            if name.startswith(f"{layer}.") and dot:
                children.setdefault(child, set()).add(rest)
        router = children.pop("router", None)
        for child, names in children.items():
            if names == router:
                aliases |= {f"{layer}.{child}.{n}": f"{layer}.router.{n}" for n in sorted(names)}
    return aliases
