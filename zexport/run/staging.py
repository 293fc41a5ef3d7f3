"""The output folder's transaction: it appears complete, or everything is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zexport.run.out_dir import check_content, check_place, real_path
from zexport.run.receipts import drop_receipts, drop_unfinished, finished_files
from zexport.store.disk import writing
from zexport.store.folders import make_folder, remove
from zexport.store.publish import locked, parents, publish, restore, workplaces


@contextmanager
def staged_folder(
    out_dir: Path,
    *,
    overwrite: bool,
    sources: Iterable[Path] = (),
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[Path]:
    """A folder to fill: it becomes ``out_dir`` when the block ends, and never when that fails.

    It lies beside ``out_dir``, as ``<out_dir>.partial``, so that the last step is a rename. Before
    the block, everything that can be known to fail has been looked at; an older folder is replaced
    only when the new one is complete and on the disk. Two processes never fill the same folder.

    What was done is kept where a rerun may go on: after an interrupt, and where the system refused,
    the folder stays with the files that have receipts. It holds what a stopped export left,
    killed ones included, when the block begins. After any other failure it is gone.

    Args:
        out_dir: the folder to make; a symbolic link is followed.
        overwrite: whether an older model folder is replaced.
        sources: the files being read, which the folder must neither hold nor lie beside.
        warn: told of what could not be cleared away once the folder was there.
    """
    target = real_path(out_dir)
    check_place(target, sources)
    for place in workplaces(target):
        check_place(place, sources)
    with parents(target.parent), locked(target):
        restore(target)
        check_content(target, overwrite=overwrite)
        partial, _ = workplaces(target)
        with writing(partial):
            make_folder(partial)
            drop_unfinished(partial)
        try:
            yield partial
            with writing(partial):
                drop_receipts(partial)
                publish(partial, target, overwrite=overwrite, warn=warn)
        except BaseException as error:
            _clear_up(partial, error)
            raise


def _clear_up(partial: Path, error: BaseException) -> None:
    """Keep the finished shards where a rerun may succeed; else leave nothing."""
    finished = finished_files(partial) if _may_pass(error) else ()
    if not finished:
        with suppress(OSError):
            remove(partial)
        return
    with suppress(OSError):
        drop_unfinished(partial)
    count = f"{len(finished)} finished shard{'s' * (len(finished) > 1)}"
    error.add_note(f"Kept {count} in {partial}: the same command goes on from there.")


def _may_pass(error: BaseException) -> bool:
    """Whether the cause lies with the user or the system, and not in what was read or written."""
    is_interrupt = not isinstance(error, Exception) or isinstance(error, MemoryError)
    return is_interrupt or isinstance(error.__cause__, OSError)
