"""The base model: its weights, and whether it is the model that this run fine-tuned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    ZexportError,
)
from zexport.export.plan import INDEX_FILE, SINGLE_FILE
from zexport.filenames import ADAPTER_CONFIG, CONFIG, MANIFEST_NAME
from zexport.findings import Finding, FindingKind
from zexport.formats.safetensors import SafetensorsHeader, read_header, read_index
from zexport.model.config import QUANTIZATION_KEYS, ConfigFile, differences
from zexport.model.hf_files import affects_model
from zexport.model.hub_cache import cached_snapshot, hub_id_of, is_hub_id, plain_name
from zexport.model.names import ModelNames, NamesUnknown
from zexport.options import ExportOptions
from zexport.ranges.compare import CastReplica, compare_casts, cosines
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.storage.contents import read_json_object
from zexport.storage.files import is_file, is_folder, matching, real
from zexport.storage.json import Json, as_table
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
    """The weights of ``--base``; ``instead`` says what a folder without plain weights contains."""

    path: Path | None = None
    tensors: Mapping[str, StoredTensor] = {}
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
    placed = read_index(weights, "Mend the index, or give another model folder")
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
    tensors = {name: frozen_in(header, name) for header in headers for name in header.tensors}
    if path is None:
        return Base()
    config = path / CONFIG
    content = read_json_object(config) if is_file(config) else {}
    is_quantized = any(content.get(key) for key in QUANTIZATION_KEYS)
    is_quantized = is_quantized or any(re.search(_SCALES, one) for one in tensors)
    instead = "quantized weights" if is_quantized else "" if tensors else _instead(path)
    return Base(path, tensors, instead, is_quantized)


def frozen_in(header: SafetensorsHeader, name: str) -> StoredTensor:
    tensor = header.tensors[name]
    return StoredTensor(name, tensor.shape, tensor.dtype, Role.FROZEN, header.source(name))


def _instead(folder: Path) -> str:
    """Return what a folder contains instead of safetensors weights of a model."""
    adapter = folder / ADAPTER_CONFIG
    if is_file(adapter):
        name = read_json_object(adapter).get("base_model_name_or_path")
        return f"an adapter, not its base model ({name or 'which it does not name'})"
    if any(matching(folder, "*-of-*.safetensors")):
        return f"shards without {INDEX_FILE}"
    return "no safetensors files"


def under_names_of(names: ModelNames | NamesUnknown, base: Base) -> Base:
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
        doubtful: why its name or its RoPE settings are, if no weights were compared.
        is_merged: it contains this checkpoint's adapter.
        warnings: why it may be another one.
        nbytes_read: bytes of tensors read.
    """

    strange: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    is_merged: bool = False
    warnings: tuple[str, ...] = ()
    nbytes_read: int = 0


def check_base(
    stored: Mapping[str, StoredTensor],
    base: Base,
    configs: tuple[ConfigFile | None, ConfigFile | None],
    files: Sequence[ReadableFile],
    *,
    location: Location,
    named: BaseName | None,
) -> BaseCheck:
    """Compare the base with the checkpoint: config key by key, then sampled weights, then names.

    Frozen weights must be equal; without any, trained weights must resemble the base's. Names only
    count if no weights tell: folders are renamed, and an instruct model has its base's shapes.

    Args:
        stored: the checkpoint's weights of the base model, by in-memory name.
        base: the base, by in-memory name.
        configs: the checkpoint's, and the base's.
        named: the name of this run's base; ``None`` if no weight is taken from the base.
    """
    own, theirs = configs
    if own is not None and theirs is not None and own.path == theirs.path:
        own = None
    strange, rope = _config_differences(own, theirs, CONFIG)
    if base.path is None or not base.tensors:
        return BaseCheck(strange, rope)
    frozen = {name: one for name, one in stored.items() if one.role is Role.FROZEN}
    samples = _Samples(base, files)
    samples.compare(frozen, "the checkpoint's frozen weights")
    if not samples.compared:
        samples.compare_directions(stored)
    folder = None if named is None else _on_this_machine(named, location)
    is_it = folder is not None and real(folder) == real(base.path)
    if named is not None and folder is not None and not is_it:
        by = f"{named.name} (named in {named.by})"
        build, other_rope = _config_differences(_config(folder), theirs, by)
        strange += build + other_rope
        samples.compare_base(folder, by, follow=location.boundary.follow)
    strange += tuple(samples.differences)
    is_proven = bool(samples.compared or is_it)
    doubtful, warnings = () if is_proven else rope, tuple[str, ...]()
    if named is not None and not (is_proven or strange):
        hub_id = hub_id_of(base.path)
        one, other = plain_name(named.name), plain_name(hub_id or base.path.name)
        names = f"{named.by} names {named.name or 'no base'}, --base is {hub_id or base.path.name}"
        if is_hub_id(named.name) and hub_id is not None and one != other:
            doubtful += (names,)
        elif one.rpartition("/")[2] != other.rpartition("/")[2]:
            warnings = (f"--base may be another model: {names}, and no weights could be compared",)
    merged = named is not None and _contains_adapter(base.path, location)
    return BaseCheck(strange, doubtful, merged, warnings, samples.nbytes_read)


