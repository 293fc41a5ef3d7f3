"""List the checkpoints of a run and their exports, as they are at one moment.

``latest`` does not prove that a checkpoint is complete: rank 0 writes it before the other ranks
finish (DeepSpeed 0.19.8, ``runtime/engine.py``: ``save_checkpoint``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from blake3 import blake3
from msgspec import Struct, field
from msgspec.structs import replace

from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.resolve import (
    PRUNED,
    Framework,
    Location,
    checkpoints_of_one_run,
    list_run_checkpoints,
    list_tags,
    locate,
    original_name,
    recorded_step,
    run_folder,
)
from zexport.checkpoint.state import TrainingState
from zexport.checkpoint.zero.file_names import MODEL_FILES, rank_files
from zexport.errors import AmbiguousTagError, CheckpointError, VerificationError, ZexportError
from zexport.export.manifest import read_manifest
from zexport.export.verify import find_edits
from zexport.filenames import MANIFEST_NAME
from zexport.formats.pickle_view import PickleView
from zexport.formats.torch_file import read_torch_file
from zexport.storage.files import (
    changed_ns,
    child_folders,
    children,
    exists,
    is_file,
    is_folder,
    is_link,
    leaves,
    listed_version,
    matching,
    read_whole,
    real,
    refresh,
    write_durably,
)
from zexport.storage.json import JsonObject, as_table, read_json_object
from zexport.storage.locks import is_being_written
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version
from zexport.storage.symlink_policy import Boundary

_T = TypeVar("_T")

OWN_FOLDER = ".zexport-watch"
"""In the folder of exports: lock, stamps, and hard links to checkpoints that wait."""

LINKS = "links"
"""In that: ``MARK/RUN/NAME`` for each checkpoint that waits, MARK being a prefix of its mark."""

NOTE = "zexport_pruned.json"
"""Next to the rank files of a pruned checkpoint: what was removed."""

TRAINER_STATE = "trainer_state.json"
_BEING_SAVED = "checkpoint-is-incomplete.txt"
_TRAINER_NAME = re.compile(r"checkpoint-\d{1,18}", re.ASCII)
_ONE_CHECKPOINT = re.compile(
    r"(checkpoint|ckpt|(global_?)?step|iter(ation)?|epoch)s?[-_=]?\d.*", re.IGNORECASE
)
"""Names of folders made for one checkpoint; a folder named by a number may be a run."""

_RANK_FILE = re.compile(r"\.(pt|bin|distcp)$|(^|/)shard-[^/]*$")
"""Not the base model's weights, which may have the names of files in a checkpoint."""

_OWN_TAGS = (Framework.ZEXPORT, Framework.OPENRLHF)


class RunCheckpoint(Struct, frozen=True):
    """One checkpoint of a run.

    Attributes:
        name: of its own folder: the tag's, or the one that a framework makes around the tag.
        folder: where to read it: in the run, or the hard links that keep it.
        tag_dir: the folder with the rank files.
        files: version of every file in the tag folder, by its path there.
        changed_ns: when one of them last changed, by the clock of their file system.
        step: the optimizer steps that it records.
        missing: what is missing or incomplete; empty for a complete checkpoint.
        is_still: whether the last scan saw the same files, and no export of older ones.
        links: folder of the hard links that keep it.
        is_gone: whether the run has removed it, and only hard links are left.
    """

    name: str
    folder: Path
    tag_dir: Path
    files: Mapping[str, Version]
    changed_ns: int
    step: int | None = None
    missing: str = ""
    is_still: bool = False
    links: Path | None = None
    is_gone: bool = False

    @property
    def written_ns(self) -> int:
        """When the last of its files was written."""
        return max((one.mtime_ns for one in self.files.values()), default=0)

    @property
    def mark(self) -> str:
        """A digest of names, sizes and times: it differs once a file is saved again.

        Restored files of several checkpoints may have equal times: the name distinguishes them.
        """
        return digest_of_versions({f"{self.name}/{file}": one for file, one in self.files.items()})

    @property
    def is_trainers(self) -> bool:
        """Whether a Trainer saved it: ``checkpoint-N`` around the tag."""
        is_named = _TRAINER_NAME.fullmatch(original_name(self.name)) is not None
        return is_named and self.folder != self.tag_dir


