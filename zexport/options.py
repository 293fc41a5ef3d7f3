"""Options of exports and resharding."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from enum import StrEnum
from functools import wraps
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Struct

from zexport.errors import UsageError
from zexport.findings import FindingKind
from zexport.storage.location import place

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_DTYPE_NAMES = {
    **dict.fromkeys(("float", "float32"), "fp32"),
    **dict.fromkeys(("half", "float16"), "fp16"),
    "bfloat16": "bf16",
}


def dtype_name(text: str) -> str:
    """Return zexport's name for a dtype such as ``torch.bfloat16`` or ``BF16``."""
    name = text.lower().removeprefix("torch.")
    return _DTYPE_NAMES.get(name, name)


class ExportDType(StrEnum):
    """Dtype of the exported floating-point tensors."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    AUTO = "auto"
    """The dtype of the module weights in training; under FSDP, each weight's own."""

    @classmethod
    def _missing_(cls, value: object) -> ExportDType | None:
        """Accept torch's names and any case."""
        name = dtype_name(value) if isinstance(value, str) else value
        return next((member for member in cls if member == name), None)


class NameLayout(StrEnum):
    """Names of the exported tensors."""

    HUB = "hub"
    """Hub names, as ``save_pretrained`` of the installed transformers writes them."""
    MEMORY = "memory"
    """In-memory names, as in the checkpoint's ``param_shapes``."""


class AdapterMode(StrEnum):
    """Whether a PEFT adapter is kept or merged."""

    AUTO = "auto"
    """Merged if a base model is passed, else kept."""
    KEEP = "keep"
    """A folder that PEFT loads onto the base model."""
    MERGE = "merge"
    """A whole model: the base model with the adapter merged."""


class Engine(StrEnum):
    """Program that reassembles the weights."""

    NATIVE = "native"
    DEEPSPEED = "deepspeed"


class CheckMode(StrEnum):
    """How many elements of master weights are compared with module weights."""

    SAMPLED = "sampled"
    """Some elements of every tensor, from each rank file that has a part."""
    FULL = "full"
    """Every element."""


class ResumeFormat(StrEnum):
    """Format of a resharded checkpoint."""

    NATIVE = "native"
    """Rank files for one world size and ZeRO stage; ``load_checkpoint`` loads them."""
    UNIVERSAL = "universal"
    """DeepSpeed's universal checkpoint, for any world size."""


_P = ParamSpec("_P")
SHARD_NBYTES_MIN = 10**6
"""A smaller shard size is a mistake, such as 5 for 5 GB."""

_T = TypeVar("_T")


def chosen(name: str, kind: type[_T], value: object) -> _T:
    """Return an option's value as ``kind``, such as an enum member from its text."""
    try:
        return msgspec.convert(value, kind, dec_hook=_given_path)
    except msgspec.ValidationError as cause:
        members = [getattr(one, "__members__", {}) for one in (kind, *get_args(kind))]
        values = [str(one.value) for own in members for one in own.values()]
        expected = ", ".join(values) or getattr(kind, "__name__", str(kind))
        raise UsageError(f"{name} cannot be {value!r}", expected=expected) from cause


def _given_path(kind: type, value: Any) -> Path:
    if kind is not Path:
        raise TypeError(f"no {kind.__name__}")
    return place(value)


_PLAIN: dict[str, Any] = {"bool": bool, "str | None": str | None, "CheckMode": CheckMode}


