"""From any path and ``--tag`` to a tag folder, and to the format that is in it.

A path may be a run's output folder (with ``checkpoint-N`` folders), a folder with tags and
``latest`` (``checkpoint-N`` is one), or a tag folder. One folder may be the first two at once.
The folder of an FSDP checkpoint is a tag folder: the frameworks have no ``latest`` for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.adapter_folder import holds_adapter, no_step, read_adapter
from zexport.checkpoint.fsdp.source import fsdp_step, holds_fsdp, open_fsdp
from zexport.checkpoint.state import TrainingState
from zexport.checkpoint.zero.source import holds_checkpoint, read_checkpoint, zero_step
from zexport.errors import (
    AmbiguousTagError,
    CheckpointError,
    DamagedCheckpointError,
    NoSuchTagError,
    NotACheckpointError,
    OtherTagError,
    UnsafeError,
    UsageError,
)
from zexport.filenames import MANIFEST_NAME, SOURCE_SIDECAR
from zexport.storage.files import (
    absolute,
    child_folders,
    children,
    exists,
    is_file,
    is_folder,
    is_link,
    is_local,
    read_regular,
    real,
)
from zexport.storage.location import last_names
from zexport.storage.locks import check_finished, is_unfinished
from zexport.storage.os_errors import reading
from zexport.storage.symlink_policy import Boundary
from zexport.text import some

NEWEST = "newest"
"""``--tag newest``: the newest complete checkpoint."""

PRUNED = "pruned-"
"""Begins a pruned checkpoint's name, so that no training resumes from it as ``checkpoint-N``."""

LATEST = ("latest", "latest_universal")
"""Files that name a tag; DeepSpeed's ``ds_to_universal.py`` writes the second."""

LATEST_OF_RL = {
    "latest_checkpointed_iteration.txt": "global_step_",
    "latest_ckpt_global_step.txt": "global_step_",
}
"""Files of verl and SkyRL with the number of a step, and what its folder's name begins with."""

READ_MAX = 16
"""How many checkpoints of a run are opened for their step; names order the others."""

_LATEST_NBYTES_MAX = 4096
_DIGITS = re.compile(r"\d{1,18}", re.ASCII)
_WORD = re.compile(r"[^\W\d_]+")
_OF_ACCELERATE = re.compile(r"pytorch_model(?:_fsdp)?(?:_\d{1,9})?", re.ASCII)
_TIME_WORD = re.compile(
    "best|checkpoint|ckpt|end|epoch|final|global|iter|iteration|last|latest|step"
)
_CHOOSE = "Choose one with --tag"


class Framework(Enum):
    """Which program named the folders around a tag."""

    HF_TRAINER = "Hugging Face Trainer"
    ACCELERATE = "Accelerate"
    LIGHTNING = "PyTorch Lightning"
    OPENRLHF = "OpenRLHF"
    ZEXPORT = "zexport train"
    DEEPSPEED = "DeepSpeed"
    VERL = "verl or SkyRL"
    TORCH = "PyTorch"
    PEFT = "PEFT"


class Kind(Enum):
    """What sharded the weights."""

    ZERO = "DeepSpeed ZeRO"
    FSDP = "FSDP"
    ADAPTER = "nothing: a plain PEFT folder"


class TagChoice(Enum):
    OPTION = "given by --tag"
    HANDED_OVER = "the folder given"
    LATEST = "named by latest"
    ONLY = "the only tag"
    NEWEST = "the newest complete one"


class Location(Struct, frozen=True):
    """The tag folder ``root / tag``; links in it may lead into ``boundary``.

    ``model_dir`` is where the framework saves config.json and the tokenizer, if it does.
    """

    root: Path
    tag: str
    chosen: TagChoice
    framework: Framework
    tags: tuple[str, ...]
    boundary: Boundary
    real_root: Path
    model_dir: Path
    kind: Kind = Kind.ZERO

    @property
    def tag_dir(self) -> Path:
        return self.root / self.tag

    @property
    def is_zero(self) -> bool:
        return self.kind is Kind.ZERO

    @property
    def keeps_runs(self) -> bool:
        """Whether all tags of a run share ``root``."""
        return not self.is_zero or self.framework in (Framework.DEEPSPEED, Framework.ZEXPORT)

    @property
    def name(self) -> str:
        """The last two names of the folder that only this checkpoint is in."""
        return last_names(self.real_root / self.tag if self.keeps_runs else self.real_root)