def judge_base(
    check: BaseCheck,
    base: Base,
    options: ExportOptions,
    *,
    uses_weights: bool,
    files: Sequence[str] = (),
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return accepted findings and warnings about the base.

    A base that gives no weight may have another name; if it gives no file of the model either
    (``files`` are the names of those that it gives), it may be any model.

    Raises:
        UsageError: it is another model, or contains this checkpoint's adapter, and
            ``--allow base-mismatch`` was not given.
    """
    problem, kind = "not the base model of this run", FindingKind.BASE_MISMATCH
    if uses_weights and check.is_merged and kind not in options.allow:
        raise UsageError(
            "base model already contains this checkpoint's adapter",
            path=base.path,
            found=f"a merge of this checkpoint in its {MANIFEST_NAME}",
            hint=HINT_BASE,
            finding=kind,
        )
    gives_model = uses_weights or any(map(affects_model, files))
    refused = (check.strange if gives_model else ()) + (check.doubtful if uses_weights else ())
    if refused and kind not in options.allow:
        raise UsageError(
            problem,
            path=base.path,
            found="; ".join(refused),
            expected="the same model",
            hint=HINT_BASE,
            finding=kind,
        )
    harmless = [one for one in (*check.strange, *check.doubtful) if one not in refused]
    only = f"only {some(files)}" if files else "nothing"
    warnings = [f"--base is {problem}: {one}; the export takes {only} from it" for one in harmless]
    findings = tuple(Finding(kind, "", 0, f"{problem}: {one}", accepted=True) for one in refused)
    return findings, (*check.warnings, *warnings)


class _Samples:
    """Sampled comparisons of other weights with those of the base."""

    def __init__(self, base: Base, files: Sequence[ReadableFile]) -> None:
        self._base, self._files = base, files
        self.differences: list[str] = []
        self.compared = self.nbytes_read = 0

    def compare(self, others: Mapping[str, StoredTensor], by: str) -> None:
        """Compare weights that the run did not change.

        A base in 32 bits may have been rounded twice: loaded in one 16-bit dtype, trained in the
        other. Then one unit in the last place is no difference.
        """
        pairs, differing = self._pairs(others), []
        with SourceReader(self._files) as reader:
            for one in compare_casts(pairs, reader.read_into, full=False, expect=reader.expect):
                is_wider = one.replica.kept_dtype.itemsize > one.replica.other_dtype.itemsize
                if one.largest > (1 if is_wider else 0):
                    differing.append(f"{one.replica.name} ({one.count} of {one.compared} samples)")
            self.nbytes_read += reader.nbytes_read
        self.compared += len(pairs)
        if differing:
            counts = f"{len(differing)} of {len(pairs)}"
            self.differences.append(f"{counts} weights differ from {by}: {some(differing, 3)}")

    def compare_directions(self, stored: Mapping[str, StoredTensor]) -> None:
        """Compare trained matrices by cosine: training changes weights a little, never wholly."""
        trained = {name: one for name, one in stored.items() if one.role is Role.TRAINABLE}
        pairs = self._pairs({n: one for n, one in trained.items() if len(one.shape) > 1})
        with SourceReader(self._files) as reader:
            found = cosines(pairs, reader.read_into, expect=reader.expect)
            self.nbytes_read += reader.nbytes_read
        if len(found) >= _PAIRS_MIN and (mean := sum(found) / len(found)) <= _COSINE_MIN:
            self.differences.append(
                f"{len(pairs)} trained weights do not resemble the base's (mean cosine {mean:.2f})"
            )

    def compare_base(self, folder: Path, by: str, *, follow: bool) -> None:
        """Compare with the base that the run names, if this machine has readable weights of it."""
        headers: tuple[SafetensorsHeader, ...] = ()
        with suppress(ZexportError), reading(folder):
            headers = read_base(folder, follow_symlinks=follow)
        self._files = (*self._files, *headers)
        self.compare(base_of(folder, headers).tensors if headers else {}, by)

    def _pairs(self, others: Mapping[str, StoredTensor]) -> list[CastReplica]:
        return [
            CastReplica(
                name=name,
                path=self._base.path or Path(),
                kept=given.source,
                kept_dtype=given.dtype,
                other=tensor.source,
                other_dtype=tensor.dtype,
                names_it=False,
            )
            for name, tensor in others.items()
            if (given := self._base.tensors.get(name)) is not None
            and given.shape == tensor.shape
            and given.dtype.is_floating
            and tensor.dtype.is_floating
            and given.source is not None
            and tensor.source is not None
        ]


def _config_differences(
    own: ConfigFile | None, base: ConfigFile | None, by: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return differences in the model's build, and in RoPE settings, which a run may change."""
    if own is None or base is None:
        return (), ()
    found = [*differences(own.content, base.content)]
    kinds = [[str(one) for one in found if one.is_rope is is_rope] for is_rope in (False, True)]
    build, rope = ((f"{by} and the base's config: {some(one, 8)}",) if one else () for one in kinds)
    return build, rope


def _contains_adapter(base: Path, location: Location) -> bool:
    """Whether the base's manifest records a merge of the adapter in this checkpoint."""
    content: Mapping[str, Json] = {}
    with suppress(ZexportError):
        path = base / MANIFEST_NAME
        content = read_json_object(path) if is_file(path) else {}
    of, options = as_table(content.get("checkpoint")), as_table(content.get("options"))
    is_same = (of.get("folder"), of.get("tag")) == (location.name, location.tag)
    return is_same and options.get("adapter") == "merge"


def _on_this_machine(base: BaseName, location: Location) -> Path | None:
    """Return the folder of a named model: in the Hub cache, here, or above the checkpoint."""
    if is_hub_id(base.name) and (cached := cached_snapshot(base.name, base.revision)) is not None:
        return cached
    above = (location.real_root.parent, location.real_root.parent.parent)
    for start in (Path(), *above) if base.name else ():
        with suppress(OSError):  # another user's folder
            if is_folder(folder := start / base.name):
                return folder
    return None


def _config(folder: Path) -> ConfigFile | None:
    with suppress(ZexportError, OSError):
        if is_file(folder / CONFIG):
            return ConfigFile(folder / CONFIG, read_json_object(folder / CONFIG))
    return None
