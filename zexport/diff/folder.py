"""The weights of one model folder: which tensors there are, where they lie, and which are tied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.resolve import is_tag_dir, list_run_checkpoints, list_tags
from zexport.checkpoint.state import StoredTensor
from zexport.errors import CheckpointError, DamagedCheckpointError
from zexport.export.base_model import frozen_in, weights_file
from zexport.export.plan import SourceFile
from zexport.filenames import ADAPTER_FILE, MANIFEST_NAME
from zexport.formats.safetensors import read_header, read_index
from zexport.model.config import ConfigFile
from zexport.model.names import Fit
from zexport.model.names_client import Learner, NamesClient
from zexport.storage.contents import read_json_object
from zexport.storage.files import children, exists, is_file, is_folder, matching
from zexport.storage.json import as_table
from zexport.storage.locks import check_finished
from zexport.storage.os_errors import reading
from zexport.text import shell_word

_INDEX_PATTERN = "*.safetensors.index.json"
_WEIGHTS_PATTERN = "*.safetensors"
_TORCH_PATTERN = "pytorch_model.bin*"
_FETCH_AGAIN = "Fetch the folder again"
_NO_WEIGHTS_HINT = (
    "Name a folder with model.safetensors or its index, or one safetensors file; "
    "zexport verify --against compares with a checkpoint"
)


class ModelWeights(Struct, frozen=True):
    """The tensors of a folder, or of the one file that was named, and the files that hold them."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    files: tuple[SourceFile, ...]

    @property
    def is_adapter(self) -> bool:
        """Whether these are a peft adapter's weights alone, which have names of their own."""
        return bool(self.files) and all(file.path.name == ADAPTER_FILE for file in self.files)

    @property
    def is_hollow(self) -> bool:
        """Whether these are, some of them at least, the empty placeholders that ZeRO-3 leaves."""
        return any(placed.shape == (0,) for placed in self.tensors.values())

    @property
    def words(self) -> str:
        """The files that hold them: one by its name, several by their number."""
        names = [file.path.name for file in self.files]
        return names[0] if len(names) == 1 else f"{len(names):,} safetensors files"

    def learn_ties(self) -> Mapping[str, str]:
        """Alias to source, from the manifest, else from the model class that the config names.

        The latter asks transformers, in a process of its own, and is remembered from then on.
        Nothing is known of a single file.
        """
        manifest, config = self.path / MANIFEST_NAME, self.path / "config.json"
        if is_file(manifest) and (tied := as_table(read_json_object(manifest).get("tied"))):
            return {alias: str(source) for alias, source in tied.items()}
        if not is_file(config):
            return {}
        content = ConfigFile(config, read_json_object(config))
        shapes = {name: placed.shape for name, placed in self.tensors.items()}
        fit = Learner(None, NamesClient(are_needed=False)).fit(content, shapes)
        return fit.names.tied if isinstance(fit, Fit) else {}


def has_rank_files(path: Path) -> bool:
    """Whether a folder is a checkpoint's: a tag folder, or one with tags right below it."""
    with reading(path):
        return is_folder(path) and (is_tag_dir(path) or bool(list_tags(path)))


def open_weights(path: Path) -> ModelWeights:
    """What a model folder, or one safetensors file, holds; headers and an index alone are read."""
    with reading(path, hint="Check its permissions, and that nothing is writing there"):
        check_finished(path, CheckpointError)
        return _open_weights(path)


def _open_weights(path: Path) -> ModelWeights:
    tensors: dict[str, StoredTensor] = {}
    files = []
    listed = _weight_files(path)
    for file, wanted in listed.items():
        header = read_header(file)
        if missing := wanted - header.tensors.keys():
            raise DamagedCheckpointError(
                f"lacks tensor {min(missing)!r}, which the index places there",
                path=file,
                hint=_FETCH_AGAIN,
            )
        if twice := header.tensors.keys() & tensors.keys():
            raise DamagedCheckpointError(
                f"holds tensor {min(twice)!r}, which another file beside it holds too",
                path=file,
                hint="Name one of the files",
            )
        tensors |= {name: frozen_in(header, name) for name in header.tensors}
        files.append(SourceFile(file, header.version, ()))
    return ModelWeights(path, tensors, tuple(files))


def _weight_files(path: Path) -> dict[Path, set[str]]:
    """The files that hold the weights, and the names that an index promises of each."""
    if is_file(path) and path.match(_INDEX_PATTERN):
        if not (listed := read_index(path, _FETCH_AGAIN)):
            raise DamagedCheckpointError(
                "is an index without weight_map", path=path, hint=_FETCH_AGAIN
            )
        return listed
    if is_file(path):
        return {path: set()}
    if weights := weights_file(path):
        return _weight_files(weights)
    if others := matching(path, _TORCH_PATTERN):
        raise CheckpointError(
            f"holds {others[0].name}, which transformers would load and zexport diff does not read",
            path=path,
            hint="Load it with transformers, and compare what save_pretrained writes of it",
        )
    indexes = matching(path, _INDEX_PATTERN)
    if len(indexes) == 1:
        return _weight_files(indexes[0])
    files = matching(path, _WEIGHTS_PATTERN)
    if not files:
        raise CheckpointError(_lack(path), path=path, hint=_instead(path))
    return {file: set() for file in files}


def _instead(path: Path) -> str:
    """What may be meant by a path without weights."""
    if has_rank_files(path):
        return (
            "It is a checkpoint, which is compared with another one; zexport verify MODEL "
            f"--against {shell_word(path)} compares an export with it"
        )
    if is_folder(path) and (runs := list_run_checkpoints(path)):
        return f"Give one of its checkpoints, for example {shell_word(path / runs[-1])}"
    return _NO_WEIGHTS_HINT


def _lack(path: Path) -> str:
    if is_folder(path):
        children(path)  # which says so where the folder may not be read
        return "holds no safetensors weights"
    return "is neither a folder nor a regular file" if exists(path) else "does not exist"