class Candidate(Struct, frozen=True):
    """What ``--tag`` may name: a tag, or a checkpoint of a run, with its last tag folder."""

    name: str
    tag_dir: Path
    step: int | None


class Source(Struct, frozen=True):
    """A format: does a folder contain it, at which global step, and its state (one per node)."""

    kind: Kind
    holds: Callable[[Path], bool]
    step: Callable[[Path, Boundary], int | None]
    read: Callable[[Sequence[Location]], TrainingState]


SOURCES = (
    Source(Kind.ZERO, holds_checkpoint, zero_step, read_checkpoint),
    Source(Kind.FSDP, holds_fsdp, fsdp_step, open_fsdp),
)
ADAPTER = Source(Kind.ADAPTER, holds_adapter, no_step, read_adapter)
"""Only the folder given may be one: checkpoints of PEFT models have these files too."""


def source_in(tag_dir: Path) -> Source:
    return next((one for one in SOURCES if one.holds(tag_dir)), ADAPTER)


def locate(path: Path, tag: str | None = None, *, follow_symlinks: bool = False) -> Location:
    """Return the tag folder that ``path`` and ``tag`` mean.

    Without ``tag``: the path itself, the tag that ``latest`` names, or the only one. ``tag`` is a
    tag in ``path``, a checkpoint of the run, or a tag that only one of its checkpoints has.
    """
    with reading(path, hint="Check the path and its permissions"):
        path = _existing(path)
        boundary = Boundary.of(path, follow=follow_symlinks)
        if not is_tag_dir(path):
            if not (list_tags(path) or is_file(path / LATEST[0])):
                if (
                    tag in (None, path.name)
                    and holds_adapter(path)
                    and not list_run_checkpoints(path)
                ):
                    boundary = boundary.including(path.parent)
                    return location_of(path, TagChoice.HANDED_OVER, boundary)
                _check_any(path, tag)
            return _in_root(path, boundary) if tag is None else _named(path, tag, boundary)
        if tag not in (None, path.name, original_name(path.name)):
            raise OtherTagError(
                "is a tag folder, but --tag names another",
                path=path,
                found=tag,
                hint="Omit --tag, or pass the folder that contains this tag",
            )
        boundary = boundary.including(path.parent)
        return location_of(path, TagChoice.HANDED_OVER, boundary)


def locate_all(path: Path, *, follow_symlinks: bool = False) -> Iterator[tuple[str, Location]]:
    """Yield name and tag folder of every checkpoint of the run in ``path``, newest first."""
    path = _existing(path)
    boundary = Boundary.of(path, follow=follow_symlinks)
    if is_tag_dir(path):
        yield path.name, locate(path, follow_symlinks=follow_symlinks)
        return
    if not list_tags(path):
        _check_any(path)
        runs = list_run_checkpoints(path)
        path = path / runs[0] if len(runs) == 1 else path
    found = list_candidates(path, boundary)
    names = [one.name for one in found] or list_run_checkpoints(path)
    for alike in (names, *map(list_tags, {one.tag_dir.parent for one in found})):
        if not are_of_one_run(alike):
            raise _ambiguous("contains several models, and none is the newest", path, alike)
    for one in reversed(found):
        yield one.name, location_of(one.tag_dir, TagChoice.NEWEST, boundary)


def location_of(tag_dir: Path, chosen: TagChoice, boundary: Boundary) -> Location:
    root, tag = tag_dir.parent, tag_dir.name
    kind = source_in(tag_dir).kind
    return Location(
        root=root,
        tag=tag,
        chosen=chosen,
        framework=framework_of(root, tag, kind),
        tags=list_tags(root),
        boundary=boundary,
        real_root=real(root),
        model_dir=root if kind is Kind.ZERO else _model_dir(tag_dir),
        kind=kind,
    )


