"""The model card: what the weights are and where they are from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zexport import __version__
from zexport.checkpoint.resolve import Kind
from zexport.checkpoint.state import TrainingState
from zexport.model.hf_files import HfFiles
from zexport.model.hub_cache import hub_id_of, is_hub_id
from zexport.ranges.dtypes import DType
from zexport.storage.files import read_range
from zexport.text import placeless, printable

_TAGS = ("zexport", "deepspeed")
_UNFILLED, _CARD_NBYTES = b"[More Information Needed]", 1 << 16
"""What peft writes in a card for the user to fill in (peft 0.21, ``peft_model.py``)."""

_TASKS = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}
"""Endings of class names, and the task of the Hub that they are for."""

_ORIGINS = {
    Kind.ZERO: "a DeepSpeed checkpoint",
    Kind.FSDP: "an FSDP checkpoint",
    Kind.ADAPTER: "a PEFT adapter",
}
_LICENSE = re.compile(r"[a-z][a-z0-9.-]{2,63}")


def model_card(
    checkpoint: TrainingState,
    dtype: DType,
    files: HfFiles,
    *,
    architecture: str | None = None,
    apart: Mapping[str, Sequence[str]] | None = None,
    origin: Sequence[str] = (),
    trained_on: str = "",
    is_adapter: bool = False,
) -> bytes:
    """Return the content of ``README.md``, with metadata for the Hub.

    Args:
        apart: file to weights in it that the model's class does not have.
        origin: paragraphs about what is not from training, and about accepted findings.
        trained_on: the base model, as an adapter names it.
    """
    steps, ranks, version = checkpoint.global_steps, checkpoint.ranks, checkpoint.ds_version
    location = checkpoint.location
    program = "DeepSpeed" if location.is_zero else location.framework.value
    step = "" if steps is None else f" after {steps - checkpoint.skipped_steps} steps"
    by = "" if ranks is None else f"{ranks} rank{'s' * (ranks != 1)} of "
    layout = f"{checkpoint.layout.removesuffix('checkpoint')} checkpoint".strip().replace("  ", " ")
    name, tag = _inline(checkpoint.location.name), _inline(checkpoint.location.tag)
    where = f"`{name}`" if name.endswith(tag) else f"`{name}` (tag `{tag}`)"
    title = "Adapter" if is_adapter else _inline(architecture or "Model")
    lines = [
        "---",
        *_metadata(files, architecture, trained_on, is_adapter=is_adapter),
        "---",
        "",
        f"# {title} from {_ORIGINS[checkpoint.location.kind]}",
        "",
        f"The weights are from the {layout} {where},",
        f"written by {by}{program}{f' {_inline(version)}' if version else ''}{step} and",
        f"consolidated to {dtype.torch_name} by zexport {__version__}. "
        "`zexport_manifest.json` has a digest of every tensor;",
        "`zexport verify .` checks them.",
        "",
    ]
    lines += [line for paragraph in origin for line in (_inline(paragraph), "")]
    for file, names in (apart or {}).items():
        model = _inline(architecture or "the model")
        lines += [
            f"`{file}` holds weights that {model} does not have and `from_pretrained` ignores:",
            ", ".join(f"`{_inline(name)}`" for name in names) + ".",
            "",
        ]
    return "\n".join(lines).encode(errors="backslashreplace")


def is_unfilled(path: Path) -> bool:
    return _UNFILLED in read_range(path, 0, _CARD_NBYTES)


def paragraphs_of(warnings: Sequence[str]) -> list[str]:
    """Return the paragraphs of a card about the warnings of the export."""
    listed = [f"- {placeless(one)}." for one in warnings]
    return ["Warnings of zexport during the export:", *listed] if listed else []


def _metadata(
    files: HfFiles, architecture: str | None, trained_on: str, *, is_adapter: bool
) -> list[str]:
    """Return the metadata of a card, without local paths.

    The base model is the cached ``--base``, or the one that the adapter, the config or the card of
    ``--base`` names.
    """
    is_encoder = "modules.json" in files.copied
    library = "sentence-transformers" if is_encoder else files.config and "transformers"
    own = "" if files.config is None else str(files.config.content.get("_name_or_path"))
    cached = "" if files.base is None else hub_id_of(files.base) or ""
    names = (cached, trained_on, own, _stated(files.base_card, "base_model"))
    base_model = next(filter(is_hub_id, names), None)
    task = next((t for end, t in _TASKS.items() if (architecture or "").endswith(end)), None)
    license_id = _LICENSE.fullmatch(_stated(files.base_card, "license"))
    known = {
        "base_model": base_model,
        "base_model_relation": base_model and ("adapter" if is_adapter else "finetune"),
        "library_name": "peft" if is_adapter else library,
        "license": license_id and license_id[0],
        "pipeline_tag": "sentence-similarity" if is_encoder else task,
    }
    stated = [f"{key}: {value}" for key, value in known.items() if value is not None]
    links = [
        (key, _inline(_stated(files.base_card, key))) for key in ("license_name", "license_link")
    ]
    stated += [f"{key}: '{value}'" for key, value in links if value and license_id]
    return [*stated, "tags:", *(f"- {tag}" for tag in _TAGS)]


def _inline(text: str) -> str:
    """Return text of a checkpoint without markup and line breaks."""
    return printable(text).translate(str.maketrans("`<>[]", "'()()"))


def _stated(front_matter: str, key: str) -> str:
    """Return the value of a top-level key, or the only item of its list, or an empty string."""
    found = re.search(
        rf"""^{key}:[ \t]*(?:\n[ \t]*-[ \t]+)?["']?([^"'\s#]+)["']?[ \t]*$(?!\n[ \t]*-)""",
        front_matter,
        re.MULTILINE,
    )
    return found[1] if found else ""
