"""What an export is made of, and what its folder will hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zexport.adapters.saved_beside import SavedBeside
from zexport.checkpoint.contents import StoredTensor, ZeroCheckpoint
from zexport.findings import Finding
from zexport.model.sidecars import Sidecars
from zexport.plan.plan import FilePlan, SideFile, SourceFile
from zexport.weights.named import NamedTensors
from zexport.weights.select import Selection


@dataclass(frozen=True, slots=True)
class Material:
    """What an export is made of.

    Attributes:
        checkpoint: what was opened.
        stored: its tensors, renamed.
        sidecars: the files around it.
        given: tensors of the base model's folder, by name.
        files: all files that may be read.
        notes: what was done to it so far, in words.
        saved: what peft saved of the base model beside it, by the adapter's name.
        task: what the adapter was trained for that was merged into it, as peft calls it.
    """

    checkpoint: ZeroCheckpoint
    stored: NamedTensors
    sidecars: Sidecars
    given: Mapping[str, StoredTensor]
    files: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()
    saved: Mapping[str, SavedBeside] = field(default_factory=dict)
    task: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """What an output folder will hold, before anything of how it is written.

    Attributes:
        selection: the tensors, by their names in the plan.
        shards: the files that hold them.
        side_files: the other files.
        sidecars: what they are made of.
        warnings: what the user should know.
        findings: what was found that was allowed.
        hub_layout: the label of the way in which the model is saved; ``None`` where it has none.
        heads: tensors of heads that the model does not know, by name.
    """

    selection: Selection
    shards: tuple[FilePlan, ...]
    side_files: tuple[SideFile, ...]
    sidecars: Sidecars
    warnings: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    hub_layout: str | None = None
    heads: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def written(self) -> tuple[StoredTensor, ...]:
        """All that is written."""
        return (*self.selection.tensors.values(), *self.heads.values())
