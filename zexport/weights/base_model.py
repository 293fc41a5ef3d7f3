"""Weights in model folders: of the base, which no scales belong to, and beside the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path

from msgspec import Struct, field, structs

from zexport.checkpoint.resolve import list_tags
from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.checkpoint.zero.records import ZERO3
from zexport.errors import DamagedCheckpointError, UnsafeError, UnsupportedError, ZexportError
from zexport.filenames import ADAPTER_CONFIG, CONFIG
from zexport.formats.safetensors_file import SafetensorsHeader, read_header, read_index
from zexport.model.fit import ModelNames, NamesUnknown
from zexport.plan.plan import INDEX_FILE, SINGLE_FILE, SourceFile
from zexport.printable import some
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.replicas import CastReplica
from zexport.store.boundary import Boundary
from zexport.store.contents import read_json_object
from zexport.store.folders import is_file, is_link, matching

_WEIGHTS = re.compile(r"[^/\0]+\.safetensors(\.index\.json)?")
_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class Base(Struct, frozen=True):
    """The model folder that was given for what a checkpoint lacks, or none.

    ``instead`` is what a folder without weights has in their place, in words.
    """

    path: Path | None = None
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    instead: str = ""

    def __repr__(self) -> str:
        """The folder and the number of its weights; there are thousands."""
        return f"Base({self.path}, {len(self.tensors)} tensors)"

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name to shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def read_base(base: Path | None, *, follow_symlinks: bool) -> tuple[SafetensorsHeader, ...]:
    """Headers of the weight files that ``from_pretrained`` would load of a base model."""
    if base is None:
        return ()
    boundary = Boundary.of(base, follow=follow_symlinks)
    for name in (SINGLE_FILE, INDEX_FILE, CONFIG):
        boundary.check(base / name)
    weights = weights_file(base)
    if weights is None:
        return ()
    boundary.check(weights)
    if weights.suffix == ".json":
        return tuple(_read_indexed(weights, boundary))
    return (read_header(weights),)


def weights_file(folder: Path) -> Path | None:
    """The safetensors file, or the index of several, that ``from_pretrained`` opens in a folder.

    Source: transformers 5.23, ``modeling_utils.py``, ``_get_resolved_checkpoint_files``: what the
    config names goes first, and a single file goes before an index.
    """
    config = folder / CONFIG
    named = read_json_object(config).get("transformers_weights") if is_file(config) else None
    if named is None:
        return next(filter(is_file, (folder / SINGLE_FILE, folder / INDEX_FILE)), None)
    if isinstance(named, str) and _WEIGHTS.fullmatch(named):
        return folder / named
    raise UnsafeError(
        "has a transformers_weights that is no safetensors file beside it",
        path=config,
        found=repr(named),
        hint="Give a folder as save_pretrained writes it",
    )


def _read_indexed(index: Path, boundary: Boundary) -> Iterator[SafetensorsHeader]:
    """Headers of the files that an index names, each with the tensors that it places there."""
    for path, placed in read_index(index, "Mend the index, or give another model folder").items():
        boundary.check(path)
        header = read_header(path)
        tensors = {n: one for n, one in header.tensors.items() if n in placed}
        yield structs.replace(header, tensors=tensors)


def source_files(headers: Iterable[SafetensorsHeader]) -> Iterator[SourceFile]:
    """Weight files that are no torch files, each once."""
    for header in {header.path: header for header in headers}.values():
        yield SourceFile.of(header)


def base_of(path: Path | None, headers: Iterable[SafetensorsHeader]) -> Base:
    """The base of a folder whose weight files have these headers."""
    tensors = {name: frozen_in(header, name) for header in headers for name in header.tensors}
    return Base(path, tensors, "" if tensors or path is None else _instead(path))


def frozen_in(header: SafetensorsHeader, name: str) -> StoredTensor:
    """A tensor of a file, which no training of the checkpoint has changed."""
    tensor = header.tensors[name]
    return StoredTensor(name, tensor.shape, tensor.dtype, Role.FROZEN, header.source(name))


def _instead(folder: Path) -> str:
    """What a folder has where a model's weights should be."""
    adapter = folder / ADAPTER_CONFIG
    if is_file(adapter):
        of = read_json_object(adapter).get("base_model_name_or_path")
        return f"a peft adapter, and not the model that it is for ({of or 'which has no name'})"
    if any(matching(folder, "*-of-*.safetensors")):
        return f"shards without {INDEX_FILE}, which says what is in each: copy that file as well"
    return "no safetensors files, which alone are read"


