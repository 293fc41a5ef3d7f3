"""Typed access to untrusted values of a pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError
from zexport.formats.pickle_values import MAX_NDIM, MAX_SIZE, Opaque, TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import Shape

_PLAIN = (bool, int, float, str)
_PLAIN_MAX = 4096
_DEPTH_MAX = 8


class PickleView(Struct, frozen=True, gc=False):
    """A value, its file, and its place there for messages.

    Methods that require a type raise ``DamagedCheckpointError``, or ``UnsafeError`` if the value is
    a call in the pickle.
    """

    path: Path
    where: str
    value: Any

    def has(self, key: str) -> bool:
        """Whether it is a dictionary with this key."""
        return isinstance(self.value, dict) and key in self.value

    def get(self, key: object) -> PickleView:
        """Return the value at a key; ``None`` if the key is missing."""
        return PickleView(self.path, f"{self.where}[{key!r}]", self.mapping().get(key))

    def need(self, key: object) -> PickleView:
        """Return the value at a required key."""
        if key not in self.mapping():
            self.fail(f"has no key {key!r}", "another kind of file, or an incomplete one")
        return self.get(key)

    def mapping(self) -> Mapping[Any, Any]:
        return self.value if isinstance(self.value, dict) else self.fail("is not a dictionary")

    def table(self) -> Mapping[str, Any]:
        """Return the items with text keys; none if it is not a dictionary."""
        found = self.value.items() if isinstance(self.value, dict) else ()
        return {key: value for key, value in found if isinstance(key, str)}

    def entries(self) -> Iterator[tuple[str, PickleView]]:
        """Yield the items of a dictionary with text keys; none for ``None``."""
        for key, value in () if self.value is None else self.mapping().items():
            if not isinstance(key, str):
                self.fail(f"has the key {key!r}, which is not text")
            yield key, PickleView(self.path, f"{self.where}[{key!r}]", value)

    def items(self) -> list[PickleView]:
        """Return the items of a list; none for ``None``."""
        if self.value is None:
            return []
        if not isinstance(self.value, list | tuple):
            self.fail("is not a list")
        return [
            PickleView(self.path, f"{self.where}[{i}]", one) for i, one in enumerate(self.value)
        ]

    def items_or_self(self) -> list[PickleView]:
        """Return the items of a list; a single value as a list of one."""
        return self.items() if isinstance(self.value, list | tuple) else [self]

    def number(self) -> int:
        return self.value if type(self.value) is int else self.fail("is not a whole number")

    def number_or(self, default: int | None) -> int | None:
        return self.value if type(self.value) is int else default

    def text(self) -> str:
        return self.value if isinstance(self.value, str) else self.fail("is not text")

    def text_or(self, default: str | None) -> str | None:
        return self.value if isinstance(self.value, str) else default

    def tensor(self) -> TensorRef:
        return self.value if isinstance(self.value, TensorRef) else self.fail("is not a tensor")

    def tensors(self) -> dict[str, TensorRef]:
        """Return the tensors of a state dict; none for ``None``.

        Extra state may be any object (torch 2.13, ``nn/modules/module.py``,
        ``_EXTRA_STATE_KEY_SUFFIX``); a call instead of another tensor is refused.
        """
        return {
            name: entry.tensor()
            for name, entry in self.entries()
            if isinstance(entry.value, TensorRef)
            or (isinstance(entry.value, Opaque) and not name.endswith("_extra_state"))
        }

    def shape(self) -> Shape:
        """Return a shape that torch allows."""
        if not isinstance(self.value, list | tuple) or len(self.value) > MAX_NDIM:
            self.fail("is not a shape")
        sizes = tuple(item.number() for item in self.items())
        if any(size < 0 for size in sizes) or prod(filter(None, sizes)) > MAX_SIZE:
            self.fail("is not the shape of a tensor")
        return sizes

    def shapes(self) -> dict[str, Shape]:
        """Return a dictionary of shapes; none for ``None``. Equal shapes are one object."""
        known: dict[Shape, Shape] = {}
        shapes = ((name, entry.shape()) for name, entry in self.entries())
        return {name: known.setdefault(shape, shape) for name, shape in shapes}

    def plain_values(self) -> dict[str, object]:
        """Return nested numbers and texts by their keys, joined with dots.

        A list of numbers and texts is one value. Values larger than any config are left out; they
        may contain themselves.
        """
        found: dict[str, object] = {}
        waiting, room = [("", 0, self.value)], _PLAIN_MAX
        while waiting:
            prefix, depth, value = waiting.pop()
            if isinstance(value, _PLAIN):
                found[prefix] = value
            elif isinstance(value, list | tuple | dict) and len(value) <= room:
                room -= len(value)
                if not isinstance(value, dict) and all(isinstance(one, _PLAIN) for one in value):
                    found[prefix] = tuple(value)
                elif depth < _DEPTH_MAX:
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    waiting += [
                        (f"{prefix}.{key}".lstrip("."), depth + 1, one) for key, one in items
                    ]
        return found

    def fail(self, problem: str, found: str = "") -> NoReturn:
        """Raise for this value."""
        if isinstance(self.value, Opaque):
            raise UnsafeError(
                f"{self.where} is a call in the pickle",
                path=self.path,
                found=str(self.value),
                expected="plain data",
                hint="Do not load this file with torch.load; ask who made it",
            )
        raise DamagedCheckpointError(
            f"{self.where} {problem}",
            path=self.path,
            found=found or type(self.value).__name__,
            hint="Copy this file again",
        )


def view(file: TorchFile, where: str) -> PickleView:
    """Return the content of a file; ``where`` names it in messages."""
    return PickleView(file.path, where, file.value)
