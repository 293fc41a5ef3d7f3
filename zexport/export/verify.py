"""Check an export against its manifest, its index, and its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from zexport.errors import VerificationError, ZexportError
from zexport.export.checked_reader import WeightReader
from zexport.export.destination import unedited_files
from zexport.export.manifest import (
    Manifest,
    SourceEntry,
    TensorEntry,
    is_as_written,
    read_manifest,
    source_entries,
)
from zexport.export.plan import INDEX_FILE, ExportPlan, Origin, TensorPlan
from zexport.export.report import (
    Meter,
    OnBytes,
    OnProgress,
)
from zexport.export.stream import stream
from zexport.export.write import READBACK_THREADS, is_safetensors, read_written
from zexport.filenames import MANIFEST_NAME
from zexport.formats.safetensors import FileTensor
from zexport.model.hub_cache import GivenBase
from zexport.ranges.digest import FileDigests, digest_tensors
from zexport.storage.files import listed_version, names_below, version
from zexport.storage.json import JsonReport, Natural, as_list, as_table
from zexport.storage.os_errors import reading
from zexport.storage.storage import OutputFile


class Problem(Struct, frozen=True):
    """A contradiction.

    Attributes:
        file: name of the file in the output folder; may be empty.
        tensor: name of the tensor in the output; may be empty.
        problem: what is wrong, without a full stop.
    """

    file: str
    tensor: str
    problem: str


_EDITED_MANIFEST = Problem(MANIFEST_NAME, "", "is not what was written: its digest differs")


class VerifyReport(JsonReport, Struct, frozen=True):
    """What was checked, and everything that is wrong.

    Attributes:
        out_dir: the folder.
        ok: whether nothing is wrong.
        files: number of files whose bytes were compared.
        tensors: number of tensors whose bytes were compared.
        against_checkpoint: every tensor was also computed again from the checkpoint.
        origin: the checkpoint of the export, by its manifest or by comparison; null if unknown.
        compared_with: the checkpoint of ``--against``; null without one.
        is_checkpoint: the folder is a resharded checkpoint; ``tensors`` counts pieces of its ranks.
        by_manifest_alone: files that were only compared with the manifest, such as config.json.
        warnings: another step than the manifest's.
        problems: everything that is wrong.
        base: the base model of the export; null without one.
        notes: warnings of the export; options of this command without effect.
        conclusion: summary if the export is intact and the checkpoint is another; else empty.
    """

    out_dir: Path
    ok: bool
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

    def __bool__(self) -> bool:
        return self.ok


def verify_export(
    out_dir: Path,
    *,
    plan: ExportPlan | None = None,
    progress: OnProgress | None = None,
) -> VerifyReport:
    """Return everything that is wrong with an export; every byte is read.

    Memory does not grow with the model. Damage of the export is reported, never raised. ``plan`` is
    what the checkpoint would give today: every tensor is computed again from it and compared.

    Raises:
        CheckpointError: a source of ``plan`` cannot be read, is damaged, or changed.
    """
    try:
        manifest = read_manifest(out_dir)
    except VerificationError as error:
        unread = (Problem(MANIFEST_NAME, "", ". ".join(filter(None, (error.problem, error.hint)))),)
        return VerifyReport(out_dir, False, 0, 0, plan is not None, unread)
    nbytes = sum(entry.nbytes for entry in manifest.files.values())
    again = sum(shard.data_nbytes for shard in plan.shards) if plan else 0
    meter = Meter(progress, to_verify=nbytes + again)
    wrong, tensors = _compare_files(out_dir, manifest, manifest.files, meter.verified)
    unlisted, added = _unlisted(out_dir, manifest)
    problems = [*unlisted, *wrong]
    if not is_as_written(out_dir):
        problems.insert(0, _EDITED_MANIFEST)
    checkpoint = as_table(manifest.provenance.get("checkpoint"))
    origin, conclusion = Origin.recorded(checkpoint), ""
    warnings = [f"{name} was added to the export and may change what loads" for name in added]
    if plan is not None:
        against, concluded = _compare_checkpoint(plan, manifest, meter.verified)
        conclusion = "" if problems else concluded
        problems += against
        if origin is not None and origin.step != plan.origin.step:
            steps = f"of step {origin.step}, the checkpoint of step {plan.origin.step}"
            warnings.append(f"the export is {steps}")
        elif not problems:
            origin = plan.origin
    computed = manifest.shards if plan else set()
    warned = (*as_list(checkpoint.get("warnings")), *as_list(manifest.provenance.get("warnings")))
    return VerifyReport(
        out_dir=out_dir,
        ok=not problems,
        files=len(manifest.files),
        tensors=tensors,
        against_checkpoint=plan is not None,
        problems=tuple(dict.fromkeys(problems)),
        origin=origin,
        compared_with=plan.origin if plan else None,
        is_checkpoint="settings" in manifest.provenance,
        by_manifest_alone=tuple(sorted(manifest.files.keys() - computed)),
        warnings=tuple(warnings),
        base=GivenBase.recorded(manifest.provenance.get("base")),
        notes=tuple(f"warning of the export: {one}" for one in warned),
        conclusion=conclusion,
    )


def find_edits(out_dir: Path) -> list[Problem]:
    """Return which files of an export were added, removed or changed since it was published.

    A file of tensors is read only if its size or time (in a bucket, a version) differs.
    """
    try:
        manifest = read_manifest(out_dir)
    except VerificationError as error:
        return [Problem(MANIFEST_NAME, "", error.problem)]
    if not is_as_written(out_dir):
        return [_EDITED_MANIFEST]
    listed, there = manifest.files.keys(), names_below(out_dir) - {MANIFEST_NAME}
    unread = {
        name
        for name in unedited_files(out_dir, manifest.shards & listed & there)
        if listed_version(out_dir / name).nbytes == manifest.files[name].nbytes
    }
    changed, _ = _compare_files(out_dir, manifest, (listed & there) - unread, lambda _: None)
    return [
        *(Problem(name, "", "was added") for name in sorted(there - listed)),
        *(Problem(name, "", "was removed") for name in sorted(listed - there)),
        *changed,
    ]


_LOADED = re.compile(
    r".*\.(safetensors|index\.json|gguf|h5|msgpack|jinja|py)|.*model.*\.bin|.*config\.json"
    r"|(tokenizer|chat_template).*|.*vocab.*|merges\.txt"
    r"|(added_tokens|modules|special_tokens_map)\.json"
)
"""Names of files that change what ``from_pretrained`` loads."""


def _unlisted(out_dir: Path, manifest: Manifest) -> tuple[list[Problem], list[str]]:
    """Return problems for unlisted weights, and names of other files that change what loads."""
    shards = [out_dir / name for name in manifest.shards]
    of_weights = {(path.parent, path.suffix) for path in shards}
    unlisted = (names_below(out_dir) | manifest.shards) - {MANIFEST_NAME, *manifest.files}
    problems, added = [], []
    for name in sorted(unlisted):
        path = out_dir / name
        if name in {INDEX_FILE, *manifest.shards} or (path.parent, path.suffix) in of_weights:
            problems.append(Problem(name, "", "is not listed in the manifest"))
        elif _LOADED.fullmatch(path.name):
            added.append(name)
    return problems, added


def _compare_files(
    out_dir: Path, manifest: Manifest, names: Iterable[str], on_bytes: OnBytes
) -> tuple[list[Problem], int]:
    """Return where these files differ from the manifest, and how many tensors were compared."""
    listed: dict[str, dict[str, TensorEntry]] = {}
    for tensor, entry in manifest.tensors.items():
        listed.setdefault(entry.shard, {})[tensor] = entry
    problems, compared = [], 0
    for name in sorted(names):
        path, file, own = out_dir / name, manifest.files[name], listed.get(name, {})
        try:
            with reading(path, VerificationError):
                nbytes = version(path).nbytes
                if nbytes != file.nbytes:
                    changed = f"has {nbytes} bytes, {file.nbytes} were written"
                    raise VerificationError(changed, path=path)
                tensors = read_written(path, name) if own else {}
                ranges = [(tensor.offset, tensor.nbytes) for tensor in tensors.values()]
                with ThreadPoolExecutor(READBACK_THREADS) as readers:
                    digests = digest_tensors(path, ranges, readers, on_bytes)
        except ZexportError as error:
            problems.append(Problem(name, "", error.problem))
            continue
        on_bytes(nbytes - sum(count for _, count in ranges))
        if digests.whole != file.blake3:
            problems.append(Problem(name, "", "does not contain the bytes that were written"))
        problems += _differences(_entries(name, tensors, digests), own, "file")
        compared += len(own)
    return problems, compared


def _entries(
    filename: str, tensors: Mapping[str, FileTensor | TensorPlan], digests: FileDigests
) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(tensor.dtype, tensor.shape, filename, digests.hex(number))
        for number, (name, tensor) in enumerate(tensors.items())
    }


def _differences(
    found: Mapping[str, TensorEntry], listed: Mapping[str, TensorEntry], where: str
) -> Iterator[Problem]:
    for name in sorted(found.keys() | listed.keys()):
        now, then = found.get(name), listed.get(name)
        if then is None:
            yield Problem(found[name].shard, name, f"is in the {where} but was not exported")
        elif now is None:
            yield Problem(then.shard, name, f"was exported but is not in the {where}")
        elif (now.dtype, now.shape) != (then.dtype, then.shape):
            problem = f"has another shape or dtype in the {where} than when exported"
            yield Problem(then.shard, name, problem)
        elif now.blake3 != then.blake3:
            yield Problem(then.shard, name, f"has other values in the {where} than when exported")


class _Discard(OutputFile):
    """The output of a file that is only compared."""

    def write(self, data: bytes | memoryview, offset: int) -> None:
        pass


def _compare_checkpoint(
    plan: ExportPlan, manifest: Manifest, on_bytes: OnBytes
) -> tuple[list[Problem], str]:
    """Return where the checkpoint differs from what was exported, and a conclusion.

    Differing sources are reported only if the tensors are equal. The conclusion is empty unless
    sources differ.
    """
    tensors: dict[str, TensorEntry] = {}
    changed: set[str] = set()
    with WeightReader.of_plan(plan) as sources:
        sources.compare()
        for one in stream(
            plan, plan.shards, sources, lambda _: _Discard(), lambda _, n: on_bytes(n)
        ):
            name, digests = one.file.filename, one.digests()
            tensors |= _entries(name, {tensor.name: tensor for tensor in one.file.tensors}, digests)
            if name in manifest.files and manifest.files[name].blake3 != digests.whole:
                changed.add(name)
            sources.take(one.coverage.ranges())
        found = {entry.path: entry for entry in source_entries(plan, sources.finish())}
    has_base = bool(manifest.provenance.get("from_base"))
    where = "checkpoint, or in the base," if has_base else "checkpoint"
    problems = [*_differences(tensors, manifest.tensors, where)]
    others = [*_source_problems(plan, found, {entry.path: entry for entry in manifest.sources})]
    unit = "pieces" if plan.form.is_checkpoint else "tensors"
    count, differing = len(tensors.keys() | manifest.tensors.keys()), len(problems)
    conclusion = ""
    if others and not differing:
        conclusion = (
            f"All {count:,} {unit} are equal; only the files that contain them differ from those "
            "that were exported, as after resharding"
        )
    elif others and 2 * differing > count:
        conclusion = (
            f"{differing:,} of {count:,} {unit} differ, and so do their files: this checkpoint is "
            "of another run or step than the exported one"
        )
    settings = "has other settings, or other values than tensors, in the checkpoint"
    changed -= {problem.file for problem in problems}
    return [
        *(problems or others),
        *(Problem(name, "", settings) for name in sorted(changed) if not is_safetensors(name)),
    ], conclusion


def _source_problems(
    plan: ExportPlan, found: Mapping[str, SourceEntry], listed: Mapping[str, SourceEntry]
) -> Iterator[Problem]:
    pruned = {name for path, name in plan.source_names.items() if path in plan.pruned}
    for name in sorted(found.keys() | listed.keys()):
        now, then = found.get(name), listed.get(name)
        if then is None:
            problem = "was not read for the export"
        elif now is None:
            problem = "is not read any more"
        elif name not in pruned and (now.nbytes, now.blake3) != (then.nbytes, then.blake3):
            problem = "is not what was read for the export"
        else:
            continue
        yield Problem("", "", f"source {name} {problem}")
