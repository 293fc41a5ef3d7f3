"""Reading a pickle without running it, and saying in plain words when it cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from mmap import mmap
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
from zexport.store.object_files import ObjectBytes

MAX_PICKLE_NBYTES = 64 << 20


class Pickle(Struct, frozen=True):
    """One pickle: its value, the byte after it, and what it mentions.

    The value is of plain Python values and the classes of ``zexport.formats.inert``; it may be
    nested to any depth and contain itself. ``unknown_globals`` are those outside the closed list,
    and those on it that were called with arguments they are never given, sorted.
    """

    value: object
    end: int
    unknown_globals: tuple[Global, ...]
    storages: Mapping[str, StorageRef | ForeignStorage]


def load(data: bytes | memoryview | mmap | ObjectBytes, *, path: Path, start: int = 0) -> Pickle:
    """The pickle that begins at byte ``start`` of ``data``; nothing it names is imported or called.

    ``path`` is the file that it is from, for messages.
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
        problem = f"the pickle is damaged at byte {machine.pos}: {_reason(error)}"
        hint = "Copy the file again from where it was written"
        raise DamagedCheckpointError(problem, path=path, hint=hint) from error
    unknown = (machine.globals - HARMLESS) | machine.misused
    return Pickle(value, machine.pos, tuple(sorted(unknown)), machine.storages)


def _reason(error: ValueError | IndexError) -> str:
    if isinstance(error, MalformedError):
        return str(error)
    if isinstance(error, IndexError):
        return "it ends early, or takes more values than it made"
    return "a text or a number in it cannot be decoded"
