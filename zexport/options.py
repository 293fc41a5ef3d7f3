"""What the caller of an export may choose."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum
from functools import wraps
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_type_hints

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


class ExportDType(Enum):
    """The element type of the exported floating-point tensors."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    AUTO = "auto"
    """The type that the module trained in."""

    @classmethod
    def _missing_(cls, value: object) -> ExportDType | None:
        """Accept torch's names and any case."""
        name = dtype_name(value) if isinstance(value, str) else value
        return next((member for member in cls if member.value == name), None)


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


class ResumeFormat(Enum):
    """The form of a checkpoint that training goes on from."""

    NATIVE = "native"
    """Rank files for one world size and stage, which plain ``load_checkpoint`` takes."""
    UNIVERSAL = "universal"
    """DeepSpeed's universal checkpoint, for every world size."""


_P = ParamSpec("_P")
SHARD_NBYTES_MIN = 10**6
"""A smaller bound on a file of weights is a slip, such as 5 for 5 GB."""

_T = TypeVar("_T")


def chosen(name: str, kind: type[_T], value: object) -> _T:
    """A value of the kind that it is to be, such as an enumeration's member from its text."""
    try:
        return msgspec.convert(value, kind, dec_hook=_given_path)
    except msgspec.ValidationError as cause:
        values = [str(one.value) for one in getattr(kind, "__members__", {}).values()]
        expected = ", ".join(values) or getattr(kind, "__name__", str(kind))
        raise UsageError(f"{name} cannot be {value!r}", expected=expected) from cause


def _given_path(kind: type, value: Any) -> Path:
    if kind is not Path:
        raise TypeError(f"no {kind.__name__}")
    return place(value)


_PLAIN: dict[str, Any] = {"bool": bool, "str | None": str | None, "CheckMode": CheckMode}


def checks_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The same function; what a switch, a mode or a text given by name cannot be is refused.

    To Python any text is true: ``delete="no"`` would delete.
    """
    kinds = {name: _PLAIN[one] for name, one in function.__annotations__.items() if one in _PLAIN}

    @wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _T:
        for name in kinds.keys() & named.keys():
            named[name] = chosen(name, kinds[name], named[name])
        return function(*args, **named)

    return call


def settle(options: DataclassInstance) -> None:
    """Enumerations may be given by value and paths as text; what fits no field is refused."""
    kinds = get_type_hints(type(options))
    for name in (one.name for one in fields(options)):
        object.__setattr__(options, name, chosen(name, kinds[name], getattr(options, name)))


@dataclass(frozen=True, slots=True)
class RecordedOptions:
    """The choices that change what is written, as a manifest keeps them.

    Attributes:
        dtype: element type of the floating-point tensors.
        layout: whose names the tensors carry.
        hub_layout: which of the ways in which the model may be saved, by its label, which is empty
            for transformers' own; null leaves it to the base, or to transformers, and is recorded
            where names are as stored.
        engine: who rebuilds the weights.
        exclude_frozen: leave out frozen weights, whether they are there or not.
        max_shard_nbytes: largest size of a safetensors file's data, in bytes.
        renames: pairs of pattern and replacement, applied in order to every name of the checkpoint,
            before it is compared with the model's names.
        check: how much is compared of weights that the checkpoint holds twice.
        only: export the part of the model whose names begin with this, and a dot, alone; it is left
            out of the names. Empty for all.
        allow: kinds of findings that are told and do not end the export.
        adapter: what becomes of a peft model's adapter.
        adapter_name: which one, where there are several; null keeps all, or merges the only one.
        base_dtype: the element type that the base had in the training of an adapter; ``auto`` for
            the one that DeepSpeed's configuration had it cast to.
    """

    dtype: ExportDType = ExportDType.FP32
    _: KW_ONLY
    layout: NameLayout = NameLayout.HUB
    hub_layout: str | None = None
    engine: Engine = Engine.NATIVE
    exclude_frozen: bool = False
    max_shard_nbytes: int = 5_000_000_000
    renames: tuple[tuple[str, str], ...] = ()
    check: CheckMode = CheckMode.SAMPLED
    only: str = ""
    allow: frozenset[FindingKind] = frozenset()
    adapter: AdapterMode = AdapterMode.AUTO
    adapter_name: str | None = None
    base_dtype: ExportDType = ExportDType.AUTO

    def __post_init__(self) -> None:
        """What fits no field is refused."""
        settle(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(RecordedOptions):
    """The choices of one export, with their defaults: those that are recorded, and these.

    Attributes:
        base: a model folder for config, tokenizer and frozen weights that the checkpoint lacks. The
            hub's name of a model in its cache on this machine, unless a folder is called so.
        adapter_config: ``adapter_config.json`` of the adapter, where none lies with the checkpoint.
        jobs: worker threads.
        max_memory_nbytes: bound on the memory of the process; ``None`` for the default.
        overwrite: replace an older model in the output folder's place.
    """

    base: Path | None = None
    adapter_config: Path | None = None
    jobs: int = min(4, os.cpu_count() or 1)
    max_memory_nbytes: int | None = None
    overwrite: bool = False

    def recorded(self) -> RecordedOptions:
        """Those choices that change what is written."""
        kept = {one.name: getattr(self, one.name) for one in fields(RecordedOptions)}
        return RecordedOptions(**kept)

    @classmethod
    def from_recorded(cls, recorded: object) -> ExportOptions:
        """The recorded choices that ``recorded`` came from, and else the defaults.

        The engine is the native one, whichever was used.
        """
        found = msgspec.convert(recorded, RecordedOptions)
        kept = {one.name: getattr(found, one.name) for one in fields(RecordedOptions)}
        return cls(**kept | {"engine": Engine.NATIVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """The choices of one resharding, with their defaults.

    Attributes:
        world_size: data-parallel ranks that are to load it; not needed for a universal checkpoint.
        stage: their ZeRO stage, 1 to 3; ``None`` for the source's.
        ds_config: their DeepSpeed configuration; ``None`` for the one in the source's files.
        format: rank files or a universal checkpoint.
        drop_client_state: leave out of the client's own state what cannot be written safely.
        for_deepspeed: version of DeepSpeed that is to load it; ``None`` for the newest.
        allow: kinds of findings that are told and do not end the work.
        check: how much is compared of weights that the checkpoint holds twice.
        jobs: worker threads.
        max_memory_nbytes: bound on the memory of the process; ``None`` for the default.
        overwrite: replace an older folder in the output's place.
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
        """What fits no field is refused."""
        settle(self)


class Share(Struct, frozen=True):
    """Part ``number`` of ``count``, from 1: whole files, about equal in bytes."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def select(self, sizes: Sequence[int]) -> list[int]:
        """Return the numbers of its files: their middle byte is in its range of all bytes."""
        ends = [*accumulate(sizes)]
        total = max(ends[-1], 1) if ends else 1
        own = []
        for number, (nbytes, end) in enumerate(zip(sizes, ends, strict=True)):
            middle = end - (nbytes + 1) // 2
            if min(middle * self.count // total, self.count - 1) == self.number - 1:
                own.append(number)
        return own
