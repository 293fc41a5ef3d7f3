"""Values out of a checkpoint's pickles, asked for as the type they should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError
from zexport.formats.inert import MAX_NDIM, MAX_SIZE, Opaque, TensorRef
from zexport.ranges.dtypes import Shape

_PLAIN = (bool, int, float, str)
_PLAIN_MAX = 4096
_DEPTH_MAX = 8


class Value(Struct, frozen=True, gc=False):
    """An untrusted value and where it was found, asked for as the type it should have."""

    path: Path
    where: str
    value: object

    @property
    def is_none(self) -> bool:
        """Whether there is nothing."""
        return self.value is None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing, or an empty list."""
        return self.value is None or self.value == []

    def has(self, key: str) -> bool:
        """Whether it is a dictionary with this key."""
        return isinstance(self.value, dict) and key in self.value

    def get(self, key: str) -> Value:
        """The value at ``key``; ``None`` where the key is absent."""
        return Value(self.path, f"{self.where}[{key!r}]", self.mapping().get(key))

    def need(self, key: str) -> Value:
        """The value at ``key``, which must be there."""
        if not self.has(key):
            self.fail(f"lacks the key {key!r}", "another kind of file or an incomplete one")
        return self.get(key)

    def mapping(self) -> Mapping[object, object]:
        """The dictionary that it must be."""
        if not isinstance(self.value, dict):
            self.fail("is not a dictionary")
        return self.value

    def mapping_or_empty(self) -> Mapping[str, object]:
        """The items with text keys; nothing where it is no dictionary."""
        if not isinstance(self.value, dict):
            return {}
        return {key: value for key, value in self.value.items() if isinstance(key, str)}

    def entries(self) -> Iterator[tuple[str, Value]]:
        """The items of a dictionary with text keys; nothing for ``None``."""
        for key, value in {} if self.value is None else self.mapping().items():
            if not isinstance(key, str):
                self.fail(f"has the key {key!r}, which is no name")
            yield key, Value(self.path, f"{self.where}[{key!r}]", value)

    def by_number(self) -> dict[int, Value]:
        """The items of a dictionary; those whose key is no whole number are left out."""
        return {
            key: Value(self.path, f"{self.where}[{key}]", value)
            for key, value in self.mapping().items()
            if type(key) is int
        }

    def items(self) -> list[Value]:
        """The items of a list; nothing for ``None``."""
        if self.value is None:
            return []
        if not isinstance(self.value, list | tuple):
            self.fail("is not a list")
        return [Value(self.path, f"{self.where}[{i}]", value) for i, value in enumerate(self.value)]

    def items_or_self(self) -> list[Value]:
        """The items of a list; a single value as a list of one."""
        return self.items() if isinstance(self.value, list | tuple) else [self]

    def number(self) -> int:
        """The whole number that it must be."""
        if type(self.value) is not int:
            self.fail("is not a whole number")
        return self.value

    def number_or_none(self) -> int | None:
        """The whole number that it is, if it is one."""
        return self.value if type(self.value) is int else None

    def text(self) -> str:
        """The text that it must be."""
        if not isinstance(self.value, str):
            self.fail("is not text")
        return self.value

    def text_or_none(self) -> str | None:
        """The text that it is, if it is text."""
        return self.value if isinstance(self.value, str) else None

    def tensor(self) -> TensorRef:
        """The tensor that it must be."""
        if not isinstance(self.value, TensorRef):
            self.fail("is not a tensor")
        return self.value

    def tensors(self) -> dict[str, TensorRef]:
        """The tensors of a state dict; entries that are no tensors (extra state) are left out.

        A module's extra state may be any object (torch 2.13, ``nn/modules/module.py``,
        ``_EXTRA_STATE_KEY_SUFFIX``); elsewhere an object stands where a weight should be.
        """
        return {
            name: entry.tensor()
            for name, entry in self.entries()
            if isinstance(entry.value, TensorRef)
            or (isinstance(entry.value, Opaque) and not name.endswith("_extra_state"))
        }

    def shapes(self) -> dict[str, Shape]:
        """A dictionary of shapes by name; nothing for ``None``. Equal ones are one object."""
        known: dict[Shape, Shape] = {}
        shapes = ((name, entry.shape()) for name, entry in self.entries())
        return {name: known.setdefault(shape, shape) for name, shape in shapes}

    def shape(self) -> Shape:
        """A shape: a list or tuple of whole numbers, 0 or more, as many as torch lets it have.

        Neither a size nor their product is beyond what torch counts elements with.
        """
        if not isinstance(self.value, list | tuple) or len(self.value) > MAX_NDIM:
            self.fail("is not a shape")
        sizes = tuple(item.number() for item in self.items())
        if any(size < 0 for size in sizes) or prod(filter(None, sizes)) > MAX_SIZE:
            self.fail("is not a shape that a tensor can have")
        return sizes

    def lr_step(self) -> int | None:
        """The step in a scheduler's state (DeepSpeed's, or torch's)."""
        state = self.mapping_or_empty()
        for key in ("last_batch_iteration", "last_epoch"):
            value = state.get(key)
            if type(value) is int:
                return value
        return None

    def first_step(self) -> int | TensorRef | None:
        """The ``step`` of the first parameter that has one, in a torch optimizer's state dict.

        DeepSpeed's FusedAdam counts by parameter group (``ops/adam/fused_adam.py``); with
        ``elastic_checkpoint`` there is a list of states, one a group
        (``runtime/zero/stage_1_and_2.py``, ``_get_base_optimizer_state``).
        """
        state, groups = (self.mapping_or_empty().get(key) for key in ("state", "param_groups"))
        entries = list(state.values()) if isinstance(state, dict) else []
        entries += groups if isinstance(groups, list) else []
        entries += self.value if isinstance(self.value, list) else []
        for entry in entries:
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is int or isinstance(step, TensorRef):
                return step
        return None

    def plain_values(self) -> dict[str, object]:
        """The numbers and texts within it, by the keys that lead there, joined by dots.

        A list of nothing else is one value. What takes more than a configuration or a group's
        settings ever do (values that contain themselves can) is left out.
        """
        found: dict[str, object] = {}
        below, room = [("", 0, self.value)], _PLAIN_MAX
        while below:
            above, depth, value = below.pop()
            if isinstance(value, _PLAIN):
                found[above] = value
            elif isinstance(value, list | tuple | dict) and len(value) <= room:
                room -= len(value)
                if not isinstance(value, dict) and all(isinstance(one, _PLAIN) for one in value):
                    found[above] = tuple(value)
                elif depth < _DEPTH_MAX:
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    below += [(f"{above}.{key}".lstrip("."), depth + 1, one) for key, one in items]
        return found

    def fail(self, problem: str, found: str = "") -> NoReturn:
        """Raise, by whose fault it is."""
        if isinstance(self.value, Opaque):
            raise UnsafeError(
                f"{self.where} hides its value behind a call",
                path=self.path,
                found=str(self.value),
                expected="plain data",
                hint="Do not load this file with torch.load; ask who made it",
            )
        raise DamagedCheckpointError(
            f"{self.where} {problem}",
            path=self.path,
            found=found or type(self.value).__name__,
            hint="Copy the file again from where it was written",
        )
