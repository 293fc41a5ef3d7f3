"""The Hugging Face files of a checkpoint: config, tokenizer, processor, templates, code, card.

All files of one kind come from the first folder that has any: the checkpoint, the folders of its
other nodes, the folder above (the Trainer's ``output_dir``), then ``--base``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, NotACheckpointError
from zexport.filenames import CONFIG, GENERATION_CONFIG, README, SOURCE_SIDECAR, TOKENIZER_CONFIG
from zexport.model.config import ConfigFile
from zexport.storage.files import (
    children,
    is_file,
    is_folder,
    matching,
    read_range,
    read_regular,
    real,
    same_bytes,
)
from zexport.storage.json import Json, JsonTable, as_table, read_json_object, several
from zexport.storage.symlink_policy import Boundary
from zexport.text import some

Files = Mapping[str, Path]
"""Files by their name in the output."""

_VOCABULARIES = """
    tokenizer.json tokenizer.model vocab.json vocab.txt vocab-src.json source.spm spiece.model
    spm.model spm_char.model sentencepiece.bpe.model sentencepiece.model prophetnet.tokenizer
    dict.txt bpe.codes tekken.json
"""
"""Files with a tokenizer's vocabulary; a folder with one of them has a tokenizer.

Source: transformers 5.23, every ``VOCAB_FILES_NAMES``; ``tekken.json`` is from mistral-common.
"""
_TOKENIZER_MORE = """
    tokenizer_config.json special_tokens_map.json added_tokens.json merges.txt target.spm
    target_vocab.json vocab-tgt.json normalizer.json emoji.json byte_maps.json entity_vocab.json
    word_shape.json word_pronunciation.json *.tiktoken
"""
_PROCESSOR = """
    processor_config.json preprocessor_config.json video_preprocessor_config.json
    audio_tokenizer_config.json
"""
_TEMPLATES = "chat_template.jinja chat_template.json additional_chat_templates/*.jinja"
_ENCODER = "modules.json"
_ENCODER_MORE = "config_sentence_transformers.json sentence_*_config.json [0-9]*_*/config.json"
"""What makes an encoder of a model, such as the pooling; weights of its steps are not copied.

