"""The folder ``zero`` of a universal checkpoint: a folder for each weight, a file for each state.

Source: DeepSpeed 0.10 to 0.19, ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.checkpoint.layouts.zero3 import stripe_numel
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.untrusted import Value
from zexport.errors import (
    DamagedCheckpointError,
    LayoutError,
    UnsafeError,
    UnsupportedError,
)
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import Window
from zexport.store.folders import child_folders, exists, is_file

FOLDER = "zero"


OPTIMIZER_STATE = "optimizer_state"


STEP = "step"
"""Files of what is no parameter's own, and of the steps that each has taken."""


CONVERT_AGAIN = (
    "Convert the checkpoint again with DeepSpeed's ds_to_universal, or export its source"
)


def names_its_groups(said: Value) -> bool:
    """Whether what is said in ``optimizer_state.pt`` names the parameters of every group.

    So ``zexport reshard`` does, with round robin undone; the converter leaves the numbers in it of
    the flat groups that there were.
    """
    params = [one.need("params").items() for one in said.get("param_groups").items()]
    return any(params) and all(isinstance(one.value, str) for own in params for one in own)


def weight_folders(zero: Path) -> dict[str, Path]:
    """The folders of weights, by name: plain ones directly in ``zero``."""
    folders = {}
    for folder, is_link in child_folders(zero):
        if is_link:
            raise UnsafeError(
                "is a link, where a folder of a weight should be",
                path=folder,
                hint="Put the folder itself there",
            )
        folders[folder.name] = folder
    return folders


def has_moments(folder: Path) -> bool:
    """Whether an optimizer stepped the weight of this folder."""
    return exists(folder / "exp_avg.pt")


def read_weight(
    tag_dir: Path,
    name: str,
    shards: list[Shape],
    models: Mapping[int, ModelStates],
    folders: Mapping[str, Path],
) -> tuple[StoredTensor, TorchFile]:
    """A trained weight out of its ``fp32.pt``."""
    if name not in folders or not is_file(folders[name] / "fp32.pt"):
        raise DamagedCheckpointError(
            f"lacks the file of the weight {name!r}",
            path=tag_dir / FOLDER,
            expected=f"{name}/fp32.pt",
            hint=CONVERT_AGAIN,
        )
    file = read_torch_file(folders[name] / "fp32.pt")
    content = Value(file.path, "the file", file.value)
    if isinstance(file.value, TensorRef):
        tensor = file.value
        world_size = models[min(models)].dp_world_size
        shape = shape_of_flat(name, tensor.numel, shards, world_size)
    else:
        tensor = content.need("param").tensor()
        shape = tensor.shape
        experts = content.get("ep_num_experts").number() if content.has("ep_num_experts") else None
        check_whole(name, shape, shards, experts=experts, cut=content.has("vocab_tensor"))
        _refuse_rounded(content, name, models)
    if not tensor.dtype.is_floating:
        content.fail("does not hold a floating-point weight", tensor.dtype.torch_name)
    source = Window(file.source(tensor), 0, prod(shape) * tensor.dtype.itemsize)
    return StoredTensor(name, shape, tensor.dtype, Role.TRAINABLE, source), file


def _refuse_rounded(content: Value, name: str, models: Mapping[int, ModelStates]) -> None:
    """Refuse a weight that was made from 16-bit values, for want of optimizer state.

    The converter then writes ``param`` alone and no moments (``ds_to_universal.py``, ``main``).
    """
    made = [model.module[name] for model in models.values() if name in model.module]
    is_rounded = any(tensor.numel and tensor.dtype in (DType.BF16, DType.F16) for tensor in made)
    is_stepped = has_moments(content.path.parent)
    if is_rounded and not is_stepped and content.mapping().keys() == {"param"}:
        raise UnsupportedError(
            f"holds no master of the weight {name!r}: the converter made it from 16-bit values",
            path=content.path,
            hint="Export the checkpoint that it was converted from",
        )


def check_one_type(weights: Iterable[tuple[StoredTensor, TorchFile]]) -> None:
    """Refuse a weight that was rounded: all masters of a run are of one floating-point type.

    Left out is what no optimizer stepped, which the converter turns to fp32 whatever the type of
    the masters (``ds_to_universal.py``, ``main``).

    Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``, which clone
    all groups as fp32 or, with 16-bit master weights, all in the one 16-bit type.
    """
    stepped = [(one, file) for one, file in weights if one.numel and has_moments(file.path.parent)]
    counts = Counter(one.dtype for one, _ in stepped).most_common()
    if len(counts) < 2:  # noqa: PLR2004 - a second type
        return
    usual = counts[0][0]
    odd, file = next((one, file) for one, file in stepped if one.dtype is not usual)
    raise DamagedCheckpointError(
        f"holds the weight {odd.name!r} in another element type than the others",
        path=file.path,
        found=odd.dtype.torch_name,
        expected=usual.torch_name,
        hint=CONVERT_AGAIN,
    )


def check_whole(
    name: str, whole: Shape, shards: Sequence[Shape], *, experts: int | None, cut: bool
) -> None:
    """Hold a whole weight against its shape in each model-parallel rank's ``param_shapes``."""
    if experts is not None:
        fits = whole[:1] == (experts,) and all(shard[1:] == whole[1:] for shard in shards)
    elif cut:
        rows = sum(shard[0] for shard in shards if shard)
        fits = all(shard[1:] == whole[1:] for shard in shards) and 0 < whole[0] <= rows
    else:
        fits = all(shard == whole for shard in shards) or _is_split(whole, shards)
    if not fits:
        raise LayoutError(
            f"the weight {name!r} has another shape than the model files say",
            list(whole),
            " and ".join(str(list(shard)) for shard in shards),
        )


def _is_split(whole: Shape, shards: Sequence[Shape]) -> bool:
    """Whether shards may be pieces of the whole: none is larger, and together they suffice."""
    return (
        len(shards) > 1
        and all(len(shard) == len(whole) for shard in shards)
        and all(n <= size for shard in shards for n, size in zip(shard, whole, strict=True))
        and prod(whole) <= sum(prod(shard) for shard in shards)
    )


def shape_of_flat(
    name: str, numel: int, shards: Sequence[Shape], world_size: int | None = None
) -> Shape:
    """The shape of a weight that is stored flat, as from ZeRO-3 without tensor parallelism.

    The converter leaves behind it all stripes of padding but one, as it strips the absolute number
    of elements by which a stripe is beyond the end. Source: DeepSpeed 0.15 to 0.19.2,
    ``checkpoint/ds_to_universal.py`` (``extract_zero_shards_stage3``); 0.19.8 leaves none.
    """
    whole = prod(shards[0])
    lengths = {whole}
    if world_size:
        lengths.add(max(whole, (world_size - 1) * stripe_numel(whole, world_size)))
    if len(set(shards)) != 1 or numel not in lengths:
        raise LayoutError(
            f"the weight {name!r} has another length than the model files say",
            f"{numel} elements",
            " and ".join(str(list(shard)) for shard in shards),
        )
    return shards[0]
