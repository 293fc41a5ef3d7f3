"""Open two models and pair their tensors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.resolve import is_tag_dir, list_tags, pruned_name
from zexport.checkpoint.state import StoredTensor
from zexport.diff.config import Setting, compare_configs
from zexport.diff.tensors import Outcome, Pair, TensorDiff, compare_tensors
from zexport.errors import CheckpointError, DamagedCheckpointError, UsageError
from zexport.export.base_model import weights_file, weights_in
from zexport.export.plan import SourceFile
from zexport.export.report import Progress
from zexport.filenames import CONFIG, MANIFEST_NAME
from zexport.formats.safetensors import read_header, read_index
from zexport.model.config import ConfigFile
from zexport.model.hub_cache import model_folder
from zexport.model.hub_names import Fit
from zexport.model.names_client import Learner
from zexport.options import ExportOptions
from zexport.storage.files import children, exists, is_file, is_folder, matching
from zexport.storage.json import Natural, as_table, read_json_object
from zexport.storage.location import place
from zexport.storage.locks import check_finished
from zexport.storage.os_errors import reading
from zexport.text import brief, shell_word

_INDEX_PATTERN = "*.safetensors.index.json"
_FETCH_AGAIN = "Download the folder again"
_LAYER = re.compile(r"(.*?\.\d+)\.")


class Counts(Struct, frozen=True):
    """Number of tensors by outcome.

    Attributes:
        equal: same shape, dtype and bytes.
        cast_equal: equal after rounding one side to a dtype.
        different: values changed.
        shape: shapes differ; common rows are compared.
        only_in_a: missing in B.
        only_in_b: missing in A.
    """

    equal: Natural
    cast_equal: Natural
    different: Natural
    shape: Natural
    only_in_a: Natural
    only_in_b: Natural


class ModuleDiff(Struct, frozen=True):
    """Comparison of a layer, or of a module outside of layers.

    Attributes:
        name: the layer with its number, or the tensor name without its last part.
        tensors: number of tensors compared.
        unequal: number of these that are not equal.
        relative_norm: norm of all differences divided by the norm of A; ``None`` if A is zero.
    """

    name: str
    tensors: Natural
    unequal: Natural
    relative_norm: float | None


class DiffReport(Struct, frozen=True):
    """Comparison of two models or checkpoints.

    Attributes:
        a: path of A.
        b: path of B.
        compared: which files were compared.
        settings: keys of config files, or settings of checkpoints, that differ.
        counts: number of tensors by outcome.
        modules: comparison by module, largest difference first.
        nbytes_read: bytes read from both sides.
        tensors: tensors that are not equal, largest difference first; with ``--all``, all tensors.
    """

    a: Path
    b: Path
    compared: str
    settings: tuple[Setting, ...]
    counts: Counts
    modules: tuple[ModuleDiff, ...]
    nbytes_read: Natural
    tensors: tuple[TensorDiff, ...]

    __repr__ = brief

    def count(self, outcome: Outcome) -> int:
        """Return the number of tensors with this outcome."""
        return int(getattr(self.counts, outcome))

    @property
    def is_equal(self) -> bool:
        """Whether all tensors and settings are equal."""
        return self.is_cast_equal and not self.counts.cast_equal

    @property
    def is_cast_equal(self) -> bool:
        """Whether all tensors are equal or equal after rounding, and all settings are equal."""
        alike = self.counts.equal + self.counts.cast_equal
        return alike == len(self.tensors) and not self.settings


class Weights(Struct, frozen=True):
    """Tensors of one side by name, the files that contain them, and tied names if known."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    files: tuple[SourceFile, ...]
    aliases: Mapping[str, str] = {}

    @property
    def has_placeholders(self) -> bool:
        """Whether tensors are the empty placeholders that ZeRO-3 leaves."""
        return any(tensor.shape == (0,) for tensor in self.tensors.values())

    def tied(self) -> Mapping[str, str]:
        """Return tied names, alias to source: known, or of the manifest, or of the model class."""
        if self.aliases:
            return self.aliases
        manifest, config = self.path / MANIFEST_NAME, self.path / CONFIG
        if is_file(manifest) and (tied := as_table(read_json_object(manifest).get("tied"))):
            return {alias: str(source) for alias, source in tied.items()}
        if not is_file(config):
            return {}
        content = ConfigFile(config, read_json_object(config))
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        fit = Learner(are_needed=False).fit(content, shapes)
        return fit.names.tied if isinstance(fit, Fit) else {}


