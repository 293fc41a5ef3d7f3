"""The files around the weights: which make up a kind, and in which folder each kind is found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zexport.errors import DamagedCheckpointError, NotACheckpointError
from zexport.model.config import ConfigFile
from zexport.model.custom_code import code_files, modules_named
from zexport.store.boundary import Boundary
from zexport.store.files import read_range, version
from zexport.store.folders import children, is_file, is_folder, matching, real
from zexport.store.json import Json, JsonObject, read_json_list, read_json_object

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_README = "README.md"
_CARD_NBYTES_MAX = 64 << 10
_SOURCE_SIDECAR = "zexport_source.json"
_COPIED_NBYTES_MAX = 1 << 30
_OWN_FOLDERS = Boundary(())


Files = dict[str, Path]
"""Name in the output to the file that is copied there."""

_TOKENIZER_CONFIG = "tokenizer_config.json"
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "vocab-src.json",
    "source.spm",
    "spiece.model",
    "spm.model",
    "spm_char.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "prophetnet.tokenizer",
    "dict.txt",
    "bpe.codes",
    "tekken.json",
)
"""Files that hold a tokenizer's vocabulary; a folder with one of them has a tokenizer.

Source: transformers 5.23, every ``VOCAB_FILES_NAMES``; ``tekken.json`` is mistral-common's.
"""
_TOKENIZER_MORE = (
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "target.spm",
    "target_vocab.json",
    "vocab-tgt.json",
    "normalizer.json",
    "emoji.json",
    "byte_maps.json",
    "entity_vocab.json",
    "word_shape.json",
    "word_pronunciation.json",
)
_PROCESSOR = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
)
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_LICENSE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([-_.][\w.-]+)?", re.IGNORECASE)
_LICENSES_MAX = 16

_MODULES = "modules.json"
_MODULES_MAX = 64
_SENTENCE_CONFIG = re.compile(r"sentence_[\w-]+_config\.json")


@dataclass(frozen=True, slots=True)
class Sidecars:
    """What was found around the weights.

    Attributes:
        config: the model's config, if any.
        source: content of the sidecar that `zexport train` writes, if any.
        copied: the other files to copy, by their name in the output.
        missing: what is nowhere, in words.
        base: the folder that was given for what the checkpoint lacks, links followed.
        base_card: the metadata of its model card.
    """

    config: ConfigFile | None
    source: Mapping[str, Json] | None
    copied: Mapping[str, Path]
    missing: tuple[str, ...]
    base: Path | None
    base_card: str = ""


def find_sidecars(
    root: Path, base: Path | None = None, boundary: Boundary = _OWN_FOLDERS
) -> Sidecars:
    """The files that belong to the checkpoint in ``root``.

    Each kind comes whole from the first folder that has it: ``root``, its parent (the Hugging Face
    Trainer's ``output_dir``), ``base``. Kinds are never mixed from two folders. A model card is
    kept where it lies in ``root`` itself, and licences are those of ``root``, else of ``base``:
    what lies above a checkpoint may be about anything. A link leads to somewhere in the folder that
    it lies in, or within ``boundary``.
    """
    if base is not None and not is_folder(base):
        raise NotACheckpointError("is no folder", path=base, hint="Give --base a model folder")
    given = [] if base is None else [base]
    folders = [root, root.parent, *given]
    config = _find_config(root, folders, boundary)
    tokenizer = tokenizer_files(folders)
    copied = _first_of(_present(folder, (_GENERATION_CONFIG,)) for folder in folders)
    copied |= _sentence_transformers_files(folders)
    copied |= _first_of(_license_files(folder) for folder in (root, *given))
    copied |= _present(root, (_README,))
    if config is not None:
        copied |= _config_code([config.path.parent, *folders], config.content)
    copied |= _processor_files(folders) | tokenizer
    _check_links(copied.values(), (root, *given, root.parent), boundary)
    _check_sizes(copied)
    missing = tuple(
        word for word, found in (("config.json", config), ("a tokenizer", tokenizer)) if not found
    )
    return Sidecars(
        config,
        _read_source_sidecar(root, boundary),
        copied,
        missing,
        base=None if base is None else real(base),
        base_card="" if base is None else read_card(base),
    )


def read_card(folder: Path) -> str:
    """The metadata of a folder's model card: the lines between its first two ``---``."""
    path = folder / _README
    if not is_file(path):
        return ""
    text = read_range(path, 0, _CARD_NBYTES_MAX).decode(errors="replace")
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text.lstrip("\ufeff"), re.DOTALL)
    return found[1] if found else ""


def _first_of(found: Iterable[Files]) -> Files:
    return next(filter(None, found), {})


def _check_links(paths: Iterable[Path], folders: Sequence[Path], boundary: Boundary) -> None:
    """Refuse a file that leads out of the first of the folders that it lies in."""
    within = {folder: boundary.including(folder) for folder in folders}
    for path in paths:
        next(within[folder] for folder in folders if path.is_relative_to(folder)).check(path)


