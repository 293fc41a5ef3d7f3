"""Layers with experts (DeepSpeed-MoE, AutoEP): their names, placement on ranks, and expert files.

Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint``),
``moe/experts.py``, ``module_inject/auto_ep_layer.py`` and ``checkpoint/autoep_affine.py``.
DeepSpeed-MoE numbers experts from 0 on every rank in rank files, and by their number in the layer
in expert files, which have module weights; AutoEP stacks all experts of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.boxes import Piece, cut_boxes, in_file, join_boxes
from zexport.checkpoint.state import FileKind, Parameter, Role
from zexport.checkpoint.zero.file_names import rank_file_name, read_rank_file
from zexport.checkpoint.zero.ranks import FROM_NODES, Ranks, TagFolder
from zexport.checkpoint.zero.records import MAX_DEGREE, ModelStates
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.pickle_view import PickleView, view
from zexport.formats.torch_file import TorchFile

_NATIVE = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d{1,9})\.(.+)", re.ASCII)
AUTOEP_WEIGHTS = ("w1", "w2", "w3")


class NativeName(Struct, frozen=True):
    """The name of a weight of a DeepSpeed-MoE expert: prefix, number of the expert, rest."""

    prefix: str
    number: int
    rest: str

    def of(self, number: int) -> str:
        return f"{self.prefix}.{number}.{self.rest}"


def native_name(name: str) -> NativeName | None:
    match = _NATIVE.fullmatch(name)
    return NativeName(match[1], int(match[2]), match[3]) if match else None


def of_first(name: str) -> str:
    """Return the name of the same weight of expert 0; other names as they are."""
    native = native_name(name)
    return name if native is None else native.of(0)


class AutoEpLayer(Struct, frozen=True):
    """A layer that AutoEP replaced; ``held``: experts of each rank, in its tensors' order."""

    number: int
    module: str
    experts: str
    held: Sequence[Sequence[int]]

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.held))


class ExpertFile(Struct, frozen=True):
    """Module weights of one expert, by their names in the whole layer."""

    file: TorchFile
    tensors: Mapping[str, TensorRef]


class ExpertLayers(Struct, frozen=True):
    """Layers with experts.

    Attributes:
        native: number of experts by prefix (DeepSpeed-MoE).
        autoep: layer by the name of a weight that AutoEP stacks.
        files: expert files by layer number, in the experts' order; ZeRO-3 writes none.
        stored: module weights and buffers in expert files, by their names in the model.
    """

    native: Mapping[str, int]
    autoep: Mapping[str, AutoEpLayer]
    files: Mapping[int, Sequence[ExpertFile]]
    stored: Mapping[str, Parameter]

    def has(self, name: str) -> bool:
        return name in self.autoep or native_name(name) is not None

    def has_frozen(self, trained: Iterable[str]) -> bool:
        """Whether expert files have weights that are not trained.

        ZeRO-2's table of frozen weights has those of the first rank, and every rank would load
        them over its own (``engine.py``, ``load_module_state_dict``).
        """
        known, stored = {*map(of_first, trained)}, self.stored.values()
        return any(one.role is Role.FROZEN and of_first(one.name) not in known for one in stored)


def find_layers(tag: TagFolder, ranks: Ranks) -> ExpertLayers:
    """Return the layers with experts of one model-parallel index, with checked expert files."""
    model, autoep = ranks.first, autoep_weights(ranks.first)
    if ranks.is_zero3:
        return ExpertLayers({}, autoep, {}, {})
    files, stored, native = _read_files(tag, ranks), dict[str, Parameter](), dict[str, int]()
    for name, layer in autoep.items():
        numbered = enumerate(files.get(layer.number, ()))
        every = ((one.file, one.tensors.get(f"{name}.{number}")) for number, one in numbered)
        places = [(file, ref) for file, ref in every if ref is not None]
        kinds = {(ref.shape, ref.dtype) for _, ref in places}
        if len(places) != layer.num_experts or len(kinds) != 1:
            raise LayoutError(f"expert files do not have {name!r} of all experts", kinds, "one")
        parts = [
            in_file(file, f"{name}.{number}", ref, Role.FROZEN)
            for number, (file, ref) in enumerate(places)
        ]
        parts = [replace(one, shape=(1, *one.shape)) for one in parts]
        one_each = replace(layer, held=[[number] for number in range(layer.num_experts)])
        stored[name] = replace(join_experts(parts, one_each), name=name)
    stacked = {layer.number for layer in autoep.values()}
    for own in (own for number, own in files.items() if number not in stacked):
        kinds_of = [{of_first(n): (r.shape, r.dtype) for n, r in o.tensors.items()} for o in own]
        native |= {name.prefix: len(own) for name in map(native_name, kinds_of[0]) if name}
        for one, alike in zip(own, kinds_of, strict=True):
            if alike != kinds_of[0] or one.tensors.keys() & stored.keys():
                what = f"{one.file.path.name} has other weights"
                raise LayoutError(what, [*one.tensors], [*kinds_of[0]])
            for name, ref in one.tensors.items():
                # buffer_names has rank 0's experts only, and all experts are built alike.
                role = Role.BUFFER if of_first(name) in model.buffers else Role.FROZEN
                stored[name] = in_file(one.file, name, ref, role)
    return ExpertLayers(native, autoep, files, stored)


