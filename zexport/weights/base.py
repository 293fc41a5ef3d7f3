"""The weights of the model folder given as a base: which file holds which tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.errors import DamagedCheckpointError
from zexport.formats.safetensors_file import SafetensorsHeader, read_header, read_index
from zexport.model.fit import ModelNames, NamesUnknown
from zexport.plan.plan import SourceFile
from zexport.plan.shards import INDEX_FILE, SINGLE_FILE
from zexport.ranges.dtypes import Shape
from zexport.store.boundary import Boundary
from zexport.store.folders import is_file, matching

_LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True, slots=True)
class Base:
    """The model folder that was given for what a checkpoint lacks, or none.

    Attributes:
        path: the folder.
        tensors: its weights, by name.
        has_files: whether it has safetensors files, which alone are read.
    """

    path: Path | None = None
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    has_files: bool = False

    def __repr__(self) -> str:
        """The folder and the number of its weights; there are thousands."""
        return f"Base({self.path}, {len(self.tensors)} tensors)"

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name to shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def read_base(base: Path | None, *, follow_symlinks: bool) -> tuple[SafetensorsHeader, ...]:
    """Headers of a base model's weight files: those that its index names, else the single one."""
    if base is None:
        return ()
    boundary = Boundary.of(base, follow=follow_symlinks)
    index, single = base / INDEX_FILE, base / SINGLE_FILE
    for path in (index, single):
        boundary.check(path)
    if is_file(index):
        return tuple(_read_indexed(index, boundary))
    return (read_header(single),) if is_file(single) else ()


def _read_indexed(index: Path, boundary: Boundary) -> Iterator[SafetensorsHeader]:
    """Headers of the files that an index names, each with the tensors that it places there."""
    for path, placed in read_index(index, "Mend the index, or give another model folder").items():
        boundary.check(path)
        header = read_header(path)
        tensors = {n: one for n, one in header.tensors.items() if n in placed}
        yield replace(header, tensors=tensors)


def source_files(headers: Iterable[SafetensorsHeader]) -> Iterator[SourceFile]:
    """Weight files that are no torch files, each once."""
    for header in {header.path: header for header in headers}.values():
        yield SourceFile.of(header)


def base_of(path: Path | None, headers: Iterable[SafetensorsHeader]) -> Base:
    """The base of a folder whose weight files have these headers."""
    tensors = {
        name: StoredTensor(name, tensor.shape, tensor.dtype, Role.FROZEN, header.source(name))
        for header in headers
        for name, tensor in header.tensors.items()
    }
    return Base(path, tensors, path is not None and any(matching(path, "*.safetensors")))


def under_names_of(names: ModelNames | NamesUnknown, base: Base) -> Base:
    """A base model's weights by the names that the model has for them.

    They differ where the base's files are those of the class inside the model, which have no prefix
    (GPT-2 and MiniLM on the hub), or of a class around it, and in layer norms of BERT's time. What
    the model does not know, such as the scales of quantized weights, goes along with the rest.

    Source: transformers 5.23, ``core_model_loading.py``, ``rename_source_key``, and the legacy
    renamings of ``conversion_mapping.py``.
    """
    if isinstance(names, NamesUnknown) or not base.tensors:
        return base
    prefix = f"{names.base_prefix}." if names.base_prefix else ""
    everything = names.all_names
    known = {name: _known_as(name, prefix, everything) for name in base.tensors}
    is_inside = any(new == prefix + name != name for name, new in known.items())
    is_around = any(name == f"{prefix}{new}" != new for name, new in known.items())
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in base.tensors.items():
        beside = prefix + name if is_inside else name.removeprefix(prefix if is_around else "")
        new = known[name] or beside
        if known[name] and new in renamed:
            raise _twice(new, base.path)
        renamed[new] = tensor if new == name else replace(tensor, name=new)
    return replace(base, tensors=renamed)


def _known_as(name: str, prefix: str, known: Set[str]) -> str | None:
    """What a model calls a weight of the base; ``None`` where it has no such weight."""
    now = name
    for old, new in _LEGACY.items():
        now = f"{now.removesuffix(old)}{new}" if now.endswith(old) else now
    forms = (name, now, now.removeprefix(prefix), prefix + now)
    return next((form for form in forms if form in known), None)


def under_prefix(prefix: str, wanted: Iterable[str], base: Base) -> Base:
    """A base's weights under a prefix, where that alone gives those that are wanted.

    So the files of an encoder serve an adapter on a classifier around it.
    """
    has = base.tensors
    lacking = [name for name in wanted if name not in has]
    if not lacking or not all(
        name.startswith(prefix) and name.removeprefix(prefix) in has for name in lacking
    ):
        return base
    tensors = {prefix + name: replace(one, name=prefix + name) for name, one in has.items()}
    return replace(base, tensors=tensors)


def _twice(name: str, path: Path | None) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"holds two weights that are both {name} in the model",
        path=path,
        expected="one, with or without the prefix of the model's class",
        hint="Load the base with transformers, and give what save_pretrained writes of it",
    )