def under_names_of(names: ModelNames | NamesUnknown, base: Base) -> Base:
    """A base model's weights by the names that the model has for them.

    They differ where the base's files are those of the class inside the model, which have no prefix
    (GPT-2 and MiniLM on the hub), or of a class around it, and in layer norms of BERT's time. What
    the model does not know, such as the scales of quantized weights, goes along with the rest.

    Source: transformers 5.23, ``core_model_loading.py``, ``rename_source_key``, and the legacy
    renamings of ``conversion_mapping.py``.
    """
    if isinstance(names, NamesUnknown) or not base.tensors:
        return base
    prefix = f"{names.base_prefix}." if names.base_prefix else ""
    everything = names.all_names
    known = {name: _known_as(name, prefix, everything) for name in base.tensors}
    is_inside = any(new == prefix + name != name for name, new in known.items())
    is_around = any(name == f"{prefix}{new}" != new for name, new in known.items())
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in base.tensors.items():
        beside = prefix + name if is_inside else name.removeprefix(prefix if is_around else "")
        new = known[name] or beside
        if known[name] and new in renamed:
            raise DamagedCheckpointError(
                f"holds two weights that are both {new} in the model",
                path=base.path,
                expected="one, with or without the prefix of the model's class",
                hint="Load the base with transformers, and give what save_pretrained writes of it",
            )
        renamed[new] = tensor if new == name else replace(tensor, name=new)
    return structs.replace(base, tensors=renamed)


def _known_as(name: str, prefix: str, known: Set[str]) -> str | None:
    """What a model calls a weight of the base; ``None`` where it has no such weight."""
    now = name
    for old, new in _LEGACY.items():
        now = f"{now.removesuffix(old)}{new}" if now.endswith(old) else now
    forms = (name, now, now.removeprefix(prefix), prefix + now)
    return next((form for form in forms if form in known), None)


def under_prefix(prefix: str, wanted: Iterable[str], base: Base) -> Base:
    """A base's weights under a prefix, where that alone gives those that are wanted.

    So the files of an encoder serve an adapter on a classifier around it.
    """
    has = base.tensors
    lacking = [name for name in wanted if name not in has]
    if not lacking or not all(
        name.startswith(prefix) and name.removeprefix(prefix) in has for name in lacking
    ):
        return base
    tensors = {prefix + name: replace(one, name=prefix + name) for name, one in has.items()}
    return structs.replace(base, tensors=tensors)


_AFTER_WEIGHT = re.compile(
    r"(?P<weight>.+?)(?:_scale|_scales|_scale_inv|_global_scale|_zero_point|_packed|_shape|_g_idx"
    r"|_blocks|_qdata|\._data|\._scale|\.absmax|\.quant_map|\.nested_absmax|\.nested_quant_map"
    r"|\.quant_state\..+)"
)
_IN_MODULE = re.compile(r"(?P<module>.+)\.(?:SCB|weight_format|qweight|qzeros|scales|g_idx)")
"""Names of scales: after a weight's own, or beside it in its module.

Source: transformers 5.23 (``integrations/finegrained_fp8.py``, ``integrations/mxfp4.py``) and the
forms that bitsandbytes, compressed-tensors, GPTQ, AWQ and torchao write.
"""

_PACKED = frozenset({DType.I8, DType.U8, DType.F8_E4M3, DType.F8_E5M2})
_NUMBERS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16, DType.C64})


