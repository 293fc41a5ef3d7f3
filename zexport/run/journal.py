"""The journal of finished shards: it lies in the unfinished folder, and lets a rerun go on.

An entry is made when its shard is on the disk, and appears whole or not at all. It says which plan
the shard belongs to, what was written of it, and what was read for it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from blake3 import blake3

from zexport.plan.plan import ExportPlan, FilePlan
from zexport.ranges.casts import Statistics
from zexport.run.fingerprint import fingerprint
from zexport.run.results import ShardResult, TensorResult
from zexport.store.disk import write_durably, writing
from zexport.version import __version__

JOURNAL_NAME = ".zexport_journal"
"""A folder within the unfinished folder; never part of the finished one."""

_SCHEMA = 1
_ENTRY = ".json"


class Journal:
    """The finished shards of a plan, in the folder that it fills."""

    def __init__(self, folder: Path, plan: ExportPlan) -> None:
        self._folder = folder / JOURNAL_NAME
        self._sources = fingerprint(_SCHEMA, __version__, plan.reference is None, plan.sources)
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)

    def add(self, planned: FilePlan, written: ShardResult) -> None:
        """Note a shard that is on the disk.

        Raises:
            OutputError: the note cannot be written.
        """
        table = {
            "fingerprint": self._fingerprint(planned),
            "nbytes": written.nbytes,
            "blake3": written.blake3,
            "tensors": {
                name: [one.blake3, _counts(one.statistics)] for name, one in written.tensors.items()
            },
            "ranges": {str(path): ranges for path, ranges in written.ranges.items()},
        }
        text = json.dumps(table).encode()
        seal = blake3(text).hexdigest().encode()
        write_durably(self._entry(planned), [seal, b"\n", text])

    def find(self, planned: FilePlan) -> ShardResult | None:
        """What was noted of a shard; ``None`` where nothing was, or something of another plan."""
        try:
            seal, text = self._entry(planned).read_bytes().split(b"\n", 1)
        except (OSError, ValueError):
            return None
        if blake3(text).hexdigest().encode() != seal:
            return None
        table = json.loads(text)
        if table["fingerprint"] != self._fingerprint(planned):
            return None
        return ShardResult(
            planned.filename,
            table["nbytes"],
            table["blake3"],
            {
                name: TensorResult(digest, Statistics(*counts))
                for name, (digest, counts) in table["tensors"].items()
            },
            {
                Path(path): [(start, stop, crc) for start, stop, crc in ranges]
                for path, ranges in table["ranges"].items()
            },
        )

    def keep_only(self, filenames: set[str]) -> None:
        """Clear everything out of the folder but these shards and what is noted of them.

        Raises:
            OutputError: something cannot be removed.
        """
        folder = self._folder.parent
        with writing(folder):
            for path in (*folder.iterdir(), *self._folder.iterdir()):
                name = path.name.removesuffix(_ENTRY) if path.parent == self._folder else path.name
                if path != self._folder and name not in filenames:
                    _remove(path)

    def _entry(self, planned: FilePlan) -> Path:
        return self._folder / f"{planned.filename}{_ENTRY}"

    def _fingerprint(self, planned: FilePlan) -> str:
        return fingerprint(self._sources, planned)


def finished_shards(folder: Path) -> tuple[str, ...]:
    """Names of the shards that the journal in a folder notes, whatever plan they are of."""
    found = (folder / JOURNAL_NAME).glob(f"*{_ENTRY}")
    names = (path.name.removesuffix(_ENTRY) for path in found)
    return tuple(sorted(name for name in names if (folder / name).is_file()))


def drop_unfinished(folder: Path) -> None:
    """Remove everything but finished shards and what is noted of them.

    Raises:
        OSError: something cannot be removed.
    """
    finished = finished_shards(folder)
    for path in folder.iterdir():
        if not finished or path.name not in (*finished, JOURNAL_NAME):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _counts(seen: Statistics) -> tuple[int, int, int, bool]:
    return seen.nan, seen.inf, seen.overflow, seen.all_zero
