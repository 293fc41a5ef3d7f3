"""Digest of a plan: equal for equal plans on any machine, whatever the paths of its sources.

The digest of a source that many tensors share is computed once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from blake3 import blake3
from msgspec import Struct

from zexport import __version__
from zexport.export.plan import ExportPlan, FilePlan, TensorPlan


class PlanDigest:
    """The digest of a plan (``whole``), and of each file by the sources of its bytes."""

    def __init__(self, plan: ExportPlan) -> None:
        places = {source.path: f"source {at}" for at, source in enumerate(plan.sources)}
        self._nodes = _Nodes(places)
        names = plan.source_names
        sources = [(names[source.path], source.version, source.members) for source in plan.sources]
        context = (__version__, plan.reference is None, tuple(sources))
        self._context = self._nodes.digest(context)
        self._files = {file.filename: self._of_file(file) for file in plan.shards}
        sides = ((side.filename, side.content) for side in plan.side_files)
        provenance = json.dumps(dict(plan.provenance), sort_keys=True)
        whole = (self._context, tuple(self._files.items()), tuple(sides), provenance)
        self.whole = self._nodes.digest(whole).hex()

    def of_file(self, file: FilePlan) -> str:
        return self._files[file.filename]

    def _of_file(self, file: FilePlan) -> str:
        digest = blake3(self._context)
        frame = file.frame.pieces([0] * len(file.tensors))
        digest.update(self._nodes.digest((file.filename, b"".join(data for _, data in frame))))
        for tensor in file.tensors:
            digest.update(self._of_tensor(tensor))
        return digest.hexdigest()

    def _of_tensor(self, tensor: TensorPlan) -> bytes:
        source = self._nodes.digest(tensor.source)
        types = (tensor.stored_dtype.value, tensor.dtype.value)
        text = repr((tensor.name, tensor.shape, types, tensor.stored_name, tensor.offset))
        return blake3(source + text.encode(errors="backslashreplace")).digest()


class _Nodes:
    """Digests of dataclasses and tuples by content.

    Tuples of sources, such as the partitions below ten thousand tensors, are remembered.
    """

    def __init__(self, places: Mapping[Path, str]) -> None:
        self._places = places
        self._known: dict[int, tuple[object, bytes]] = {}  # with the object, so that its id stays

    def digest(self, node: object) -> bytes:
        if id(node) in self._known:
            return self._known[id(node)][1]
        if isinstance(node, tuple):
            values: Iterable[object] = node
        elif (isinstance(node, Struct) or is_dataclass(node)) and not isinstance(node, type):
            values = (getattr(node, name) for name in _names(type(node)))
        else:
            raise TypeError(f"a plan has no digest of a {type(node).__name__}")
        name = type(node).__name__.encode()
        found = blake3(b"%s(%s" % (name, b"".join(map(self._text, values)))).digest()
        if isinstance(node, tuple) and node and hasattr(node[0], "constituents"):
            self._known[id(node)] = (node, found)
        return found

    def _text(self, value: object) -> bytes:
        """Return a plain value with its length, or the digest of a compound one."""
        if isinstance(value, tuple | Struct) or is_dataclass(value):
            return self.digest(value)
        if isinstance(value, Path):
            value = self._places.get(value, value.name)
        elif isinstance(value, Enum):
            value = value.name
        plain = value if isinstance(value, bytes) else repr(value).encode(errors="backslashreplace")
        return b"%s %d:%s" % (type(value).__name__.encode(), len(plain), plain)


@cache
def _names(kind: type) -> tuple[str, ...]:
    if issubclass(kind, Struct):
        return kind.__struct_fields__
    return tuple(field.name for field in fields(kind) if field.compare)  # type: ignore[arg-type]
