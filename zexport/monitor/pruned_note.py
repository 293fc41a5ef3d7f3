"""The note next to the rank files of a pruned checkpoint: what was removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import DamagedCheckpointError
from zexport.storage.contents import read_regular
from zexport.storage.files import is_file
from zexport.storage.json import SCHEMA, Natural
from zexport.storage.os_errors import reading

NOTE = "zexport_pruned.json"
_NBYTES_MAX = 64 << 20


class Sizes(Struct, frozen=True):
    """Bytes of a file that was rewritten without optimizer states."""

    before: Natural
    after: Natural


class Note(Struct, frozen=True):
    """What was removed of a checkpoint, when, and after which comparison.

    Attributes:
        checkpoint: name of the folder before.
        at: in UTC (``2026-11-22T15:04:05+00:00``).
        export: folder of the export that it was compared with.
        export_manifest: BLAKE3 of that export's manifest.
        tensors: number of tensors compared.
        left_out: keys of optimizer states files that cannot be rewritten.
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


def read_note(tag_dir: Path) -> Note | None:
    """Return the note next to the rank files, if there is one."""
    path = tag_dir / NOTE
    if not is_file(path):
        return None
    with reading(path):
        content = read_regular(path, _NBYTES_MAX)
    try:
        return msgspec.json.decode(content or b"", type=Note)
    except msgspec.DecodeError as cause:
        raise DamagedCheckpointError(
            "is not a note of zexport prune", path=path, hint="Remove it"
        ) from cause
