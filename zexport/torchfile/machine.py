"""The state of a pickle that is being read: the bytes ahead, the stack, the memo, the mentions."""

from __future__ import annotations

from collections.abc import Mapping
from mmap import mmap

from zexport.torchfile.inert import (
    ForeignStorage,
    FragmentAddress,
    Global,
    MalformedError,
    Opaque,
    StorageRef,
)
from zexport.torchfile.known_globals import Call


class Machine:
    """The state of one run.

    ``stack`` holds the values since the last mark; the stacks below it wait in ``marks``. The memo
    is a dict, so that a large index in the input costs nothing.
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
        "stack",
        "storages",
    )

    def __init__(self, data: bytes | mmap, *, start: int, limit: int) -> None:
        self.data = data
        self.pos = start
        self.limit = limit
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
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
        return self.data[begin:end]

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
            value = run(args)
            if value is not None:
                return value
            self.misused.add(callee)
        return Opaque(callee, args)
