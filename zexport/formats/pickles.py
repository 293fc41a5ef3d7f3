"""How to read a pickle without running it, and what it says in plain words when it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from mmap import mmap
from pathlib import Path

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError, UnsupportedError
from zexport.formats.inert import (
    ExcessError,
    ForeignStorage,
    FragmentAddress,
    Global,
    HiddenError,
    MalformedError,
    Opaque,
    OpaqueKey,
    StorageRef,
    TensorRef,
)
from zexport.formats.known_globals import HARMLESS
from zexport.formats.opcodes import COSTS, MAX_NBYTES, OPCODES, STOP, Machine

__all__ = [
    "ForeignStorage",
    "FragmentAddress",
    "Global",
    "Opaque",
    "OpaqueKey",
    "Pickle",
    "StorageRef",
    "TensorRef",
    "load",
]

MAX_PICKLE_NBYTES = 64 << 20
# Every opcode pushes, stores or appends a bounded number of values, so this one number bounds the
# stack, the memo and all containers together. A model of 100,000 tensors takes about 4 million.
MAX_OPCODES = 32_000_000


class Pickle(Struct, frozen=True):
    """One pickle, read.

    Attributes:
        value: plain Python values, and the classes of ``zexport.formats.inert`` for everything
            else. It may be nested to any depth and contain itself.
        end: the first byte after it.
        unknown_globals: the globals outside the closed list, and those on it that were called with
            arguments they are never given; sorted.
        storages: the storages it mentions, by key.
    """

    value: object
    end: int
    unknown_globals: tuple[Global, ...]
    storages: Mapping[str, StorageRef | ForeignStorage]


def load(data: bytes | memoryview | mmap, *, path: Path, start: int = 0) -> Pickle:
    """The pickle that begins at byte ``start`` of ``data``; nothing it names is imported or called.

    Args:
        data: bytes of the file, or of the record within it.
        path: the file, for messages.
        start: where the pickle begins.
    """
    if isinstance(data, memoryview):
        data = data.tobytes()
    limit = min(len(data), start + MAX_PICKLE_NBYTES)
    machine = Machine(data, start, limit, spent=0 if isinstance(data, mmap) else limit - start)
    try:
        value = _run(machine)
    except HiddenError as error:
        problem = f"{error}, at byte {machine.pos} of its pickle"
        hint = "Do not load this file with anything that runs pickles unless you trust its author"
        raise UnsafeError(problem, path=path, hint=hint) from error
    except ExcessError as error:
        hint = "Save again without the large lists that client_state may hold"
        problem = f"holds a pickle that {error}"
        raise UnsupportedError(problem, path=path, hint=hint) from error
    except (ValueError, IndexError, KeyError) as error:
        problem = f"the pickle is damaged at byte {machine.pos}: {_reason(error)}"
        hint = "Copy the file again from where it was written"
        raise DamagedCheckpointError(problem, path=path, hint=hint) from error
    unknown = (machine.globals - HARMLESS) | machine.misused
    return Pickle(value, machine.pos, tuple(sorted(unknown)), machine.storages)


def _run(machine: Machine) -> object:
    """The value on top of the stack at STOP."""
    data, costs = machine.data, COSTS
    for _ in range(MAX_OPCODES):
        code = data[machine.pos]
        machine.pos += 1
        if code == STOP:
            break
        machine.spent += costs[code]
        if machine.spent > MAX_NBYTES:
            machine.spend(0)
        OPCODES[code](machine)
    else:
        raise MalformedError(f"it goes on after {MAX_OPCODES} opcodes")
    if any(fragment.numel < 0 for fragment in machine.fragments):
        raise MalformedError("a fragment_address is never filled")
    return machine.stack.pop()


def _reason(error: Exception) -> str:
    if isinstance(error, MalformedError):
        return str(error)
    if isinstance(error, KeyError):
        return "it refers to a value that it never stored"
    if isinstance(error, IndexError):
        return "it ends early, or takes more values than it made"
    return "a text or a number in it cannot be decoded"
