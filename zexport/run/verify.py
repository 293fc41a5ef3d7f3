"""Re-reading an export: whether it is still what its manifest, its index and its checkpoint say."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.errors import VerificationError, ZexportError
from zexport.export.hub_folder import FILES_APART
from zexport.export.plan import ExportPlan, Origin
from zexport.filenames import MANIFEST_NAME
from zexport.model.hub_cache import GivenBase
from zexport.printable import brief
from zexport.ranges.digests import digest_file, digest_of_parts, digest_ranges
from zexport.run.against_checkpoint import Problem, frame_problems, hold_against
from zexport.run.manifest import Manifest, is_as_written, read_manifest
from zexport.run.output_files import WrittenFile, is_of_tensors, is_safetensors, read_written
from zexport.run.progress import Progress, Teller
from zexport.store.contents import read_regular
from zexport.store.files import listed_version, reading, version
from zexport.store.folders import exists, is_file, leaves, matching
from zexport.store.json import JsonObject, Natural, form_of
from zexport.store.publish import unedited


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and everything that is wrong with it.

    Attributes:
        out_dir: the folder.
        ok: whether nothing is wrong.
        files: files whose bytes were compared.
        tensors: tensors whose bytes were compared.
        against_checkpoint: whether every tensor was also made again from the checkpoint.
        origin: the checkpoint that it was made from, as its manifest or the checkpoint says; null
            where neither does.
        compared_with: the checkpoint that it was held against; null without one.
        is_checkpoint: whether training goes on from it: then ``tensors`` are the pieces of its
            ranks.
        by_manifest_alone: files that were held against the manifest and nothing else, such as
            config and tokenizer.
        warnings: files that were added to the export and change what loads; a step of the
            checkpoint that differs from the manifest's.
        problems: everything that is wrong.
        base: the model that the export was given for what the checkpoint lacks; null without one.
        notes: what was warned of when it was made, and what of this command changed nothing.
        conclusion: what the problems come to, where the export is whole and the checkpoint is not
            the one that it was made from; empty else.
    """

    out_dir: Path
    ok: bool = field(init=False)
    files: Natural
    tensors: Natural
    against_checkpoint: bool
    problems: tuple[Problem, ...]
    origin: Origin | None = None
    compared_with: Origin | None = None
    is_checkpoint: bool = False
    by_manifest_alone: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    base: GivenBase | None = None
    notes: tuple[str, ...] = ()
    conclusion: str = ""

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "ok", not self.problems)

    def __bool__(self) -> bool:
        """Whether nothing is wrong."""
        return self.ok

    def to_json(self) -> JsonObject:
        """The report as JSON values, with a ``schema`` number."""
        return form_of(self)


_INDEX_NBYTES_MAX = 64 << 20
INDEX_NAME = "model.safetensors.index.json"
_EDITED_MANIFEST = Problem(MANIFEST_NAME, "", "is not what was written: its digest differs")
_OTHER_BYTES = "does not hold the bytes that were written"
_SHARD_PATTERN = "*.safetensors"

_WEIGHTS, _TOKENIZER = "other weights", "of a tokenizer"
_ADDED = {
    "adapter_config.json": "from_pretrained loads an adapter with it",
    "adapter_model.*": "the weights of an adapter",
    "chat_template*": "another chat template",
    "*.jinja": "another chat template",
    "*.py": "code",
    "*.safetensors": _WEIGHTS,
    "*model*.bin": _WEIGHTS,
    "*.gguf": _WEIGHTS,
    "*.h5": _WEIGHTS,
    "*.msgpack": _WEIGHTS,
    "*.index.json": _WEIGHTS,
    "tokenizer*": _TOKENIZER,
    "*vocab*": _TOKENIZER,
    "merges.txt": _TOKENIZER,
    "special_tokens_map.json": _TOKENIZER,
    "added_tokens.json": _TOKENIZER,
    "*config.json": "a configuration",
    "modules.json": "an encoder is made of the model with it",
}
"""What files change by their names; the first that fits."""


