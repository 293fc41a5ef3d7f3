"""The names of files beside weights, as transformers, peft and zexport itself give them."""

from __future__ import annotations

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
README = "README.md"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
WEIGHTS_IN_ORDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where from_pretrained looks for weights: it loads the first that is there.

Source: transformers 5.23, ``modeling_utils.py`` (``_get_resolved_checkpoint_files``).
"""
SOURCE_SIDECAR = "zexport_source.json"

MANIFEST_NAME = "zexport_manifest.json"
"""What says that a folder is an export, and which: it is written last."""

RECEIPTS = ".zexport_journal"
"""A folder within an unfinished one, which is an export's by it; never part of the finished one."""
