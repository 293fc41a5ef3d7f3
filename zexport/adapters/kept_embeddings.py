"""Embeddings that an adapter updates: peft saves them whole beside it, wherever they are.

Source: peft 0.21, ``utils/save_and_load.py`` (``get_peft_model_state_dict``,
``save_embedding_layers``). After a vocabulary was resized they are the only copy of the new rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from zexport.adapters.config import EMBEDDINGS, AdapterConfig
from zexport.model.peft_names import PEFT_PREFIX, read_name

_FACTORS = (".lora_embedding_A", ".lora_A.weight")


def lacking_embeddings(config: AdapterConfig, kept: Iterable[str]) -> dict[str, str]:
    """Embeddings that peft would have saved too: name in its file to name in the base model.

    Args:
        config: the adapter's.
        kept: the names that its file has so far.
    """
    names = set(kept)
    if not config.is_embedding_targeted:
        return {}
    modules = {name.removesuffix(end) for name in names for end in _FACTORS if name.endswith(end)}
    wanted = {
        f"{module}.base_layer.weight"
        for module in modules
        if module.rpartition(".")[2] in EMBEDDINGS
    }
    return {
        name: read_name(name.removeprefix(PEFT_PREFIX)).of_base for name in sorted(wanted - names)
    }
