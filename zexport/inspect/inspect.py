"""What is in a checkpoint, whether it can be exported, and if not, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.checkpoint.resolve import NEWEST, are_of_one_run, runs_in
from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.errors import AmbiguousTagError, UnsafeError, ZexportError
from zexport.export.adapters import adapters_in, find_config, is_peft
from zexport.export.peft_config import AdapterConfig
from zexport.export.peft_names import parse_name
from zexport.export.weights import Weights
from zexport.filenames import CONFIG
from zexport.inspect.around import (
    TagSummary,
    WeightFile,
    list_weight_files,
    summarize_choice,
    summarize_tags,
)
from zexport.model.hf_files import find_hf_files
from zexport.optional_deps import lack_for_names, to_have_names
from zexport.options import ExportOptions
from zexport.ranges.dtypes import DType
from zexport.storage.files import absolute
from zexport.storage.location import place
from zexport.storage.os_errors import reading
from zexport.text import shell_word


class Outcome(Enum):
    """Whether an export would succeed, as far as metadata tells."""

    EXPORTABLE = "exportable"
    NEEDS_BASE = "needs_base"
    """Frozen weights were left out: a base model has to fill them in."""
    NOT_EXPORTABLE = "not_exportable"
    CHOOSE_TAG = "choose_tag"
    """Several checkpoints, and nothing says which one is meant."""


class Verdict(Struct, frozen=True):
    """One line of judgement, without a full stop, and a command to run or what to do first."""

    outcome: Outcome
    sentence: str
    next_step: str


class Count(Struct, frozen=True):
    """How many tensors, and how many elements they have together."""

    tensors: int
    numel: int


class AdapterSummary(Struct, frozen=True):
    """One adapter of a peft model; what its ``adapter_config.json`` says is empty without one.

    ``rank`` is that of most of its updates; ``has_base`` tells whether the checkpoint holds weights
    of its base model too.
    """

    name: str
    tensors: int
    has_base: bool
    method: str | None
    rank: int | None
    targets: tuple[str, ...]
    saved_modules: tuple[str, ...]


class Inspection(Struct, frozen=True):
    """Everything that ``zexport inspect`` shows, but for the statistics of tensors.

    ``tags`` has every tag around the chosen one, and it, newest last; ``checkpoint`` is ``None``
    where nothing says which is meant. ``problems`` are what stands in the way of an export.
    """

    path: Path
    tags: tuple[TagSummary, ...]
    checkpoint: TrainingState | None
    weight_files: tuple[WeightFile, ...]
    missing_sidecars: tuple[str, ...]
    problems: tuple[ZexportError, ...]
    verdict: Verdict
    adapters: tuple[AdapterSummary, ...] = ()

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Every tensor once."""
        return self.checkpoint.tensors if self.checkpoint is not None else ()

    def counts(self) -> Mapping[Role, Count]:
        """Tensors and elements by role."""
        counts = {}
        for role in Role:
            numels = [tensor.numel for tensor in self.tensors if tensor.role is role]
            counts[role] = Count(len(numels), sum(numels))
        return counts

    def tied(self) -> Count:
        """Tied names, and the elements that they would have if they were stored again."""
        if self.checkpoint is None:
            return Count(0, 0)
        numel = {tensor.name: tensor.numel for tensor in self.tensors}
        aliases = self.checkpoint.aliases
        return Count(len(aliases), sum(numel.get(name, 0) for name in aliases.values()))

    def nbytes_read(self) -> int:
        """Bytes of tensors that an export reads."""
        return sum(tensor.numel * tensor.dtype.itemsize for tensor in self.tensors)

    def nbytes_written(self, target: DType) -> int:
        """Bytes of tensors that an export to ``target`` writes."""
        return sum(tensor.numel * tensor.output_dtype(target).itemsize for tensor in self.tensors)

    def asked_with(self, words: Sequence[str]) -> Inspection:
        """The same, whose next step repeats what was asked for, which needs one checkpoint."""
        step = " ".join((self.verdict.next_step, *map(shell_word, words)))
        return replace(self, verdict=replace(self.verdict, next_step=step))

    def with_problems(self, more: Sequence[ZexportError]) -> Inspection:
        """The same with what reading the values has shown; without an export, if it is anything."""
        problems = (*self.problems, *more)
        return replace(self, problems=problems, verdict=_refusal(problems)) if more else self

    def missing_files(self) -> tuple[str, ...]:
        """Names of the rank files to fetch."""
        return self.checkpoint.missing_files if self.checkpoint is not None else ()


def inspect_checkpoint(
    path: Checkpoint, *, tag: str | None = None, follow_symlinks: bool = False
) -> Inspection:
    """What is at ``path``; no tensor data is read, but for one scalar a rank file.

    ``path`` is any level of a checkpoint's folders; several where nodes kept their own parts.
    """
    paths = [*map(place, [path] if isinstance(path, Path | str) else path)]
    try:
        checkpoint = open_checkpoint(paths, tag=tag, follow_symlinks=follow_symlinks)
    except AmbiguousTagError as cause:
        if len(paths) > 1:
            raise AmbiguousTagError(
                f"{cause.problem}, and is one of {len(paths)} folders that were given",
                path=cause.path,
                found=cause.found,
                hint="Give one run alone; several folders are parts of one checkpoint, which "
                "--tag names",
            ) from cause
        given, holder = absolute(paths[0]), paths[0]
        if cause.path is not None and cause.path.is_relative_to(given):
            holder = holder / cause.path.relative_to(given)  # below it, if it holds nothing else
        tags = summarize_choice(holder, follow_symlinks=follow_symlinks)
        if tag == NEWEST or not tags or runs_in(holder):  # it names the runs
            raise
        return _choice(holder, tags)
    with reading(paths[0], hint="Check its permissions"):
        return _inspect(paths, checkpoint, tag)


