"""Files that were added to an export, by which another model would be loaded of it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

from zexport.run.manifest import MANIFEST_NAME
from zexport.store.folders import leaves

_WEIGHTS, _TOKENIZER = "other weights", "of a tokenizer"
_KINDS = {
    "adapter_config.json": "from_pretrained loads an adapter with it",
    "adapter_model.*": "the weights of an adapter",
    "chat_template*": "another chat template",
    "*.jinja": "another chat template",
    "*.py": "code",
    "*.safetensors": _WEIGHTS,
    "*model*.bin": _WEIGHTS,
    "*.gguf": _WEIGHTS,
    "*.h5": _WEIGHTS,
    "*.msgpack": _WEIGHTS,
    "*.index.json": _WEIGHTS,
    "tokenizer*": _TOKENIZER,
    "*vocab*": _TOKENIZER,
    "merges.txt": _TOKENIZER,
    "special_tokens_map.json": _TOKENIZER,
    "added_tokens.json": _TOKENIZER,
    "*config.json": "a configuration",
    "modules.json": "an encoder is made of the model with it",
}
"""What files change by their names; the first that fits."""


def added_files(out_dir: Path, listed: Container[str]) -> Iterator[str]:
    """What is to be known of files that the manifest does not list, where they change what loads.

    Safetensors files beside the export's own are told as contradictions.
    """
    for path in leaves(out_dir):
        name = path.relative_to(out_dir).as_posix()
        kind = next((kind for pattern, kind in _KINDS.items() if path.match(pattern)), "")
        if not kind or name in listed or name == MANIFEST_NAME:
            continue
        if path.parent != out_dir or path.suffix != ".safetensors":
            yield f"{name} was added to the export and changes what loads: {kind}"