def checks_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function with checked keyword arguments.

    Any text is true in Python, so ``delete="no"`` would delete.
    """
    kinds = {name: _PLAIN[one] for name, one in function.__annotations__.items() if one in _PLAIN}

    @wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _T:
        for name in kinds.keys() & named.keys():
            named[name] = chosen(name, kinds[name], named[name])
        return function(*args, **named)

    return call


def settle(options: DataclassInstance) -> None:
    """Convert fields of a new record to their types, such as text to paths and enum members."""
    kinds = get_type_hints(type(options))
    for name in (one.name for one in fields(options)):
        object.__setattr__(options, name, chosen(name, kinds[name], getattr(options, name)))


@dataclass(frozen=True, slots=True)
class RecordedOptions:
    """Options that change the output; a manifest records them.

    Attributes:
        dtype: dtype of the floating-point tensors; ``None`` for fp32, or for a checkpoint of FSDP
            each weight's own.
        layout: names of the tensors.
        hub_layout: label of one of several Hub layouts of the model (empty: transformers' own);
            ``None`` chooses by the base model, or transformers' own.
        engine: program that reassembles the weights.
        exclude_frozen: leave out frozen weights.
        keep_unloaded: copy the tensors of the base that the model class does not load.
        max_shard_nbytes: maximum size of a shard's tensors, in bytes.
        renames: regex and replacement pairs, applied in order to the checkpoint's names first.
        check: how many elements of master weights are compared with module weights.
        only: export only the submodule with this name, and remove it from names; empty for all.
        allow: finding kinds to accept.
        adapter: whether a PEFT adapter is kept or merged.
        adapter_name: one of several adapters; ``None`` keeps all, or merges the only one.
        base_dtype: dtype of the base weights while the adapter was trained; ``auto`` takes it from
            the DeepSpeed config.
    """

    dtype: ExportDType | None = None
    _: KW_ONLY
    layout: NameLayout = NameLayout.HUB
    hub_layout: str | None = None
    engine: Engine = Engine.NATIVE
    exclude_frozen: bool = False
    keep_unloaded: bool = False
    max_shard_nbytes: int = 5_000_000_000
    renames: tuple[tuple[str, str], ...] = ()
    check: CheckMode = CheckMode.SAMPLED
    only: str = ""
    allow: frozenset[FindingKind] = frozenset()
    adapter: AdapterMode = AdapterMode.AUTO
    adapter_name: str | None = None
    base_dtype: ExportDType = ExportDType.AUTO

    def __post_init__(self) -> None:
        settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(RecordedOptions):
    """Options of an export: those of ``RecordedOptions``, and these.

    Attributes:
        base: base model (folder or cached Hub name): supplies config, tokenizer and unsaved frozen
            weights.
        adapter_config: ``adapter_config.json``, if the checkpoint has none.
        jobs: number of worker threads.
        max_memory_nbytes: memory limit in bytes; ``None`` for the default.
        overwrite: replace an older export or model folder.
    """

    base: Path | None = None
    adapter_config: Path | None = None
    jobs: int = min(4, os.cpu_count() or 1)
    max_memory_nbytes: int | None = None
    overwrite: bool = False

    def recorded(self) -> RecordedOptions:
        """Return only the options that change the output."""
        kept = {one.name: getattr(self, one.name) for one in fields(RecordedOptions)}
        return RecordedOptions(**kept)

    @classmethod
    def from_recorded(cls, recorded: object) -> ExportOptions:
        """Return recorded options, with defaults for the rest and the native engine."""
        found = msgspec.convert(recorded, RecordedOptions)
        kept = {one.name: getattr(found, one.name) for one in fields(RecordedOptions)}
        return cls(**kept | {"engine": Engine.NATIVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """Options of a resharding.

    Attributes:
        world_size: new data-parallel world size; not needed for a universal checkpoint.
        stage: new ZeRO stage, 1 to 3; ``None`` for the source's.
        ds_config: new DeepSpeed config; ``None`` for the one in the rank files.
        format: rank files or a universal checkpoint.
        drop_client_state: leave out client state that cannot be written safely.
        for_deepspeed: DeepSpeed version that will load it; ``None`` for the newest.
        allow: finding kinds to accept.
        check: how many elements of master weights are compared with module weights.
        jobs: number of worker threads.
        max_memory_nbytes: memory limit in bytes; ``None`` for the default.
        overwrite: replace an older output.
    """

    world_size: int | None = None
    stage: int | None = None
    ds_config: Path | None = None
    format: ResumeFormat = ResumeFormat.NATIVE
    drop_client_state: bool = False
    for_deepspeed: str | None = None
    allow: frozenset[FindingKind] = frozenset()
    check: CheckMode = CheckMode.SAMPLED
    jobs: int = min(4, os.cpu_count() or 1)
    max_memory_nbytes: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        settle(self)


class Share(Struct, frozen=True):
    """Part ``number`` of ``count``, from 1: whole files, about equal in bytes."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def select(self, sizes: Sequence[int]) -> list[int]:
        """Return the indices of its files: their middle byte is in its range of all bytes."""
        ends = [*accumulate(sizes)]
        total = max(ends[-1], 1) if ends else 1
        own = []
        for number, (nbytes, end) in enumerate(zip(sizes, ends, strict=True)):
            middle = end - (nbytes + 1) // 2
            if min(middle * self.count // total, self.count - 1) == self.number - 1:
                own.append(number)
        return own
