"""Read a pickle without running it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError, UnsupportedError
from zexport.formats.inert import (
    ExcessError,
    ForeignStorage,
    Global,
    HiddenError,
    MalformedError,
    StorageRef,
)
from zexport.formats.known_globals import HARMLESS
from zexport.formats.pickle_machine import Machine
from zexport.storage.contents import FileBytes

MAX_PICKLE_NBYTES = 64 << 20
_UNFIT = "it ends early, takes more values than it made, or has a text that cannot be decoded"


class Pickle(Struct, frozen=True):
    """A pickle: its value, the byte after it, and the names in it.

    The value is of plain Python values and the classes of ``zexport.formats.inert``; it may be
    nested to any depth and contain itself. ``unknown_globals`` are those outside the closed list,
    and those on it that were called with arguments they are never given, sorted.
    """

    value: object
    end: int
    unknown_globals: tuple[Global, ...]
    storages: Mapping[str, StorageRef | ForeignStorage]


def load(data: bytes | memoryview | FileBytes, *, path: Path, start: int = 0) -> Pickle:
    """Return the pickle at byte ``start`` of ``data``; nothing it names is imported or called.

    ``path`` is its file, for messages.
    """
    if isinstance(data, memoryview):
        data = data.tobytes()
    limit = min(len(data), start + MAX_PICKLE_NBYTES)
    is_held = isinstance(data, bytes)
    machine = Machine(data, start, limit, spent=limit - start if is_held else 0)
    try:
        value = machine.run()
    except HiddenError as error:
        problem = f"{error}, at byte {machine.pos} of its pickle"
        hint = "Do not load this file with anything that runs pickles unless you trust its author"
        raise UnsafeError(problem, path=path, hint=hint) from error
    except ExcessError as error:
        hint = "Save again without the large lists that client_state may hold"
        problem = f"holds a pickle that {error}"
        raise UnsupportedError(problem, path=path, hint=hint) from error
    except (ValueError, IndexError) as error:
        reason = error if isinstance(error, MalformedError) else _UNFIT
        problem = f"the pickle is damaged at byte {machine.pos}: {reason}"
        hint = "Copy the file again from where it was written"
        raise DamagedCheckpointError(problem, path=path, hint=hint) from error
    unknown = (machine.globals - HARMLESS) | machine.misused
    return Pickle(value, machine.pos, tuple(sorted(unknown)), machine.storages)