def _model_dir(tag_dir: Path) -> Path:
    """Source: verl and SkyRL of August 2026 (``huggingface/``); Accelerate 1.15, ``fsdp_utils``."""
    if is_folder(tag_dir / "huggingface"):
        return tag_dir / "huggingface"
    return tag_dir.parent if _OF_ACCELERATE.fullmatch(tag_dir.name) else tag_dir


def framework_of(root: Path, tag: str, kind: Kind = Kind.ZERO) -> Framework:
    if kind is Kind.ADAPTER:
        return Framework.PEFT
    if kind is Kind.FSDP:
        names = " ".join(child.name for child in children(root / tag))
        if "trainer_state.json" in names:
            return Framework.HF_TRAINER
        if _OF_ACCELERATE.fullmatch(tag) or "pytorch_model_fsdp" in names:
            return Framework.ACCELERATE
        return Framework.VERL if "model_world_size_" in names else Framework.TORCH
    if is_file(root / SOURCE_SIDECAR):
        return Framework.ZEXPORT
    if is_file(root / "trainer_state.json"):
        return Framework.HF_TRAINER
    if _OF_ACCELERATE.fullmatch(tag):
        return Framework.ACCELERATE
    if root.suffix == ".ckpt" and tag == "checkpoint":
        return Framework.LIGHTNING
    return Framework.OPENRLHF if root.name in ("_actor", "_critic") else Framework.DEEPSPEED


def original_name(name: str) -> str:
    """Return the name that a folder had before it was pruned."""
    return name.removeprefix(PRUNED)


def pruned_name(path: Path) -> Path:
    """Return the path that a folder has once it is pruned."""
    return path.parent / (PRUNED + original_name(path.name))


def run_folder(path: Path) -> Path:
    """Return the folder with a run's checkpoints: ``path``, or ``checkpoints`` in it.

    Source: Accelerate 1.15, ``accelerator.py`` (``save_state``: ``checkpoints/checkpoint_<n>``).
    """
    inner = path / "checkpoints"
    if not is_folder(inner) or is_tag_dir(path) or is_file(path / LATEST[0]):
        return path
    has_own = list_tags(path) or list_run_checkpoints(path)
    return inner if list_run_checkpoints(inner) and not has_own else path


def read_latest(root: Path, name: str = LATEST[0]) -> str | None:
    path = root / name
    if not is_file(path):
        return None
    tag = (read_regular(path, _LATEST_NBYTES_MAX) or b"").decode(errors="replace").strip()
    if not tag or "\n" in tag or "\ufffd" in tag:
        raise DamagedCheckpointError(
            "does not contain a tag name",
            path=path,
            expected="one line such as global_step100",
            hint="Choose the tag with --tag",
        )
    _check_child_name(tag, path, UnsafeError)
    return tag


def is_tag_dir(path: Path) -> bool:
    return is_folder(path) and any(source.holds(path) for source in SOURCES)


def list_tags(folder: Path) -> tuple[str, ...]:
    """Return the names of the tag folders in ``folder``, sorted by number."""
    return _children_that(is_tag_dir, folder)