def _check_sizes(files: Files) -> None:
    for path in files.values():
        if (nbytes := version(path).nbytes) > _COPIED_NBYTES_MAX:
            raise DamagedCheckpointError(
                "is too large for a file of its kind",
                path=path,
                found=f"{nbytes} bytes",
                expected=f"{_COPIED_NBYTES_MAX} or fewer",
                hint="Mend or remove the file",
            )


def _find_config(root: Path, folders: Sequence[Path], boundary: Boundary) -> ConfigFile | None:
    for folder in folders:
        path = folder / _CONFIG
        if is_file(path):
            boundary.including(folder).check(path)
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


def _read_source_sidecar(root: Path, boundary: Boundary) -> Mapping[str, Json] | None:
    path = root / _SOURCE_SIDECAR
    boundary.including(root).check(path)
    return read_json_object(path) if is_file(path) else None


def tokenizer_files(folders: Sequence[Path]) -> Files:
    """The tokenizer of the first folder that has one, with its chat templates and own code.

    A folder with a vocabulary comes before one that has only ``tokenizer_config.json``, which is
    all there is to tokenizers that work on bytes, but elsewhere may be what a save left behind.
    """
    folder = _first_with(folders, _VOCABULARIES) or _first_with(folders, (_TOKENIZER_CONFIG,))
    if folder is None:
        return {}
    found = _present(folder, (*_VOCABULARIES, *_TOKENIZER_MORE))
    found |= {path.name: path for path in matching(folder, "*.tiktoken") if is_file(path)}
    return found | _chat_templates(folder) | _code_of(found, (_TOKENIZER_CONFIG,))


def _processor_files(folders: Sequence[Path]) -> Files:
    """The processor of the first folder that has one, with its chat template and own code.

    That is what turns images, sound or video into a model's input: processor, image processor,
    video processor, feature extractor.
    """
    folder = _first_with(folders, _PROCESSOR)
    if folder is None:
        return {}
    found = _present(folder, _PROCESSOR)
    return found | _chat_templates(folder) | _code_of(found, _PROCESSOR)


def _sentence_transformers_files(folders: Sequence[Path]) -> Files:
    """What makes an encoder of the model in the first folder that has it: pooling and the like.

    ``modules.json`` names the folders of the steps, of which the configs are copied; a step's
    weights, where it has any, are the checkpoint's concern. Source: sentence-transformers 5.1,
    ``SentenceTransformer._load_sbert_model``.
    """
    for folder in folders:
        if steps := _steps(folder):
            names = [_MODULES, "config_sentence_transformers.json"]
            names += [name for name in _names(folder) if _SENTENCE_CONFIG.fullmatch(name)]
            inner = (step.get("path") for step in steps)
            names += [f"{path}/config.json" for path in inner if _is_plain(path)]
            return _present(folder, names)
    return {}


def _steps(folder: Path) -> list[JsonObject]:
    """The entries of ``modules.json``; none where it is a file of another kind, or not there."""
    try:
        content = read_json_list(folder / _MODULES) if is_file(folder / _MODULES) else []
    except DamagedCheckpointError:
        return []
    steps = [step for step in content if isinstance(step, dict) and "type" in step]
    return steps if len(steps) == len(content) <= _MODULES_MAX else []


def _is_plain(path: Json) -> bool:
    """Whether it names a folder below; the model itself lies beside the file, in ``""``."""
    return isinstance(path, str) and re.fullmatch(r"\w[\w.-]*", path) is not None


def _license_files(folder: Path) -> Files:
    """The licence, notices and terms of use that lie in a folder."""
    names = [name for name in _names(folder) if _LICENSE.fullmatch(name)]
    return _present(folder, names[:_LICENSES_MAX])


def _config_code(folders: Sequence[Path], content: Mapping[str, Json]) -> Files:
    """The code that a config names, from the first of the folders that has any of it."""
    modules = modules_named(content)
    found = (code_files(folder, modules) for folder in folders)
    return next(filter(None, found), {}) if modules else {}


def _present(folder: Path, names: Iterable[str]) -> Files:
    """Those of the files that a folder has, by name."""
    return {name: folder / name for name in names if is_file(folder / name)}


def _first_with(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    return next((f for f in folders if any(is_file(f / name) for name in names)), None)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in children(folder) if is_file(path))


def _chat_templates(folder: Path) -> Files:
    more = matching(folder / "additional_chat_templates", "*.jinja")
    files = {str(PurePosixPath(path.parent.name, path.name)): path for path in more}
    return _present(folder, _CHAT_TEMPLATES) | {n: p for n, p in files.items() if is_file(p)}


def _code_of(found: Files, configs: Sequence[str]) -> Files:
    """The code that these configs name, from the folder that they lie in."""
    code: Files = {}
    for name in configs:
        if name in found:
            code |= code_files(found[name].parent, modules_named(_content(found[name])))
    return code


def _content(path: Path) -> JsonObject:
    """What a file says; nothing where it is no JSON object: it is copied as it is."""
    try:
        return read_json_object(path)
    except DamagedCheckpointError:
        return {}
