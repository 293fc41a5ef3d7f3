"""The checkpoints that a folder holds: which there are, of which steps, and which is the newest.

A folder may hold tags, and a run's ``output_dir`` a folder for each checkpoint, with the tags in
it, and tags of its own beside those.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.model_states import read_model_states
from zexport.checkpoint.pruned import original_name
from zexport.checkpoint.rank_files import MODEL_FILES, list_rank_files, parse_rank_file
from zexport.errors import ZexportError
from zexport.formats.torch_file import read_torch_file
from zexport.store.address import Address
from zexport.store.boundary import Boundary
from zexport.store.files import version
from zexport.store.folders import child_folders, children, is_folder, is_link, matching, real
from zexport.store.publish import is_unfinished

READ_MAX = 16
"""So many checkpoints are looked into for their step; among the others, names decide."""

_DIGITS = re.compile(r"\d{1,18}", re.ASCII)
_ACCELERATE = re.compile(r"pytorch_model(?:_\d{1,9})?", re.ASCII)
_WORD = re.compile(r"[^\W\d_]+")
_AGES = frozenset(
    (
        *("best", "checkpoint", "ckpt", "end", "epoch", "final", "global"),
        *("iter", "iteration", "last", "latest", "step"),
    )
)
"""Words that say when a checkpoint was made, and not what it is of."""


class Candidate(Struct, frozen=True):
    """What ``--tag`` may name: a tag of a folder, or a checkpoint of a run there.

    Attributes:
        name: of the tag folder, or of the checkpoint's folder.
        root: the folder that holds its tags.
        tags: the one tag, or all of the checkpoint, newest last.
        step: what the newest of them records; ``None`` where it was not looked into, or says none.
    """

    name: str
    root: Path
    tags: tuple[str, ...]
    step: int | None


def list_candidates(folder: Path, boundary: Boundary) -> tuple[Candidate, ...]:
    """The tags in a folder and the checkpoints of its run, newest last."""
    found = {run: (folder / run, by_age(folder / run, boundary)) for run in list_ages(folder)}
    found |= {tag: (folder, (tag,)) for tag in list_tags(folder)}
    folders = {name: root / tags[-1] for name, (root, tags) in found.items()}
    steps = recorded_steps(folders, boundary)
    ordered = newest_last(folders, steps, _times_at_one_step(folders, steps))
    return tuple(Candidate(name, *found[name], steps.get(name)) for name in ordered)


def list_ages(folder: Path) -> tuple[str, ...]:
    """Those of ``list_run_checkpoints`` that are of one run, with the tags beside them if any are.

    Beside tags these are those named by age alone: other folders may be other models (a critic
    below its actor). Source: transformers 5.23, ``trainer.py`` (``save_model``: under ZeRO-3 that
    gathers nothing on saving, DeepSpeed's ``save_checkpoint`` writes the end of training to
    ``output_dir`` itself, beside ``checkpoint-N``).
    """
    runs = list_run_checkpoints(folder)
    if list_tags(folder):
        return tuple(run for run in runs if is_age(run))
    return runs if are_of_one_run(runs) else ()


def list_run_checkpoints(folder: Path) -> tuple[str, ...]:
    """Names of the folders in a run's ``output_dir`` that hold tags, by the numbers in them."""
    return _list_children(folder, lambda child: is_folder(child) and bool(list_tags(child)))


def list_runs(folder: Path) -> tuple[str, ...]:
    """Names of the folders in ``folder`` that are themselves a run's ``output_dir``."""
    return _list_children(folder, lambda it: is_folder(it) and bool(list_run_checkpoints(it)))


def list_tags(folder: Path) -> tuple[str, ...]:
    """Names of the tag folders in ``folder``, by the numbers in them."""
    return _list_children(folder, is_tag_dir)


def _list_children(folder: Path, is_wanted: Callable[[Path], bool]) -> tuple[str, ...]:
    """Names of the wanted folders in ``folder``; of a disk's, one that may not be read is none.

    Nor is a link to another of them, which is a second name, nor unfinished work of zexport.
    """

    def is_readable_and_wanted(child: Path) -> bool:
        try:
            return is_wanted(child) and beside(child) is None and not is_unfinished(child)
        except PermissionError:  # such as lost+found, where a disk holds the checkpoints
            if isinstance(child, Address):
                raise
            return False

    names = (child.name for child, _ in child_folders(folder) if is_readable_and_wanted(child))
    return tuple(sorted(names, key=_by_number))


def beside(path: Path) -> str | None:
    """The name that a link leads to beside itself; none for anything else."""
    target = real(path) if is_link(path) else None
    return target.name if target is not None and target.parent == real(path.parent) else None


