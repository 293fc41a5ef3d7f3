"""The base model: its weights, and whether it is the model that this run fine-tuned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, structs
from msgspec.structs import replace

from zexport.checkpoint.resolve import Location
from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import (
    DamagedCheckpointError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    VerificationError,
    ZexportError,
)
from zexport.export.manifest import read_manifest
from zexport.export.plan import INDEX_FILE, SINGLE_FILE
from zexport.export.weights import Tensors
from zexport.filenames import ADAPTER_CONFIG, CONFIG, MANIFEST_NAME
from zexport.findings import Finding, FindingKind, Findings
from zexport.formats.safetensors import SafetensorsHeader, read_header, read_index
from zexport.model.config import QUANTIZATION_KEYS, ConfigFile, differences
from zexport.model.hf_files import affects_model
from zexport.model.hub_cache import cached_snapshot, hub_id_of, is_hub_id, plain_name
from zexport.model.hub_names import Names, NamesUnknown
from zexport.options import ExportOptions
from zexport.ranges.compare import CastReplica, compare_casts, cosines
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.reader import SourceReader
from zexport.storage.files import is_file, is_folder, real
from zexport.storage.json import as_table, read_json_object
from zexport.storage.os_errors import reading
from zexport.storage.symlink_policy import Boundary
from zexport.text import some

HINT_BASE = "Pass the model that this run fine-tuned with --base"

_PAIRS_MIN = 3
"""Fewer matrices prove nothing: a head may be new."""

_COSINE_MIN = 0.25
"""Mean cosine below which no training made one from the other; that of strangers is 0."""

_WEIGHTS = r"[^/\0]+\.safetensors(\.index\.json)?"
_NOW = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_LEGACY = r"LayerNorm\.(?:gamma|beta)$"
_SCALES = (
    r"weight_(?:scale\w*|packed|shape|zero_point|g_idx|global_scale)$|weight\.(?:_|quant_|absmax|nested_)"
    r"|\.(?:qweight|qzeros|scales|g_idx|SCB|weight_format)$|_proj_(?:blocks|scales?|scale_inv)$"
)
"""Tensors that only quantized weights have, whatever the config contains.

