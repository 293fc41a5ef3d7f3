"""The files around the weights: which make up a kind, and in which folder each kind is found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field

from zexport.errors import DamagedCheckpointError, NotACheckpointError, ZexportError
from zexport.filenames import (
    ADDED,
    CONFIG,
    GENERATION_CONFIG,
    PROCESSOR_CONFIG,
    README,
    SOURCE_SIDECAR,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from zexport.model.config import ConfigFile
from zexport.model.custom_code import code_files
from zexport.store.boundary import Boundary
from zexport.store.contents import is_json, read_json_list, read_json_object, read_range
from zexport.store.files import version
from zexport.store.folders import children, is_file, is_folder, matching, real
from zexport.store.json import Json

_CARD_NBYTES_MAX = 64 << 10
_COPIED_NBYTES_MAX = 1 << 30
_OWN_FOLDERS = Boundary(())

THE_CHECKPOINT, ABOVE, BASE = "the checkpoint", "the folder above", "--base"
"""The folders that files are looked for in, as messages name them."""

Files = Mapping[str, Path]
"""Files by name."""

_Files = dict[str, Path]

_VOCABULARIES = (
    TOKENIZER,
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
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    ADDED,
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
PROCESSOR = (
    PROCESSOR_CONFIG,
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
)
MODULES = "modules.json"
SENTENCE_CONFIGS = (
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_NAMING_CODE = (TOKENIZER_CONFIG, *PROCESSOR)
_STATING = (
    *(CONFIG, GENERATION_CONFIG, README),
    *(*_VOCABULARIES, *_TOKENIZER_MORE, *PROCESSOR, *CHAT_TEMPLATES),
    *(MODULES, *SENTENCE_CONFIGS),
)
"""Files that state facts of a model, wherever in a run they lie."""

_LICENSE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([-_.][\w.-]+)?", re.IGNORECASE)
_LICENSES_MAX = 16

_MODULES_MAX = 64
_SENTENCE_CONFIG = re.compile(r"sentence_[\w-]+_config\.json")


class Sidecars(Struct, frozen=True):
    """What was found around the weights.

    ``source`` is the sidecar that `zexport train` writes, ``copied`` all other files by their name
    in the output, and ``missing`` what is nowhere, in words. ``folders`` are the folders that were
    looked through, with those of their files that state something of a model, ``nodes`` those that
    hold other nodes' parts of the checkpoint, and ``above`` is the one that it lies in.
    """

    config: ConfigFile | None
    source: Mapping[str, Json] | None
    copied: Files
    missing: tuple[str, ...]
    base: Path | None
    base_card: str = ""
    base_config: ConfigFile | None = None
    run_configs: Mapping[str, ConfigFile] = field(default_factory=dict)
    folders: Mapping[str, Files] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    above: Path | None = None

    @property
    def files(self) -> Files:
        """The config and all that is copied, by name."""
        return {**self.copied, **({} if self.config is None else {CONFIG: self.config.path})}

    @property
    def files_above(self) -> list[str]:
        """Names of the files that the folder above the checkpoint gives."""
        return sorted(name for name, path in self.files.items() if path.parent == self.above)


def find_sidecars(
    root: Path,
    base: Path | None = None,
    boundary: Boundary = _OWN_FOLDERS,
    parts: Iterable[tuple[Path, Boundary]] = (),
    before: Path | None = None,
) -> Sidecars:
    """The files that belong to the checkpoint in ``root``.

    Each kind comes whole from the first folder that has it: ``root``, those of ``parts``, in which
    nodes kept the rest of the checkpoint, its parent (the Hugging Face Trainer's ``output_dir``),
    ``base``. A model card is kept where it lies in the checkpoint itself, and licences are its own,
    else those of ``base``: what lies above a checkpoint may be about anything. A link leads to
    somewhere in the folder that it lies in, or within its boundary. ``before`` is the checkpoint
    before it in its run: what it has is compared, and nothing of it taken.
    """
    given, nodes = _given(base), dict(parts)
    own = {root: boundary.including(root), **nodes}
    other = {folder: boundary.including(folder) for folder in (*given, root.parent)}
    within = {**own, **{folder: one for folder, one in other.items() if folder not in own}}
    folders = [*own, root.parent, *given]
    config = _find_config(root, {folder: within[folder] for folder in folders})
    tokenizer = tokenizer_files(folders)
    copied = _taken([*own], folders, given, config) | tokenizer
    _check(copied.values(), within)
    code = [name for name in copied if name.endswith(".py")]
    run = {ABOVE: (root.parent, boundary.including(root.parent))}
    run |= {f"folder {n} of the checkpoint": one for n, one in enumerate(nodes.items(), start=2)}
    stating = {by: _stating(*one, code) for by, one in run.items()}
    run_configs = dict(_configs(root, run, stating))
    if before is not None:
        seen, configs = _of_before(root, before, boundary, code)
        stating, run_configs = stating | seen, run_configs | configs
    source = root / SOURCE_SIDECAR
    boundary.including(root).check(source)
    return Sidecars(
        config,
        read_json_object(source) if is_file(source) else None,
        copied,
        tuple(_missing(config, tokenizer, copied)),
        base=None if base is None else real(base),
        base_card="" if base is None else read_card(base),
        base_config=_find_config(root, {folder: within[folder] for folder in given}),
        run_configs=run_configs,
        folders={
            THE_CHECKPOINT: _stating(root, boundary.including(root), code),
            **stating,
            BASE: {} if base is None else _stating(base, boundary.including(base), code),
        },
        nodes=tuple(by for by in run if by != ABOVE),
        above=root.parent,
    )


def _taken(
    own: Sequence[Path],
    folders: Sequence[Path],
    given: Sequence[Path],
    config: ConfigFile | None,
) -> _Files:
    """What comes with a config and a tokenizer, each kind whole from one folder."""
    copied = _first_of(_present(folder, (README,)) for folder in own)
    copied |= _first_of(_present(folder, (GENERATION_CONFIG,)) for folder in folders)
    copied |= _first_of(_license_files(folder) for folder in (*own, *given))
    copied |= _first_of(_sentence_transformers_files(folder) for folder in folders)
    if config is not None:
        around = [config.path.parent, *folders]
        copied |= _first_of(code_files(folder, config.content) for folder in around)
    return copied | _kind(_first_with(folders, PROCESSOR), PROCESSOR)


def _given(base: Path | None) -> list[Path]:
    """The base, where one was given."""
    if base is not None and not is_folder(base):
        raise NotACheckpointError(
            "is no folder",
            path=base,
            hint="Give --base a model folder, or the name of a model in the hub's cache",
        )
    return [] if base is None else [base]


def _configs(
    root: Path, run: Mapping[str, tuple[Path, Boundary]], stating: Mapping[str, Files]
) -> Iterator[tuple[str, ConfigFile]]:
    """The configs in the other folders of a run."""
    for by, (folder, within) in run.items():
        config = _find_config(root, {folder: within} if CONFIG in stating[by] else {})
        if config is not None:
            yield by, config


def _of_before(
    root: Path, before: Path, boundary: Boundary, code: Iterable[str]
) -> tuple[dict[str, Files], dict[str, ConfigFile]]:
    """What states facts in the checkpoint before this one; nothing where it cannot be read.

    It is compared and no more, and its run may be removing it at this moment.
    """
    run = {before.name: (before, boundary.including(root.parent))}
    with suppress(ZexportError, OSError):
        stating = {before.name: _stating(*run[before.name], code)}
        return stating, dict(_configs(root, run, stating))
    return {}, {}


def _missing(
    config: ConfigFile | None, tokenizer: _Files, copied: Mapping[str, Path]
) -> Iterator[str]:
    """What a model needs beside its weights and is nowhere, in words."""
    if config is None:
        yield CONFIG
    if not tokenizer:
        yield "a tokenizer"
    sees = config is not None and {"vision_config", "audio_config"} & config.content.keys()
    if sees and not copied.keys() & {*PROCESSOR}:
        yield "a processor"


def stating_files(folder: Path) -> Files:
    """The files that state facts in a model's folder."""
    return _stating(folder, Boundary.of(folder), ())


def _stating(folder: Path, within: Boundary, code: Iterable[str]) -> Files:
    """The files that state facts in a folder; links that lead elsewhere state nothing."""
    templates = (str(path.relative_to(folder)) for path in matching(folder, MORE_TEMPLATES))
    found = _present(folder, (*_STATING, *code, *templates))
    return {name: path for name, path in found.items() if within.holds(path)}


def read_card(folder: Path) -> str:
    """The metadata of a folder's model card: the lines between its first two ``---``."""
    path = folder / README
    if not is_file(path):
        return ""
    text = read_range(path, 0, _CARD_NBYTES_MAX).decode(errors="replace")
    first, *lines = text.lstrip("\ufeff").split("\n")
    bounds = (number for number, line in enumerate(lines) if line.rstrip() == "---")
    end = next(bounds, None) if first.rstrip() == "---" else None
    return "" if end is None else "\n".join(lines[:end])


def _check(paths: Iterable[Path], folders: Mapping[Path, Boundary]) -> None:
    """Refuse a file that is too large, or leads out of the first of the folders it lies in."""
    for path in paths:
        next(one for folder, one in folders.items() if path.is_relative_to(folder)).check(path)
        if (nbytes := version(path).nbytes) > _COPIED_NBYTES_MAX:
            raise DamagedCheckpointError(
                "is too large for a file of its kind",
                path=path,
                found=f"{nbytes} bytes",
                expected=f"{_COPIED_NBYTES_MAX} or fewer",
                hint="Mend or remove the file",
            )


def _find_config(root: Path, folders: Mapping[Path, Boundary]) -> ConfigFile | None:
    """The first config; an unreadable one above the checkpoint counts as none: it may be any."""
    for folder, within in folders.items():
        path = folder / CONFIG
        if is_file(path):
            within.check(path)
            try:
                content = read_json_object(path)
            except DamagedCheckpointError:
                if folder != root.parent:
                    raise
                continue
            if "model_type" in content or "architectures" in content:
                return ConfigFile(path, content)
    return None


def tokenizer_files(folders: Sequence[Path]) -> _Files:
    """The tokenizer of the first folder that has one, with its chat templates and own code.

    A folder with a vocabulary comes before one that has only ``tokenizer_config.json``, which is
    all there is to tokenizers that work on bytes, but elsewhere may be what a save left behind.
    """
    folder = _first_with(folders, _VOCABULARIES) or _first_with(folders, _TOKENIZER_MORE[:1])
    return _kind(folder, (*_VOCABULARIES, *_TOKENIZER_MORE), "*.tiktoken")


def _first_with(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    return next((f for f in folders if any(is_file(f / name) for name in names)), None)


def _kind(folder: Path | None, names: Sequence[str], *patterns: str) -> _Files:
    """Those of the files that a folder has, with chat templates and the code that configs name.

    A config that is no JSON object names none: it is copied as it is.
    """
    if folder is None:
        return {}
    code: _Files = {}
    for path in _present(folder, [name for name in names if name in _NAMING_CODE]).values():
        try:
            content = read_json_object(path)
        except DamagedCheckpointError:
            continue
        code |= code_files(folder, content)
    for pattern in (MORE_TEMPLATES, *patterns):
        names = (*names, *(str(path.relative_to(folder)) for path in matching(folder, pattern)))
    return _present(folder, (*names, *CHAT_TEMPLATES)) | code


def _sentence_transformers_files(folder: Path) -> _Files:
    """What makes an encoder of the model, where a folder has it: pooling and the like.

    ``modules.json`` names the folders of the steps, of which the configs are copied; a step's
    weights, where it has any, are the checkpoint's concern. Source: sentence-transformers 5.1,
    ``SentenceTransformer._load_sbert_model``.
    """
    try:
        content = read_json_list(folder / MODULES) if is_file(folder / MODULES) else []
    except DamagedCheckpointError:
        return {}
    steps = [step for step in content if isinstance(step, dict) and "type" in step]
    if not steps or len(steps) < len(content) or len(steps) > _MODULES_MAX:
        return {}
    names = [MODULES, "config_sentence_transformers.json"]
    names += [path.name for path in children(folder) if _SENTENCE_CONFIG.fullmatch(path.name)]
    inner = [path for step in steps if isinstance(path := step.get("path"), str)]
    names += [f"{path}/config.json" for path in inner if re.fullmatch(r"\w[\w.-]*", path)]
    return _present(folder, names)


def states_model(name: str) -> bool:
    """Whether a file says something of how a model works, as cards and licences do not."""
    return name != README and _LICENSE.fullmatch(name) is None


def _license_files(folder: Path) -> _Files:
    """The licence, notices and terms of use that lie in a folder."""
    names = [path.name for path in children(folder) if _LICENSE.fullmatch(path.name)]
    return dict([*_present(folder, names).items()][:_LICENSES_MAX])


def _first_of(found: Iterable[_Files]) -> _Files:
    return next(filter(None, found), {})


def _present(folder: Path, names: Iterable[str]) -> _Files:
    """Those of the files that a folder has, by name."""
    return {name: folder / name for name in names if is_file(folder / name)}


def spoilt_files(copied: Mapping[str, Path]) -> list[str]:
    """Names of JSON files that no program will read: cut short, or something else."""
    named = sorted(copied.items())
    return [name for name, path in named if path.suffix == ".json" and not is_json(path)]
