"""Names of files next to weights."""

from __future__ import annotations

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
README = "README.md"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
SOURCE_SIDECAR = "zexport_source.json"
WEIGHTS_IN_ORDER = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""``from_pretrained`` loads the first that exists.

Source: transformers 5.23, ``modeling_utils.py`` (``_get_resolved_checkpoint_files``).
"""
MANIFEST_NAME = "zexport_manifest.json"
"""Marks a complete export: it is written last."""
RECEIPTS = ".zexport_journal"
"""Folder of the journal in a staging folder."""
