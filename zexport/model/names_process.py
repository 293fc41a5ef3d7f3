"""Asks transformers for a model's names: ``python -m zexport.model.names_process < CONFIG``.

It prints one line of JSON. The model is built on the meta device, without weights, and from classes
that transformers itself ships: code that a config names is never imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from zexport.conversion.describe import describe_model

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Tables from model type to class that are tried where a config names no architecture."""


def describe(content: dict[str, Any]) -> dict[str, Any]:
    """State dicts that a config may mean: ``{"candidates": [...]}``, or ``{"error": ...}``."""
    model_type = str(content.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        return {
            "error": f"transformers {transformers.__version__} has no model type {model_type!r}"
        }
    architectures = content.get("architectures") or _architectures_of(model_type)
    known = [name for name in architectures if hasattr(transformers, name)]
    if not known:
        named = ", ".join(map(repr, architectures)) or "any architecture for it"
        return {"error": f"transformers {transformers.__version__} does not have {named}"}
    config_class = transformers.CONFIG_MAPPING[model_type]
    return {
        "candidates": [
            describe_model(_without_data(name, config_class.from_dict(dict(content))))
            for name in known
        ]
    }


def _architectures_of(model_type: str) -> list[str]:
    """The classes of a model type, the likeliest first."""
    found: list[str] = []
    for mapping in _MAPPINGS:
        names = getattr(modeling_auto, mapping).get(model_type, ())
        found += [names] if isinstance(names, str) else names
    return list(dict.fromkeys(found))


def _without_data(architecture: str, config: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, architecture)._from_config(config)


if __name__ == "__main__":
    print(json.dumps(describe(json.load(sys.stdin.buffer))))  # noqa: T201 - this process's answer
