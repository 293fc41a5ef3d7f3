"""A plain PEFT folder: ``adapter_model.safetensors`` with ``adapter_config.json``.

Source: peft 0.21, ``utils/save_and_load.py`` (``get_peft_model_state_dict`` removes the adapter's
name from every tensor name).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zexport.checkpoint.boxes import Bound
from zexport.checkpoint.state import (
    MASTER,
    Cell,
    CheckpointFile,
    FileKind,
    Parameter,
    Role,
    TrainingState,
    stored_tensors,
)
from zexport.filenames import ADAPTER_CONFIG, ADAPTER_FILE
from zexport.formats.safetensors import read_header
from zexport.storage.files import is_file
from zexport.storage.json import read_json_object, several
from zexport.storage.symlink_policy import Boundary

if TYPE_CHECKING:
    from zexport.checkpoint.resolve import Location

PREFIX = "base_model.model."
_COPY = "modules_to_save"
_OF_LORA = re.compile(r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?=\.(?:weight|bias)$|$)")


def holds_adapter(folder: Path) -> bool:
    return is_file(folder / ADAPTER_CONFIG) and is_file(folder / ADAPTER_FILE)


def no_step(folder: Path, boundary: Boundary) -> None:
    """Return nothing: an adapter does not record its step."""


def read_adapter(locations: Sequence[Location]) -> TrainingState:
    """Return the adapter's tensors under their names in training."""
    location, folder = locations[0], locations[0].tag_dir
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        location.boundary.check(folder / name)
    header = read_header(folder / ADAPTER_FILE)
    config = read_json_object(folder / ADAPTER_CONFIG)
    saved = [one for one in several(config.get(_COPY)) if isinstance(one, str)]
    parameters = {}
    for on_disk, tensor in header.tensors.items():
        name = with_adapter_name(on_disk, saved)
        stored = {MASTER: Bound(tensor.dtype, header.source(on_disk))}
        parameters[name] = Parameter(name, tensor.shape, Role.TRAINABLE, stored)
    whole, nbytes = Cell(parameters), header.version.nbytes
    file = CheckpointFile(header.path, FileKind.ADAPTER, 0, nbytes, needed=True, unknown_globals=())
    return TrainingState(
        location=location,
        layout="PEFT adapter",
        whole=whole,
        tensors=stored_tensors(whole),
        files=(file,),
        torch_files=(header,),  # type: ignore[arg-type] # only its records are used
    )


def with_adapter_name(name: str, saved_modules: Sequence[str] = ()) -> str:
    """Return the name in training of a tensor that PEFT saved: with the adapter ``default``."""
    if not name.startswith(PREFIX):
        return name
    if match := _OF_LORA.search(name):
        rest = name[match.end() :] or (".weight" if name.endswith("_vector") else "")
        return f"{name[: match.end()]}.default{rest}"
    for module in saved_modules:
        at = f".{name}".rfind(f".{module}.")
        if at >= 0:
            end = at + len(module)
            return f"{name[:end]}.{_COPY}.default{name[end:]}"
    return name
