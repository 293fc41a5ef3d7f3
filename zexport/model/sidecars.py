"""The files around the weights: where config, tokenizer and their kin are, and what is edited."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from zexport.dtypes import DType
from zexport.errors import DamagedCheckpointError, NotACheckpointError
from zexport.jsontypes import Json, JsonObject

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_CORE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_TOKENIZER_MORE = (
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_PROCESSOR = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_SOURCE_SIDECAR = "zexport_source.json"
_JSON_NBYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A ``config.json``: where it lies and what it says."""

    path: Path
    content: Mapping[str, Json]

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model classes, as the config gives them."""
        names = self.content.get("architectures")
        return tuple(n for n in names if isinstance(n, str)) if isinstance(names, list) else ()

    def edited(self, dtype: DType, architecture: str | None = None) -> bytes:
        """The file's new content: every key as it was, but for the element type.

        ``architecture`` is written where the file names none: servers choose their code by it.
        transformers 5 writes ``dtype``, transformers 4 wrote ``torch_dtype``; the older key is
        kept up to date where it stands, and so are both in the configs of sub-models.
        """
        edited = _with_dtype(dict(self.content), dtype.torch_name)
        edited["dtype"] = dtype.torch_name
        if architecture is not None and not self.architectures:
            edited["architectures"] = [architecture]
        return _json_bytes(edited)


@dataclass(frozen=True, slots=True)
class Sidecars:
    """What was found around the weights.

    Attributes:
        config: the model's config, if any.
        source: content of the sidecar that `zexport train` writes, if any.
        copied: the other files to copy, by their name in the output.
        missing: what is nowhere, in words.
        base: the folder that was given for what the checkpoint lacks.
    """

    config: ConfigFile | None
    source: Mapping[str, Json] | None
    copied: Mapping[str, Path]
    missing: tuple[str, ...]
    base: Path | None


def find_sidecars(root: Path, base: Path | None = None) -> Sidecars:
    """The files that belong to the checkpoint in ``root``.

    Each kind comes whole from the first folder that has it: ``root``, its parent (the Hugging Face
    Trainer's ``output_dir``), ``base``. Kinds are never mixed from two folders.

    Raises:
        DamagedCheckpointError: a config or sidecar is not JSON.
        NotACheckpointError: ``base`` is no folder.
    """
    if base is not None and not base.is_dir():
        raise NotACheckpointError("is no folder", path=base, hint="Give --base a model folder")
    folders = [root, root.parent, *([base] if base is not None else [])]
    config = _find_config(root, folders)
    copied: dict[str, Path] = {}
    generation = _first(folders, (_GENERATION_CONFIG,))
    tokenizer = _first(folders, _TOKENIZER_CORE)
    processor = _first(folders, _PROCESSOR)
    if generation is not None:
        copied[_GENERATION_CONFIG] = generation / _GENERATION_CONFIG
    if tokenizer is not None:
        copied |= _present(tokenizer, (*_TOKENIZER_CORE, *_TOKENIZER_MORE))
        copied |= _chat_templates(tokenizer)
    if processor is not None:
        copied |= _present(processor, _PROCESSOR)
    if config is not None:
        copied |= _custom_code(config)
    missing = tuple(
        word
        for word, found in (("config.json", config), ("a tokenizer", tokenizer))
        if found is None
    )
    return Sidecars(config, _read_source_sidecar(root), copied, missing, base)


def _find_config(root: Path, folders: Sequence[Path]) -> ConfigFile | None:
    for folder in folders:
        path = folder / _CONFIG
        if path.is_file():
            content = _read_config(path, is_the_models=folder != root.parent)
            if "model_type" in content or "architectures" in content:
                return ConfigFile(path, content)
    return None


def _read_config(path: Path, *, is_the_models: bool) -> JsonObject:
    """What a config says; nothing for an unreadable one above the checkpoint: it may be any."""
    try:
        return read_json_object(path)
    except DamagedCheckpointError:
        if is_the_models:
            raise
        return {}


def _read_source_sidecar(root: Path) -> Mapping[str, Json] | None:
    path = root / _SOURCE_SIDECAR
    return read_json_object(path) if path.is_file() else None


def read_json_object(path: Path) -> JsonObject:
    """The JSON object in a file.

    Raises:
        DamagedCheckpointError: it is too large, not JSON, or no object.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_JSON_NBYTES_MAX + 1)
        value = json.loads(content) if len(content) <= _JSON_NBYTES_MAX else None
    except (OSError, ValueError, RecursionError) as error:
        raise _not_an_object(path, error) from error
    if not isinstance(value, dict):
        raise _not_an_object(path, f"a {type(value).__name__}")
    return cast(JsonObject, value)


def _not_an_object(path: Path, found: object) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "is not a JSON object", path=path, found=found, hint="Mend or remove the file"
    )


def _first(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    return next((f for f in folders if any((f / name).is_file() for name in names)), None)


def _present(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}


def _chat_templates(folder: Path) -> dict[str, Path]:
    templates = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {f"additional_chat_templates/{path.name}": path for path in templates}


def _custom_code(config: ConfigFile) -> dict[str, Path]:
    """The Python files that ``auto_map`` names, which are copied and never imported."""
    auto_map = config.content.get("auto_map")
    references = list(auto_map.values()) if isinstance(auto_map, dict) else []
    flat = [r for ref in references for r in (ref if isinstance(ref, list) else [ref])]
    modules = {r.split(".")[0] for r in flat if isinstance(r, str) and "--" not in r}
    names = [f"{module}.py" for module in modules if re.fullmatch(r"\w+", module)]
    return _present(config.path.parent, sorted(names))


def _json_bytes(content: JsonObject) -> bytes:
    """The file as transformers writes it; escapes that no UTF-8 can stand for stay escapes."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()


def _with_dtype(config: JsonObject, name: str) -> JsonObject:
    edited: JsonObject = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            edited[key] = name
        elif key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            edited[key] = _with_dtype(value, name)
        else:
            edited[key] = value
    return edited
