"""Whether a base is the model that training began from: what names and weights tell.

Names alone prove little: folders are moved and renamed, and the instruct sibling of a base has its
shapes and nearly its name. Where both sides have a weight that was not trained, its values decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.resolve import Location
from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import ZexportError
from zexport.facts.model import OF_BASE, Fact
from zexport.facts.statements import Statement, disagreements
from zexport.filenames import ADAPTER_CONFIG, CONFIG, MANIFEST_NAME
from zexport.formats.safetensors_file import SafetensorsHeader
from zexport.model.card import base_named
from zexport.model.config import ConfigFile
from zexport.model.config_facts import config_statements
from zexport.model.hub_cache import cached_snapshot, hub_id_of, is_hub_id, plain_name
from zexport.model.sidecars import read_card
from zexport.options import AdapterMode
from zexport.printable import some
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.ranges.replicas import CastReplica, Comparison, compare_casts, cosines
from zexport.store.contents import read_json_object
from zexport.store.files import reading
from zexport.store.folders import is_file, is_folder, real
from zexport.store.json import tables_in
from zexport.weights.base_model import Base, base_of, read_base

_OF_OPTIMIZER = "optim_states"
"""In the names of files that hold what was trained."""

_PAIRS_MIN = 3
"""A head or two may have been made anew before training."""

_UNLIKE = 0.25
"""A mean cosine of weights that no training of one from the other gives; that of strangers is 0."""


class BaseName(Struct, frozen=True):
    """What a file (``by``) calls the model that training began from; the name may be empty."""

    name: str
    revision: str = "main"
    by: str = ADAPTER_CONFIG

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
        named: what the one that training began from is called; ``None`` where nothing is taken
            from the base, so that what it is called does not matter.
    """
    if base.path is None or not base.tensors:
        return SameBase()
    history = () if named is None else tuple(_history(base.path, named, location, files))
    if any(one.fact is Fact.BASE_MERGED for one in history):
        return SameBase(history)
    same = _same_weights(stored, base, files, location, named)
    return replace(same, statements=(*history, *same.statements))


def _same_weights(
    stored: Mapping[str, StoredTensor],
    base: Base,
    files: Sequence[ReadableFile],
    location: Location,
    named: BaseName | None,
) -> SameBase:
    """What weights tell, and where they tell nothing the names."""
    frozen = {name: one for name, one in stored.items() if one.role is Role.FROZEN}
    found = _compared(frozen, base, files, "the checkpoint (frozen)")
    if not (found.statements or found.agrees):
        found = _likened(stored, base, files)
    if named is None or base.path is None:
        return found
    folder = _on_this_machine(named, location)
    if folder is not None and real(folder) == real(base.path):
        return replace(found, agrees=not found.statements)
    by = f"{named.name} (named in {named.by})"
    found = replace(found, statements=(*found.statements, *_built(folder, base.path, by)))
    if folder is not None and (
        headers := _headers(folder, follow_symlinks=location.boundary.follow)
    ):
        other = base_of(folder, headers)
        more = _compared(other.tensors, base, (*files, *headers), by)
        found = SameBase(
            (*found.statements, *more.statements),
            found.nbytes_read + more.nbytes_read,
            agrees=found.agrees or more.agrees,
        )
    if not found.statements and not found.agrees:
        return replace(found, statements=tuple(_names(named, base.path)))
    return found


def _built(named: Path | None, given: Path, by: str) -> Iterator[Statement]:
    """Where the configs of two models contradict each other in how these are built."""
    one, other = (_config(folder) for folder in (named, given))
    if one is not None and other is not None:
        stated = config_statements(one, other, f"the config of {by}")
        for found in disagreements(s for s in stated if s.fact in OF_BASE):
            yield from chain.from_iterable(found.statements.values())


def _config(folder: Path | None) -> ConfigFile | None:
    """The config in a folder; none where it cannot be read: it only might tell."""
    path = None if folder is None else folder / CONFIG
    with suppress(ZexportError, OSError):
        if path is not None and is_file(path):
            return ConfigFile(path, read_json_object(path))
    return None


def _compared(
    trained_on: Mapping[str, StoredTensor], base: Base, files: Iterable[ReadableFile], by: str
) -> SameBase:
    """Weights that are known to be those of the training's base, held against the base given."""
    pairs = _pairs(trained_on, base)
    with SourceReader(files) as reader:
        compared = compare_casts(pairs, reader.read_into, full=False, expect=reader.expect)
        differing = [one for one in compared if _differs(one)]
        nbytes = reader.nbytes_read
    if not differing:
        return SameBase((), nbytes, agrees=bool(pairs))
    told = [f"{one.replica.name} ({one.count} of {one.compared} compared)" for one in differing]
    others = f"other values of {len(differing)}"
    statements = (
        Statement(Fact.BASE_WEIGHTS, f"{len(pairs)} weights", by),
        Statement(Fact.BASE_WEIGHTS, others, f"the base: {some(told, 3)}"),
    )
    return SameBase(statements, nbytes)


