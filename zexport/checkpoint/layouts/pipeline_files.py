"""The layer files of a pipeline: names that are relative to a layer, and which layer that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.checkpoint.rank_files import RankFile, RankFileKind
from zexport.checkpoint.ranks import check_written_as_named
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError
from zexport.formats.pickles import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.dtypes import Shape

TIED = "tied_modules."
"""How the name of a tied layer's parameter begins; its key and its name in the layer follow."""

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LayerFile:
    """What one layer file holds: the layer's weights as the module has them, and its buffers.

    Source: DeepSpeed 0.19.8, ``runtime/pipe/module.py`` (``save_state_dict``): every layer that has
    a state dict; a second use of a tied layer through a function of its own has none.

    Attributes:
        file: the file.
        layer: index of the layer in the pipeline.
        tensor_rank: tensor-parallel rank.
        tensors: name within the layer to tensor.
    """

    file: TorchFile
    layer: int
    tensor_rank: int
    tensors: Mapping[str, TensorRef]

    def stored(self, key: str, name: str, role: Role) -> StoredTensor:
        """The tensor at ``key`` under its full ``name``."""
        tensor = self.tensors[key]
        return StoredTensor(name, tensor.shape, tensor.dtype, role, self.file.source(tensor))


def read_layers(files: Iterable[RankFile]) -> tuple[LayerFile, ...]:
    """The layer files among ``files``, by tensor rank and layer."""
    return tuple(
        sorted(
            (_read(file) for file in files if file.kind is RankFileKind.PIPELINE_LAYER),
            key=lambda layer: (layer.tensor_rank, layer.layer),
        )
    )


def layer_of(name: str) -> int | None:
    """The layer that a full name belongs to; ``None`` for a tied layer's."""
    head = name.partition(".")[0]
    return int(head) if head.isascii() and head.isdecimal() else None


def check_holds_trained(
    layer: LayerFile, masters: Mapping[str, StoredTensor], buffers: Set[str]
) -> None:
    """Refuse a layer file that has other weights in the place of those that its layer trains.

    A layer file is the state dict of the very module whose parameters ``param_shapes`` names
    (DeepSpeed 0.10 to 0.19, ``runtime/pipe/module.py``), so the names are the same. Two things may
    differ without harm: a layer may keep weights out of its state dict, and a wrapper's hook may
    rename them (torch 2.13, ``checkpoint_wrapper.py``). Each then has one of its shape here.
    """
    prefix = f"{layer.layer}."
    shapes = {prefix + key: tensor.shape for key, tensor in layer.tensors.items()}
    surplus = {n: shape for n, shape in shapes.items() if n not in masters and n not in buffers}
    trained = {name: one.shape for name, one in masters.items() if name.startswith(prefix)}
    lacking = {name: shape for name, shape in trained.items() if name not in shapes}
    if surplus and Counter(lacking.values()) - Counter(surplus.values()):
        raise DamagedCheckpointError(
            f"lacks weights that layer {layer.layer} trains, and holds others",
            path=layer.file.path,
            found=_shown(prefix, surplus),
            expected=_shown(prefix, lacking),
            hint="Copy this layer file of the same save again",
        )


def _shown(prefix: str, shapes: Mapping[str, Shape]) -> str:
    first = [
        f"{name.removeprefix(prefix)} {list(shapes[name])}" for name in sorted(shapes)[:_SHOWN]
    ]
    return ", ".join(first) + (", ..." if len(shapes) > _SHOWN else "")


def _read(file: RankFile) -> LayerFile:
    torch_file = read_torch_file(file.path)
    check_written_as_named(torch_file)
    return LayerFile(
        file=torch_file,
        layer=file.layer,
        tensor_rank=file.tensor_rank,
        tensors=Value(file.path, "layer states", torch_file.value).tensors(),
    )
