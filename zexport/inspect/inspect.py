"""What is in a checkpoint, whether it can be exported, and if not, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.candidates import are_of_one_run, list_tags
from zexport.checkpoint.contents import Role, StoredTensor, ZeroCheckpoint
from zexport.checkpoint.opening import NEWEST, Checkpoint, open_checkpoint
from zexport.errors import AmbiguousTagError, UnsafeError, ZexportError
from zexport.inspect.adapters import AdapterSummary, summarize_adapters
from zexport.inspect.tags import TagSummary, summarize_choice, summarize_tags
from zexport.inspect.weight_files import WeightFile, list_weight_files
from zexport.model.sidecars import find_sidecars
from zexport.printable import shell_word
from zexport.ranges.dtypes import DType

__all__ = ["Count", "Inspection", "Outcome", "Verdict", "inspect_checkpoint"]


class Outcome(Enum):
    """Whether an export would succeed, as far as metadata tells."""

    EXPORTABLE = "exportable"
    NEEDS_BASE = "needs_base"
    """Frozen weights were left out: a base model has to fill them in."""
    NOT_EXPORTABLE = "not_exportable"
    CHOOSE_TAG = "choose_tag"
    """Several checkpoints, and nothing says which one is meant."""


class Verdict(Struct, frozen=True):
    """One line of judgement and the next step.

    Attributes:
        outcome: the judgement as a word.
        sentence: the judgement in words, without a full stop.
        next_step: a command to run, or what to do first.
    """

    outcome: Outcome
    sentence: str
    next_step: str


class Count(Struct, frozen=True):
    """How many tensors, and how many elements they have together."""

    tensors: int
    numel: int


class Inspection(Struct, frozen=True):
    """Everything that ``zexport inspect`` shows, but for the statistics of tensors.

    Attributes:
        path: what was looked at, as it was given.
        tags: every tag beside the chosen one, and it; newest last.
        checkpoint: the chosen one; ``None`` where nothing says which is meant.
        weight_files: weights beside the tag folder, such as ``model.safetensors``.
        missing_sidecars: what an export would lack, in words.
        adapters: those of a peft model.
        problems: what stands in the way of an export.
        verdict: the judgement.
    """

    path: Path
    tags: tuple[TagSummary, ...]
    checkpoint: ZeroCheckpoint | None
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
        return {role: _count(self.tensors, role) for role in Role}

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

    Args:
        path: any level of a checkpoint's folders; several where nodes kept their own parts.
        tag: name of the tag, or ``newest``.
        follow_symlinks: read what a link leads to, wherever that is.
    """
    paths = [Path(path)] if isinstance(path, Path | str) else [Path(part) for part in path]
    try:
        checkpoint = open_checkpoint(paths, tag=tag, follow_symlinks=follow_symlinks)
    except AmbiguousTagError:
        if tag == NEWEST:
            raise
        return _choice(paths[0], follow_symlinks=follow_symlinks)
    boundary = checkpoint.location.boundary
    root = checkpoint.location.root
    problems = list(checkpoint.problems)
    missing_sidecars: tuple[str, ...] = ()
    try:
        missing_sidecars = find_sidecars(root, None, boundary).missing
    except UnsafeError:
        raise
    except ZexportError as error:
        problems.append(error)
    adapters = summarize_adapters(checkpoint)
    return Inspection(
        path=paths[0],
        tags=summarize_tags(checkpoint),
        checkpoint=checkpoint,
        weight_files=list_weight_files(root, _stored_empty(checkpoint), boundary),
        missing_sidecars=missing_sidecars,
        problems=tuple(problems),
        verdict=_verdict(paths, tag, checkpoint, problems, adapters),
        adapters=adapters,
    )


def _choice(path: Path, *, follow_symlinks: bool) -> Inspection:
    """Several checkpoints: what each is, so that one can be chosen."""
    tags = summarize_choice(path, follow_symlinks=follow_symlinks)
    name = "NAME"
    if list_tags(path) or are_of_one_run(tag.name for tag in tags):
        newest = next((tag for tag in reversed(tags) if tag.is_complete), tags[-1])
        name = shell_word(newest.name)
    verdict = Verdict(
        Outcome.CHOOSE_TAG,
        f"{len(tags)} checkpoints, and nothing says which one is meant",
        f"zexport inspect {shell_word(path)} --tag {name}",
    )
    return Inspection(path, tags, None, (), (), (), verdict)


def _verdict(
    paths: Sequence[Path],
    tag: str | None,
    checkpoint: ZeroCheckpoint,
    problems: list[ZexportError],
    adapters: Sequence[AdapterSummary],
) -> Verdict:
    if problems:
        return _refusal(problems)
    command = f"zexport consolidate {' '.join(map(shell_word, paths))} OUT"
    command += f" --tag {shell_word(tag)}" if tag is not None else ""
    if any(adapter.config is not None for adapter in adapters):
        base = "" if adapters[0].has_base else " --base DIR"
        return Verdict(
            Outcome.EXPORTABLE,
            "exportable as an adapter, or merged into its base model",
            f"{command} (or with --adapter merge{base})",
        )
    if checkpoint.left_out or checkpoint.frozen_left_out:
        return Verdict(
            Outcome.NEEDS_BASE,
            "exportable with the base model, which has the frozen weights that were left out, or "
            "without them",
            f"{command} --base DIR (or --exclude-frozen)",
        )
    return Verdict(Outcome.EXPORTABLE, "exportable, as far as metadata tells", command)


def _refusal(problems: Sequence[ZexportError]) -> Verdict:
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    sentence = f"not exportable: {_fault(problems[0])}{more}"
    return Verdict(Outcome.NOT_EXPORTABLE, sentence, _remedy(problems[0]))


def _fault(problem: ZexportError) -> str:
    where = f"{problem.path.name} " if problem.path is not None else ""
    return f"{where}{problem.problem}"


def _remedy(problem: ZexportError) -> str:
    return problem.hint or "Use a version of zexport or DeepSpeed that supports it"


def _count(tensors: tuple[StoredTensor, ...], role: Role) -> Count:
    chosen = [tensor for tensor in tensors if tensor.role is role]
    return Count(len(chosen), sum(tensor.numel for tensor in chosen))


def _stored_empty(checkpoint: ZeroCheckpoint) -> frozenset[str]:
    """Names of tensors that have no elements by nature."""
    empty = {tensor.name for tensor in checkpoint.tensors if not tensor.numel}
    return frozenset(empty | {a for a, name in checkpoint.aliases.items() if name in empty})