class StampState(StrEnum):
    """What a watch did last for a checkpoint."""

    BEGUN = "begun"
    """It started the export; the manifest is that of the export to replace, if any."""
    EXPORTED = "exported"
    OWED = "owed"
    """It is exported; the ``--then`` command has not succeeded yet."""
    RAN = "ran"
    """The ``--then`` command succeeded, and may have moved the export."""
    REMOVED = "removed"
    """``--keep`` removed the export."""


class Stamp(Struct, frozen=True):
    """What a watch records of an export.

    Attributes:
        run: folder of the run.
        mark: that of the exported checkpoint.
        manifest: digest of the export's manifest.
        state: what was done last.
    """

    run: str
    mark: str
    manifest: str
    state: StampState


class Export(Struct, frozen=True):
    """One export, as its manifest describes it.

    Attributes:
        name: of its folder.
        step: step of its checkpoint.
        sources: size and modification time of the rank files it was made from, by name.
        options: recorded options.
        manifest: digest of its manifest.
        edited: a file that was added, removed or changed since; empty for none.
        link: name of a symlink next to it that leads to it; empty for none.
    """

    name: str
    step: int | None = None
    sources: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    options: JsonObject = field(default_factory=dict)
    manifest: str = ""
    edited: str = ""
    link: str = ""

    @property
    def written_ns(self) -> int:
        """When the last rank file of its checkpoint was written."""
        return max((mtime_ns for _, mtime_ns in self.sources.values()), default=0)

    def is_of(self, checkpoint: RunCheckpoint) -> bool:
        """Whether it was made from these rank files: names, sizes and times are equal."""
        known: dict[str, set[tuple[int, int]]] = {}
        for path, one in checkpoint.files.items():
            known.setdefault(_last(path), set()).add((one.nbytes, one.mtime_ns))
        # Paths in the manifest may begin with the tag, or below it.
        shared = {path: version for path, version in self.sources.items() if _last(path) in known}
        return bool(shared) and all(v in known[_last(path)] for path, v in shared.items())


class Snapshot(Struct, frozen=True):
    """Everything that a decision depends on.

    Attributes:
        run: real path of the run.
        now_ns: the time.
        checkpoints: by name, oldest first.
        exports: by name.
        stamps: by the name of the export.
        busy: names of exports that a process is writing.
        best: names of the checkpoints that the run calls the best.
        links: all folders of hard links; some are of files that the run has saved again since.
    """

    run: str
    now_ns: int
    checkpoints: Mapping[str, RunCheckpoint] = field(default_factory=dict)
    exports: Mapping[str, Export] = field(default_factory=dict)
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    busy: frozenset[str] = frozenset()
    best: frozenset[str] = frozenset()
    links: Sequence[Path] = ()


