"""A removal that was stopped: found by its notes, held against its proof, and ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from blake3 import blake3
from msgspec import Struct

from zexport.api.verify import verify_export
from zexport.beside.hollowing import delete, doom
from zexport.beside.prunable import Place, place_of
from zexport.beside.stands_for import check_nothing_else
from zexport.checkpoint.pruned import NOTE, Note, original_name, pruned_name, read_note
from zexport.errors import CheckpointError, OutputError, VerificationError
from zexport.filenames import MANIFEST_NAME
from zexport.run.manifest import read_manifest
from zexport.run.staging import real_path
from zexport.store.address import place
from zexport.store.contents import read_whole
from zexport.store.files import writing
from zexport.store.folders import (
    absolute,
    exists,
    is_file,
    is_folder,
    is_link,
    leaves,
    matching,
    remove,
)
from zexport.store.publish import locked


class Stopped(Struct, frozen=True):
    """What a stopped removal has left.

    Attributes:
        left: the folders, each with its note.
    """

    left: tuple[tuple[Place, Note], ...]

    @property
    def places(self) -> list[Place]:
        """The folders."""
        return [one for one, _ in self.left]

    @property
    def note(self) -> Note:
        """What the first of them says; the others are of the same checkpoint."""
        return self.left[0][1]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for one in self.places for file in one.versions().values())

    def check(self, out: Path) -> None:
        """Refuse to go on where the export that proved it is another, or is not what it was.

        Raises:
            CheckpointError: ``out`` is not the export that the removal was proved by.
            VerificationError: it is damaged by now, or another.
            OutputError: it would go, too.
        """
        if absolute(place(self.note.export)) != out:
            raise CheckpointError(
                "was being removed, as proved by another export",
                path=self.places[0].folder,
                found=self.note.export,
                expected=out,
                hint="Name that one with --export",
            )
        check_apart(self.places, out)
        if not (_is_manifest(out, self.note) and verify_export(out).ok):
            left = self.places[0].folder
            raise VerificationError(
                "is not the export any more that proved what is being removed",
                path=out,
                hint=f"What is left lies in {left}; take it as it is, or remove it yourself",
            )
        for one in self.places:
            check_nothing_else(one, out, read_manifest(out))

    def end(self) -> None:
        """Remove what is left."""
        with ExitStack() as stack:
            for one in self.places:
                stack.enter_context(locked(one.target))
            for one, note in self.left:
                doom(one, note)
            for one in self.places:
                delete(one)


def _is_manifest(out: Path, note: Note) -> bool:
    path = out / MANIFEST_NAME
    return is_file(path) and blake3(read_whole(path)).hexdigest() == note.export_manifest


def check_apart(places: Sequence[Place], out: Path) -> None:
    """Refuse an export that would go with the checkpoint that it is to stand for."""
    for one in places:
        if real_path(out).is_relative_to(real_path(one.folder)):
            raise OutputError(
                "lies in the checkpoint that it is to stand for",
                path=out,
                hint="Move it out of there first",
            )


def stopped_removal(paths: Sequence[Path], tag: str | None) -> Stopped | None:
    """What a stopped removal has left of these folders, if there was one; they were proved then.

    Notes are written when all folders are renamed, so one that has none yet goes, too.

    Raises:
        CheckpointError: a folder is of another checkpoint than the one that was being removed.
    """
    for path in paths:
        _clear_empty(path if tag is None else path / tag)
    found = [(path, next(_noted(path, tag), None)) for path in paths]
    left = [one for _, one in found if one is not None]
    for path in [path for path, one in found if left and one is None]:
        try:
            one = place_of(path, tag)
        except CheckpointError:  # nothing is left of it
            continue
        _check_of(one, left[0][1])
        left.append((one, left[0][1]))
    return Stopped(tuple(left)) if left else None


def _clear_empty(path: Path) -> None:
    """Remove the empty folders of a removal that was stopped when the last file was gone."""
    target = pruned_name(path)
    if path != target and exists(path):
        return  # no removal has begun: that folder is of something else
    with writing(target):
        if is_folder(target) and not is_link(target) and all(map(is_folder, leaves(target))):
            remove(target)


def _check_of(one: Place, note: Note) -> None:
    """Refuse what was not part of the removal that a note tells of: nothing has proved it."""
    own = read_note(one.tag_dir)
    name = original_name(one.folder.name)
    if not one.is_renamed or name != note.checkpoint or (own or note).step != note.step:
        raise CheckpointError(
            "is another checkpoint than the one whose removal was stopped",
            path=one.folder,
            expected=f"parts of {note.checkpoint}",
            hint="Leave it out, and prune it by a call of its own",
        )


def _noted(path: Path, tag: str | None) -> Iterator[tuple[Place, Note]]:
    given = path if tag is None else path / tag
    for folder in dict.fromkeys((given, pruned_name(given), pruned_name(given.parent))):
        for at in matching(folder, NOTE) or matching(folder, f"*/{NOTE}"):
            note = read_note(at.parent)
            is_own = original_name(folder.name) == (note and note.checkpoint)
            if note is not None and note.is_deleted and is_own:
                yield Place(folder, at.parent), note
