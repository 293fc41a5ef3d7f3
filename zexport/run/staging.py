"""The output folder's transaction: it appears complete, or everything is as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from zexport.checkpoint.resolve import framework_of, is_tag_dir, list_run_checkpoints, list_tags
from zexport.errors import DamagedCheckpointError, OutputError, VerificationError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.printable import some
from zexport.run.manifest import read_manifest
from zexport.run.receipts import (
    begun_names,
    clear_receipts,
    drop_receipts,
    drop_unfinished,
    finished_files,
    note_older,
)
from zexport.store.address import Address
from zexport.store.contents import read_json_object
from zexport.store.files import writing
from zexport.store.folders import (
    children,
    exists,
    home,
    is_file,
    is_folder,
    is_mount,
    leaves,
    make_folder,
    may_change,
    real,
    remove,
    subfolders,
    working_folder,
)
from zexport.store.publish import (
    check_no_parts,
    locked,
    parents,
    publish,
    restore,
    workplaces,
)


@contextmanager
def staged_folder(
    out_dir: Path,
    *,
    overwrite: bool,
    is_checkpoint: bool = False,
    sources: Iterable[Path] = (),
    own: Iterable[str] = (),
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[Path]:
    """A folder to fill: it becomes ``out_dir`` when the block ends, and never when that fails.

    It lies beside it, so that the last step is a rename; all that can be known to fail is looked at
    before, and an older folder goes when the new one is on the disk. After an interrupt, and where
    the system refused, it stays with the files that have receipts; after any other failure it is
    gone. ``own`` are the names of the files that it is filled with.
    """
    target = real_path(out_dir)
    check_place(target, sources)
    if isinstance(target, Address):
        with _filled_in_place(
            target, {*own}, overwrite=overwrite, is_checkpoint=is_checkpoint, warn=warn
        ):
            yield target
        return
    for place in workplaces(target):
        check_place(place, sources)
    with parents(target.parent), locked(target):
        check_no_parts(target)
        restore(target)
        check_content(target, overwrite=overwrite, is_checkpoint=is_checkpoint)
        partial, _ = workplaces(target)
        with writing(partial):
            make_folder(partial)
            drop_unfinished(partial)
        try:
            yield partial
            if overwrite:  # the work may have taken an hour
                check_content(target, overwrite=True, is_checkpoint=is_checkpoint)
            with writing(partial):
                drop_receipts(partial)
                publish(partial, target, overwrite=overwrite, warn=warn)
        except BaseException as error:  # Ctrl-C too: then finished shards stay
            clear_up(partial, error)
            raise


@contextmanager
def _filled_in_place(
    target: Address,
    own: Set[str],
    *,
    overwrite: bool,
    is_checkpoint: bool,
    warn: Callable[[str], None],
) -> Iterator[None]:
    """A folder in object storage, which has its name from the beginning.

    It is there when its manifest is, which is written last, and only if there is none. An older
    one goes before: its manifest first, so that no mixture of the two looks whole. A rerun of one
    that is stopped there removes what it has left of the older one.
    """
    manifest = target / MANIFEST_NAME
    with writing(target):
        if is_file(manifest):  # a stopped export may have lacked this alone
            drop_receipts(target)
        if is_left := any(True for _ in leaves(target / RECEIPTS)):
            _check_left(target, own)
        else:
            check_content(target, overwrite=overwrite, is_checkpoint=is_checkpoint)
        if is_file(manifest):
            note_older(target)
            remove(manifest)
        drop_unfinished(target)
        if is_left:
            count = len(finished_files(target))
            warn(f"a stopped export was cleared up in {target}: {count} finished shards were kept")
    try:
        yield
    except BaseException as error:  # Ctrl-C too: then finished shards stay
        with suppress(OSError):
            if not is_file(manifest):  # that of another export, which has come first
                clear_up(target, error)
        raise
    clear_receipts(target, warn)


def clear_up(partial: Path, error: BaseException) -> None:
    """Keep the finished shards where a rerun may succeed; else leave nothing.

    It may where the cause lies with the user or the system, not in what was read or written.
    """
    is_interrupt = not isinstance(error, Exception) or isinstance(error, MemoryError)
    may_pass = is_interrupt or isinstance(error.__cause__, OSError)
    finished = finished_files(partial) if may_pass else ()
    if not finished:
        with suppress(OSError):
            remove(partial)
        return
    with suppress(OSError):
        drop_unfinished(partial)
    count = f"{len(finished)} finished shard{'s' * (len(finished) > 1)}"
    error.add_note(f"Kept {count} in {partial}: the same command goes on from there.")


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin")


def real_path(out_dir: Path) -> Path:
    """Where the folder will lie, links followed."""
    try:
        return real(out_dir)
    except FileNotFoundError as cause:
        raise OutputError(
            "lies in a working directory that was removed",
            path=out_dir,
            hint="Change to a folder that is there",
        ) from cause


def check_place(target: Path, sources: Iterable[Path]) -> None:
    """Refuse a folder that holds where the user is or lives, or that what is read lies in."""
    inhabited = {"your home folder": home(), "the working directory": working_folder()}
    for what, place in inhabited.items():
        if place is not None and place.is_relative_to(target):
            raise OutputError(
                f"is or holds {what}, which an export never replaces",
                path=target,
                found=place,
                hint="Choose a folder of its own for the output",
            )
    _check_apart(target, sources)


def _check_apart(target: Path, sources: Iterable[Path]) -> None:
    """Refuse a folder that holds a source, or a checkpoint's own and what is below it.

    A base's files (safetensors) stay as they are: it may have an export below it.
    """
    for folder, is_checkpoint in {(path.parent, path.suffix == ".pt") for path in sources}:
        place = real(folder)
        is_inside = is_checkpoint and _is_inside(target, place)
        if place.is_relative_to(target) or is_inside:
            raise OutputError(
                "would be mixed with the files that are read",
                path=target,
                found=f"sources in {folder}",
                hint="Choose a folder outside the checkpoint",
            )


def _is_inside(target: Path, tag_dir: Path) -> bool:
    """Whether a folder lies in one that is a checkpoint's alone: its tag's, or that around it."""
    root = tag_dir.parent
    if not target.is_relative_to(root) or target.is_relative_to(tag_dir):
        return target.is_relative_to(tag_dir)
    return not (framework_of(root, tag_dir.name).keeps_runs or list_run_checkpoints(root))


def check_content(target: Path, *, overwrite: bool, is_checkpoint: bool = False) -> None:
    """Refuse what lies at ``target``, unless that is nothing or an older result to be replaced.

    ``is_checkpoint`` says that a resharded checkpoint is to lie there: it may replace another.
    """
    with writing(target):
        is_there, is_a_folder, is_a_mount = exists(target), is_folder(target), is_mount(target)
        holds_something = is_a_folder and bool(children(target))
        holds_checkpoint = is_a_folder and (
            is_tag_dir(target) or bool(list_tags(target) or list_run_checkpoints(target))
        )
        holds_older = holds_checkpoint and is_checkpoint and _is_resharded(target)
    if is_there and not is_a_folder:
        raise OutputError("is not a folder", path=target, hint="Choose another name")
    if is_a_mount:
        raise OutputError(
            "is a mount point, which no finished folder can take the place of",
            path=target,
            hint="Choose a folder below it",
        )
    if holds_checkpoint and not holds_older:
        raise OutputError(
            "holds a checkpoint, which an export never replaces",
            path=target,
            hint="Choose another name; OUT is the last of the folders",
        )
    if holds_something and not overwrite:
        raise OutputError(
            "exists and is not empty", path=target, hint="Choose another name, or pass --overwrite"
        )
    if holds_something:
        _check_removable(target)
        _check_replaceable(target)


def _is_resharded(folder: Path) -> bool:
    """Whether its manifest says that it is what a checkpoint was resharded to."""
    try:
        return "settings" in read_manifest(folder).provenance
    except VerificationError:
        return False


def _check_left(target: Path, own: Set[str]) -> None:
    """Refuse what a stopped export has left where something else was put into it.

    Its own are the names of this one, those that it was begun for, and what has receipts.
    """
    names = {path.relative_to(target).as_posix() for path in leaves(target)}
    receipts = f"{RECEIPTS}/"
    others = names - own - {*begun_names(target), *finished_files(target)}
    foreign = {name for name in others if not name.startswith(receipts)}
    if foreign:
        raise OutputError(
            "holds an unfinished export, and what is not its own, which would be removed",
            path=target,
            found=some(sorted(foreign)),
            expected="what the export has written",
            hint="Move it elsewhere, or choose another name for the output",
        )


def _check_replaceable(target: Path) -> None:
    """Refuse an export that somebody edited, and a folder that is no export's and no model's."""
    from zexport.run.verify import find_edits  # noqa: PLC0415 - of an older one alone

    with writing(target):
        if not is_file(target / MANIFEST_NAME):
            _check_model(target)
            return
        edits = [f"{one.file} {one.problem}" for one in find_edits(target) if not one.tensor]
    if edits:
        raise OutputError(
            "was changed after zexport wrote it, so zexport does not replace it",
            path=target,
            found=some(edits, 3),
            hint="Keep what you need and remove the folder, or choose another name for the output",
        )


def _check_model(target: Path) -> None:
    names = {str(path.relative_to(target)) for path in leaves(target)}
    empty = {name for name in names if is_folder(target / name)}
    own = {n for n in names if _is_models_own(n) or n in empty} if _is_model(target) else set()
    if not own:
        raise OutputError(
            "is neither an export nor a model's folder, and nothing else is replaced",
            path=target,
            found=some(sorted(names)),
            expected=f"{MANIFEST_NAME}, weights, or a model's config.json in it",
            hint="Choose another name, or remove it yourself",
        )
    if names - own:
        raise OutputError(
            "holds what is not the model's own, which would be removed with it",
            path=target,
            found=some(sorted(names - own)),
            expected="a model's files and no more",
            hint="Move it elsewhere, or choose another name for the output",
        )


_BELOW = re.compile(
    r"additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)"
)
"""What models have in folders: transformers' further templates, sentence-transformers' modules."""


def _is_models_own(name: str) -> bool:
    """Whether a model without a manifest may have this beside its weights."""
    return "/" not in name or _BELOW.fullmatch(name) is not None


def _is_model(folder: Path) -> bool:
    has_weights = any(path.match(pattern) for path in children(folder) for pattern in _WEIGHTS)
    return has_weights or _is_model_config(folder / "config.json")


def _is_model_config(path: Path) -> bool:
    try:
        return "model_type" in read_json_object(path)
    except DamagedCheckpointError:
        return False


def _check_removable(target: Path) -> None:
    """Refuse a folder with one in it that could not be removed once the new one is there."""
    try:
        for folder, holds_something in subfolders(target):
            if holds_something and not may_change(folder):
                raise _stays(folder, "no permission to empty it")
            if is_mount(folder):
                raise _stays(folder, "it is a mount point")
    except OSError as cause:
        raise _stays(Path(cause.filename), cause.strerror or "it cannot be read") from cause


def _stays(folder: Path, why: str) -> OutputError:
    return OutputError(
        f"cannot be removed with the older model: {why}",
        path=folder,
        hint="Remove it yourself, or choose another name for the output",
    )
