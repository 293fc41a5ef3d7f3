"""Summary of a checkpoint: layout, files, parameters, problems, and whether it can be exported."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.open import Checkpoint, open_checkpoint, open_locations
from zexport.checkpoint.resolve import (
    NEWEST,
    READ_MAX,
    Candidate,
    Location,
    TagChoice,
    are_of_one_run,
    list_candidates,
    list_run_checkpoints,
    list_tags,
    locate,
    location_of,
    recorded_step,
    run_folder,
    runs_in,
)
from zexport.checkpoint.state import FileKind, Role, StoredTensor, TrainingState
from zexport.checkpoint.zero.file_names import rank_files
from zexport.errors import AmbiguousTagError, UnsafeError, ZexportError
from zexport.export.adapters import adapters_in, find_config, is_peft
from zexport.export.peft import parse_name
from zexport.export.weights import Weights
from zexport.filenames import CONFIG
from zexport.formats.pickle_values import TensorRef
from zexport.formats.safetensors import read_header
from zexport.formats.torch_file import read_torch_file
from zexport.model.hf_files import find_hf_files
from zexport.optional_deps import lack_for_names, to_have_names
from zexport.options import ExportOptions
from zexport.ranges.dtypes import DType
from zexport.storage.files import absolute, is_file, leaves, matching, version
from zexport.storage.location import place
from zexport.storage.os_errors import reading
from zexport.storage.symlink_policy import Boundary
from zexport.text import shell_word

_WEIGHT_PATTERNS = (
    "model*.safetensors",
    "adapter_model*.safetensors",
    "pytorch_model*.bin",
    "adapter_model*.bin",
)

_BY_METADATA = ", judged by metadata"


class Outcome(StrEnum):
    """Whether an export would succeed, judged by metadata."""

    EXPORTABLE = "exportable"
    NEEDS_BASE = "needs_base"
    """Frozen weights were left out; a base model has them."""
    NOT_EXPORTABLE = "not_exportable"
    CHOOSE_TAG = "choose_tag"
    """Several checkpoints, and no ``latest``."""


class Verdict(Struct, frozen=True):
    """Outcome, its reason without a full stop, and the next command or step."""

    outcome: Outcome
    sentence: str
    next_step: str


class Count(Struct, frozen=True):
    """Number of tensors, and of their elements."""

    tensors: int
    numel: int


class TagSummary(Struct, frozen=True):
    """A tag or checkpoint of the run; ``None`` for values that are unknown.

    Attributes:
        nbytes: size of all files in its folder.
        world_size: number of ranks.
        complete: whether it was opened without problems.
        chosen: whether the summary describes this one.
    """

    name: str
    step: int | None = None
    nbytes: int | None = None
    optimizer_files: int = 0
    world_size: int | None = None
    complete: bool | None = None
    chosen: bool = False


class WeightFile(Struct, frozen=True):
    """A file of weights in the folder of the tag; ``problem`` is why it cannot be read.

    ``placeholders`` are tensors that ZeRO-3 left empty.
    """

    name: str
    nbytes: int
    tensors: int = 0
    placeholders: tuple[str, ...] = ()
    unknown_globals: tuple[str, ...] = ()
    problem: str = ""


class AdapterSummary(Struct, frozen=True):
    """A PEFT adapter; ``method`` and what follows are empty without ``adapter_config.json``.

    ``has_base``: the checkpoint contains weights of the base model too.
    """

    name: str
    tensors: int
    has_base: bool
    method: str | None = None
    rank: int | None = None
    targets: tuple[str, ...] = ()
    saved_modules: tuple[str, ...] = ()


class Inspection(Struct, frozen=True):
    """Everything that ``zexport inspect`` shows, except statistics.

    Attributes:
        tags: the tags of the run, newest last.
        checkpoint: the chosen one; ``None`` if it is ambiguous.
        missing_model_files: such as ``config.json``.
        problems: everything that prevents an export.
    """

    path: Path
    tags: tuple[TagSummary, ...]
    verdict: Verdict
    checkpoint: TrainingState | None = None
    weight_files: tuple[WeightFile, ...] = ()
    missing_model_files: tuple[str, ...] = ()
    problems: tuple[ZexportError, ...] = ()
    adapters: tuple[AdapterSummary, ...] = ()

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        return self.checkpoint.tensors if self.checkpoint is not None else ()

    @property
    def missing_files(self) -> tuple[str, ...]:
        """Names of missing rank files that an export needs."""
        return self.checkpoint.missing_files if self.checkpoint is not None else ()

    def counts(self) -> Mapping[Role, Count]:
        counts = {}
        for role in Role:
            numels = [tensor.numel for tensor in self.tensors if tensor.role is role]
            counts[role] = Count(len(numels), sum(numels))
        return counts

    def tied(self) -> Count:
        """Return the number of tied names, and the elements of their tensors."""
        if self.checkpoint is None:
            return Count(0, 0)
        numel = {tensor.name: tensor.numel for tensor in self.tensors}
        aliases = self.checkpoint.aliases
        return Count(len(aliases), sum(numel.get(name, 0) for name in aliases.values()))

    def nbytes_read(self) -> int:
        """Return the bytes of tensors that an export reads."""
        return sum(tensor.numel * tensor.dtype.itemsize for tensor in self.tensors)

    def nbytes_written(self, target: DType) -> int:
        """Return the bytes of tensors that an export to ``target`` writes."""
        return sum(tensor.numel * tensor.output_dtype(target).itemsize for tensor in self.tensors)

    def with_values(self, more: Sequence[ZexportError]) -> Inspection:
        """Return the summary after all values were read, with the problems found by that."""
        if problems := (*self.problems, *more):
            return replace(self, problems=problems, verdict=_refusal(problems))
        text = self.verdict.sentence.replace(_BY_METADATA, "; all weights were read")
        return replace(self, verdict=replace(self.verdict, sentence=text))


def inspect_checkpoint(
    path: Checkpoint,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
) -> Inspection:
    """Return the summary of a checkpoint; of its data, one scalar per rank file is read.

    ``path`` and ``tag`` are those of ``open_checkpoint``.
    """
    paths = [*map(place, [path] if isinstance(path, Path | str) else path)]
    try:
        checkpoint = open_checkpoint(paths, tag=tag, follow_symlinks=follow_symlinks)
    except AmbiguousTagError as error:
        given, holder = absolute(paths[0]), paths[0]
        if error.path is not None and error.path.is_relative_to(given):
            holder = holder / error.path.relative_to(given)  # a folder in it may contain the run
        boundary = Boundary.of(holder, follow=follow_symlinks)
        tags = tuple(_list_tags(run_folder(holder), boundary, opens=True))
        if len(paths) > 1 or tag == NEWEST or not tags or runs_in(holder):
            raise
        return Inspection(holder, tags, _choice(holder, tags))
    with reading(paths[0], hint="Check its permissions"):
        return _inspect(paths, checkpoint, tag)


def _inspect(paths: Sequence[Path], checkpoint: TrainingState, tag: str | None) -> Inspection:
    location = checkpoint.location
    problems = list(checkpoint.problems)
    missing: tuple[str, ...] = ()
    try:
        with reading(location.root, hint="Check its permissions"):
            parts = ((one.root, one.boundary) for one in checkpoint.parts)
            missing = find_hf_files(location.model_dir, None, location.boundary, parts).missing
    except UnsafeError:
        raise
    except ZexportError as error:
        problems.append(error)
    adapters = tuple(_adapters(checkpoint))
    command = f"zexport consolidate {' '.join(map(shell_word, paths))} OUT"
    command += f" --tag {shell_word(tag)}" if tag is not None else ""
    if problems:
        verdict = _refusal(problems)
    else:
        verdict = _verdict(command, checkpoint, adapters, needs_config=CONFIG in missing)
    tags = [*_list_tags(location.root, location.boundary)]
    if not (location.is_zero or are_of_one_run(one.name for one in tags)):
        tags = [one for one in tags if one.name == location.tag]  # not a run
    empty = {tensor.name for tensor in checkpoint.tensors if not tensor.numel}
    empty |= {alias for alias, name in checkpoint.aliases.items() if name in empty}
    return Inspection(
        path=paths[0],
        tags=tuple(
            _opened_tag(one.name, checkpoint, chosen=True) if one.name == location.tag else one
            for one in tags
        ),
        verdict=verdict,
        checkpoint=checkpoint,
        weight_files=_weight_files(checkpoint, empty),
        missing_model_files=missing,
        problems=tuple(problems),
        adapters=adapters,
    )


# --- verdict ---


def _verdict(
    command: str,
    checkpoint: TrainingState,
    adapters: Sequence[AdapterSummary],
    *,
    needs_config: bool,
) -> Verdict:
    if any(adapter.method is not None for adapter in adapters):
        merge = "--adapter merge" if adapters[0].has_base else "--base MODEL"
        return Verdict(
            Outcome.EXPORTABLE,
            "exportable as an adapter, or merged into its base model",
            f"{command}  # or merged: {command} {merge}",
        )
    if checkpoint.left_out or checkpoint.frozen_left_out:
        return Verdict(
            Outcome.NEEDS_BASE,
            "exportable without the frozen weights, or with those of the base model",
            f"{command} --base MODEL  # or {command} --exclude-frozen",
        )
    command += " --base MODEL" if needs_config else ""
    sentence = f"exportable{_BY_METADATA}"
    if lack := lack_for_names():
        sentence += f"; Hub names may be unknown here ({lack})"
        command += f"  # or add --layout memory. For Hub names: {to_have_names()}"
    return Verdict(Outcome.EXPORTABLE, sentence, command)


def _refusal(problems: Sequence[ZexportError]) -> Verdict:
    first, *more = problems
    where = f"{first.path.name}: " if first.path is not None else ""
    rest = f", and {len(more)} more" if more else ""
    return Verdict(
        Outcome.NOT_EXPORTABLE,
        f"not exportable: {where}{first.problem}{rest}",
        first.hint or "Use a version of zexport or DeepSpeed that supports it",
    )


def _choice(path: Path, tags: Sequence[TagSummary]) -> Verdict:
    name = "NAME"
    if are_of_one_run(tag.name for tag in tags):
        name = next((tag for tag in reversed(tags) if tag.complete), tags[-1]).name
    return Verdict(
        Outcome.CHOOSE_TAG,
        f"{len(tags)} checkpoints, and no `latest` that names one",
        f"zexport inspect {shell_word(path)} --tag {shell_word(name)}",
    )


# --- tags ---


def _list_tags(root: Path, boundary: Boundary, *, opens: bool = False) -> Iterator[TagSummary]:
    """Yield the tags of a folder and the checkpoints of its run, newest last.

    Only the newest ``READ_MAX`` are looked into, and only with ``opens`` is it known whether they
    are complete.
    """
    candidates = list_candidates(root, boundary) or [
        Candidate(name, root / name / list_tags(root / name)[-1], None)
        for name in list_run_checkpoints(root)
    ]
    for index, one in enumerate(candidates, start=READ_MAX - len(candidates)):
        summary = TagSummary(one.name, one.step)
        with suppress(ZexportError):  # opening this tag reports what is wrong
            if one.tag_dir.parent == root:
                location = location_of(one.tag_dir, TagChoice.NEWEST, boundary)
            else:
                location = locate(one.tag_dir.parent, follow_symlinks=boundary.follow)
            with reading(location.tag_dir):
                files = rank_files(location.tag_dir)
                optimizers = sum(file.kind is FileKind.OPTIMIZER for file in files)
                summary = TagSummary(one.name, one.step, optimizer_files=optimizers)
                if index >= 0:
                    step = recorded_step(location.tag_dir, boundary)
                    summary = replace(summary, step=step, nbytes=_folder_nbytes(location))
                if index >= 0 and opens:
                    summary = _opened_tag(one.name, open_locations([location]))
        yield summary


def _opened_tag(name: str, state: TrainingState, *, chosen: bool = False) -> TagSummary:
    optimizers = sum(file.kind is FileKind.OPTIMIZER for file in state.files)
    return TagSummary(
        name=name,
        step=state.global_steps,
        nbytes=_folder_nbytes(state.location),
        optimizer_files=optimizers,
        world_size=state.world_size if optimizers else None,
        complete=not state.problems if optimizers else None,
        chosen=chosen,
    )


def _folder_nbytes(location: Location) -> int:
    return sum(
        version(path).nbytes
        for path in leaves(location.tag_dir)
        if is_file(path) and location.boundary.holds(path)
    )


# --- weight files and adapters ---


def _weight_files(checkpoint: TrainingState, empty: Container[str]) -> tuple[WeightFile, ...]:
    """Return the weight files in the folder of the tag; ``empty`` tensors are no placeholders."""
    location = checkpoint.location
    paths = {path for pattern in _WEIGHT_PATTERNS for path in matching(location.model_dir, pattern)}
    found = []
    for path in sorted(filter(is_file, paths - {file.path for file in checkpoint.files})):
        location.boundary.check(path)
        file = WeightFile(path.name, version(path).nbytes)
        try:
            if path.suffix == ".safetensors":
                shapes = {name: tensor.shape for name, tensor in read_header(path).tensors.items()}
            else:
                content = read_torch_file(path)
                entries = content.value.items() if isinstance(content.value, dict) else ()
                shapes = {str(n): one.shape for n, one in entries if isinstance(one, TensorRef)}
                file = replace(file, unknown_globals=tuple(map(str, content.unknown_globals)))
        except ZexportError as error:
            found.append(replace(file, problem=error.problem))
            continue
        placeholders = tuple(n for n, shape in shapes.items() if 0 in shape and n not in empty)
        found.append(replace(file, tensors=len(shapes), placeholders=placeholders))
    return tuple(found)


def _adapters(checkpoint: TrainingState) -> Iterator[AdapterSummary]:
    options, stored = ExportOptions(), Weights.of(checkpoint)
    if not is_peft(checkpoint, stored, options):
        return
    owners = [parse_name(tensor.name).adapter for tensor in checkpoint.tensors]
    has_base = any(
        tensor.role is Role.FROZEN and tensor.source is not None and not owner
        for tensor, owner in zip(checkpoint.tensors, owners, strict=True)
    )
    for name in adapters_in(stored):
        summary = AdapterSummary(name, owners.count(name), has_base)
        try:
            config = find_config(name, checkpoint, options)
        except UnsafeError:
            raise
        except ZexportError:  # exporting it reports what is wrong
            config = None
        if config is not None:
            modules = config.target_modules or []
            modules = [modules] if isinstance(modules, str) else modules
            summary = replace(
                summary,
                method=config.peft_type,
                rank=config.r,
                targets=(*modules, *(config.target_parameters or ())),
                saved_modules=tuple(config.modules_to_save or ()),
            )
        yield summary