def check_plain(
    taken: Iterable[StoredTensor],
    base: Base,
    names: ModelNames | NamesUnknown,
    absent: Iterable[str] = (),
) -> None:
    """Refuse weights taken from a base that are no numbers as they stand.

    Where the model's names are not known a weight may be a buffer; then wide integers are taken
    for what they are.
    """
    is_known = isinstance(names, ModelNames)
    own = names.all_names if isinstance(names, ModelNames) else frozenset()
    scales = _scales(name for name in base.tensors if name not in own)
    packed: dict[str, str] = {}
    for tensor in taken:
        name, dtype = tensor.name, tensor.dtype
        if dtype in _PACKED or (is_known and dtype not in _NUMBERS):
            packed[name] = dtype.torch_name
        elif name in scales or name in scales.values():
            packed[name] = f"scaled by {scales.get(name, name)}"
    packed |= {name: f"there is {scales[name]}" for name in absent if name in scales}
    if packed:
        raise UnsupportedError(
            "the base model's weights are quantized, and some would be taken without their scales",
            path=base.path,
            found=some(tuple(f"{name} ({what})" for name, what in packed.items())),
            expected="a floating-point type, with no scales beside it",
            hint="Give the model before its quantization with --base, or leave these weights out "
            "with --exclude-frozen",
        )


def _scales(names: Iterable[str]) -> dict[str, str]:
    """Name of a weight to that of what scales it."""
    scales: dict[str, str] = {}
    for name in names:
        if found := _AFTER_WEIGHT.fullmatch(name):
            scales[found["weight"]] = name
        elif found := _IN_MODULE.fullmatch(name):
            scales[f"{found['module']}.weight"] = name
    return scales


def read_gathered(checkpoint: TrainingState) -> tuple[SafetensorsHeader, ...]:
    """Headers of the weights that ZeRO-3 gathered when the checkpoint was saved.

    The Hugging Face Trainer writes them beside the tag folder where
    ``stage3_gather_16bit_weights_on_model_save`` is on; which step they are of they do not say, but
    it can only be that of the one tag there is. Files that cannot be read, or are links, are none.
    """
    location = checkpoint.location
    if checkpoint.stage != ZERO3 or len(list_tags(location.root)) != 1:
        return ()
    try:
        headers = read_base(location.root, follow_symlinks=location.boundary.follow)
    except ZexportError:
        return ()  # nothing depends on them; `zexport inspect` tells what is wrong
    return () if any(is_link(header.path) for header in headers) else headers


def gathered_copies(
    checkpoint: TrainingState, headers: Iterable[SafetensorsHeader]
) -> tuple[CastReplica, ...]:
    """The gathered copies of the masters; nothing unless all are there, and nothing unknown."""
    trained = {t.name for t in checkpoint.tensors if t.role is Role.TRAINABLE and t.numel}
    known = {tensor.name: tensor for tensor in checkpoint.tensors}
    known |= {a: known[n] for a, n in checkpoint.aliases.items() if n in known}
    copies: dict[str, CastReplica] = {}
    for header in headers:
        for name, copy in header.tensors.items():
            tensor = known.get(name)
            if tensor is None or tensor.shape != copy.shape:
                return ()
            replica = copy_of(tensor, header, name)
            if tensor.role is Role.TRAINABLE and replica is not None:
                copies[tensor.name] = replica
    return tuple(copies.values()) if trained <= copies.keys() else ()


def copy_of(tensor: StoredTensor, header: SafetensorsHeader, name: str) -> CastReplica | None:
    """A file's tensor as the copy of a checkpoint's; ``None`` where its shape or type forbid it."""
    copy = header.tensors[name]
    is_narrower = copy.dtype.is_floating and copy.dtype.itemsize < tensor.dtype.itemsize
    if tensor.source is None or copy.shape != tensor.shape:
        return None
    if copy.dtype is not tensor.dtype and not is_narrower:
        return None
    return CastReplica(
        name=tensor.name,
        path=header.path,
        kept=tensor.source,
        kept_dtype=tensor.dtype,
        other=header.source(name),
        other_dtype=copy.dtype,
        names_it=False,
    )