def verify_export(
    out_dir: Path,
    *,
    plan: ExportPlan | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Everything that is wrong with an exported folder; nothing is changed, and every byte is read.

    Memory does not grow with the model. Damage to the export is gathered, never raised. ``plan`` is
    what the checkpoint would give today: then every tensor is made again from it and compared.

    Raises:
        CheckpointError: a source of ``plan`` cannot be read, is damaged, or was changed.
    """
    try:
        manifest = read_manifest(out_dir)
    except VerificationError as error:
        unread = (Problem(MANIFEST_NAME, "", ". ".join(filter(None, (error.problem, error.hint)))),)
        return VerifyReport(out_dir, 0, 0, plan is not None, unread)
    told = Teller(progress, _nbytes_to_read(manifest, plan))
    headers, problems = _written(out_dir, _holding_tensors(manifest))
    if not is_as_written(out_dir):
        problems.append(_EDITED_MANIFEST)
    problems += _unlisted(out_dir, manifest)
    problems += _header_problems(manifest, headers)
    problems += _index_problems(out_dir, headers)
    for name in manifest.files:
        found = _byte_problems(out_dir, name, headers.get(name), manifest, told.add)
        problems += (one for one in found if one not in problems)
    conclusion = ""
    if plan is not None:
        held = hold_against(plan, manifest, told.add)
        conclusion = "" if problems else held.conclusion
        problems += (*held.problems, *frame_problems(out_dir, plan))
    return VerifyReport(
        out_dir=out_dir,
        files=len(manifest.files),
        tensors=sum(entry.shard in headers for entry in manifest.tensors.values()),
        against_checkpoint=plan is not None,
        problems=tuple(problems),
        origin=_origin(manifest, plan, is_whole=not problems),
        compared_with=plan.origin if plan else None,
        is_checkpoint="settings" in manifest.provenance,
        by_manifest_alone=_by_manifest_alone(manifest, plan),
        warnings=(*_added_files(out_dir, manifest.files), *_other_step(manifest, plan)),
        base=GivenBase.recorded(manifest.provenance.get("base")),
        notes=tuple(_told_then(manifest)),
        conclusion=conclusion,
    )


def find_edits(out_dir: Path) -> list[Problem]:
    """Return what somebody changed in an export: files added, removed or written again.

    A file of tensors is read only if its size or time (in a bucket, a version) is another.
    """
    try:
        manifest = read_manifest(out_dir)
    except VerificationError as error:
        return [Problem(MANIFEST_NAME, "", error.problem)]
    if not is_as_written(out_dir):
        return [_EDITED_MANIFEST]
    there = {path.relative_to(out_dir).as_posix() for path in leaves(out_dir)}
    edits = [
        Problem(one, "", "was added") for one in sorted(there - {MANIFEST_NAME, *manifest.files})
    ]
    edits += [Problem(one, "", "was removed") for one in sorted(manifest.files.keys() - there)]
    rest = {name: entry for name, entry in manifest.files.items() if name in there}
    for name in unedited(out_dir / MANIFEST_NAME, manifest.shards) & rest.keys():
        if listed_version(out_dir / name).nbytes == rest[name].nbytes:
            del rest[name]
    headers, problems = _written(out_dir, [n for n in _holding_tensors(manifest) if n in rest])
    for name in rest:
        problems += _byte_problems(out_dir, name, headers.get(name), manifest, lambda _: None)
    return edits + problems


def _origin(manifest: Manifest, plan: ExportPlan | None, *, is_whole: bool) -> Origin | None:
    """The checkpoint that it was made from: the one at hand, unless that is likely another."""
    recorded = Origin.recorded(manifest.provenance.get("checkpoint"))
    if plan is None:
        return recorded
    is_same = Origin.recorded(plan.provenance.get("checkpoint")) == recorded
    is_likely = is_whole and not any(_other_step(manifest, plan))
    return plan.origin if recorded is None or is_same or is_likely else recorded


def _other_step(manifest: Manifest, plan: ExportPlan | None) -> Iterator[str]:
    """Warn of a checkpoint of another step than the manifest records; another tag is refused."""
    recorded = Origin.recorded(manifest.provenance.get("checkpoint"))
    if plan is not None and recorded is not None and plan.origin.step != recorded.step:
        yield f"the export is of step {recorded.step}, the checkpoint of step {plan.origin.step}"


class _Told(Struct, frozen=True):
    warnings: tuple[str, ...] = ()


def _told_then(manifest: Manifest) -> Iterator[str]:
    """What was warned of when the folder was made: of the checkpoint, and of all around it."""
    for record in (manifest.provenance.get("checkpoint"), manifest.provenance):
        with suppress(msgspec.ValidationError):
            for warning in msgspec.convert(record, _Told).warnings:
                yield f"when it was made: {warning}"


def _by_manifest_alone(manifest: Manifest, plan: ExportPlan | None) -> tuple[str, ...]:
    """The files that were held against nothing but the manifest."""
    of_tensors = () if plan is None else _holding_tensors(manifest)
    return tuple(sorted(manifest.files.keys() - {*of_tensors}))


def _nbytes_to_read(manifest: Manifest, plan: ExportPlan | None) -> int:
    again = 0 if plan is None else sum(shard.data_nbytes for shard in plan.shards)
    return sum(entry.nbytes for entry in manifest.files.values()) + again


def _written(out_dir: Path, names: Iterable[str]) -> tuple[dict[str, WrittenFile], list[Problem]]:
    """The files of tensors that there are, and what is wrong with those that cannot be read."""
    found = {}
    problems = []
    for name in names:
        path = out_dir / name
        try:
            with reading(path, VerificationError):
                if is_file(path):
                    found[name] = read_written(path, name)
        except ZexportError as error:
            problems.append(Problem(name, "", error.problem))
    return found, problems


def _holding_tensors(manifest: Manifest) -> list[str]:
    """The files whose tensors were written one by one, and all of their form where that is a model.

    Safetensors beside rank files, such as a peft adapter, were copied as they were.
    """
    told = manifest.shards
    is_model = any(map(is_safetensors, told)) or not told
    own = (name for name in manifest.files if is_of_tensors(name))
    return [name for name in own if name in told or (is_model and is_safetensors(name))]


def _unlisted(out_dir: Path, manifest: Manifest) -> Iterator[Problem]:
    """Files that would be loaded beside those that the manifest lists."""
    places = {(out_dir, _SHARD_PATTERN)}
    for name in _holding_tensors(manifest):
        if not is_safetensors(name):
            places.add(((out_dir / name).parent, f"*{Path(name).suffix}"))
    found = {path.relative_to(out_dir).as_posix() for at in places for path in matching(*at)}
    for name in sorted(found - manifest.files.keys()):
        yield Problem(name, "", "is not listed in the manifest")


def _added_files(out_dir: Path, listed: Container[str]) -> Iterator[str]:
    """What is to be known of files that the manifest does not list, where they change what loads.

    Safetensors files beside the export's own are told as contradictions.
    """
    for path in leaves(out_dir):
        name = path.relative_to(out_dir).as_posix()
        kind = next((kind for pattern, kind in _ADDED.items() if path.match(pattern)), "")
        if not kind or name in listed or name == MANIFEST_NAME:
            continue
        if path.parent != out_dir or path.suffix != ".safetensors":
            yield f"{name} was added to the export and changes what loads: {kind}"


def _header_problems(manifest: Manifest, headers: dict[str, WrittenFile]) -> Iterator[Problem]:
    """Where the headers and the manifest differ about a tensor."""
    if not manifest.tensors:
        yield Problem(MANIFEST_NAME, "", "lists no tensor")
    for shard, header in headers.items():
        for name, tensor in header.tensors.items():
            entry = manifest.tensors.get(name)
            if entry is None or entry.shard != shard:
                yield Problem(shard, name, "is not listed for this file")
            elif (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                yield Problem(shard, name, "has another shape or dtype than listed")
    for name, entry in manifest.tensors.items():
        there = headers.get(entry.shard)
        if there is not None and name not in there.tensors:
            yield Problem(entry.shard, name, "is listed but not in the file")
        elif entry.shard not in manifest.files or not is_of_tensors(entry.shard):
            yield Problem(entry.shard, name, "is listed in a file that is not")


def _index_problems(out_dir: Path, written: dict[str, WrittenFile]) -> Iterator[Problem]:
    """Where the index and the headers differ; one shard of the plain name needs no index."""
    path = out_dir / INDEX_NAME
    own = {name for name in written if is_safetensors(name) and name not in FILES_APART}
    headers = {name: written[name] for name in sorted(own)}
    if not exists(path):
        if sum("/" not in name for name in headers) > 1:
            yield Problem(INDEX_NAME, "", "is missing though there are several shards")
        return
    try:
        index = json.loads(read_regular(path, _INDEX_NBYTES_MAX) or b"")
        weight_map = msgspec.convert(index["weight_map"], dict[str, str])
        total_nbytes = index["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield Problem(INDEX_NAME, "", f"is not an index: {type(error).__name__}: {error}")
        return
    placed = {name: shard for shard, header in headers.items() for name in header.tensors}
    for name in sorted(weight_map.keys() | placed.keys()):
        if weight_map.get(name) != placed.get(name):
            yield Problem(INDEX_NAME, name, "lies in another file than the index says")
    nbytes = sum(t.nbytes for header in headers.values() for t in header.tensors.values())
    if total_nbytes != nbytes:
        yield Problem(INDEX_NAME, "", f"total_size is {total_nbytes}, the shards hold {nbytes}")


def _byte_problems(
    out_dir: Path,
    name: str,
    there: WrittenFile | None,
    manifest: Manifest,
    on_bytes: Callable[[int], None],
) -> list[Problem]:
    """Where a file's bytes, and its tensors' bytes, are not those that were written."""
    path, entry = out_dir / name, manifest.files[name]
    try:
        found = version(path).nbytes
        if found != entry.nbytes:
            return [Problem(name, "", f"has {found} bytes, {entry.nbytes} were written")]
        if there is not None:
            return _tensor_problems(name, there, manifest, on_bytes)
        on_bytes(found)
        is_whole = digest_file(path) == entry.blake3
    except OSError as error:
        return [Problem(name, "", f"cannot be read: {error.strerror}")]
    return [] if is_whole else [Problem(name, "", _OTHER_BYTES)]


def _tensor_problems(
    name: str, file: WrittenFile, manifest: Manifest, on_bytes: Callable[[int], None]
) -> list[Problem]:
    """Where a file's tensors, and so the file, are not those that were written."""
    ranges = [(tensor.offset, tensor.nbytes) for tensor in file.tensors.values()]
    digests = digest_ranges(file.path, ranges, on_bytes=on_bytes)
    nbytes = manifest.files[name].nbytes
    whole = digest_of_parts(file.path, nbytes, ranges, digests)
    on_bytes(nbytes - sum(count for _, count in ranges))
    problems = []
    if whole != manifest.files[name].blake3:
        problems.append(Problem(name, "", _OTHER_BYTES))
    for tensor, digest in zip(file.tensors, digests, strict=True):
        listed = manifest.tensors.get(tensor)
        if listed is not None and listed.blake3 != digest:
            problems.append(Problem(name, tensor, "does not hold the values that were written"))
    return problems
