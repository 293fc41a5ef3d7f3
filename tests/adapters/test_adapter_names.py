"""Names of peft models, taken apart."""

from __future__ import annotations

import pytest

from zexport.adapters.peft_names import adapters_of, read_name

LAYER = "base_model.model.model.layers.0.q_proj"


@pytest.mark.parametrize(
    ("name", "on_disk"),
    [
        (f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_A.weight"),
        (f"{LAYER}.lora_B.other.bias", f"{LAYER}.lora_B.bias"),
        (f"{LAYER}.lora_magnitude_vector.default.weight", f"{LAYER}.lora_magnitude_vector"),
        (f"{LAYER}.lora_magnitude_vector.default", f"{LAYER}.lora_magnitude_vector"),
        (f"{LAYER}.lora_embedding_A.default", f"{LAYER}.lora_embedding_A"),
        (f"{LAYER}.base_layer.lora_A.default.weight", f"{LAYER}.base_layer.lora_A.weight"),
        (f"{LAYER}.ia3_l.default", f"{LAYER}.ia3_l"),
        (f"{LAYER}.modules_to_save.default.dense.weight", f"{LAYER}.dense.weight"),
        (
            f"{LAYER}.token_adapter.trainable_tokens_delta.default",
            f"{LAYER}.token_adapter.trainable_tokens_delta",
        ),
        ("model.layers.0.q_proj.lora_A.default.weight", f"{LAYER}.lora_A.weight"),
        (f"module.{LAYER}.lora_A.default.weight", f"{LAYER}.lora_A.weight"),
        ("prompt_encoder.default.embedding.weight", "prompt_embeddings"),
        ("base_model.score.modules_to_save.default.weight", "base_model.score.weight"),
    ],
)
def test_peft_saves_a_tensor_without_its_adapters_name(name: str, on_disk: str) -> None:
    assert read_name(name).on_disk == on_disk


@pytest.mark.parametrize(
    ("name", "of_base"),
    [
        (f"{LAYER}.base_layer.weight", "model.layers.0.q_proj.weight"),
        (f"{LAYER}.base_layer.base_layer.gate_up_proj", "model.layers.0.q_proj.gate_up_proj"),
        (f"{LAYER}.original_module.weight", "model.layers.0.q_proj.weight"),
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("base_model.model.scale", "scale"),
    ],
)
def test_a_weight_of_the_base_has_the_name_it_has_there(name: str, of_base: str) -> None:
    part = read_name(name)
    assert (part.adapter, part.of_base) == ("", of_base)


def test_adapters_are_told_by_their_tensors() -> None:
    names = [f"{LAYER}.lora_A.b.weight", f"{LAYER}.base_layer.weight", f"{LAYER}.ia3_l.a"]
    assert adapters_of([*names, f"{LAYER}.lora_B.b.weight"]) == ("b", "a")