class Differences(Struct, frozen=True):
    """Tensors of both sides, largest difference first, and the bytes read to compare them."""

    tensors: tuple[TensorDiff, ...] = ()
    nbytes_read: int = 0


def diff_models(
    a: Path | str,
    b: Path | str,
    *,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> DiffReport:
    """Compare the weights of two model folders, tensor by tensor.

    Tied weights are compared even if the two sides store them under different names. Memory does
    not grow with the models.

    Args:
        a: a model folder or safetensors file, such as an export, or the Hub id of a cached model.
        b: the same, such as the base model.
        jobs: worker threads; by default one per core, up to 4.
        progress: called at every step.

    Raises:
        CheckpointError: a side has no safetensors weights, or they cannot be read.
        UnsafeError: an index names a file outside its folder.
        UnsupportedError: zexport does not know a dtype.
    """
    a, b = (model_folder(place(side)) for side in (a, b))
    sides = open_weights(a), open_weights(b)
    found = compare_weights(*sides, jobs=jobs, progress=progress)
    files = [
        one.files[0].path.name if len(one.files) == 1 else f"{len(one.files):,} safetensors files"
        for one in sides
    ]
    compared = files[0] if files[0] == files[1] else f"{files[0]} of A, {files[1]} of B"
    if has_rank_files(a) or has_rank_files(b):
        compared += "; not the rank files, which --states compares"
    return make_report((a, b), compared, found, settings=compare_configs(a, b))


def compare_weights(
    a: Weights,
    b: Weights,
    *,
    jobs: int | None,
    progress: Callable[[Progress], None] | None = None,
) -> Differences:
    """Return the comparison of all tensors; a tensor may be found under a tied name."""
    jobs = ExportOptions().jobs if jobs is None else jobs
    if jobs < 1:
        raise UsageError("jobs are too few", found=jobs, expected="1 or more")
    tied = {**a.tied(), **b.tied()} if a.tensors.keys() != b.tensors.keys() else {}
    pairs, missing = [], []
    for name, one in a.tensors.items():
        if (other := b.tensors.get(name) or _under_tied_name(name, b, tied)) is not None:
            pairs.append(Pair(one, other))
        else:
            missing.append(TensorDiff(Outcome.ONLY_IN_A, name, None, one.dtype, a_shape=one.shape))
    for name in b.tensors.keys() - a.tensors.keys():
        one = b.tensors[name]
        if (other := _under_tied_name(name, a, tied)) is not None:
            pairs.append(Pair(other, one))
        else:
            missing.append(
                TensorDiff(Outcome.ONLY_IN_B, None, name, b_dtype=one.dtype, b_shape=one.shape)
            )
    pairs = list(dict.fromkeys(pairs))
    files = {file.path: file for file in (*a.files, *b.files)}
    found, nbytes = compare_tensors(pairs, files.values(), jobs=jobs, progress=progress)
    return Differences(tuple(sorted((*found, *missing), key=_worst_first)), nbytes)


def _under_tied_name(name: str, other: Weights, tied: Mapping[str, str]) -> StoredTensor | None:
    source = tied.get(name, name)
    names = (source, *(alias for alias, root in tied.items() if root == source))
    return next((other.tensors[one] for one in names if one in other.tensors), None)


_ORDER = (
    Outcome.ONLY_IN_A,
    Outcome.ONLY_IN_B,
    Outcome.SHAPE,
    Outcome.DIFFERENT,
    Outcome.CAST_EQUAL,
    Outcome.EQUAL,
)


def _worst_first(tensor: TensorDiff) -> tuple[int, int, float, str]:
    values, rank = tensor.values, _ORDER.index(tensor.outcome)
    if values is None:
        return rank, 0, 0.0, tensor.name
    relative = math.inf if values.relative_norm is None else values.relative_norm
    return rank, -(values.nan_in_one + values.inf_in_one), -relative, tensor.name


def make_report(
    paths: tuple[Path, Path],
    compared: str,
    weights: Differences,
    states: Differences | None = None,
    *,
    settings: Iterable[Setting] = (),
) -> DiffReport:
    """Return the report on weights and, of checkpoints, optimizer states."""
    states = states or Differences()
    tensors = (*weights.tensors, *states.tensors)
    outcomes = Counter(tensor.outcome for tensor in tensors)
    by_module: dict[str, list[TensorDiff]] = {}
    for tensor in weights.tensors:
        if tensor.values is not None:
            layer = _LAYER.match(tensor.name)
            name = layer[1] if layer else tensor.name.rpartition(".")[0] or tensor.name
            by_module.setdefault(name, []).append(tensor)
    modules = [_module_diff(name, group) for name, group in by_module.items()]
    modules.sort(key=lambda one: (-(one.relative_norm or 0.0), not one.unequal, one.name))
    return DiffReport(
        a=paths[0],
        b=paths[1],
        compared=compared,
        settings=tuple(settings),
        counts=Counts(**{outcome: outcomes[outcome] for outcome in Outcome}),
        modules=tuple(modules),
        nbytes_read=weights.nbytes_read + states.nbytes_read,
        tensors=tensors,
    )


def _module_diff(name: str, tensors: Sequence[TensorDiff]) -> ModuleDiff:
    values = [tensor.values for tensor in tensors if tensor.values is not None]
    norm = math.hypot(*(one.norm or 0.0 for one in values))
    difference = math.hypot(*((one.relative_norm or 0.0) * (one.norm or 0.0) for one in values))
    unequal = sum(tensor.outcome is not Outcome.EQUAL for tensor in tensors)
    return ModuleDiff(name, len(tensors), unequal, difference / norm if norm else None)


# --- opening ---


def has_rank_files(path: Path) -> bool:
    """Return whether a folder is a tag folder, or contains tag folders."""
    with reading(path):
        return is_folder(path) and (is_tag_dir(path) or bool(list_tags(path)))


def open_weights(path: Path) -> Weights:
    """Return the tensors of a model folder or safetensors file; only headers are read."""
    with reading(path, hint="Check its permissions, and that no other process is writing it"):
        check_finished(path, CheckpointError)
        tensors: dict[str, StoredTensor] = {}
        files = []
        for file, indexed in _weight_files(path).items():
            header = read_header(file)
            if missing := indexed - header.tensors.keys():
                raise DamagedCheckpointError(
                    f"tensor {min(missing)!r} of the index is missing",
                    path=file,
                    hint=_FETCH_AGAIN,
                )
            if twice := header.tensors.keys() & tensors.keys():
                raise DamagedCheckpointError(
                    f"tensor {min(twice)!r} is also in another file of this folder",
                    path=file,
                    hint="Pass one of the files",
                )
            tensors |= weights_in(header)
            files.append(SourceFile(file, header.version, ()))
        return Weights(path, tensors, tuple(files))


def _weight_files(path: Path) -> dict[Path, set[str]]:
    """Return the files with weights, and the names that an index lists for each."""
    if is_file(path) and path.match(_INDEX_PATTERN):
        if not (indexed := read_index(path, _FETCH_AGAIN)):
            raise DamagedCheckpointError("weight_map is missing", path=path, hint=_FETCH_AGAIN)
        return indexed
    if is_file(path):
        return {path: set()}
    if weights := weights_file(path):
        return _weight_files(weights)
    if others := matching(path, "pytorch_model.bin*"):
        raise CheckpointError(
            f"zexport diff cannot read {others[0].name}",
            path=path,
            hint="Load the model with transformers and compare what save_pretrained writes",
        )
    indexes = matching(path, _INDEX_PATTERN)
    if len(indexes) == 1:
        return _weight_files(indexes[0])
    if files := matching(path, "*.safetensors"):
        return {file: set() for file in files}
    raise _no_weights(path)


def _no_weights(path: Path) -> CheckpointError:
    problem = "is not a folder or regular file" if exists(path) else "does not exist"
    hint = (
        "Pass a folder with model.safetensors or its index, or a safetensors file; "
        "zexport verify --against compares an export with its checkpoint"
    )
    if exists(pruned := pruned_name(path)):
        hint = f"It was pruned: pass {pruned}"
    if is_folder(path):
        children(path)  # raises if the folder is not readable
        problem = "no safetensors weights found"
        if has_rank_files(path):
            hint = (
                "It is a checkpoint: pass two checkpoints, or use zexport verify MODEL "
                f"--against {shell_word(path)}"
            )
    return CheckpointError(problem, path=path, hint=hint)
