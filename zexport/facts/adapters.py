"""The facts of adapters: what their configuration and their tensors say, and what the base does.

A fact is added by adding a row here, and by stating it where it is read.
"""

from __future__ import annotations

from zexport.facts.rows import Agreement, AnyFact, Row, noted, warned_of


def _of_one_adapter(name: str) -> Row:
    """What an adapter's configuration says as its tensors do."""
    return Row(
        name,
        f"adapter_config.json does not fit the adapter's tensors: the {name} differs",
        hint="Take the adapter_config.json that this run wrote",
    )


class AdapterFact(AnyFact):
    """What may be stated more than once of an adapter."""

    ADAPTER_METHOD = _of_one_adapter("method")
    ADAPTER_RANK = _of_one_adapter("rank")
    ADAPTER_TARGETS = _of_one_adapter("choice of target_modules")
    ADAPTER_DORA = _of_one_adapter("use of DoRA (use_dora)")
    ADAPTER_BIAS = _of_one_adapter("use of biases (lora_bias)")
    ADAPTER_TOKENS = _of_one_adapter("number of trainable_token_indices")
    ADAPTER_PROMPT = _of_one_adapter("size of the prompt")
    ADAPTER_FEEDFORWARD = _of_one_adapter("choice of feedforward_modules")
    ADAPTER_COPIES = _of_one_adapter("choice of modules_to_save")
    ADAPTER_EFFECT = warned_of(
        "effect of an adapter",
        "the adapter changes nothing",
    )
    ADAPTER_OWN = warned_of(
        "whose configuration an adapter's is",
        "an adapter has no configuration of its own, and the export goes by another one's: take "
        "care that both were trained with the same, lora_alpha above all",
    )
    ADAPTER_UNHELD = warned_of(
        "parts that an adapter's configuration names",
        "adapter_config.json names parts that the adapter has no tensors for: take care that it is "
        "the file that this run wrote",
    )
    ADAPTER_TASK = warned_of(
        "task of a merged adapter",
        "the adapter was trained for another task than the model is built for",
        hint="Give the base with the config of the class that was trained with --base",
        agreement=Agreement.SHARED,
    )
    ADAPTER_CLASS = warned_of(
        "class of the model that an adapter was trained on",
        "the adapter was trained on a model of another class than config.json names: take care "
        "that the base is the one that was trained on",
    )
    KEPT_TARGETS = warned_of(
        "choice of targets that is left to peft",
        "peft chooses the modules by the model type, and passes over tensors of others: write "
        "target_modules into adapter_config.json as they were trained",
    )
    KEPT_BASE = noted(
        "name of the base model, where an adapter is kept",
        "adapter_config.json does not name the base as other machines find it: load the base "
        "yourself, or write its name on the hub there",
    )
    ADAPTER_CONFIGS = warned_of(  # the nearest was taken, or the one that the user named
        "keys that decide values, in several adapter_config.json",
        "files of the adapter's configuration differ, and the export goes by the first of these: "
        "take care that it is the one that was trained with",
    )
    ADAPTER_NODES = Row(
        "keys that decide values, in the adapter_config.json of several nodes",
        "nodes of one checkpoint have other files of the adapter's configuration",
        hint="Give the one that was trained with as --adapter-config FILE",
    )
    KEPT_EMBEDDING = warned_of(
        "tokens, where an adapter is kept",
        "without the embedding, which was resized if it was trained with all tokens: no file has "
        "it; save it with modules_to_save",
        agreement=Agreement.BELOW,
    )
    KEPT_CHANGES = warned_of(  # peft repeats what was neither random nor made of data
        "base weights, where an adapter is kept",
        "peft changed the base weights before training, and they are not in this folder: the "
        "adapter is right only where peft's loading makes the same change to the same base again",
    )
