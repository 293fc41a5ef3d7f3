"""What the run's folder holds beside the checkpoints, and when it may be begun."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zexport.errors import OutputError
from zexport.train.files import open_like_config, write_atomically
from zexport.train.options import OPTIONS_FILE, TrainOptions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from zexport.train.gathered_model import AdapterWriter, ModelWriter

SOURCE_FILE = "zexport_source.json"
"""The sidecar that tells an export the hub names (see ``source``)."""


def check_free(out: Path) -> None:
    """Refuse a folder in which something lies already."""
    if out.exists() and not out.is_dir():
        raise OutputError("is not a folder", path=out)
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(
            "is not empty",
            path=out,
            hint="Continue the run in it with --resume, or name another folder",
        )


def claim_folder(options: TrainOptions, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """OUT exists and is ours, with the base model of an adapter that has no other home.

    That one is saved in ``dtype``, rounded as DeepSpeed will round it.

    Called on rank 0, before an adapter changes the model's names.
    """
    from zexport.train.gathered_model import meta_twin  # noqa: PLC0415 - the command reads this module too

    out = options.out
    if options.resume:
        return
    try:
        check_free(out)
        out.mkdir(parents=True, exist_ok=True)
        if options.lora and options.model is None:
            rounded = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
            meta_twin(model, dtype).save_pretrained(options.base, state_dict=rounded)
            open_like_config(options.base)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror}", path=out) from error


def describe_run(
    options: TrainOptions,
    model: PreTrainedModel,
    writer: ModelWriter | AdapterWriter,
    source: str,
) -> None:
    """Configuration, tokenizer, sidecar and options lie in OUT. Called on rank 0."""
    out = options.out
    try:
        model.config.save_pretrained(out)
        if model.can_generate():
            model.generation_config.save_pretrained(out)
        writer.tokenizer.save_pretrained(out)
        writer.write_config(out)
        write_atomically(out / SOURCE_FILE, source)
        # The folder may be moved and resumed elsewhere: its own place is not part of the options.
        write_atomically(out / OPTIONS_FILE, replace(options, out=Path()).to_json())
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path=out) from error