class Scanner:
    """Looks at a run and its exports; reads again only what has changed."""

    def __init__(self, run: Path, outs: Path, boundary: Boundary) -> None:
        self._run, self._outs, self.boundary = run, outs, boundary
        self._marks: dict[str, str] = {}
        self._known: dict[Path, tuple[object, Any]] = {}

    def see(self) -> Snapshot:
        """Return what is there now; a run that does not exist yet has no checkpoints.

        Raises:
            CheckpointError: the run cannot be read.
        """
        with reading(self._outs):
            refresh(self._outs, below=True)
            exports, stamps = self._list_exports(), self._read_stamps()
        found = list_checkpoints(self._run, self.boundary)
        links = matching(self._outs, f"{OWN_FOLDER}/{LINKS}/*")
        for folder in links:
            one = self._linked_checkpoint(folder)
            if one is not None and found.get(one.name, one).mark == one.mark:
                found[one.name] = replace(one, links=folder, is_gone=one.name not in found)
        checkpoints: dict[str, RunCheckpoint] = {}
        for one in sorted(found.values(), key=lambda one: (one.written_ns, one.name)):
            with suppress(CheckpointError, FileNotFoundError):  # the run is removing it
                checkpoints[one.name] = self._examine(
                    one, exports.get(one.name), stamps.get(one.name)
                )
        self._marks = {name: one.mark for name, one in checkpoints.items()}
        return Snapshot(
            run=str(real(self._run)),
            now_ns=time.time_ns(),
            checkpoints=checkpoints,
            exports=exports,
            stamps=stamps,
            busy=frozenset(n for n in {*checkpoints, *exports} if is_being_written(self._outs / n)),
            best=self._find_best([*checkpoints.values()]) if exports else frozenset(),
            links=links,
        )

    def _once(self, path: Path, state: object, read: Callable[[], _T]) -> _T:
        """Return what ``read`` found about ``path`` when its state last changed."""
        known = self._known.get(path)
        if known is None or known[0] != state:
            known = self._known[path] = (state, read())
        return cast("_T", known[1])

    def _linked_checkpoint(self, links: Path) -> RunCheckpoint | None:
        """Return the checkpoint in ``MARK/RUN/NAME``; ``None`` if it is not what was linked."""
        with suppress(CheckpointError, FileNotFoundError):
            for folder in filter(is_folder, matching(links, "*/*")):
                within = Boundary.of(folder.parent, follow=self.boundary.follow)
                found = checkpoint_at(folder, within)
                return found if found.mark.startswith(links.name) else None
        return None

    def _list_exports(self) -> dict[str, Export]:
        found: dict[str, Export] = {}
        for path in children(self._outs) if is_folder(self._outs) else ():
            if path.name.startswith(".") or is_link(path) or not is_file(path / MANIFEST_NAME):
                continue
            with suppress(FileNotFoundError):  # a command is moving it
                files = {str(one): listed_version(one) for one in leaves(path) if is_file(one)}
                export = self._once(path, files, partial(_read_export, path))
                found[path.name] = replace(export, link=link_to(path))
        return found

    def _read_stamps(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        for path in matching(self._outs, f"{OWN_FOLDER}/stamps/*.json"):
            with suppress(msgspec.DecodeError):  # then the export counts as the user's
                content = self._once(path, listed_version(path), partial(read_whole, path))
                found[path.name.removesuffix(".json")] = msgspec.json.decode(content, type=Stamp)
        return found

    def _examine(
        self, checkpoint: RunCheckpoint, export: Export | None, stamp: Stamp | None
    ) -> RunCheckpoint:
        """Return the checkpoint with step and problems; an exported one is not opened."""
        mark, folder = checkpoint.mark, checkpoint.folder
        is_exported = export is not None and export.is_of(checkpoint)
        states = changed_ns(folder / TRAINER_STATE), exists(folder / _BEING_SAVED)

        def read() -> tuple[int | None, str]:
            within = Boundary.of(folder.parent, follow=self.boundary.follow)
            missing = "" if is_exported else find_missing(checkpoint)
            return recorded_step(checkpoint.tag_dir, within), missing

        step, missing = self._once(folder, (mark, is_exported or states), read)
        # Equal files prove nothing if it is saved again: some ranks may not have begun to write.
        is_still = self._marks.get(checkpoint.name) == mark and (
            stamp is None or stamp.mark == mark
        )
        return replace(checkpoint, step=step, missing=missing, is_still=is_still)

    def _find_best(self, checkpoints: Sequence[RunCheckpoint]) -> frozenset[str]:
        """Return the best of each model, as its newest readable checkpoint records."""
        models, names = set[str](), set[str]()
        for one in reversed(checkpoints):
            model, path = model_of(one.name, {one.step}), one.folder / TRAINER_STATE
            if model not in models and not one.missing:
                state = one.mark, changed_ns(path), changed_ns(self._run / TRAINER_STATE)
                with suppress(ZexportError, OSError):
                    names |= self._once(path, state, partial(best_names, self._run, [one]))
                    models.add(model)
        return frozenset(names)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def is_run(folder: Path) -> bool:
    """Whether a folder contains checkpoints."""
    return bool(list_tags(folder) or list_run_checkpoints(folder))


def list_checkpoints(run: Path, boundary: Boundary) -> dict[str, RunCheckpoint]:
    """Return the checkpoints in a run folder by name, except pruned ones.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    found: dict[str, RunCheckpoint] = {}
    with reading(run):
        try:
            refresh(run, below=True)
            run = run_folder(run)
            tags = list_tags(run)
            checkpoints = checkpoints_of_one_run(run) if tags else list_run_checkpoints(run)
        except FileNotFoundError:
            return found
    for name in filter(str.isprintable, (*checkpoints, *tags)):
        if not name.startswith(PRUNED):
            with suppress(CheckpointError, FileNotFoundError):  # the run is removing it
                found[name] = checkpoint_at(run / name, boundary)
    return found


def checkpoint_at(folder: Path, boundary: Boundary) -> RunCheckpoint:
    """Return the checkpoint in a folder, by what the folder lists."""
    try:
        tag_dir = locate(folder, follow_symlinks=boundary.follow).tag_dir
    except AmbiguousTagError:  # such as actor and critic; opening it reports that
        tag_dir = folder
    saved = (path for path in leaves(tag_dir) if NOTE not in path.name)
    files = [path for path in saved if boundary.holds(path) and not is_folder(path)]
    versions = {path.relative_to(tag_dir).as_posix(): listed_version(path) for path in files}
    changed = max((changed_ns(path) or 0 for path in files), default=0)
    return RunCheckpoint(folder.name, folder, tag_dir, versions, changed)


def check_as_seen(folder: Path, mark: str, *, follow: bool) -> None:
    """Raise unless the files of a checkpoint are those that had the mark."""
    refresh(folder)
    with reading(folder):
        found = checkpoint_at(folder, Boundary.of(folder.parent, follow=follow))
    if found.mark != mark:
        raise CheckpointError(
            "was saved again during the export",
            path=folder,
            hint="Export it once no process writes to it",
        )


def find_missing(checkpoint: RunCheckpoint) -> str:
    """Return what a checkpoint still lacks; empty if it is complete.

    A Trainer writes its state once every rank has closed its files (transformers 5.23,
    ``trainer.py``: ``_save_checkpoint``). If rank files are newer, it is being saved again. Any
    other checkpoint needs all files of all ranks, each complete up to its end.
    """
    if checkpoint.is_trainers:
        lacks, state = _missing_of_trainer(checkpoint), checkpoint.folder / TRAINER_STATE
        if lacks or listed_version(state).mtime_ns >= checkpoint.written_ns:
            return lacks
        return f"{TRAINER_STATE} is older than the rank files"
    found = open_complete(checkpoint)
    return found.statement() if isinstance(found, CheckpointError) else ""


def open_complete(
    checkpoint: RunCheckpoint, nodes: Iterable[Path] = ()
) -> TrainingState | ZexportError:
    """Return the metadata of a complete checkpoint, or its first problem.

    ``nodes`` are the run's folders on other nodes, which have their parts of it.
    """
    if checkpoint.is_trainers and (lacks := _missing_of_trainer(checkpoint)):
        return CheckpointError(lacks, path=checkpoint.folder)
    run = checkpoint.folder.parent
    inner = checkpoint.tag_dir.relative_to(run)
    try:
        opened = open_checkpoint([one / inner for one in (run, *nodes)])
    except ZexportError as error:
        return error
    problems = sorted(opened.problems, key=lambda one: not isinstance(one, CheckpointError))
    return problems[0] if problems else opened


def _missing_of_trainer(checkpoint: RunCheckpoint) -> str:
    """Return what shows that a Trainer has not finished; empty for nothing."""
    if exists(checkpoint.folder / _BEING_SAVED):
        return f"{_BEING_SAVED} exists"
    try:
        read_json_object(checkpoint.folder / TRAINER_STATE)
    except ZexportError:
        return f"{TRAINER_STATE} is missing or incomplete"
    return ""


def is_one_checkpoint(location: Location) -> bool:
    """Whether the folder around a tag was made for this checkpoint only, and is not a run."""
    if list_run_checkpoints(location.root):
        return False  # a run may also contain a tag: Trainer.save_model under ZeRO-3
    if location.framework is Framework.LIGHTNING:
        return True
    is_named = _ONE_CHECKPOINT.fullmatch(original_name(location.root.name)) is not None
    is_single = location.framework not in _OWN_TAGS and len(location.tags) == 1
    is_wrapped = location.framework in (Framework.HF_TRAINER, Framework.ACCELERATE)
    return is_named and (is_single or is_wrapped)


def model_of(name: str, steps: Container[int | None]) -> str:
    """Return the part of a checkpoint's name that all checkpoints of its model share.

    A number is a step if the files record it; other numbers belong to the model (``seed1``).
    """
    name = re.sub(r"epoch=\d+", "epoch=#", original_name(name))
    at = [one for one in re.finditer(r"\d{1,18}", name, re.ASCII) if int(one[0]) in steps]
    return f"{name[: at[-1].start()]}#{name[at[-1].end() :]}" if at else name


def best_names(run: Path, newest: Sequence[RunCheckpoint]) -> set[str]:
    """Return the names of the best checkpoints, as the newest checkpoints of a run record.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    states = [folder / TRAINER_STATE for folder in (run, *(one.folder for one in newest))]
    paths: list[object] = [  # transformers 5.23, trainer.py (_save_checkpoint)
        read_json_object(path).get("best_model_checkpoint") for path in states if is_file(path)
    ]
    for one in newest:
        paths += _best_of_lightning(one.tag_dir)
    return {Path(path).name for path in paths if isinstance(path, str)}


def _best_of_lightning(tag_dir: Path) -> Iterator[object]:
    """Yield what each ``ModelCheckpoint`` recorded; it is in every rank's model states file.

    Source: Lightning 2.6, ``callbacks/model_checkpoint.py`` (``state_dict``) and
    ``strategies/deepspeed.py`` (``save_checkpoint``).
    """
    models = (file.path for file in rank_files(tag_dir) if file.kind in MODEL_FILES)
    if (path := next(models, None)) is None:
        return
    states = PickleView(path, "model states", read_torch_file(path).value).table()
    for key, state in PickleView(path, "callbacks", states.get("callbacks")).table().items():
        yield PickleView(path, f"callback {key!r}", state).table().get("best_model_path")


def link_to(folder: Path) -> str:
    """Return the name of a symlink next to a folder that leads to it, or into it; or nothing."""
    target = real(folder)
    with reading(folder.parent):
        links = [path for path, is_linked in child_folders(folder.parent) if is_linked]
    return next((link.name for link in links if real(link).is_relative_to(target)), "")


def digest_of_versions(versions: Mapping[str, Version]) -> str:
    """Return a digest of names, sizes and times."""
    lines = "\n".join(f"{name} {one}" for name, one in sorted(versions.items()))
    return blake3(lines.encode(errors="surrogateescape")).hexdigest()


def digest_of_manifest(out: Path) -> str:
    """Return the digest of an export's manifest; empty if there is none."""
    path = out / MANIFEST_NAME
    return blake3(read_whole(path)).hexdigest() if is_file(path) else ""


def first_edit(out: Path) -> str:
    """Return a file of an export that was added, removed or changed; empty for none."""
    try:
        edits = find_edits(out)
    except (ZexportError, OSError):
        return "it cannot be read"
    return next((f"{one.file} {one.problem}" for one in edits), "")


def _read_export(out: Path) -> Export:
    try:
        manifest = read_manifest(out)
    except VerificationError:
        return Export(out.name, edited=first_edit(out))
    step = as_table(manifest.provenance.get("checkpoint")).get("global_steps")
    rank_files = (one for one in manifest.sources if _RANK_FILE.search(one.path))
    return Export(
        name=out.name,
        step=step if isinstance(step, int) else None,
        sources={one.path: (one.nbytes, one.mtime_ns) for one in rank_files},
        options=as_table(manifest.provenance.get("options")),
        manifest=digest_of_manifest(out),
        edited=first_edit(out),
    )


def write_stamp(outs: Path, name: str, stamp: Stamp) -> None:
    """Record what was done for a checkpoint, durably."""
    write_durably(outs / OWN_FOLDER / "stamps" / f"{name}.json", msgspec.json.encode(stamp))