Source: transformers 5.23 (``integrations/finegrained_fp8.py``, ``integrations/mxfp4.py``) and the
forms that bitsandbytes, compressed-tensors, GPTQ, AWQ and torchao write.
"""

_PACKED = frozenset({DType.I8, DType.U8, DType.F8_E4M3, DType.F8_E5M2})


class Base(Struct, frozen=True):
    """The weights of ``--base``; ``instead``: what the folder has if it has no plain weights."""

    path: Path | None = None
    tensors: Tensors = {}
    instead: str = ""
    is_quantized: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def read_base(base: Path | None, *, follow_symlinks: bool) -> tuple[SafetensorsHeader, ...]:
    """Return the headers of the weight files that ``from_pretrained`` would load."""
    if base is None:
        return ()
    boundary = Boundary.of(base, follow=follow_symlinks)
    for name in (SINGLE_FILE, INDEX_FILE, CONFIG):
        boundary.check(base / name)
    weights = weights_file(base)
    if weights is None:
        return ()
    boundary.check(weights)
    if weights.suffix != ".json":
        return (read_header(weights),)
    placed = read_index(weights, "Pass another model folder with --base")
    headers = []
    for path, names in placed.items():
        boundary.check(path)
        header = read_header(path)
        tensors = {name: one for name, one in header.tensors.items() if name in names}
        headers.append(structs.replace(header, tensors=tensors))
    return tuple(headers)


def weights_file(folder: Path) -> Path | None:
    """Return the safetensors file or index that ``from_pretrained`` opens in a folder.

    What the config names comes first, then a single file, then an index.

    Source: transformers 5.23, ``modeling_utils.py`` (``_get_resolved_checkpoint_files``).
    """
    config = folder / CONFIG
    named = read_json_object(config).get("transformers_weights") if is_file(config) else None
    if named is None:
        return next(filter(is_file, (folder / SINGLE_FILE, folder / INDEX_FILE)), None)
    if isinstance(named, str) and re.fullmatch(_WEIGHTS, named):
        return folder / named
    raise UnsafeError(
        "transformers_weights is not a safetensors file of this folder",
        path=config,
        found=repr(named),
        hint="Pass a folder that save_pretrained wrote",
    )


def base_of(path: Path | None, headers: Iterable[SafetensorsHeader]) -> Base:
    if path is None:
        return Base()
    tensors, config = weights_in(*headers), path / CONFIG
    content = read_json_object(config) if is_file(config) else {}
    is_quantized = any(content.get(key) for key in QUANTIZATION_KEYS)
    is_quantized = is_quantized or any(re.search(_SCALES, one) for one in tensors)
    instead = "quantized weights" if is_quantized else "" if tensors else _instead(path)
    return Base(path, tensors, instead, is_quantized)


def weights_in(*headers: SafetensorsHeader) -> Tensors:
    return {
        name: StoredTensor(name, one.shape, one.dtype, Role.FROZEN, header.source(name))
        for header in headers
        for name, one in header.tensors.items()
    }


def _instead(folder: Path) -> str:
    adapter = folder / ADAPTER_CONFIG
    if is_file(adapter):
        name = read_json_object(adapter).get("base_model_name_or_path")
        return f"an adapter, not its base model ({name or 'which it does not name'})"
    return f"neither {SINGLE_FILE} nor {INDEX_FILE}"


def under_names_of(names: Names, base: Base) -> Base:
    """Return the base with its weights under the in-memory names of the model.

    The base's files may be those of the class inside the model, without its prefix (GPT-2 and
    MiniLM on the Hub), or of a class around it, or use BERT's old layer norm names; and they may
    contain either name of tied weights.

    Source: transformers 5.23, ``core_model_loading.py`` (``rename_source_key``),
    ``conversion_mapping.py`` (legacy renamings).
    """
    if isinstance(names, NamesUnknown) or not base.tensors:
        return base
    prefix, known = f"{names.base_prefix}.", names.all_names
    modern = {name: re.sub(_LEGACY, lambda found: _NOW[found[0]], name) for name in base.tensors}
    forms: list[Callable[[str], str]] = [lambda name: name]
    if names.base_prefix:
        forms += [lambda name: prefix + name, lambda name: name.removeprefix(prefix)]
    form = max(forms, key=lambda form: sum(form(now) in known for now in modern.values()))
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in base.tensors.items():
        new = next((n for n in (name, modern[name], form(modern[name])) if n in known), form(name))
        if new in known and new in renamed:
            raise DamagedCheckpointError(
                f"two weights are both {new} of the model",
                path=base.path,
                expected="one",
                hint="Load the base with transformers and pass what save_pretrained writes",
            )
        renamed[new] = replace(tensor, name=new)
    for alias, source in names.tied.items():
        spellings = [{}, *map(names.names_in, names.layouts)]
        if any(one.get(source, source) in renamed for one in spellings):
            continue
        one = next((one for one in spellings if one.get(alias, alias) in renamed), None)
        if one is not None:
            new = one.get(source, source)
            renamed[new] = replace(renamed.pop(one.get(alias, alias)), name=new)
    return structs.replace(base, tensors=renamed)


def not_loaded(names: Names, base: Base) -> dict[str, StoredTensor]:
    """Return the base's tensors that the model class does not load, such as ``mtp.*``."""
    if isinstance(names, NamesUnknown):
        return {}
    aliases = (name for layout in names.layouts for name in layout.aliases.values())
    known = names.all_names.union(names.tied, aliases)
    placed = under_names_of(names, base).tensors
    loaded = {id(one.source) for name, one in placed.items() if name in known}
    return {name: one for name, one in base.tensors.items() if id(one.source) not in loaded}


