"""What lies around a tag folder: the other tags, and weights beside them.

A tag is told from the names of its files and one of them. The weights are real ones, or ZeRO-3's
empty placeholders: without gathering on save, its module holds a tensor of no elements for every
parameter, and a framework that saves the module saves those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.open import open_locations
from zexport.checkpoint.resolve import (
    READ_MAX,
    Candidate,
    TagChoice,
    list_candidates,
    list_run_checkpoints,
    list_tags,
    locate,
    location_of,
    recorded_step,
    run_folder,
)
from zexport.checkpoint.state import FileKind, TrainingState
from zexport.checkpoint.zero.file_names import RankFile, rank_files
from zexport.checkpoint.zero.records import optimizer_states
from zexport.errors import CheckpointError, ZexportError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.safetensors import read_header
from zexport.formats.torch_file import read_torch_file
from zexport.storage.files import is_file, leaves, matching, version
from zexport.storage.os_errors import reading
from zexport.storage.symlink_policy import Boundary

_WEIGHT_PATTERNS = (
    "model*.safetensors",
    "adapter_model*.safetensors",
    "pytorch_model*.bin",
    "adapter_model*.bin",
)


class TagSummary(Struct, frozen=True):
    """One tag; ``chosen`` tells that the rest of the inspection is about it.

    ``step``, ``nbytes`` (of all files in its folder), ``world_size`` (how many optimizer files it
    should have) and ``complete`` are ``None`` where they were not looked at or cannot be read.
    """

    name: str
    step: int | None = None
    nbytes: int | None = None
    optimizer_files: int = 0
    world_size: int | None = None
    complete: bool | None = None
    chosen: bool = False


def summarize_tags(checkpoint: TrainingState) -> tuple[TagSummary, ...]:
    """The tags around an opened checkpoint, newest last; it itself as it was opened.

    Where its folder is a run's ``output_dir``, the run's checkpoints are among them.
    """
    location = checkpoint.location
    return tuple(
        _of_opened(checkpoint) if one.name == location.tag else one
        for one in _summarize_all(location.root, location.boundary)
    )


def summarize_choice(path: Path, *, follow_symlinks: bool = False) -> tuple[TagSummary, ...]:
    """The tags in ``path``, and the checkpoints in a run's folder, newest last."""
    boundary = Boundary.of(path, follow=follow_symlinks)
    return tuple(_summarize_all(run_folder(path), boundary, is_judged=True))


def _summarize_all(
    root: Path, boundary: Boundary, *, is_judged: bool = False
) -> Iterator[TagSummary]:
    """Every candidate; so many of the newest are looked into, the others named only.

    Complete is what has all files; where they are judged, what ``--tag newest`` would take.
    """
    models = list_run_checkpoints(root)
    candidates = list_candidates(root, boundary) or [
        Candidate(n, root / n / list_tags(root / n)[-1], None) for n in models
    ]
    for index, one in enumerate(candidates, start=READ_MAX - len(candidates)):
        is_read, step = index >= 0, one.step
        location = location_of(one.tag_dir, TagChoice.NEWEST, boundary)
        if one.tag_dir.parent != root:
            try:
                location = locate(one.tag_dir.parent, follow_symlinks=boundary.follow)
            except ZexportError:  # it cannot be opened without a tag of its own, or at all
                yield TagSummary(one.name)
                continue
            step = recorded_step(location.tag_dir, boundary) if is_read else None
        try:
            with reading(folder := location.tag_dir):
                summary = _summarize(one.name, folder, boundary, step, is_read=is_read)
                if is_judged and is_read and summary.complete is not False:
                    is_whole = not open_locations([location]).problems
                    summary = replace(summary, complete=is_whole)
        except CheckpointError:  # opening this tag tells what is wrong
            summary = TagSummary(one.name, step)
        yield summary


