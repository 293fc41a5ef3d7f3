"""The names of files beside weights, as transformers, peft and zexport itself give them."""

from __future__ import annotations

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
README = "README.md"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
SPECIAL_TOKENS = "special_tokens_map.json"
PROCESSOR_CONFIG = "processor_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
SOURCE_SIDECAR = "zexport_source.json"
