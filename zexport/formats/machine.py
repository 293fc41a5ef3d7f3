"""The state of a pickle that is being read: the bytes ahead, the stack, the memo, the mentions."""

from __future__ import annotations

from collections.abc import Mapping
from mmap import mmap

from zexport.formats.inert import (
    ExcessError,
    ForeignStorage,
    FragmentAddress,
    Global,
    MalformedError,
    Opaque,
    StorageRef,
)
from zexport.formats.known_globals import Call

MAX_NBYTES = 192 << 20
"""Memory that one pickle and its values may take, as ``Machine.spend`` estimates it.

A model file of 100,000 tensors takes nearly all of it (a hundred megabytes, as the estimate errs
upwards). Without this bound a few kilobytes of compressed pickle could ask for gigabytes of empty
containers.
"""

_STRAY_NBYTES = 128
_COPY_NBYTES = 160
_OPAQUE_NBYTES = 112
_SET_NBYTES = 160
_SHORT = 4
"""What a call that copies at most so many values takes is within what its opcode costs."""


class Machine:
    """The state of one run.

    ``stack`` holds the values since the last mark; the stacks below it wait in ``marks``. Picklers
    number what they store from 0 on, so ``memo`` is a list; ``strays`` has what was stored under
    any other number, so that a large one in the input costs nothing.
    """

    __slots__ = (
        "data",
        "fragments",
        "globals",
        "limit",
        "marks",
        "memo",
        "misused",
        "pos",
        "spent",
        "stack",
        "storages",
        "strays",
    )

    def __init__(self, data: bytes | mmap, *, start: int, limit: int) -> None:
        self.data = data
        self.pos = start
        self.limit = limit
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: list[object] = []
        self.strays: dict[int, object] = {}
        self.spent = 0 if isinstance(data, mmap) else limit - start
        self.globals: set[Global] = set()
        self.misused: set[Global] = set()
        self.storages: dict[str, StorageRef | ForeignStorage] = {}
        self.fragments: list[FragmentAddress] = []

    def take(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes."""
        begin, end = self.pos, self.pos + nbytes
        if end > self.limit:
            raise MalformedError("it ends early, or is longer than it may be")
        self.pos = end
        self.spent += nbytes
        return self.data[begin:end]

    def spend(self, nbytes: int) -> None:
        """Account for memory that is about to be taken.

        Everything that an opcode makes is charged when it is made, and never given back: that
        bounds the time as well, since no opcode works longer than it is charged for.
        """
        self.spent += nbytes
        if self.spent > MAX_NBYTES:
            raise ExcessError(f"would take more than {MAX_NBYTES >> 20} MiB of memory")

    def remember(self, index: int, value: object) -> None:
        """Store ``value`` in the memo."""
        if index == len(self.memo):
            self.memo.append(value)
            self.strays.pop(index, None)
        elif 0 <= index < len(self.memo):
            self.memo[index] = value
        else:
            self.spend(_STRAY_NBYTES)
            self.strays[index] = value

    def recall(self, index: int) -> object:
        """What the memo has at ``index``."""
        return self.memo[index] if 0 <= index < len(self.memo) else self.strays[index]

    def take_int(self, nbytes: int) -> int:
        """The next ``nbytes`` bytes as an unsigned number."""
        return int.from_bytes(self.take(nbytes), "little")

    def take_line(self) -> bytes:
        """The bytes up to the next line feed, without it."""
        end = self.data.find(b"\n", self.pos, self.limit)
        if end < 0:
            raise MalformedError("a line of it does not end")
        line = self.take(end - self.pos)
        self.pos += 1
        return line

    def pop_mark(self) -> list[object]:
        """The values since the last mark."""
        values, self.stack = self.stack, self.marks.pop()
        return values

    def mention(self, module: object, name: object) -> Global:
        """The global of that name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise MalformedError("the name of a global is not text")
        result = Global(module, name)
        self.globals.add(result)
        return result

    def call(self, known: Mapping[Global, Call], callee: object, args: object) -> object:
        """What a call stands for: a value for the calls in ``known``, else an ``Opaque``."""
        if not isinstance(args, tuple):
            raise MalformedError("the arguments of a call are not a tuple")
        if isinstance(callee, Global) and (run := known.get(callee)) is not None:
            # A call may copy what it is given, and the memo gives one long list to many calls.
            copied = [len(a) for a in args if isinstance(a, list | tuple) and len(a) > _SHORT]
            self.spend(_COPY_NBYTES * sum(copied))
            value = run(args)
            if isinstance(value, set | frozenset):
                self.spend(_SET_NBYTES)
            if value is not None:
                return value
            self.misused.add(callee)
        self.spend(_OPAQUE_NBYTES)
        return Opaque(callee, args)
