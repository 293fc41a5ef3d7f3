"""Where a job writes: a folder that is renamed when complete, or a bucket folder in place.

In a bucket, the output exists once its manifest does. The manifest is written last and never
replaces another.
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec

from zexport.errors import OutputError
from zexport.export.journal import finished_files
from zexport.export.plan_file import FileSize
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.storage.files import (
    check_space,
    children,
    exists,
    is_file,
    is_folder,
    is_link,
    is_local,
    listed_version,
    make_folder,
    names_below,
    open_output,
    read_whole,
    remove,
    remove_durably,
    sync_path,
    write_durably,
)
from zexport.storage.local import remove_if_possible, rename, rename_durably, set_times
from zexport.storage.locks import locked, locked_file, parents, with_suffix, workplaces
from zexport.storage.os_errors import lacks_memory, writing
from zexport.text import some

_OLDER = "older"
"""In the journal of a bucket folder: the names of the export that is being replaced."""


class Destination(ABC):
    """Where one job writes.

    Attributes:
        target: the output folder.
        folder: where files are written.
        journal: the folder of receipts, with the sealed plan.
        plan_path: the sealed plan.
        is_renamed: whether ``folder`` becomes ``target`` by a rename.
    """

    is_renamed = False

    def __init__(self, target: Path, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.journal = folder / RECEIPTS
        self.plan_path = self.journal / "plan"

    def lock(self, seconds: float) -> AbstractContextManager[None]:  # noqa: ARG002
        """Keep other processes from beginning or finishing this job, if there are locks."""
        return nullcontext()

    def lock_part(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Keep other processes from writing the same part, if there are locks."""
        return nullcontext()

    def parts_running(self) -> tuple[str, ...]:
        """Return the parts that processes are writing, if there are locks."""
        return ()

    def reserve(self, files: Sequence[FileSize], more_nbytes: int) -> None:  # noqa: B027 - not in a bucket
        """Allocate all space, so that a full disk shows before a byte is read."""

    @abstractmethod
    def prepare(self, own: Set[str], *, resumes: bool) -> None:
        """Remove what this or another job left; if the job resumes, not its files and journal.

        ``own`` are the names of the job's files.
        """

    @abstractmethod
    def publish(self, *, overwrite: bool, warn: Callable[[str], None]) -> None:
        """Make the output appear, after its manifest."""


def destination(target: Path) -> Destination:
    """Return the destination for an output folder without links."""
    return LocalFolder(target) if is_local(target) else Bucket(target)


def unedited_files(out_dir: Path, names: Set[str]) -> Set[str]:
    """Return those of an export's files that were not written since it was published.

    A local file has the modification time of the manifest. An object is older; stores record
    seconds, so that one of the same second may be newer.
    """
    published = listed_version(out_dir / MANIFEST_NAME).mtime_ns
    is_as_published = operator.eq if is_local(out_dir) else operator.lt
    return {n for n in names if is_as_published(listed_version(out_dir / n).mtime_ns, published)}


def _clear_except(folder: Path, kept: Set[str], *, keep_journal: bool) -> None:
    """Remove all below a folder except these files and locks; then folders that are empty.

    The journal goes last: it marks the rest as an export's. If kept, other parts may write to it
    meanwhile.
    """
    gone = [name for name in names_below(folder) if name not in kept and not name.endswith(".lock")]
    remove(*(folder / name for name in gone if not _is_in_journal(name)))
    if not keep_journal:
        remove(*(folder / name for name in gone if _is_in_journal(name)))
    if is_local(folder):
        for path in sorted(folder.rglob("*"), reverse=True):
            if is_folder(path) and not children(path):
                remove(path)


def _is_in_journal(name: str) -> bool:
    return name.startswith(f"{RECEIPTS}/")


