"""The model card: what the weights are and where they come from, with no invented number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zexport import __version__
from zexport.checkpoint.resolve import Location
from zexport.checkpoint.state import TrainingState
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.model.hub_cache import hub_id_of, is_hub_id, plain_name
from zexport.model.sidecars import Sidecars, read_card
from zexport.printable import placeless, printable
from zexport.ranges.dtypes import DType
from zexport.store.contents import read_range

_TAGS = ("zexport", "deepspeed")
_UNFILLED, _CARD_NBYTES = b"[More Information Needed]", 1 << 16
"""What peft's card says where somebody is to write (peft 0.21, ``peft_model.py``)."""

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

_PLAIN = re.compile(
    r"(?!(?:yes|no|true|false|on|off|null)$)[a-z][\w./-]*|https://\S+|[\w-]+/[\w.-]+",
    re.ASCII | re.IGNORECASE,
)
"""Words, links and names of the hub that YAML takes for strings as they are."""

_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_LICENSE_NAME = re.compile(r"\w[\w.-]{0,63}")
_LICENSE_LINK = re.compile(r"(https://[\w./%~-]{1,200}|\w[\w.-]{0,63})")


def model_card(
    checkpoint: TrainingState,
    dtype: DType,
    sidecars: Sidecars,
    architecture: str | None = None,
    apart: Mapping[str, Sequence[str]] | None = None,
    *,
    origin: Sequence[str] = (),
    trained_on: str | None = "",
    is_adapter: bool = False,
) -> bytes:
    """The content of ``README.md``, with metadata as the hub takes them.

    ``architecture`` is the class where the config has none, and ``apart`` are weights that it does
    not know, by file; ``origin`` is what came from elsewhere, or was exported all the same, in
    paragraphs. ``trained_on`` is what an adapter calls its base: empty where nothing shows that it
    is the one, ``None`` where files differ in which base it was.
    """
    named = sidecars.config.architectures if sidecars.config is not None else ()
    architecture = next(iter(named), architecture)
    steps = checkpoint.global_steps
    step = "" if steps is None else f" after {steps - checkpoint.skipped_steps} steps"
    title = "Adapter" if is_adapter else _inline(architecture or "Model")
    lines = [
        "---",
        _metadata(sidecars, architecture, trained_on, is_adapter=is_adapter),
        "---",
        "",
        f"# {title} from a DeepSpeed checkpoint",
        "",
        f"The weights are those of the {_of_layout(checkpoint)} {_inlined(checkpoint.location)},",
        f"written by {_writer(checkpoint)}{step} and",
        f"consolidated to {dtype.torch_name} by zexport {__version__}. "
        "`zexport_manifest.json` has a digest of every tensor;",
        "`zexport verify .` checks them.",
        "",
    ]
    for paragraph in origin:
        lines += [_inline(paragraph), ""]
    for file, names in (apart or {}).items():
        model = _inline(architecture or "the model")
        lines.append(
            f"`{file}` holds what {model} does not know and `from_pretrained` does not read:"
        )
        lines += [", ".join(f"`{_inline(name)}`" for name in names) + ".", ""]
    return "\n".join(lines).encode(errors="backslashreplace")


def is_unfilled(path: Path) -> bool:
    """Whether a card is peft's, which leaves everything to be filled in."""
    return _UNFILLED in read_range(path, 0, _CARD_NBYTES)


def paragraphs_of(warnings: Sequence[str]) -> list[str]:
    """What a card says of what was warned of when the export was made."""
    head = "zexport warned of this when it made the export:"
    return [head, *(f"- {placeless(one)}." for one in warnings)] if warnings else []


def card_statements(sidecars: Sidecars, named: Mapping[str, str]) -> Iterator[Statement]:
    """What the card calls the base model, and what others call it.

    ``named`` has the name of each who names it; what is no name of the hub counts for none.
    """
    path, readme = sidecars.copied.get("README.md"), "the checkpoint's README.md"
    card = read_card(path.parent) if path is not None else ""
    base = base_named(card)
    for by, name in {readme: base, **named}.items():
        yield Statement(Fact.NAMED_BASE, plain_name(name) if is_hub_id(name) else None, by)


