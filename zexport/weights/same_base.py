"""Whether a base is the model that training began from: what names and weights tell.

Names alone prove little: folders are moved and renamed, and the instruct sibling of a base has its
shapes and nearly its name. Where both sides have a weight that was not trained, its values decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.errors import ZexportError
from zexport.facts.statements import Statement
from zexport.facts.table import Fact
from zexport.formats.safetensors_file import SafetensorsHeader
from zexport.model.hub_cache import cached_snapshot, hub_id_of, is_hub_id
from zexport.printable import some
from zexport.ranges.copies import CastReplica, Comparison, compare_casts
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.store.folders import is_folder, real
from zexport.weights.base import Base, base_of, read_base

_QUANTIZED = re.compile(
    r"[-_.](?:unsloth[-_.])?(?:bnb[-_.])?(?:\d[-_.]?bits?|int[48]|fp8|nf4|[gw]\d?a?\d*g?ptq|gptq|awq"
    r"|gguf|hqq|w4a16|w8a8)(?:[-_.].*)?$",
    re.IGNORECASE,
)
"""How names end that quantized forms of a model are given."""


class SameBase(Struct, frozen=True):
    """What was found.

    Attributes:
        statements: what is said of the base, and by whom.
        nbytes_read: bytes of tensors that were read to tell.
        agrees: whether weights were compared, and all of them are the same.
    """

    statements: tuple[Statement, ...] = ()
    nbytes_read: int = 0
    agrees: bool = False


def compare_base(
    stored: Mapping[str, StoredTensor],
    base: Base,
    files: Sequence[ReadableFile],
    *,
    named: str = "",
    follow_symlinks: bool = False,
) -> SameBase:
    """Hold a base against the one that was trained, by samples of weights and by names.

    Args:
        stored: the checkpoint's weights of the base model, by its names.
        base: the one that was given.
        files: all files that may be read.
        named: what an adapter's configuration calls the one it was trained on; may be empty.
        follow_symlinks: read what a link leads to, wherever that is.
    """
    if base.path is None or not base.tensors:
        return SameBase()
    frozen = {name: one for name, one in stored.items() if one.role is Role.FROZEN}
    found = _compared(frozen, base, files, "the checkpoint, frozen")
    folder = _on_this_machine(named)
    if folder is not None and real(folder) == real(base.path):
        return SameBase(found.statements, found.nbytes_read)
    if folder is not None and (headers := _headers(folder, follow_symlinks=follow_symlinks)):
        other = base_of(folder, headers)
        more = _compared(other.tensors, base, (*files, *headers), f"{named}, which it names")
        found = SameBase(
            (*found.statements, *more.statements),
            found.nbytes_read + more.nbytes_read,
            agrees=found.agrees or more.agrees,
        )
    if named and not found.statements and not found.agrees:
        return replace(found, statements=tuple(_names(named, base.path)))
    return found


def _compared(
    trained_on: Mapping[str, StoredTensor], base: Base, files: Iterable[ReadableFile], by: str
) -> SameBase:
    """Weights that are known to be those of the training's base, held against the base given."""
    pairs = [
        CastReplica(
            name=name,
            path=base.path or Path(),
            kept=given.source,
            kept_dtype=given.dtype,
            other=tensor.source,
            other_dtype=tensor.dtype,
            names_it=False,
        )
        for name, tensor in trained_on.items()
        if (given := base.tensors.get(name)) is not None
        and given.shape == tensor.shape
        and given.dtype.is_floating
        and tensor.dtype.is_floating
        and given.source is not None
        and tensor.source is not None
    ]
    with SourceReader(files) as reader:
        differing = [c for c in compare_casts(pairs, reader.read_into, full=False) if _differs(c)]
        nbytes = reader.nbytes_read
    if not differing:
        return SameBase((), nbytes, agrees=bool(pairs))
    told = [f"{one.replica.name} ({one.count} of {one.compared} compared)" for one in differing]
    others = f"other values of {len(differing)}: {some(told, 3)}"
    statements = (
        Statement(Fact.BASE_WEIGHTS, f"{len(pairs)} weights", by),
        Statement(Fact.BASE_WEIGHTS, others, "the base"),
    )
    return SameBase(statements, nbytes)


def _differs(found: Comparison) -> bool:
    """Whether two tensors are not one, even if it was rounded twice on its way.

    A base in 32 bits may have been loaded in one 16-bit type and trained in the other.
    """
    is_wider = found.replica.kept_dtype.itemsize > found.replica.other_dtype.itemsize
    return found.largest > (1 if is_wider else 0)


def _on_this_machine(named: str) -> Path | None:
    """The folder of the model that an adapter names: a path, or the hub's cache; if it is here."""
    if Path(named).is_absolute():
        return Path(named) if is_folder(Path(named)) else None
    return cached_snapshot(named) if is_hub_id(named) else None


def _headers(folder: Path, *, follow_symlinks: bool) -> tuple[SafetensorsHeader, ...]:
    """Headers of a model's weight files; none where they cannot be read: it only might tell."""
    try:
        return read_base(folder, follow_symlinks=follow_symlinks)
    except ZexportError:
        return ()


def _names(named: str, given: Path) -> Iterator[Statement]:
    """What two names tell, where nothing else does."""
    hub_id = hub_id_of(given)
    here = hub_id or given.name
    one, other = _plain(named), _plain(here)
    if is_hub_id(named) and hub_id is not None and one != other:
        fact = Fact.BASE_NAME
    elif one.rpartition("/")[2] != other.rpartition("/")[2] or _is_quantized(named, here):
        fact = Fact.BASE_UNTRACED
    else:
        return
    yield Statement(fact, named, "adapter_config.json")
    yield Statement(fact, here, "--base")


def _plain(name: str) -> str:
    """A model's name in small letters, without what tells of a quantized form of it."""
    return _QUANTIZED.sub("", name.rstrip("/").lower())


def _is_quantized(*names: str) -> bool:
    return len({name.lower() != _plain(name) for name in names}) > 1