def _read_files(tag: TagFolder, ranks: Ranks) -> dict[int, list[ExpertFile]]:
    """Return the expert files of each layer, all of them and no others."""
    present: dict[tuple[int, int], ExpertFile] = {}
    for name in tag.of_kind(FileKind.EXPERT):
        if name.mp == ranks.index:
            file = read_rank_file(name)
            present[name.layer, name.expert] = ExpertFile(file, view(file, "expert").tensors())
    counts = ranks.first.num_experts
    due = ((layer, expert) for layer, count in enumerate(counts) for expert in range(count))
    if missing := next((at for at in due if at not in present), None):
        raise IncompleteCheckpointError(
            "expert files are missing",
            path=tag.path,
            found=f"{len(present)} of {sum(counts)}",
            expected=rank_file_name(FileKind.EXPERT, layer=missing[0], expert=missing[1]),
            hint=FROM_NODES,
        )
    if len(present) > sum(counts):
        raise LayoutError("more expert files than experts", len(present), sum(counts))
    return {n: [present[n, e] for e in range(count)] for n, count in enumerate(counts) if count}


def autoep_layers(model: ModelStates) -> tuple[AutoEpLayer, ...]:
    key = "ds_autoep_layers" if model.root.has("ds_autoep_layers") else "autoep_layers"
    return tuple(map(_autoep_layer, model.root.get(key).items()))


def autoep_weights(model: ModelStates) -> dict[str, AutoEpLayer]:
    """Return the layer of every weight of AutoEP's experts."""
    layers = autoep_layers(model)
    return {f"{one.experts}.{weight}": one for one in layers for weight in AUTOEP_WEIGHTS}


def _autoep_layer(entry: PickleView) -> AutoEpLayer:
    """Parse a record of AutoEP; without a placement, ranks have equal consecutive ranges."""
    placement = entry.get("expert_placement")
    form, version = entry.get("checkpoint_format_version").value, placement.table().get("version")
    is_placed = entry.has("expert_placement") or entry.has("affine_maps")
    if form not in (None, 1) or (is_placed and version != 1):
        raise UnsupportedError(
            "unknown AutoEP format",
            path=entry.path,
            found=f"format {form}, placement {version}",
            hint="Update zexport",
        )
    count, ep_size = entry.need("num_experts").number(), entry.need("ep_size").number()
    if not 0 < ep_size <= count <= MAX_DEGREE:
        entry.fail("has impossible numbers of experts", f"{count} experts on {ep_size} ranks")
    placed = {
        one.need("rank").number(): [number.number() for number in one.need("experts").items()]
        for one in (placement.need("ranks").items() if is_placed else ())
    }
    shares = enumerate(equal_shares(count, ep_size))
    held = [placed.get(rank, []) if is_placed else share for rank, share in shares]
    module, experts = (entry.need(key).text() for key in ("module_path", "expert_key_prefix"))
    return AutoEpLayer(entry.need("moe_layer_id").number(), module, experts, held)


def equal_shares(num_experts: int, ep_size: int) -> list[range]:
    """Return the experts of each expert-parallel rank: equal consecutive ranges."""
    if ep_size < 1 or num_experts % ep_size:
        raise LayoutError("experts do not divide by the expert-parallel size", num_experts, ep_size)
    each = num_experts // ep_size
    return [range(rank * each, (rank + 1) * each) for rank in range(ep_size)]


def join_experts(alike: Sequence[Parameter], layer: AutoEpLayer) -> Parameter:
    """Join AutoEP's experts of all ranks into one tensor, in the order of their numbers."""
    first, counts = alike[0], [len(held) for held in layer.held]
    if [one.shape[:1] for one in alike] != [(count,) for count in counts]:
        raise LayoutError(f"{first.name!r} has other experts", [one.shape for one in alike], counts)
    ranks = zip(alike, layer.held, strict=True)
    pieces = [piece for part, held in ranks for piece in _pieces(part, held)]
    return join_boxes(first.name, (layer.num_experts, *first.shape[1:]), first.role, pieces)[0]


def cut_experts(whole: Parameter, held: Sequence[int]) -> Parameter:
    """Return a rank's experts of a tensor that has those of all ranks: undoes ``join_experts``."""
    return cut_boxes(whole, (len(held), *whole.shape[1:]), _pieces(whole, held))


def _pieces(part: Parameter, held: Sequence[int]) -> Iterator[Piece]:
    """Yield the runs of experts that a rank's part has of the whole."""
    rest = (0,) * (len(part.shape) - 1)
    for _, run in groupby(enumerate(held), key=lambda pair: pair[1] - pair[0]):
        (place, expert), *more = run
        yield Piece(part, (expert, *rest), (place, *rest), (len(more) + 1, *part.shape[1:]))


def without_experts(model: ModelStates, layers: ExpertLayers) -> ModelStates:
    """Return the model states without experts; flat groups of experts stay, empty."""

    def dense(by_name: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in by_name.items() if not layers.has(name)}

    return replace(
        model,
        module=dense(model.module),
        buffers=tuple(name for name in model.buffers if not layers.has(name)),
        param_shapes=tuple(dense(shapes) for shapes in model.param_shapes),
        frozen_shapes=model.frozen_shapes and dense(model.frozen_shapes),
        frozen=dense(model.frozen),
        shared={**dense(model.shared), **_router_aliases(model, layers)},
    )


def _router_aliases(model: ModelStates, layers: ExpertLayers) -> dict[str, str]:
    """Return the original names of AutoEP's routers, which ``shared_params`` does not have.

    The module ``router`` is set under both names; values under the original one may be outdated.
    """
    aliases: dict[str, str] = {}
    for module in dict.fromkeys(layer.module for layer in layers.autoep.values()):
        children: dict[str, list[str]] = {}
        for name in sorted(name for name in model.module if name.startswith(f"{module}.")):
            child, _, rest = name.removeprefix(f"{module}.").partition(".")
            children.setdefault(child, []).append(rest)
        router = children.pop("router", [])
        alike = [child for child, names in children.items() if names == router]
        aliases |= {f"{module}.{one}.{n}": f"{module}.router.{n}" for one in alike for n in router}
    return aliases
