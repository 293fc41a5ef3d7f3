"""What a manifest says of where an export came from: the checkpoint, the options, the account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.options import RecordedOptions
from zexport.store.json import Natural
from zexport.weights.accounting import Accounting


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """The checkpoint that was exported.

    Attributes:
        tag: name of the tag folder.
        layout: in words, such as ``ZeRO-3`` or ``ZeRO-1 (BF16_Optimizer)``.
        stage: ZeRO stage.
        world_size: data-parallel ranks that wrote it.
        global_steps: optimizer steps taken.
        deepspeed_version: version of DeepSpeed that wrote it.
        module_dtype: element type the module trained in, as torch names it (``bfloat16``).
        master_dtype: element type of the master weights.
        warnings: how values were chosen where there was a choice, in sentences.
    """

    tag: str
    layout: str
    stage: Natural | None
    world_size: Natural | None
    global_steps: Natural | None
    deepspeed_version: str | None
    module_dtype: str | None
    master_dtype: str | None
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: ZeroCheckpoint) -> CheckpointRecord:
        """What is recorded of a checkpoint; nothing that varies by where it lies."""
        dtypes = (checkpoint.module_dtype, checkpoint.master_dtype)
        module_dtype, master_dtype = (dtype.torch_name if dtype else None for dtype in dtypes)
        return cls(
            tag=checkpoint.location.tag,
            layout=checkpoint.layout,
            stage=checkpoint.stage,
            world_size=checkpoint.world_size,
            global_steps=checkpoint.global_steps,
            deepspeed_version=checkpoint.ds_version,
            module_dtype=module_dtype,
            master_dtype=master_dtype,
            warnings=checkpoint.warnings,
        )


@dataclass(frozen=True, slots=True)
class Provenance:
    """What an export was made of.

    Attributes:
        checkpoint: the checkpoint that was exported.
        options: the options that decide what is written.
        loadable: whether transformers loads the folder with no missing and no unexpected key; false
            also where that is not known.
        tied: name that is not written, to the written name that the model ties it to.
        from_base: weights that the base model filled in.
        heads: weights that the model's class does not know, in files of their own.
        mended: what config.json stated otherwise than the weights have it, and was mended, in
            words.
        accounting: where every element of the flat partitions went, and of trained weights that
            lie elsewhere; an export whose sum is not exact is refused.
    """

    checkpoint: CheckpointRecord
    options: RecordedOptions
    loadable: bool
    tied: Mapping[str, str]
    from_base: tuple[str, ...]
    heads: tuple[str, ...]
    mended: tuple[str, ...]
    accounting: Accounting