def check_plain(taken: Iterable[StoredTensor], base: Base, missing: Sequence[str] = ()) -> None:
    """Raise if weights would be taken from a quantized base without scales, or are packed in it."""
    packed = [one.name for one in taken if base.is_quantized or one.dtype in _PACKED]
    packed += missing if base.is_quantized else ()
    if packed:
        raise UnsupportedError(
            "base model is quantized, and its weights are wrong without their scales",
            path=base.path,
            found=some(packed),
            expected="floating-point weights",
            hint="Pass the model before quantization with --base, or leave these weights out with "
            "--exclude-frozen",
        )


class BaseName(Struct, frozen=True):
    """The base model's name, perhaps empty, and the file that contains it (``by``)."""

    name: str
    by: str
    revision: str = "main"


class BaseCheck(Struct, frozen=True):
    """Whether ``--base`` is the model that this run fine-tuned.

    Attributes:
        strange: why its weights or its config are another model's.
        unusable: why only its files may be used: no weights could be compared and it has another
            name on the Hub, or it contains this checkpoint's adapter.
        warnings: why it may be another one.
    """

    strange: Sequence[str] = ()
    unusable: Sequence[str] = ()
    warnings: Sequence[str] = ()


def check_base(
    stored: Tensors,
    base: Base,
    configs: tuple[ConfigFile | None, ConfigFile | None],
    reader: SourceReader,
    *,
    location: Location,
    named: BaseName | None,
) -> BaseCheck:
    """Compare the base with the checkpoint: config key by key, then sampled weights, then names.

    Frozen weights must be equal; without any, trained weights must resemble the base's. Names only
    count if no weights can be compared: users rename folders.

    Args:
        stored: the checkpoint's weights of the base model, by in-memory name.
        base: the base, by in-memory name.
        configs: the checkpoint's, and the base's.
        named: the name of this run's base; ``None`` if no weight is taken from the base.
    """
    strange = _config_differences(*configs, CONFIG)
    if base.path is None or not base.tensors:
        return BaseCheck(strange)
    folder = None if named is None else _on_this_machine(named)
    is_it = folder is not None and real(folder) == real(base.path)
    original: tuple[SafetensorsHeader, ...] = ()
    by = ""
    if named is not None and folder is not None and not is_it:
        by = f"{named.name} (named in {named.by})"
        strange += _config_differences(_config(folder), configs[1], by)
        with suppress(ZexportError), reading(folder):
            original = read_base(folder, follow_symlinks=location.boundary.follow)
    frozen = {name: one for name, one in stored.items() if one.role is Role.FROZEN}
    same = replicas_of(base.tensors, frozen, base.path)
    reader.add(*original)
    strange += _differing(same, reader, "the checkpoint's frozen weights")
    if not same:
        strange += _unlike(base, stored, reader)
    named_pairs = replicas_of(base.tensors, weights_in(*original), base.path)
    strange += _differing(named_pairs, reader, by)
    unusable, warnings = list[str](), list[str]()
    if named is not None and not (strange or same or named_pairs or is_it):
        hub_id = hub_id_of(base.path)
        one, other = plain_name(named.name), plain_name(hub_id or base.path.name)
        names = f"{named.by} names {named.name or 'no base'}, --base is {hub_id or base.path.name}"
        if is_hub_id(named.name) and hub_id is not None and one != other:
            unusable.append(names)
        elif one.rpartition("/")[2] != other.rpartition("/")[2]:
            warnings.append(
                f"--base may be another model: {names}, and no weights could be compared"
            )
    if named is not None and _contains_adapter(base.path, location):
        unusable.append(f"{MANIFEST_NAME}: this adapter is already merged into it")
    return BaseCheck(strange, unusable, warnings)