def base_named(card: str) -> str:
    """The model that a card says its own was made of; empty where it says none."""
    return _value(card, "base_model")


def _of_layout(checkpoint: TrainingState) -> str:
    """What kind of checkpoint it is, as far as that is known."""
    return f"{checkpoint.layout.removesuffix('checkpoint')} checkpoint".strip().replace("  ", " ")


def _writer(checkpoint: TrainingState) -> str:
    """Who wrote it, as far as that is known."""
    ranks, version = checkpoint.ranks, checkpoint.ds_version
    by = "" if ranks is None else f"{ranks} rank{'s' * (ranks != 1)} of "
    return f"{by}DeepSpeed{f' {_inline(version)}' if version else ''}"


def _inlined(location: Location) -> str:
    """The checkpoint's name, and that of its tag where it says something else."""
    name, tag = f"`{_inline(location.name)}`", f"`{_inline(location.tag)}`"
    return name if location.name.endswith(location.tag) else f"{name} (tag {tag})"


def _metadata(
    sidecars: Sidecars, architecture: str | None, trained_on: str | None, *, is_adapter: bool
) -> str:
    """What the hub reads of a card; a path of some machine is never part of it.

    The base model's name is that of the base folder in the hub's cache, else what a merged adapter
    calls it, else what the config says in ``_name_or_path`` if that is a hub's name, else what the
    base folder's card says its own base is; what was trained is a finetune of it, merged or not.
    The licence is the one that the base folder's card states.
    """
    card = sidecars.base_card
    license_id = _stated(card, "license", _LICENSE_ID)
    is_encoder = "modules.json" in sidecars.copied
    is_model = sidecars.config is not None  # without, these are weights that nothing loads
    library = "sentence-transformers" if is_encoder else "transformers" if is_model else None
    names = (name for name in _names(sidecars, card, trained_on) if is_hub_id(name))
    base_model = next(names, None)
    known = {
        "base_model": base_model,
        "base_model_relation": base_model and ("adapter" if is_adapter else "finetune"),
        "library_name": "peft" if is_adapter else library,
        "license": license_id,
        "license_name": license_id and _stated(card, "license_name", _LICENSE_NAME),
        "license_link": license_id and _stated(card, "license_link", _LICENSE_LINK),
        "pipeline_tag": "sentence-similarity" if is_encoder else _task(architecture or ""),
    }
    told = {key: value for key, value in known.items() if value is not None}
    lines = [f"{key}: {_as_yaml(value)}" for key, value in told.items()]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in _TAGS)])


def _as_yaml(value: str) -> str:
    """A value without quotes in it as YAML takes it for a string."""
    return value if _PLAIN.fullmatch(value) else f"'{value}'"


def _task(architecture: str) -> str | None:
    return next((task for ending, task in _TASKS if architecture.endswith(ending)), None)


def _inline(text: str) -> str:
    """Text of a checkpoint as Markdown shows it: no markup, no line of its own."""
    return printable(text).translate(str.maketrans("`<>[]", "'()()"))


def _stated(card: str, key: str, pattern: re.Pattern[str]) -> str | None:
    value = _value(card, key)
    return value if pattern.fullmatch(value) else None


def _names(sidecars: Sidecars, card: str, trained_on: str | None) -> Iterator[str]:
    if trained_on is None:
        return
    if sidecars.base is not None and (cached := hub_id_of(sidecars.base)):
        yield cached
    yield trained_on
    if sidecars.config is not None:
        yield str(sidecars.config.content.get("_name_or_path"))
    yield _value(card, "base_model")


def _value(front_matter: str, key: str) -> str:
    """The value of a key at the top level, or the one item of its list; empty if there is none."""
    found = re.search(
        rf"""^{key}:[ \t]*(?:\n[ \t]*-[ \t]+)?["']?([^"'\s#]+)["']?[ \t]*$(?!\n[ \t]*-)""",
        front_matter,
        re.MULTILINE,
    )
    return found[1] if found else ""