class LocalFolder(Destination):
    """A folder filled as ``OUT.partial`` under a lock, and renamed to OUT when complete."""

    is_renamed = True

    def __init__(self, target: Path) -> None:
        partial, self._replaced = workplaces(target)
        super().__init__(target, partial)
        self._aside = with_suffix(partial, ".journal")

    @contextmanager
    def lock(self, seconds: float) -> Iterator[None]:
        """Hold the lock next to the target; undo what a killed process left half done.

        Folders above the target are made, and removed again if the block fails.
        """
        with parents(self.target.parent), locked(self.target, seconds=seconds):
            with writing(self.target):
                self._restore()
                if exists(self._aside) and exists(self.folder):
                    rename(self._aside, self.journal)
                elif exists(self._aside):
                    remove(self._aside)
            yield

    def lock_part(self, name: str) -> AbstractContextManager[None]:
        path = self.journal / f"{name.replace('/', '-of-')}.lock"
        held = f"another process writes part {name} of this folder"
        return locked_file(path, self.target, held, seconds=2.0)

    def parts_running(self) -> tuple[str, ...]:
        paths, found = list[Path](), []
        with suppress(FileNotFoundError):  # another process publishes or removes the folder
            paths = sorted(self.journal.glob("*.lock"))
        for path in paths:
            try:
                with locked_file(path, self.target, "held", seconds=0):
                    pass  # removes the file of a dead process
            except OutputError:
                found.append(path.stem.replace("-of-", "/"))
        return tuple(found)

    def prepare(self, own: Set[str], *, resumes: bool) -> None:
        with writing(self.folder):
            make_folder(self.folder)
            _clear_except(self.folder, own if resumes else set(), keep_journal=resumes)
            make_folder(self.journal)

    def reserve(self, files: Sequence[FileSize], more_nbytes: int) -> None:
        for path in (self.folder / file.filename for file in files):
            if is_link(path):  # never write through one
                remove(path)
        missing = [file for file in files if not exists(self.folder / file.filename)]
        check_space(self.folder, sum(file.nbytes for file in missing) + more_nbytes)
        for file in missing:
            with open_output(self.folder / file.filename, is_new=True) as output:
                output.reserve(file.nbytes)
        with writing(self.folder):
            sync_path(self.folder)

    def publish(self, *, overwrite: bool, warn: Callable[[str], None]) -> None:
        """Rename the folder to its target, or undo everything.

        The journal is moved away first and removed last, so that after a kill the next process
        finds it again. All files get the same time, for ``unedited_files``.
        """
        with writing(self.target):
            rename(self.journal, self._aside)
            try:
                written = [*sorted(self.folder.rglob("*"), reverse=True), self.folder]
                set_times(written, time.time_ns())
                for path in written:
                    sync_path(path)
                if overwrite and exists(self.target):
                    self._discard(warn)
                    rename(self.target, self._replaced)
                rename_durably(self.folder, self.target)
            except BaseException:  # Ctrl-C too
                self._restore()
                rename(self._aside, self.journal)
                raise
            remove_if_possible(self._aside)
            remove_if_possible(self.target / RECEIPTS)  # without locks, others may put it back
            self._discard(warn)

    def _restore(self) -> None:
        if exists(self._replaced) and not exists(self.target):
            rename(self._replaced, self.target)

    def _discard(self, warn: Callable[[str], None]) -> None:
        try:
            if exists(self._replaced):
                remove_durably(self._replaced)
        except OSError as cause:
            warn(f"{self._replaced}: cannot be removed ({cause.strerror}). Remove it yourself")


class Bucket(Destination):
    """A folder in object storage, without locks and renames.

    Several processes may write equal files; plan and manifest are create-only.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(target, target)

    def prepare(self, own: Set[str], *, resumes: bool) -> None:
        """Remove files of this job or of an older export; refuse others.

        The manifest of an older export goes first, after its names are recorded. So no mixture of
        two exports looks complete, and a rerun knows what is left of the older.
        """
        with writing(self.target):
            there = names_below(self.target)
            if not resumes and MANIFEST_NAME in there:
                write_durably(self.journal / _OLDER, msgspec.json.encode(sorted(there)))
                remove(self.target / MANIFEST_NAME)
                there = names_below(self.target)
            finished = {*finished_files(self.target)}
            known = own | finished
            if f"{RECEIPTS}/{_OLDER}" in there:
                known |= {*msgspec.json.decode(read_whole(self.journal / _OLDER))}
            in_journal = {*filter(_is_in_journal, there)}
            foreign = there - known - in_journal
            if in_journal and foreign:
                raise OutputError(
                    "contains an unfinished export and other files, which would be removed",
                    path=self.target,
                    found=some(sorted(foreign)),
                    expected="only files of the export",
                    hint="Move them elsewhere, or choose another name for the output",
                )
            _clear_except(self.target, finished if resumes else set(), keep_journal=resumes)

    def publish(self, *, overwrite: bool, warn: Callable[[str], None]) -> None:  # noqa: ARG002
        """Remove the journal; the output is complete, so a failure is only a warning."""
        try:
            remove(self.journal)
        except OSError as cause:
            warn(f"{self.journal}: not needed, but cannot be removed ({cause.strerror})")


def abandon(folder: Path, error: BaseException) -> None:
    """Keep finished files if a rerun may succeed, else remove the unfinished folder.

    It may if the user or the system stopped the export, not if what was read or written is wrong.
    """
    is_interrupt = not isinstance(error, Exception)
    may_pass = is_interrupt or lacks_memory(error) or isinstance(error.__cause__, OSError)
    with suppress(OSError):
        if not is_local(folder) and is_file(folder / MANIFEST_NAME):
            return  # another process published it
        finished = finished_files(folder) if may_pass else ()
        if finished:
            _clear_except(folder, {*finished}, keep_journal=True)
            shards = f"{len(finished)} finished shard{'s' * (len(finished) > 1)}"
            error.add_note(f"Kept {shards} in {folder}. Run the same command to continue.")
        elif exists(folder):
            remove_durably(folder)
