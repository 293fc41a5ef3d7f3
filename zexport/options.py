"""What the caller of an export may choose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zexport.findings import FindingKind
from zexport.store.json import Json, JsonObject


class ExportDType(Enum):
    """The element type of the exported floating-point tensors."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    AUTO = "auto"
    """The type that the module trained in."""


class NameLayout(Enum):
    """Whose names the tensors carry."""

    HUB = "hub"
    """Those that ``save_pretrained`` of the installed transformers writes."""
    MEMORY = "memory"
    """Those of the checkpoint's ``param_shapes``."""


class AdapterMode(Enum):
    """What becomes of a peft model's adapter."""

    AUTO = "auto"
    """Merged where a base model is given, kept as an adapter otherwise."""
    KEEP = "keep"
    """A folder that peft loads onto the base model."""
    MERGE = "merge"
    """A model of its own: the base model with the adapter worked in."""


class Engine(Enum):
    """Who rebuilds the weights."""

    NATIVE = "native"
    DEEPSPEED = "deepspeed"


class CheckMode(Enum):
    """How much is compared of a weight that the checkpoint holds twice, fp32 and rounded."""

    SAMPLED = "sampled"
    """Some elements of every tensor, from each rank file that holds part of it."""
    FULL = "full"
    """Every element."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The choices of one export, with their defaults.

    Attributes:
        dtype: element type of the floating-point tensors.
        base: a model folder for config, tokenizer and frozen weights that the checkpoint lacks.
        max_shard_nbytes: largest size of a safetensors file's data.
        engine: who rebuilds the weights.
        exclude_frozen: leave out frozen weights, whether they are there or not.
        layout: whose names the tensors carry.
        hub_layout: which of the ways in which the model may be saved, by its label; ``None`` lets
            the base decide, or transformers.
        renames: (pattern, replacement) pairs, applied in order to every name of the checkpoint,
            before it is compared with the model's names.
        adapter: what becomes of a peft model's adapter.
        adapter_name: which one, where there are several; ``None`` keeps all, or merges the only
            one.
        adapter_config: ``adapter_config.json`` of the adapter, where none lies with the checkpoint.
        base_dtype: the element type that ``base`` had in the training of an adapter; ``AUTO`` for
            the one that DeepSpeed's configuration had it cast to.
        jobs: worker threads.
        max_memory_nbytes: bound on the memory of the process; ``None`` for the default.
        overwrite: replace an older model in the output folder's place.
        check: how much is compared of weights that the checkpoint holds twice.
        allow: kinds of findings that are told and do not end the export.
    """

    dtype: ExportDType = ExportDType.FP32
    base: Path | None = None
    max_shard_nbytes: int = 5_000_000_000
    engine: Engine = Engine.NATIVE
    exclude_frozen: bool = False
    layout: NameLayout = NameLayout.HUB
    hub_layout: str | None = None
    renames: tuple[tuple[str, str], ...] = ()
    adapter: AdapterMode = AdapterMode.AUTO
    adapter_name: str | None = None
    adapter_config: Path | None = None
    base_dtype: ExportDType = ExportDType.AUTO
    jobs: int = min(4, os.cpu_count() or 1)
    max_memory_nbytes: int | None = None
    overwrite: bool = False
    check: CheckMode = CheckMode.SAMPLED
    allow: frozenset[FindingKind] = frozenset()

    def recorded(self) -> JsonObject:
        """Those choices that change what is written, as a manifest keeps them."""
        return {
            "dtype": self.dtype.value,
            "layout": self.layout.value,
            "hub_layout": self.hub_layout,
            "engine": self.engine.value,
            "exclude_frozen": self.exclude_frozen,
            "max_shard_nbytes": self.max_shard_nbytes,
            "renames": [list(rename) for rename in self.renames],
            "check": self.check.value,
            "allow": [kind.value for kind in sorted(self.allow)],
            "adapter": self.adapter.value,
            "adapter_name": self.adapter_name,
            "base_dtype": self.base_dtype.value,
        }

    @classmethod
    def from_recorded(cls, recorded: Mapping[str, Json], *, base: Path | None) -> ExportOptions:
        """The choices that ``recorded`` came from; the native engine, whichever was used.

        Raises:
            ValueError: no export can have had these.
        """
        size, renames = recorded.get("max_shard_nbytes"), recorded.get("renames")
        allow, hub_layout = recorded.get("allow", []), recorded.get("hub_layout")
        if type(size) is not int or not isinstance(renames, list) or not isinstance(allow, list):
            raise ValueError("max_shard_nbytes is no number, or renames or allow no list")
        pairs = [rename for rename in renames if isinstance(rename, list)]
        return cls(
            dtype=ExportDType(recorded.get("dtype")),
            layout=NameLayout(recorded.get("layout")),
            hub_layout=hub_layout if isinstance(hub_layout, str) else None,
            exclude_frozen=recorded.get("exclude_frozen") is True,
            max_shard_nbytes=size,
            renames=tuple((str(pattern), str(new)) for pattern, new in pairs),
            adapter=AdapterMode(recorded.get("adapter", AdapterMode.AUTO.value)),
            adapter_name=name if isinstance(name := recorded.get("adapter_name"), str) else None,
            base_dtype=ExportDType(recorded.get("base_dtype", ExportDType.AUTO.value)),
            base=base,
            check=CheckMode(recorded.get("check", CheckMode.SAMPLED.value)),
            allow=frozenset(FindingKind(str(kind)) for kind in allow),
        )