def judge_base(
    check: BaseCheck, options: ExportOptions, *, uses_weights: bool, files: Sequence[str] = ()
) -> Findings:
    """Return accepted findings about the base.

    A base that gives no weight may have another name; if it gives no file of the model either
    (``files`` are the names of those that it gives), it may be any model.

    Raises:
        UsageError: it is another model, or contains this checkpoint's adapter, and
            ``--allow base-mismatch`` was not given.
    """
    problem, kind = "not the base model of this run", FindingKind.BASE_MISMATCH
    found = [*check.strange] if uses_weights or any(map(affects_model, files)) else []
    if uses_weights:
        found += check.unusable
    if found and kind not in options.allow:
        raise UsageError(
            problem,
            path=options.base,
            found="; ".join(found),
            expected="the same model",
            hint=HINT_BASE,
            finding=kind,
        )
    return tuple(Finding(kind, "", 0, f"{problem}: {one}", accepted=True) for one in found)


def replicas_of(kept: Tensors, others: Tensors, path: Path | None) -> list[CastReplica]:
    """Return those of ``others`` that ``kept`` has too, with the same shape, in floating point.

    ``path`` is the file or folder of either.
    """
    replicas = []
    for name, other in others.items():
        one = kept.get(name)
        if one is None or one.source is None or other.source is None or one.shape != other.shape:
            continue
        if one.dtype.is_floating and other.dtype.is_floating:
            copies = (one.source, one.dtype, other.source, other.dtype)
            replicas.append(
                CastReplica(one.name, path or Path(), *copies, is_matched_by_value=False)
            )
    return replicas


def _differing(pairs: Sequence[CastReplica], reader: SourceReader, by: str) -> list[str]:
    """Compare samples of weights that the run did not change.

    A base in 32 bits may have been rounded twice: loaded in one 16-bit dtype, trained in the other.
    Then one unit in the last place is no difference.
    """
    differing = []
    for one in compare_casts(pairs, reader.read_into, full=False, expect=reader.expect):
        is_wider = one.replica.kept_dtype.itemsize > one.replica.other_dtype.itemsize
        if one.largest > is_wider:
            differing.append(f"{one.replica.name} ({one.count} of {one.compared} samples)")
    counts = f"{len(differing)} of {len(pairs)}"
    return [f"{counts} weights differ from {by}: {some(differing, 3)}"] if differing else []


def _unlike(base: Base, stored: Tensors, reader: SourceReader) -> list[str]:
    """Compare trained matrices by cosine: training changes weights a little, never wholly."""
    matrices = {
        name: one
        for name, one in stored.items()
        if one.role is Role.TRAINABLE and len(one.shape) > 1
    }
    found = cosines(
        replicas_of(base.tensors, matrices, base.path), reader.read_into, expect=reader.expect
    )
    mean = sum(found) / max(len(found), 1)
    if len(found) < _PAIRS_MIN or mean > _COSINE_MIN:
        return []
    return [f"{len(found)} trained weights do not resemble the base's (mean cosine {mean:.2f})"]


def _config_differences(own: ConfigFile | None, base: ConfigFile | None, by: str) -> list[str]:
    if own is None or base is None or own.path == base.path:
        return []
    found = differences(own.content, base.content)
    keys = [f"{key} {ours} but {theirs}" for key, ours, theirs in found]
    return [f"{by} and the base's config: {some(keys, 8)}"] if keys else []


def _contains_adapter(base: Path, location: Location) -> bool:
    """Whether the base's manifest records a merge of the adapter in this checkpoint."""
    try:
        recorded = read_manifest(base).provenance
    except VerificationError:
        return False
    of, options = as_table(recorded.get("checkpoint")), as_table(recorded.get("options"))
    is_same = (of.get("folder"), of.get("tag")) == (location.name, location.tag)
    return is_same and options.get("adapter") == "merge"


def _on_this_machine(base: BaseName) -> Path | None:
    """Return the folder of a named model: in the Hub cache, or by its path."""
    if is_hub_id(base.name) and (cached := cached_snapshot(base.name, base.revision)) is not None:
        return cached
    with suppress(OSError):  # another user's folder
        if base.name and is_folder(Path(base.name)):
            return Path(base.name)
    return None


def _config(folder: Path) -> ConfigFile | None:
    with suppress(ZexportError, OSError):
        if is_file(folder / CONFIG):
            return ConfigFile(folder / CONFIG, read_json_object(folder / CONFIG))
    return None