Source: sentence-transformers 5.1, ``SentenceTransformer.save``.
"""

_LICENSE = r"(?i)(LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([-_.][\w.-]+)?"
_OF_RUN = re.compile(r"trainer_state\.json|training_args\.bin|(?:checkpoint|step|epoch)[-_]?\d+")
"""Names that only the folder of a run has."""

_RELATIVE_IMPORT = (
    rb"(?m)^[ \t]*from[ \t]*(\.+)[ \t]*([\w.]*)[ \t]*import[ \t]*(\([^)]*\)|(?:[^\n\\#;]|\\\r?\n)*)"
)
"""The dots of a relative import, its module, and what it imports."""

_FRONT_MATTER = r"(?sm)\ufeff?---[ \t\r]*\n(.*?)^---[ \t\r]*$"
_CARD_NBYTES_MAX, _SOURCE_NBYTES_MAX = 64 << 10, 4 << 20
_NO_BOUNDARY = Boundary(())


class HfFiles(Struct, frozen=True):
    """The Hugging Face files of a checkpoint.

    Attributes:
        config: the model's config.
        source: the sidecar that ``zexport train`` writes.
        copied: all other files, by their name in the output.
        missing: what no folder has, in words.
        own: the folders of the checkpoint, one for each node.
        base_card: the metadata of the base's model card.
    """

    config: ConfigFile | None
    source: JsonTable | None
    copied: Files
    missing: tuple[str, ...]
    own: tuple[Path, ...]
    base: Path | None = None
    base_config: ConfigFile | None = None
    base_card: str = ""

    @property
    def above(self) -> Path:
        return self.own[0].parent

    @property
    def files(self) -> Files:
        return {**self.copied, **({} if self.config is None else {CONFIG: self.config.path})}


def find_hf_files(
    root: Path,
    base: Path | None = None,
    boundary: Boundary = _NO_BOUNDARY,
    parts: Iterable[tuple[Path, Boundary]] = (),
) -> HfFiles:
    """Find the files of the checkpoint in ``root``.

    A model card is only taken from the checkpoint, a license from it or ``base``: the folder above
    may be about anything.

    Raises:
        UnsafeError: a link leads out of its folder and ``boundary``.
    """
    if base is not None and not is_folder(base):
        raise NotACheckpointError(
            "--base is not a folder",
            path=base,
            hint="Pass a model folder, or the Hub id of a cached model",
        )
    given = [] if base is None else [base]
    own = {root: boundary.including(root), **dict(parts)}
    folders = list(dict.fromkeys((*own, root.parent, *given)))
    within = {f: own.get(f, boundary.including(f)) for f in (*own, *given, root.parent)}
    config = _find_config(folders, within, root)
    copied = _first(_present(folder, README) for folder in own)
    copied |= _first(_present(folder, GENERATION_CONFIG) for folder in folders)
    copied |= _first(_licenses(folder) for folder in (*own, *given))
    if encoder := _first_with(folders, _ENCODER):
        copied |= _present(encoder, f"{_ENCODER} {_ENCODER_MORE}")
    if config is not None:
        copied |= _first(_code(f, config.content) for f in (config.path.parent, *folders))
    copied |= _with_code(_first_with(folders, _PROCESSOR), _PROCESSOR)
    # A tokenizer_config.json suffices for tokenizers of bytes, but may also be left over.
    place = _first_with(folders, _VOCABULARIES) or _first_with(folders, TOKENIZER_CONFIG)
    copied |= _with_code(place, _VOCABULARIES + _TOKENIZER_MORE)
    for path in copied.values():
        next(one for folder, one in within.items() if path.is_relative_to(folder)).check(path)
    source = root / SOURCE_SIDECAR
    own[root].check(source)
    sees = config is not None and {"vision_config", "audio_config"} & config.content.keys()
    lacks = {
        CONFIG: config is None,
        "a tokenizer": place is None,
        "a processor": sees and not copied.keys() & {*_PROCESSOR.split()},
    }
    return HfFiles(
        config,
        read_json_object(source) if is_file(source) else None,
        copied,
        tuple(what for what, is_missing in lacks.items() if is_missing),
        own=tuple(own),
        base=None if base is None else real(base),
        base_config=_find_config(given, within, root),
        base_card="" if base is None else _card_metadata(base / README),
    )


def notes_on(files: HfFiles) -> Iterator[str]:
    """Yield which of several files with one name are used; raise if those of nodes differ."""
    choices = []
    for name, path in files.files.items():
        for folder in (*files.own, files.above):
            other = folder / name
            if path != path.parent / name or folder == path.parent or name == README:
                continue
            if not is_file(other) or same_bytes(path, other):
                continue
            if affects_model(name) and {folder, path.parent} <= {*files.own}:
                raise DamagedCheckpointError(
                    "nodes of one checkpoint have different files of this name",
                    path=path,
                    found=f"other content in {other}",
                    hint="Keep the file that training used, and remove the others",
                )
            choices.append(f"{name} from {path.parent}, not {folder}")
    if choices:
        yield f"folders have different files of one name; the export uses {some(choices)}"


def warnings_on(files: HfFiles) -> Iterator[str]:
    """Yield warnings about missing Python files, and files that may be from another run."""
    configs = {name: _json_or_nothing(path) for name, path in _configs_of(files.copied)}
    own = {} if files.config is None else {CONFIG: files.config.content}
    for name, content in (own | configs).items():
        for module in sorted(_modules_named(content)):
            if f"{module}.py" not in files.copied:
                yield (
                    f"{name}: {module}.py is missing, so the model will not load. Copy it to the "
                    "checkpoint, or pass a model folder that has it with --base"
                )
    taken = [name for name, path in files.files.items() if path.parent == files.above]
    if not taken or is_file(files.above / CONFIG):
        return
    if not any(_OF_RUN.fullmatch(path.name) for path in children(files.above)):
        yield f"{some(taken)}: from the folder above, which may be of another run. Check the files"


def affects_model(name: str) -> bool:
    """Whether a file affects how the model works; cards and licenses do not."""
    return name != README and re.fullmatch(_LICENSE, name) is None


def _card_metadata(path: Path) -> str:
    if not is_file(path):
        return ""
    found = re.match(_FRONT_MATTER, read_range(path, 0, _CARD_NBYTES_MAX).decode(errors="replace"))
    return found[1] if found else ""


def _find_config(
    folders: Iterable[Path], within: Mapping[Path, Boundary], root: Path
) -> ConfigFile | None:
    """Return the first config; an unreadable one above the checkpoint is ignored."""
    for folder in folders:
        path = folder / CONFIG
        if is_file(path):
            within[folder].check(path)
            content = _json_or_nothing(path) if folder == root.parent else read_json_object(path)
            if "model_type" in content or "architectures" in content:
                return ConfigFile(path, content)
    return None


def _json_or_nothing(path: Path) -> JsonTable:
    try:
        return read_json_object(path)
    except DamagedCheckpointError:
        return {}


def _first(found: Iterable[dict[str, Path]]) -> dict[str, Path]:
    return next(filter(None, found), {})


def _first_with(folders: Sequence[Path], names: str) -> Path | None:
    return next((f for f in folders if any(is_file(f / name) for name in names.split())), None)


def _licenses(folder: Path) -> dict[str, Path]:
    return {
        path.name: path
        for path in children(folder)
        if re.fullmatch(_LICENSE, path.name) and is_file(path)
    }


def _present(folder: Path, patterns: str) -> dict[str, Path]:
    """Return the files of a folder whose names match a list of patterns, by name."""
    paths = [
        path
        for pattern in patterns.split()
        for path in (matching(folder, pattern) if "*" in pattern else [folder / pattern])
    ]
    return {str(path.relative_to(folder)): path for path in paths if is_file(path)}


def _with_code(folder: Path | None, patterns: str) -> dict[str, Path]:
    """Return the files of a folder with chat templates and the code that their configs name."""
    if folder is None:
        return {}
    files = _present(folder, f"{patterns} {_TEMPLATES}")
    codes = [_code(folder, _json_or_nothing(path)) for _, path in _configs_of(files)]
    return files | {name: path for code in codes for name, path in code.items()}


def _configs_of(files: Files) -> list[tuple[str, Path]]:
    """Return the tokenizer's and the processor's configs, which may name code."""
    names = (TOKENIZER_CONFIG, *_PROCESSOR.split())
    return [(name, files[name]) for name in names if name in files]


def _modules_named(content: JsonTable) -> set[str]:
    """Return the modules in its folder that a config names, in ``auto_map`` or as a pipeline.

    Source: transformers 5.23, ``dynamic_module_utils.py`` (``get_class_from_dynamic_module``): a
    reference to another repository is ``owner/name--module.Class``.
    """
    auto_map = content.get("auto_map")
    references: list[Json] = list(auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    pipelines = as_table(content.get("custom_pipelines"))
    references += [as_table(entry).get("impl") for entry in pipelines.values()]
    flat = [reference for one in references for reference in several(one)]
    modules = {r.split(".")[0] for r in flat if isinstance(r, str) and "--" not in r}
    return {module for module in modules if re.fullmatch(r"\w+", module)}


def _code(folder: Path, config: JsonTable) -> dict[str, Path]:
    """Return the modules in ``folder`` that a config names and all that they import, by name."""
    found: dict[str, Path] = {}
    waiting = sorted(f"{module}.py" for module in _modules_named(config))
    while waiting:
        name = waiting.pop()
        path = folder / name
        if name not in found and is_file(path):
            found[name] = path
            waiting += _imported(PurePosixPath(name), read_regular(path, _SOURCE_NBYTES_MAX) or b"")
    return found


def _imported(name: PurePosixPath, source: bytes) -> Iterator[str]:
    """Yield the files in the folder that a module's relative imports may mean."""
    for dots, module, taken in re.findall(_RELATIVE_IMPORT, source):
        above = len(name.parent.parts) - (len(dots) - 1)
        if above < 0:
            continue
        target = PurePosixPath(
            *name.parent.parts[:above], *filter(None, module.decode().split("."))
        )
        names = re.findall(r"\w+", taken.decode(errors="replace"), re.ASCII)
        for path in (target, *(target / one for one in names)):
            if path.parts:
                yield f"{path}.py"
            yield f"{path / '__init__.py'}"
