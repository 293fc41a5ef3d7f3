"""Whether a base is the model that training began from: what names and weights tell.

Names alone prove little: folders are moved and renamed, and the instruct sibling of a base has its
shapes and nearly its name. Where both sides have a weight that was not trained, its values decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.checkpoint.location import Location
from zexport.errors import ZexportError
from zexport.facts.statements import Statement
from zexport.facts.table import Fact
from zexport.formats.safetensors_file import SafetensorsHeader
from zexport.model.hub_cache import cached_snapshot, hub_id_of, is_hub_id, plain_name
from zexport.options import AdapterMode
from zexport.printable import some
from zexport.ranges.copies import CastReplica, Comparison, compare_casts
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.store.files import reading
from zexport.store.folders import is_file, is_folder, real
from zexport.store.json import read_json_object
from zexport.weights.base import Base, base_of, read_base

_MANIFEST = "zexport_manifest.json"


class BaseName(Struct, frozen=True):
    """What an adapter's configuration calls its base; the name may be empty."""

    name: str
    revision: str = "main"

    def __str__(self) -> str:
        """The name as messages have it."""
        at = f" at {self.revision}" if self.revision != "main" else ""
        return f"{self.name}{at}" if self.name else "no name"


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
    location: Location,
    named: BaseName | None = None,
) -> SameBase:
    """Hold a base against the one that was trained, by samples of weights and by names.

    Args:
        stored: the checkpoint's weights of the base model, by its names.
        base: the one that was given.
        files: all files that may be read.
        location: the checkpoint.
        named: what an adapter's configuration calls the one it was trained on, if there is any.
    """
    if base.path is None or not base.tensors:
        return SameBase()
    if named is not None and (merged := tuple(_merged_before(base.path, location))):
        return SameBase(merged)
    frozen = {name: one for name, one in stored.items() if one.role is Role.FROZEN}
    found = _compared(frozen, base, files, "the checkpoint, frozen")
    folder = _on_this_machine(named) if named is not None else None
    if folder is not None and real(folder) == real(base.path):
        return replace(found, agrees=not found.statements)
    if folder is not None and (
        headers := _headers(folder, follow_symlinks=location.boundary.follow)
    ):
        other = base_of(folder, headers)
        more = _compared(other.tensors, base, (*files, *headers), f"{named}, which it names")
        found = SameBase(
            (*found.statements, *more.statements),
            found.nbytes_read + more.nbytes_read,
            agrees=found.agrees or more.agrees,
        )
    if named is not None and not found.statements and not found.agrees:
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


def _merged_before(base: Path, location: Location) -> Iterator[Statement]:
    """Tells of a base that is an export of the same checkpoint, its adapter merged."""
    path = base / _MANIFEST
    try:
        content = read_json_object(path) if is_file(path) else {}
    except ZexportError:
        return  # `zexport verify` tells what is wrong with it
    of, options = content.get("checkpoint"), content.get("options")
    if isinstance(of, dict) and isinstance(options, dict):
        is_same = (of.get("folder"), of.get("tag")) == (location.name, location.tag)
        if is_same and options.get("adapter") == AdapterMode.MERGE.value:
            yield Statement(Fact.BASE_MERGED, "an adapter to be merged", "the checkpoint")
            yield Statement(
                Fact.BASE_MERGED, "the same, merged", f"the base, as its {_MANIFEST} says"
            )


def _on_this_machine(base: BaseName) -> Path | None:
    """The folder of the model that an adapter names: a path, or the hub's cache; if it is here."""
    if (folder := Path(base.name)).is_absolute():
        try:
            return folder if is_folder(folder) else None
        except OSError:  # it may be another user's
            return None
    return cached_snapshot(base.name, base.revision) if is_hub_id(base.name) else None


def _headers(folder: Path, *, follow_symlinks: bool) -> tuple[SafetensorsHeader, ...]:
    """Headers of a model's weight files; none where they cannot be read: it only might tell."""
    try:
        with reading(folder):
            return read_base(folder, follow_symlinks=follow_symlinks)
    except ZexportError:
        return ()


def _names(named: BaseName, given: Path) -> Iterator[Statement]:
    """What two names tell, where nothing else does."""
    hub_id = hub_id_of(given)
    here = hub_id or given.name
    one, other = plain_name(named.name), plain_name(here)
    is_other_commit = hub_id is not None and named.revision not in ("main", given.name)
    if is_hub_id(named.name) and hub_id is not None and one != other:
        fact = Fact.BASE_NAME
    elif (
        one.rpartition("/")[2] != other.rpartition("/")[2]
        or _is_quantized(named.name, here)
        or is_other_commit
    ):
        fact = Fact.BASE_UNTRACED
    else:
        return
    yield Statement(fact, str(named), "adapter_config.json")
    yield Statement(fact, f"{here} at {given.name}" if is_other_commit else here, "--base")


def _is_quantized(*names: str) -> bool:
    return len({name.lower() != plain_name(name) for name in names}) > 1