def _of_opened(checkpoint: TrainingState) -> TagSummary:
    optimizers = [f for f in checkpoint.files if f.kind is FileKind.OPTIMIZER]
    missing = checkpoint.missing_ranks or checkpoint.missing_model_ranks
    return TagSummary(
        name=checkpoint.location.tag,
        step=checkpoint.global_steps,
        nbytes=_nbytes(checkpoint.location.tag_dir, checkpoint.location.boundary),
        optimizer_files=len(optimizers),
        world_size=checkpoint.world_size if optimizers else None,
        complete=not missing if optimizers else None,
        chosen=True,
    )


def _summarize(
    name: str, folder: Path, boundary: Boundary, step: int | None, *, is_read: bool
) -> TagSummary:
    """One tag that is not opened; of files that lie outside, only the names are told."""
    files = [file for file in rank_files(folder) if file.mp == 0]
    optimizers = [file for file in files if file.kind is FileKind.OPTIMIZER]
    is_read = is_read and all(boundary.holds(file.path) for file in files)
    world_size = _world_size(optimizers[0].path) if is_read and optimizers else None
    complete = None if world_size is None else _is_complete(files, world_size)
    nbytes = _nbytes(folder, boundary) if is_read else None
    return TagSummary(name, step, nbytes, len(optimizers), world_size, complete)


def _nbytes(folder: Path, boundary: Boundary) -> int:
    files = (path for path in leaves(folder) if is_file(path) and boundary.holds(path))
    return sum(version(path).nbytes for path in files)


def _is_complete(files: Iterable[RankFile], world_size: int) -> bool:
    counts = Counter(kind for kind, rank in {(f.kind, f.rank) for f in files} if rank < world_size)
    has_model = counts[FileKind.MODEL] or counts[FileKind.MODEL_PER_RANK] == world_size
    return bool(has_model) and counts[FileKind.OPTIMIZER] == world_size


def _world_size(path: Path) -> int | None:
    try:
        counts = optimizer_states(read_torch_file(path)).partition_counts
    except ZexportError:  # a summary says what it can; opening this tag tells what is wrong
        return None
    return max(counts, default=None)


class WeightFile(Struct, frozen=True):
    """One file of weights, from its header or pickle alone.

    ``placeholders`` names the tensors that should have elements and have none, ``unknown_globals``
    what its pickle has outside the closed list; ``problem`` is why it cannot be read, if it cannot.
    """

    name: str
    nbytes: int
    tensors: int
    placeholders: tuple[str, ...]
    unknown_globals: tuple[str, ...] = ()
    problem: str = ""


def list_weight_files(
    root: Path, empty: Container[str], boundary: Boundary
) -> tuple[WeightFile, ...]:
    """The weight files directly in ``root``, by name; no tensor data is read.

    ``empty`` names the tensors that have no elements by nature.
    """
    paths = {
        path for pattern in _WEIGHT_PATTERNS for path in matching(root, pattern) if is_file(path)
    }
    for path in sorted(paths):
        boundary.check(path)
    return tuple(_read(path, empty) for path in sorted(paths))


def _read(path: Path, empty: Container[str]) -> WeightFile:
    nbytes = version(path).nbytes
    unknown: tuple[str, ...] = ()
    try:
        if path.suffix == ".safetensors":
            shapes = {name: tensor.shape for name, tensor in read_header(path).tensors.items()}
        else:
            file = read_torch_file(path)
            unknown = tuple(map(str, file.unknown_globals))
            shapes = dict(_shapes(file.value))
    except ZexportError as error:
        return WeightFile(path.name, nbytes, 0, (), problem=error.problem)
    placeholders = tuple(n for n, shape in shapes.items() if 0 in shape and n not in empty)
    return WeightFile(path.name, nbytes, len(shapes), placeholders, unknown)


def _shapes(value: object) -> Iterable[tuple[str, tuple[int, ...]]]:
    for name, tensor in value.items() if isinstance(value, dict) else ():
        if isinstance(name, str) and isinstance(tensor, TensorRef):
            yield name, tensor.shape