def list_run_checkpoints(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in ``folder`` that contain tags, sorted by number."""
    return _children_that(lambda child: is_folder(child) and bool(list_tags(child)), folder)


def checkpoints_of_one_run(folder: Path) -> tuple[str, ...]:
    """Return the names of ``list_run_checkpoints`` if they belong to one run.

    Next to tags, only names such as ``checkpoint-100`` or ``final`` do: ``Trainer.save_model``
    under ZeRO-3 writes the last tag to the run folder itself (transformers 5.23, ``trainer.py``).
    """
    runs = list_run_checkpoints(folder)
    if list_tags(folder):
        return tuple(filter(is_checkpoint_name, runs))
    return runs if are_of_one_run(runs) else ()


def runs_in(folder: Path) -> tuple[str, ...]:
    """Return the names of the runs in ``folder``, if it is not a run itself."""
    if list_tags(folder) or any(map(is_checkpoint_name, list_run_checkpoints(folder))):
        return ()
    return _children_that(lambda it: is_folder(it) and bool(list_run_checkpoints(it)), folder)


def _children_that(fit: Callable[[Path], bool], folder: Path) -> tuple[str, ...]:
    """Return the names of the folders that fit; not of unfinished exports or links to siblings."""
    names = []
    for child, _ in child_folders(folder):
        try:
            if fit(child) and _linked_sibling(child) is None and not is_unfinished(child):
                names.append(child.name)
        except PermissionError:  # such as lost+found on a mounted disk
            if not is_local(child):
                raise
    return tuple(sorted(names, key=_by_number))


def _linked_sibling(path: Path) -> str | None:
    target = real(path) if is_link(path) else None
    return target.name if target is not None and target.parent == real(path.parent) else None


def is_checkpoint_name(name: str) -> bool:
    """Return whether a name only says when it was saved: ``checkpoint-100``, ``final``."""
    return all(map(_TIME_WORD.fullmatch, _WORD.findall(original_name(name).lower())))


def are_of_one_run(names: Iterable[str]) -> bool:
    """Return whether names may belong to one run; ``actor`` and ``critic`` are two models."""
    return len({"" if is_checkpoint_name(name) else name_pattern(name) for name in names}) <= 1


def name_pattern(name: str) -> str:
    """Return the name with its numbers replaced by 0."""
    return _DIGITS.sub("0", original_name(name))


def recorded_step(tag_dir: Path, boundary: Boundary) -> int | None:
    """Return the global step that a checkpoint records; ``None`` if that cannot be read."""
    return source_in(tag_dir).step(tag_dir, boundary)


def list_candidates(folder: Path, boundary: Boundary) -> tuple[Candidate, ...]:
    """Return the tags in a folder and the checkpoints of its run, newest last.

    They are ordered by step, then by number; without a step, after the previous name of the same
    pattern. At most ``READ_MAX`` steps are read: of names without number, and the highest numbers.
    """
    runs = [folder / run for run in checkpoints_of_one_run(folder)]
    places = {run.name: run / list_tags(run)[-1] for run in runs}
    places |= {tag: folder / tag for tag in list_tags(folder)}
    names = sorted(places, key=_by_number)
    # Those without a number are last.
    numbered = sorted(names, key=lambda name: _DIGITS.search(name) is None)[-READ_MAX:]
    steps = {name: recorded_step(places[name], boundary) for name in numbered if len(names) > 1}
    known, before = dict[str, int](), dict[str, int]()
    for name in names:
        step, pattern = steps.get(name), name_pattern(name)
        known[name] = before[pattern] = before.get(pattern, -1) if step is None else step
    names.sort(key=lambda name: (known[name], steps.get(name) is None))
    return tuple(Candidate(name, places[name], steps.get(name)) for name in names)


def _by_number(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in _DIGITS.findall(name)], name


def _existing(path: Path) -> Path:
    path = absolute(path)  # not real(): messages name what the user passed
    check_finished(path, NotACheckpointError)
    if is_folder(path):
        return run_folder(path)
    hint = "Pass the run folder, checkpoint-N, or the folder that contains `latest`"
    if exists(pruned := pruned_name(path)):
        hint = f"It was pruned: pass {pruned}"
    elif is_local(path):
        above = next(parent for parent in path.parents if is_folder(parent))
        wanted, *below = path.relative_to(above).parts
        with suppress(PermissionError):
            near = _similar(wanted, sorted(child.name for child, _ in child_folders(above)))
            if near and (not below or is_folder(above.joinpath(near, *below))):
                hint = f"Did you mean {above.joinpath(near, *below)}? {hint}"
    what = "is a file, not a checkpoint folder" if exists(path) else "does not exist"
    raise NotACheckpointError(what, path=path, hint=hint)


def _similar(name: str, names: Sequence[str]) -> str | None:
    """Return the name that was probably meant: never one with another number."""
    import difflib  # noqa: PLC0415 - only for an error

    same = [one for one in names if _DIGITS.findall(one) == _DIGITS.findall(name)]
    near = difflib.get_close_matches(name, same, 1, 0.3 if _DIGITS.search(name) else 0.6)
    return near[0] if near else None


def _named(path: Path, tag: str, boundary: Boundary) -> Location:
    _check_child_name(tag, path / tag, UsageError)
    tag = _linked_sibling(path / tag) or tag
    if not exists(path / tag) and exists(pruned := pruned_name(path / tag)):
        tag = pruned.name
    runs = list_run_checkpoints(path)
    if tag in runs and not is_tag_dir(path / tag):
        return _in_root(path / tag, boundary)
    roots = (path, *(path / run for run in checkpoints_of_one_run(path)))
    holders = [root for root in roots if is_tag_dir(root / tag)]
    if holders[:1] == [path] or len(holders) == 1:
        return location_of(holders[0] / tag, TagChoice.OPTION, boundary)
    if holders:
        raise _ambiguous(
            f"several checkpoints have the tag {tag!r}", path, [h.name for h in holders]
        )
    names = [*list_tags(path), *runs]
    near = _similar(tag, [*names, NEWEST])
    raise NoSuchTagError(
        f"no tag or checkpoint is named {tag!r}",
        path=path,
        found=some(names) or "no tag folder",
        hint=f"Did you mean --tag {near}?" if near else "Choose one of these, or --tag newest",
    )


def _in_root(root: Path, boundary: Boundary) -> Location:
    """Return the tag that ``latest`` names, or the only one, or the one in the only checkpoint."""
    tags, runs = list_tags(root), list_run_checkpoints(root)
    models = [tag for tag in tags if _OF_ACCELERATE.fullmatch(tag)]
    if len(models) > 1:  # `latest` names whichever Accelerate saved last
        raise _ambiguous("contains several models that Accelerate saved together", root, models)
    for name in LATEST if tags or is_file(root / LATEST[0]) else ():
        boundary.check(root / name)
        if (latest := read_latest(root, name)) is None:
            continue
        for tag_dir in (root / latest, pruned_name(root / latest)):
            if is_tag_dir(tag_dir):
                return location_of(tag_dir, TagChoice.LATEST, boundary)
        names = (*tags, *runs)
        raise CheckpointError(
            f"names the tag {latest!r}, which does not exist",
            path=root / name,
            found=some(names) or "no tag folder",
            hint=f"Choose another with --tag {names[-1]}" if names else "Copy the tag folder again",
        )
    if len(tags) == 1:
        return location_of(root / tags[0], TagChoice.ONLY, boundary)
    if not tags and len(runs) == 1:
        return _in_root(root / runs[0], boundary)
    for name, prefix in LATEST_OF_RL.items():
        boundary.check(root / name)
        number = read_latest(root, name)
        if number is not None and prefix + number in runs:
            return replace(_in_root(root / (prefix + number), boundary), chosen=TagChoice.LATEST)
    found = [one.name for one in list_candidates(root, boundary)] or runs
    example = f", for example --tag {found[-1]} or --tag newest" if are_of_one_run(found) else ""
    raise _ambiguous("contains several checkpoints", root, found, _CHOOSE + example)


def _check_any(path: Path, tag: str | None = None) -> None:
    """Raise unless a folder without tags contains checkpoints of a run, or the one named."""
    checkpoints = list_run_checkpoints(path)
    if tag not in checkpoints and (runs := runs_in(path)):
        names = [*sorted(runs), *sorted(checkpoints)]
        hint = f"Pass one of them, for example {path / names[0]}"
        raise _ambiguous("contains whole runs, and is not a run itself", path, names, hint)
    if not checkpoints:
        raise NotACheckpointError(
            "contains no checkpoint of DeepSpeed ZeRO or FSDP",
            path=path,
            found="no rank files and no .metadata in it or two levels below",
            expected="`latest` and a tag folder such as global_step100, or files of FSDP",
            hint="It is an export: check it with zexport verify"
            if is_file(path / MANIFEST_NAME)
            else "Pass the folder that the training wrote to",
        )


def _check_child_name(tag: str, path: Path, error: type[UnsafeError | UsageError]) -> None:
    if tag in (".", "..") or any(character in tag for character in "/\\\0"):
        raise error(
            "the tag leads outside the checkpoint folder",
            path=path,
            found=repr(tag),
            expected="the name of a folder next to `latest`",
            hint="Choose the tag with --tag",
        )


def _ambiguous(
    problem: str, path: Path, names: Sequence[str], hint: str = _CHOOSE
) -> AmbiguousTagError:
    return AmbiguousTagError(problem, path=path, found=some(names), hint=hint)
