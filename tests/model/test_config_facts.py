"""What two configs say of one model: what counts is told, and what changes nothing is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zexport.facts.statements import Judgement, judge
from zexport.model.config import ConfigFile
from zexport.model.config_facts import (
    config_statements,
    unstated_statements,
)
from zexport.model.fit import ModelNames
from zexport.model.names import Learner
from zexport.model.names_client import NamesClient


def judged(own: dict[str, object], base: dict[str, object]) -> Judgement:
    one, other = (
        ConfigFile(Path(name), {"model_type": "llama", **content})  # type: ignore[dict-item]
        for name, content in (("own", own), ("base", base))
    )
    return judge(config_statements(one, other), None)


def test_other_keys_are_noted() -> None:
    (note,) = judged({"max_position_embeddings": 8}, {"max_position_embeddings": 16}).notes
    assert "max_position_embeddings 8 in the checkpoint's config.json but 16 in the base's" in note


@pytest.mark.parametrize("key", ["sliding_window", "attn_logit_softcapping"])
def test_null_is_a_statement_where_it_says_that_a_model_has_none(key: str) -> None:
    """Mistral 7B has a window in 0.1, and none in 0.2; the weights' shapes are the same."""
    for one, other in ((None, 4096), (4096, None)):
        (refused,) = judged({key: one}, {key: other}).refused
        assert f"{key} {'null' if one is None else one} in the checkpoint's" in str(refused)
    assert not judged({key: None}, {key: None}).refused
    assert not judged({}, {key: None}).refused


def test_a_window_that_is_not_used_is_none() -> None:
    """As Qwen 2.5 has it on the hub, and as transformers saves that."""
    hub: dict[str, object] = {"sliding_window": 131072, "use_sliding_window": False}
    assert not judged({"sliding_window": None, "use_sliding_window": False}, hub).refused
    assert judged({"sliding_window": None}, hub | {"use_sliding_window": True}).refused


@pytest.mark.parametrize(
    "key",
    [
        "attention_dropout",
        "hidden_dropout_prob",
        "attn_pdrop",
        "embd_pdrop",
        "decoder_layerdrop",
        "drop_path_rate",
        "dropout",
        "classifier_dropout",
        "initializer_range",
        "initializer_factor",
        "pretraining_tp",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "ctc_loss_reduction",
        "gradient_checkpointing",
    ],
)
def test_what_counts_in_training_alone_is_not_told(key: str) -> None:
    for part in ({key: 0.1}, {"text_config": {key: 0.1}}):
        other = {key: 0.2} if key in part else {"text_config": {key: 0.2}}
        found = judged(dict(part), other)
        assert not [*found.notes, *found.warnings, *found.refused]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
}
THETA = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}


def unstated(own: dict[str, Any], other: dict[str, Any], *, is_asked: bool = True) -> str:
    one, another = (ConfigFile(Path("x"), {**LLAMA, **content}) for content in (own, other))
    with NamesClient() as transformers:
        names = Learner(None, transformers).names(one, {})
    assert isinstance(names, ModelNames)
    defaults = names.defaults if is_asked else {}
    warnings = judge(unstated_statements(one, another, "the base's", defaults), None).warnings
    return "; ".join(warnings)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_key_that_one_config_leaves_to_the_class_is_a_statement_too(is_asked: bool) -> None:
    stated = {**THETA, "rms_norm_eps": 0.01}
    told = unstated({}, stated, is_asked=is_asked)
    default = "10000.0" if is_asked else "nothing"
    assert (
        f"rope_theta {default} in config.json, which leaves it to the model's class but 1" in told
    )
    assert "rms_norm_eps" in told
    assert "in the base's, which leaves it" in unstated(stated, {}, is_asked=is_asked)


def test_a_class_that_has_what_a_config_says_there_is_none_of_is_told_of() -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert "sliding_window 4096 in config.json, which leaves it" in unstated(
        mistral, mistral | {"sliding_window": None}
    )


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_theta": 10000},
        {"rope_scaling": None, "rope_theta": 10000.0},
        {"head_dim": 4, "attention_bias": False, "hidden_act": "silu"},
        {"num_key_value_heads": 4, "sliding_window": None, "unknown_hidden_size": 5},
    ],
)
def test_what_the_class_takes_by_itself_is_no_difference(stated: dict[str, Any]) -> None:
    assert not unstated({}, stated) + unstated(stated, {})