def _pairs(stored: Mapping[str, StoredTensor], base: Base) -> list[CastReplica]:
    """The base's weights beside others of the same names and shapes."""
    return [
        CastReplica(
            name=name,
            path=base.path or Path(),
            kept=given.source,
            kept_dtype=given.dtype,
            other=tensor.source,
            other_dtype=tensor.dtype,
            names_it=False,
        )
        for name, tensor in stored.items()
        if (given := base.tensors.get(name)) is not None
        and given.shape == tensor.shape
        and given.dtype.is_floating
        and tensor.dtype.is_floating
        and given.source is not None
        and tensor.source is not None
    ]


def _likened(
    stored: Mapping[str, StoredTensor], base: Base, files: Iterable[ReadableFile]
) -> SameBase:
    """Trained weights held against the base's, from which a training moves them a little way.

    That they are near proves little: those of the base's siblings are near as well.
    """
    trained = {n: one for n, one in stored.items() if one.role is Role.TRAINABLE}
    pairs = [one for one in _pairs(trained, base) if len(base.tensors[one.name].shape) > 1]
    with SourceReader(files) as reader:
        found = cosines(pairs, reader.read_into, expect=reader.expect)
        nbytes = reader.nbytes_read
    mean = sum(found) / len(found) if found else 1.0
    if mean > _UNLIKE or len(found) < _PAIRS_MIN:
        return SameBase((), nbytes)
    one, other = f"{len(pairs)} trained weights", f"others (mean cosine {mean:.2f})"
    statements = (
        Statement(Fact.BASE_WEIGHTS, one, "the checkpoint"),
        Statement(Fact.BASE_WEIGHTS, other, "the base"),
    )
    return SameBase(statements, nbytes)


def _differs(found: Comparison) -> bool:
    """Whether two tensors are not one, even if it was rounded twice on its way.

    A base in 32 bits may have been loaded in one 16-bit type and trained in the other.
    """
    is_wider = found.replica.kept_dtype.itemsize > found.replica.other_dtype.itemsize
    return found.largest > (1 if is_wider else 0)


def _history(
    base: Path, named: BaseName, location: Location, files: Sequence[ReadableFile]
) -> Iterator[Statement]:
    """What a base says of itself: that it is made of the one meant, or was merged, or has more."""
    if is_file(base / ADAPTER_CONFIG):
        yield Statement(Fact.BASE_ADAPTED, f"weights and {ADAPTER_CONFIG}", "the base")
        yield Statement(Fact.BASE_ADAPTED, "the weights alone", "the export")
    made_of = base_named(read_card(base))
    if is_hub_id(made_of) and plain_name(made_of) == plain_name(named.name):
        yield Statement(Fact.BASE_MADE_OF, str(named), named.by)
        yield Statement(Fact.BASE_MADE_OF, f"a model made of {made_of}", "the card of the base")
    path = base / MANIFEST_NAME
    try:
        content = read_json_object(path) if is_file(path) else {}
    except ZexportError:
        return  # `zexport verify` tells what is wrong with it
    of, options = content.get("checkpoint"), content.get("options")
    if isinstance(of, dict) and isinstance(options, dict):
        is_same = (of.get("folder"), of.get("tag")) == (location.name, location.tag)
        is_same = is_same or _are_sources(files, content.get("sources"))
        run = str(of.get("folder")).rpartition("/")[0]
        is_run = run == location.name.rpartition("/")[0]
        if (is_same or is_run) and options.get("adapter") == AdapterMode.MERGE.value:
            fact = Fact.BASE_MERGED if is_same else Fact.BASE_OF_RUN
            by = f"the base, as its {MANIFEST_NAME} says"
            yield Statement(fact, "an adapter to be merged", f"the checkpoint {location.name}")
            yield Statement(fact, f"the adapter of {of.get('folder')}, merged", by)


def _are_sources(files: Sequence[ReadableFile], told: object) -> bool:
    """Whether a manifest's sources are these files: a run that was moved is the same.

    Size and time of any file of the optimizer tell, which holds what was trained.
    """
    here = {(file.path.name, file.version.nbytes, file.version.mtime_ns) for file in files}
    there = {
        (str(one.get("path")).rpartition("/")[2], one.get("nbytes"), one.get("mtime_ns"))
        for one in tables_in(told)
    }
    return any(_OF_OPTIMIZER in name for name, _, _ in here & there)


def _on_this_machine(base: BaseName, location: Location) -> Path | None:
    """The folder of the model of a name: a path, or the hub's cache; if it is here.

    A path that begins at no root began where training was run: here, or above its checkpoints.
    """
    cached = cached_snapshot(base.name, base.revision) if is_hub_id(base.name) else None
    if cached is not None:  # whatever else is called so
        return cached
    above = (location.real_root.parent, location.real_root.parent.parent)
    for start in (Path(), *above) if base.name else ():
        with suppress(OSError):  # it may be another user's
            if is_folder(folder := start / base.name):
                return folder
    return None


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
    is_other_commit = named.revision not in ("main", given.name)
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
    yield Statement(fact, str(named), named.by)
    at = f" at {given.name}" if is_other_commit and hub_id is not None else ""
    yield Statement(fact, f"{here}{at}", "--base")


def _is_quantized(*names: str) -> bool:
    return len({name.lower() != plain_name(name) for name in names}) > 1
