"""The model card: what the weights are and where they come from, with no invented number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.model.origin import find_origin
from zexport.model.sidecars import Sidecars
from zexport.printable import printable
from zexport.ranges.dtypes import DType
from zexport.version import __version__

_TASKS = (
    ("ForCausalLM", "text-generation"),
    ("ForMaskedLM", "fill-mask"),
    ("ForSequenceClassification", "text-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForMultipleChoice", "multiple-choice"),
    ("ForImageClassification", "image-classification"),
    ("ForObjectDetection", "object-detection"),
    ("ForAudioClassification", "audio-classification"),
    ("ForCTC", "automatic-speech-recognition"),
    ("ForSpeechSeq2Seq", "automatic-speech-recognition"),
)
"""Endings of class names that stand for one task of the hub and no other."""


def model_card(
    checkpoint: ZeroCheckpoint,
    dtype: DType,
    sidecars: Sidecars,
    architecture: str | None = None,
    apart: Mapping[str, Sequence[str]] | None = None,
) -> bytes:
    """The content of ``README.md``, with metadata as the hub takes them.

    Args:
        checkpoint: where the weights come from.
        dtype: what they were written as.
        sidecars: what lies around them; tells the base model and its licence, if anything does.
        architecture: the model class, where the config does not name it.
        apart: file to the names of weights in it that the class does not know.
    """
    named = sidecars.config.architectures if sidecars.config is not None else ()
    architecture = next(iter(named), architecture)
    step = "" if checkpoint.global_steps is None else f" after {checkpoint.global_steps} steps"
    lines = [
        "---",
        _metadata(sidecars, architecture),
        "---",
        "",
        f"# {_inline(architecture or 'Model')} from a DeepSpeed checkpoint",
        "",
        f"The weights are those of the {checkpoint.layout} checkpoint "
        f"`{_inline(checkpoint.location.tag)}`,",
        f"written by {checkpoint.world_size} ranks of DeepSpeed "
        f"{_inline(str(checkpoint.ds_version))}{step} and",
        f"consolidated to {dtype.torch_name} by zexport {__version__}. "
        "`zexport_manifest.json` has a digest of every tensor;",
        "`zexport verify .` checks them.",
        "",
    ]
    for file, names in (apart or {}).items():
        lines += [
            f"`{file}` holds what {_inline(architecture or 'the model')} does not "
            "know and `from_pretrained` does not read:",
            ", ".join(f"`{_inline(name)}`" for name in names) + ".",
            "",
        ]
    return "\n".join(lines).encode(errors="backslashreplace")


def _metadata(sidecars: Sidecars, architecture: str | None) -> str:
    from huggingface_hub import ModelCardData  # noqa: PLC0415 - only an export needs it

    origin = find_origin(sidecars)
    is_encoder = "modules.json" in sidecars.copied
    data = ModelCardData(
        base_model=origin.base_model,
        library_name="sentence-transformers" if is_encoder else "transformers",
        pipeline_tag="sentence-similarity" if is_encoder else _task(architecture or ""),
        tags=["zexport", "deepspeed"],
        license=origin.license,
        license_name=origin.license_name,
        license_link=origin.license_link,
    )
    return str(data.to_yaml()).strip()


def _task(architecture: str) -> str | None:
    return next((task for ending, task in _TASKS if architecture.endswith(ending)), None)


def _inline(text: str) -> str:
    """Text of a checkpoint as Markdown shows it: no markup, no line of its own."""
    return printable(text).translate(str.maketrans("`<>[]", "'()()"))