def _inspect(paths: Sequence[Path], checkpoint: TrainingState, tag: str | None) -> Inspection:
    boundary = checkpoint.location.boundary
    root = checkpoint.location.root
    problems = list(checkpoint.problems)
    missing_sidecars: tuple[str, ...] = ()
    try:
        with reading(root, hint="Check its permissions"):
            parts = ((one.root, one.boundary) for one in checkpoint.parts)
            missing_sidecars = find_hf_files(root, None, boundary, parts).missing
    except UnsafeError:
        raise
    except ZexportError as error:
        problems.append(error)
    adapters = _adapters(checkpoint)
    command = f"zexport consolidate {' '.join(map(shell_word, paths))} OUT"
    command += f" --tag {shell_word(tag)}" if tag is not None else ""
    return Inspection(
        path=paths[0],
        tags=summarize_tags(checkpoint),
        checkpoint=checkpoint,
        weight_files=list_weight_files(root, _stored_empty(checkpoint), boundary),
        missing_sidecars=missing_sidecars,
        problems=tuple(problems),
        verdict=_verdict(command, checkpoint, problems, adapters, missing_sidecars),
        adapters=adapters,
    )


def _adapters(checkpoint: TrainingState) -> tuple[AdapterSummary, ...]:
    """The adapters of a checkpoint; none where it is no peft model's."""
    options = ExportOptions()
    stored = Weights.of(checkpoint)
    if not is_peft(checkpoint, stored, options):
        return ()
    parts = [parse_name(tensor.name) for tensor in checkpoint.tensors]
    kept = (t for t in checkpoint.tensors if t.role is Role.FROZEN and t.source is not None)
    has_base = any(not parse_name(tensor.name).adapter for tensor in kept)
    summaries = []
    for name in adapters_in(stored):
        try:
            config = find_config(name, checkpoint, options)
        except UnsafeError:
            raise
        except ZexportError:
            config = None
        summaries.append(
            AdapterSummary(
                name=name,
                tensors=sum(part.adapter == name for part in parts),
                has_base=has_base,
                method=None if config is None else config.peft_type,
                rank=None if config is None else config.r,
                targets=() if config is None else _targets(config),
                saved_modules=() if config is None else tuple(config.modules_to_save or ()),
            )
        )
    return tuple(summaries)


def _targets(config: AdapterConfig) -> tuple[str, ...]:
    modules = config.target_modules
    names = [modules] if isinstance(modules, str) else modules or []
    return (*names, *(config.target_parameters or ()))


def _choice(path: Path, tags: tuple[TagSummary, ...]) -> Inspection:
    """Several checkpoints: what each is, so that one can be chosen."""
    name = "NAME"
    if are_of_one_run(tag.name for tag in tags):
        name = shell_word(next((tag for tag in reversed(tags) if tag.complete), tags[-1]).name)
    verdict = Verdict(
        Outcome.CHOOSE_TAG,
        f"{len(tags)} checkpoints, and nothing says which one is meant",
        f"zexport inspect {shell_word(path)} --tag {name}",
    )
    return Inspection(path, tags, None, (), (), (), verdict)


def _verdict(
    command: str,
    checkpoint: TrainingState,
    problems: list[ZexportError],
    adapters: Sequence[AdapterSummary],
    missing_sidecars: Sequence[str],
) -> Verdict:
    if problems:
        return _refusal(problems)
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
            "exportable with the base model, which has the frozen weights that were left out, or "
            "without them",
            f"{command} --base MODEL  # or {command} --exclude-frozen",
        )
    command += " --base MODEL" if CONFIG in missing_sidecars else ""
    sentence = "exportable, as far as the rank files tell"
    if lack := lack_for_names():
        sentence += f"; here ({lack}) only if the model's names on the hub are known already"
        first = to_have_names().removeprefix("Type ")
        command += f"  # where names are not known, first {first}; or add --layout memory"
    return Verdict(Outcome.EXPORTABLE, sentence, command)


def _refusal(problems: Sequence[ZexportError]) -> Verdict:
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    first = problems[0]
    where = f"{first.path.name} " if first.path is not None else ""
    remedy = first.hint or "Use a version of zexport or DeepSpeed that supports it"
    sentence = f"not exportable: {where}{first.problem}{more}"
    return Verdict(Outcome.NOT_EXPORTABLE, sentence, remedy)


def _stored_empty(checkpoint: TrainingState) -> frozenset[str]:
    """Names of tensors that have no elements by nature."""
    empty = {tensor.name for tensor in checkpoint.tensors if not tensor.numel}
    return frozenset(empty | {a for a, name in checkpoint.aliases.items() if name in empty})
