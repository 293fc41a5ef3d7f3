"""The adapters of a peft model: which there are, of what kind, and whether their base is there."""

from __future__ import annotations

from msgspec import Struct

from zexport.adapters.find import adapter_folders, adapters_in, is_peft
from zexport.adapters.peft_format import AdapterConfig, find_adapter_config, read_name
from zexport.checkpoint.contents import Role, ZeroCheckpoint
from zexport.errors import UnsafeError, ZexportError
from zexport.options import ExportOptions
from zexport.weights.named import Weights


class AdapterSummary(Struct, frozen=True):
    """One adapter.

    Attributes:
        name: its name in the module.
        config: its ``adapter_config.json``, if one lies with the checkpoint.
        tensors: how many tensors are its own.
        has_base: whether the checkpoint holds weights of its base model too.
    """

    name: str
    config: AdapterConfig | None
    tensors: int
    has_base: bool


def summarize_adapters(checkpoint: ZeroCheckpoint) -> tuple[AdapterSummary, ...]:
    """The adapters of a checkpoint; none where it is no peft model's."""
    options = ExportOptions()
    stored, folders = Weights.of(checkpoint), adapter_folders(checkpoint, options)
    if not is_peft(stored, folders):
        return ()
    parts = [read_name(tensor.name) for tensor in checkpoint.tensors]
    frozen = {t.name for t in checkpoint.of_role(Role.FROZEN) if t.source is not None}
    has_base = any(not read_name(name).adapter for name in frozen)
    summaries = []
    for name in adapters_in(stored):
        try:
            config = find_adapter_config(name, folders, checkpoint.location.boundary)
        except UnsafeError:
            raise
        except ZexportError:
            config = None
        count = sum(part.adapter == name for part in parts)
        summaries.append(AdapterSummary(name, config, count, has_base))
    return tuple(summaries)
