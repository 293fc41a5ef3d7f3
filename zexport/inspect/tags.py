"""What each of several tags is, told from the names of its files and one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.candidates import (
    READ_MAX,
    Candidate,
    list_candidates,
    list_run_checkpoints,
    recorded_step,
)
from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.find import locate
from zexport.checkpoint.rank_files import RankFile, RankFileKind, list_rank_files
from zexport.checkpoint.states import read_optimizer_states
from zexport.errors import ZexportError
from zexport.formats.torch_file import read_torch_file
from zexport.store.boundary import Boundary


class TagSummary(Struct, frozen=True):
    """One tag.

    Attributes:
        name: what ``--tag`` takes.
        step: optimizer steps taken; ``None`` where it was not looked at or cannot be read.
        optimizer_files: how many optimizer files it has.
        world_size: how many it should have; ``None`` as above.
        is_complete: whether every rank's files are there; ``None`` where that is not known.
        is_chosen: whether it is the one that the rest of the inspection is about.
    """

    name: str
    step: int | None = None
    optimizer_files: int = 0
    world_size: int | None = None
    is_complete: bool | None = None
    is_chosen: bool = False


def summarize_tags(checkpoint: ZeroCheckpoint) -> tuple[TagSummary, ...]:
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
    return tuple(_summarize_all(path, Boundary.of(path, follow=follow_symlinks)))


def _summarize_all(root: Path, boundary: Boundary) -> Iterator[TagSummary]:
    """Every candidate; so many of the newest are looked into, the others named only."""
    models = list_run_checkpoints(root)
    candidates = list_candidates(root, boundary) or [
        Candidate(n, root / n, (), None) for n in models
    ]
    for index, one in enumerate(candidates, start=READ_MAX - len(candidates)):
        is_read, step, folder = index >= 0, one.step, root / one.name
        if one.root != root:
            try:
                folder = locate(one.root, follow_symlinks=boundary.follow).tag_dir
            except ZexportError:  # it cannot be opened without a tag of its own, or at all
                yield TagSummary(one.name)
                continue
            step = recorded_step(folder, boundary) if is_read else None
        yield _summarize(one.name, folder, boundary, step, is_read=is_read)


def _of_opened(checkpoint: ZeroCheckpoint) -> TagSummary:
    optimizers = [f for f in checkpoint.files if f.kind is RankFileKind.OPTIMIZER]
    missing = checkpoint.missing_ranks or checkpoint.missing_model_ranks
    return TagSummary(
        name=checkpoint.location.tag,
        step=checkpoint.global_steps,
        optimizer_files=len(optimizers),
        world_size=checkpoint.world_size if optimizers else None,
        is_complete=not missing if optimizers else None,
        is_chosen=True,
    )


def _summarize(
    name: str, folder: Path, boundary: Boundary, step: int | None, *, is_read: bool
) -> TagSummary:
    """One tag that is not opened; of files that lie outside, only the names are told."""
    files = [file for file in list_rank_files(folder) if file.mp_rank == 0]
    optimizers = [file for file in files if file.kind is RankFileKind.OPTIMIZER]
    is_read = is_read and all(boundary.holds(file.path) for file in files)
    world_size = _world_size(optimizers[0].path) if is_read and optimizers else None
    is_complete = None if world_size is None else _is_complete(files, world_size)
    return TagSummary(name, step, len(optimizers), world_size, is_complete)


def _is_complete(files: Iterable[RankFile], world_size: int) -> bool:
    counts = Counter(kind for kind, rank in {(f.kind, f.rank) for f in files} if rank < world_size)
    has_model = counts[RankFileKind.MODEL] or counts[RankFileKind.MODEL_PER_RANK] == world_size
    return bool(has_model) and counts[RankFileKind.OPTIMIZER] == world_size


def _world_size(path: Path) -> int | None:
    try:
        counts = read_optimizer_states(read_torch_file(path)).partition_counts
    except ZexportError:  # a summary says what it can; opening this tag tells what is wrong
        return None
    return max(counts, default=None)
