"""The model card: what the weights are and where they come from, with no invented number."""

from __future__ import annotations

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.dtypes import DType
from zexport.model.sidecars import Sidecars
from zexport.version import __version__


def model_card(checkpoint: ZeroCheckpoint, dtype: DType, sidecars: Sidecars) -> bytes:
    """The content of ``README.md``."""
    from huggingface_hub import ModelCardData  # noqa: PLC0415 - only an export needs it

    config = sidecars.config
    architecture = config.architectures[0] if config is not None and config.architectures else None
    metadata = ModelCardData(library_name="transformers", tags=["zexport", "deepspeed"])
    step = "" if checkpoint.global_steps is None else f" after {checkpoint.global_steps} steps"
    lines = [
        "---",
        metadata.to_yaml().strip(),
        "---",
        "",
        f"# {architecture or 'Model'} from a DeepSpeed checkpoint",
        "",
        f"The weights are those of the {checkpoint.layout} checkpoint `{checkpoint.location.tag}`,",
        f"written by {checkpoint.world_size} ranks of DeepSpeed {checkpoint.ds_version}{step} and",
        f"consolidated to {dtype.torch_name} by zexport {__version__}. "
        "`zexport_manifest.json` has a digest of every tensor;",
        "`zexport verify .` checks them.",
        "",
    ]
    return "\n".join(lines).encode(errors="backslashreplace")
