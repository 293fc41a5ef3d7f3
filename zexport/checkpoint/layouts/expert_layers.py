"""Which weights of a checkpoint belong to experts, and what it is without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zexport.checkpoint.layouts.expert_placement import expert_runs
from zexport.checkpoint.layouts.expert_states import (
    AutoEpLayer,
    ExpertStates,
    parse_native,
    read_autoep_layers,
)
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.states import ModelStates
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, LayoutError
from zexport.ranges.extents import ByteSource, Window

_T = TypeVar("_T")
_AUTOEP_WEIGHTS = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The layers with experts, found by the names of their weights.

    Attributes:
        native: prefix of DeepSpeed-MoE's names to the number of experts.
        autoep: name of a weight that AutoEP keeps for all experts to its layer.
        files: the expert files by layer number, in the order of the experts.
    """

    native: Mapping[str, int]
    autoep: Mapping[str, AutoEpLayer]
    files: Mapping[int, Sequence[ExpertStates]]

    def has(self, name: str) -> bool:
        """Whether ``name`` is a weight of experts."""
        return name in self.autoep or parse_native(name) is not None


def find_layers(
    ranks: RankStates, model: ModelStates, experts: Sequence[ExpertStates]
) -> ExpertLayers:
    """The layers with experts."""
    by_autoep = read_autoep_layers(model)
    files = {} if ranks.is_zero3 else _files_by_layer(model, experts)
    autoep = {
        f"{layer.experts}.{weight}": layer for layer in by_autoep for weight in _AUTOEP_WEIGHTS
    }
    if not ranks.is_zero3:
        for layer in by_autoep:
            _check_autoep_files(layer, files.get(layer.number, ()))
    if len(autoep) != len(by_autoep) * len(_AUTOEP_WEIGHTS):
        raise LayoutError("two layers have the same experts", len(by_autoep), "different layers")
    native: dict[str, int] = {}
    for number in files.keys() - {layer.number for layer in by_autoep}:
        native[_native_prefix(files[number])] = len(files[number])
        _check_alike(files[number])
    return ExpertLayers(native, autoep, files)


def _files_by_layer(
    model: ModelStates, experts: Sequence[ExpertStates]
) -> dict[int, list[ExpertStates]]:
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


def _check_autoep_files(layer: AutoEpLayer, files: Sequence[ExpertStates]) -> None:
    """The files of a layer are one for each expert, and hold no other weights than AutoEP's."""
    if len(files) != layer.num_experts:
        raise LayoutError(
            f"layer {layer.number} has not as many expert files as experts",
            len(files),
            layer.num_experts,
        )
    for states in files:
        names = {f"{layer.experts}.{weight}.{states.expert}" for weight in _AUTOEP_WEIGHTS}
        if states.tensors.keys() != names:
            raise LayoutError(
                f"{states.file.path.name} holds something else than its expert",
                sorted(states.tensors.keys() ^ names)[0],
                f"the weights {', '.join(_AUTOEP_WEIGHTS)} of {layer.experts!r}",
            )


def _native_prefix(files: Sequence[ExpertStates]) -> str:
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


def _check_alike(files: Sequence[ExpertStates]) -> None:
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
    for run in expert_runs(layer.held):
        nbytes = sources[run.ep_rank].nbytes // len(layer.held[run.ep_rank])
        yield Window(sources[run.ep_rank], run.position * nbytes, run.count * nbytes)


def _dense(by_name: Mapping[str, _T], layers: ExpertLayers) -> dict[str, _T]:
    return {name: value for name, value in by_name.items() if not layers.has(name)}


def _router_aliases(model: ModelStates, layers: ExpertLayers) -> dict[str, str]:
    """The second names that AutoEP gives its routers, which ``shared_params`` does not mention.

    Source: DeepSpeed 0.19, ``module_inject/auto_ep_layer.py``: the module ``router`` is set on its
    layer a second time, under the name that it had in the original model.
    """
    aliases: dict[str, str] = {}
    for layer in {one.module for one in layers.autoep.values()}:
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
