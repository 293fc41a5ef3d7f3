"""A checkpoint without what only a resume needs: its name, and the note of what was removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import DamagedCheckpointError
from zexport.store.contents import fresh_name, read_regular
from zexport.store.files import reading
from zexport.store.folders import is_file
from zexport.store.json import SCHEMA, Natural

PREFIX = "pruned-"
"""What the folder's name begins with: no training that looks for ``checkpoint-N`` takes it."""

NOTE = "zexport_pruned.json"
"""Beside the rank files."""

NOTES = (NOTE, fresh_name(NOTE))
"""No files of the checkpoint's, the second one where its writing was stopped."""

_NBYTES_MAX = 64 << 20


class Sizes(Struct, frozen=True):
    """A file that was written again without the optimizer's states.

    Attributes:
        before: its bytes as they were.
        after: its bytes now.
    """

    before: Natural
    after: Natural


class Note(Struct, frozen=True):
    """What was removed of a checkpoint, when, and on which proof.

    Attributes:
        zexport_version: of the zexport that removed it.
        checkpoint: name of the folder before.
        step: optimizer steps taken.
        at: when, in UTC (``2026-11-22T15:04:05+00:00``).
        export: the folder of the export that was held against it.
        export_manifest: BLAKE3 of that one's manifest.
        tensors: tensors that were compared before anything was removed.
        rewritten: files that were written again, by name.
        removed: names of files that were removed.
        left_out: keys of optimizer files that cannot be written again, and were left out.
    """

    zexport_version: str
    checkpoint: str
    step: Natural | None
    at: str
    export: str
    export_manifest: str
    tensors: Natural
    rewritten: Mapping[str, Sizes]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    schema: int = SCHEMA


def original_name(name: str) -> str:
    """The name that a folder had before it was pruned."""
    return name.removeprefix(PREFIX)


def pruned_name(path: Path) -> Path:
    """The folder's name once it is pruned; one that is has it."""
    return path.parent / (PREFIX + original_name(path.name))


def read_note(tag_dir: Path) -> Note | None:
    """The note beside the rank files, if there is one."""
    path = tag_dir / NOTE
    if not is_file(path):
        return None
    with reading(path):
        content = read_regular(path, _NBYTES_MAX)
    try:
        return msgspec.json.decode(content or b"", type=Note)
    except msgspec.DecodeError as cause:
        raise DamagedCheckpointError(
            "is not what zexport prune writes", path=path, hint="Remove it"
        ) from cause
