"""All that was collected for an export: what it is decided from, and what its folder is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from zexport.adapters.find import Adapter
from zexport.adapters.saved_beside import SavedBeside
from zexport.checkpoint.state import StoredTensor, TrainingState
from zexport.facts.statements import Statement
from zexport.filenames import GENERATION_CONFIG
from zexport.findings import Finding
from zexport.model.fit import Fit, NamesUnknown
from zexport.model.sidecars import Sidecars
from zexport.model.token_numbers import TokenNumber
from zexport.options import AdapterMode, ExportOptions
from zexport.plan.plan import SourceFile
from zexport.ranges.replicas import CastReplica
from zexport.weights.base_model import Base
from zexport.weights.named import Weights
from zexport.weights.ties import Ties


class Collected(Struct, frozen=True):
    """All that a plan is decided from; deciding reads nothing more.

    ``weights`` are the model's, heads aside, under the checkpoint's names after every rename; those
    of the base model where an adapter is merged into it, which is worked in already. ``base`` goes
    by the model's names, and the config in ``sidecars`` is mended where the weights tell otherwise.
    ``statements`` are what several files say of the same facts.
    """

    checkpoint: TrainingState
    options: ExportOptions
    weights: Weights
    sidecars: Sidecars
    base: Base = field(default_factory=Base)
    files: tuple[SourceFile, ...] = ()
    findings: tuple[Finding, ...] = ()
    mode: AdapterMode | None = None
    adapters: tuple[Adapter, ...] = ()
    saved: Mapping[str, SavedBeside] = field(default_factory=dict)
    fit: Fit | NamesUnknown = NamesUnknown("it was not asked for")
    heads: Mapping[str, StoredTensor] = field(default_factory=dict)
    ties: Ties = field(default_factory=Ties)
    gathered: tuple[CastReplica, ...] = ()
    spoilt: tuple[str, ...] = ()
    is_card_unfilled: bool = False
    tokens: tuple[TokenNumber, ...] = ()
    base_tokens: tuple[TokenNumber, ...] = ()
    statements: tuple[Statement, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    nbytes_compared: int = 0

    @property
    def files_of_base(self) -> list[str]:
        """Names of the files that the base gives."""
        base = self.options.base
        files = self.copied if self.mode is AdapterMode.KEEP else self.sidecars.files
        return [] if base is None else sorted(n for n in files if files[n].is_relative_to(base))

    @property
    def copied(self) -> Mapping[str, Path]:
        """The files that are copied, by name; beside an adapter, none that is the model's own."""
        files = self.sidecars.copied
        if self.mode is not AdapterMode.KEEP:
            return files
        own = {name for name in files if name == GENERATION_CONFIG or name.endswith(".py")}
        return {name: path for name, path in files.items() if name not in own}

    def __repr__(self) -> str:
        """What it is about; whole, it would be as long as the checkpoint."""
        mode = "a model" if self.mode is None else f"adapters to {self.mode.value}"
        return f"Collected({self.checkpoint.location.tag_dir}: {self.weights}, {mode})"
