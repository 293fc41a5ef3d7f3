"""What two configs say of one model: what counts is told, and what changes nothing is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from zexport.facts.statements import Judgement, judge
from zexport.model.config import ConfigFile
from zexport.model.config_facts import config_statements


def judged(own: dict[str, object], base: dict[str, object]) -> Judgement:
    one, other = (
        ConfigFile(Path(name), {"model_type": "llama", **content})  # type: ignore[dict-item]
        for name, content in (("own", own), ("base", base))
    )
    return judge(config_statements(one, other), None)


def test_other_keys_are_noted() -> None:
    (note,) = judged({"max_position_embeddings": 8}, {"max_position_embeddings": 16}).notes
    assert "max_position_embeddings 8 in the checkpoint's config.json; 16 in the base's" in note


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