def is_tag_dir(path: Path) -> bool:
    """Whether ``path`` holds rank files directly, or the parameters of a universal checkpoint."""
    return is_folder(path) and (
        any(parse_rank_file(child) for child in children(path))
        or any(matching(path / "zero", "*/fp32.pt"))
    )


def are_of_one_run(names: Iterable[str]) -> bool:
    """Whether folders differ in nothing but a number, or an age: ``checkpoint-N`` and ``final``.

    Others (an actor and a critic, say) are models beside one another, none of them the newer.
    """
    names = tuple(names)
    return len({_without_numbers(name) for name in names}) <= 1 or all(map(is_age, names))


def run_of(name: str) -> str:
    """What is the same for folders of one run: nothing for ages, or a name without its numbers."""
    return "" if is_age(name) else _without_numbers(name)


def kind_of(name: str) -> str:
    """What is the same for folders that one program names: a name without its numbers.

    A Trainer goes on from a ``checkpoint-N``, whatever newer tags lie beside it.
    """
    return _without_numbers(name)


def are_tied(one: Path, other: Path) -> bool:
    """Whether nothing says which of two tags of one step is the newer: neither name nor time.

    Both are of one run, or of models beside one another, in which case time says nothing either.
    """
    depth = next(i for i, (a, b) in enumerate(zip(one.parts, other.parts, strict=False)) if a != b)
    names = (one.parts[depth], other.parts[depth])
    if len({_without_numbers(name) for name in names}) <= 1:
        return False
    return not are_of_one_run(names) or written_at(one) == written_at(other)


def written_at(tag_dir: Path) -> int:
    """When the last of a tag's rank files was written, in seconds."""
    times = (version(file.path).mtime_ns for file in list_rank_files(tag_dir))
    return max(times, default=0) // 10**9


def is_age(name: str) -> bool:
    """Whether a name says when a checkpoint was made, and nothing else."""
    return all(word in _AGES for word in _WORD.findall(original_name(name).lower()))


def models_of_accelerate(tags: Iterable[str]) -> tuple[str, ...]:
    """The tags that hold one of several models each, all of one save.

    Source: Accelerate 1.15, ``accelerator.py`` (``save_state``: ``pytorch_model``, and
    ``pytorch_model_1`` and on for further models; ``latest`` names whichever was saved last).
    """
    return tuple(tag for tag in tags if _ACCELERATE.fullmatch(tag))


def by_age(folder: Path, boundary: Boundary) -> tuple[str, ...]:
    """The tags in ``folder``, newest last."""
    tags = list_tags(folder)
    if len(tags) <= 1:
        return tags
    folders = {tag: folder / tag for tag in tags}
    steps = recorded_steps(folders, boundary)
    return newest_last(tags, steps, _times_at_one_step(folders, steps))


def _times_at_one_step(
    folders: Mapping[str, Path], steps: Mapping[str, int | None]
) -> dict[str, int]:
    """When the tags were written that record a step which another records as well."""
    known = {name: step for name, step in steps.items() if step is not None}
    counts = Counter(known.values())
    return {name: written_at(folders[name]) for name, step in known.items() if counts[step] > 1}


def recorded_steps(folders: Mapping[str, Path], boundary: Boundary) -> dict[str, int | None]:
    """The steps of the tags that are looked into: those without a number, and the highest."""
    ordered = sorted(folders, key=lambda tag: (not _DIGITS.search(tag), _by_number(tag)))
    return {tag: recorded_step(folders[tag], boundary) for tag in ordered[-READ_MAX:]}


def recorded_step(tag_dir: Path, boundary: Boundary) -> int | None:
    """The steps taken, as a model file says; ``None`` where none does, or it lies outside."""
    models = [file.path for file in list_rank_files(tag_dir) if file.kind in MODEL_FILES]
    if not models or not boundary.holds(models[0]):
        return None
    try:
        return read_model_states(read_torch_file(models[0])).global_steps
    except ZexportError:  # opening this tag tells what is wrong
        return None


def newest_last(
    tags: Iterable[str], steps: Mapping[str, int | None], times: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The tags by their steps; at the same step, by their times and the numbers in their names.

    One whose step is not known comes right after the next lower one of its kind of name (an
    interrupted save after the one before it), and before all tags of other names if there is none.
    """
    highest: dict[str, int] = {}
    places: dict[str, tuple[int, bool, int, tuple[list[int], str]]] = {}
    for tag in sorted(tags, key=_by_number):
        kind, step = _without_numbers(tag), steps.get(tag)
        known = highest.get(kind, -1) if step is None else step
        places[tag] = (known, step is None, (times or {}).get(tag, 0), _by_number(tag))
        highest[kind] = known
    return tuple(sorted(places, key=places.__getitem__))


def _by_number(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in _DIGITS.findall(name)], name


def _without_numbers(name: str) -> str:
    return _DIGITS.sub("0", original_name(name))
