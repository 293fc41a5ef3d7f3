"""The model card: valid for the hub, true, and free of anything that only a machine knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from tests.support.checkpoints import Run, save, small_model
from zexport.checkpoint.open import open_checkpoint
from zexport.model.card import model_card
from zexport.model.config import ConfigFile
from zexport.model.sidecars import Sidecars, read_card
from zexport.ranges.dtypes import DType

FIXTURES = Path(__file__).parents[2] / "fixtures"
_HUB_CARD = (
    "---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\nbase_model: {}\n---\nx"
)


def _card(root: Path, architecture: str | None = None, **content: Any) -> ModelCard:
    base = root.parent / "base" if (root.parent / "base").is_dir() else None
    return _card_of(root, base, architecture, content)


def _card_of(
    root: Path, base: Path | None, architecture: str | None, content: dict[str, Any]
) -> ModelCard:
    config = ConfigFile(root / "config.json", content)
    card = "" if base is None else read_card(base)
    sidecars = Sidecars(config, None, {}, (), base, card)
    text = model_card(open_checkpoint(root), DType.BF16, sidecars, architecture).decode()
    assert REGEX_YAML_BLOCK.match(text)
    assert str(root.parent) not in text
    return ModelCard(text)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", "text-generation"),
        ("LlamaForSequenceClassification", "text-classification"),
        ("BertForMaskedLM", "fill-mask"),
        ("LlavaForConditionalGeneration", None),
        (None, None),
    ],
)
def test_the_task_is_said_where_the_class_leaves_no_doubt(
    architecture: str | None, task: str | None, zero2: Path
) -> None:
    data = _card(zero2, architecture).data
    assert (data.pipeline_tag, data.library_name) == (task, "transformers")
    assert data.tags == ["zexport", "deepspeed"]
    assert task is None or task in _tasks_of_the_hub()


def _tasks_of_the_hub() -> set[str]:
    import importlib.util
    import re

    client = importlib.util.find_spec("huggingface_hub")
    assert client is not None
    assert client.origin is not None
    text = (Path(client.origin).parent / "inference" / "_client.py").read_text()
    return {word.replace("_", "-") for word in re.findall(r"def (\w+)\(", text)}


def test_step_version_and_origin_are_told(zero2: Path) -> None:
    text = str(_card(zero2))
    name = "`zero2/global_step2`"
    for fact in ("ZeRO-2", name, "2 ranks", "0.19.8", "after 2 steps", "bfloat16"):
        assert fact in text


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2.5-0.5B", True),
        ("gpt2", False),
        ("/data/models/llama", False),
        ("models/llama", False),
        ("me/checkpoint-100", False),
        ("./a/b", False),
        ("a/b/c", False),
        ("a/b\nlicense: mit", False),
        (None, False),
    ],
)
def test_the_base_model_is_named_where_the_config_has_its_name_on_the_hub(
    name: str | None, known: bool, zero2: Path
) -> None:
    data = _card(zero2, _name_or_path=name).data
    assert data.base_model == (name if known else None)
    assert data.license is None


def test_a_base_in_the_hubs_cache_is_known_by_its_name(zero2: Path, tmp_path: Path) -> None:
    base = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "abc"
    base.mkdir(parents=True)
    data = _card_of(zero2, base, None, {"_name_or_path": "other/model"}).data
    assert data.base_model == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("written", ["org/name", '"org/name"', "\n- org/name"])
def test_licence_and_origin_of_the_base_are_those_of_its_card(written: str, zero2: Path) -> None:
    base = zero2.parent / "base"
    base.mkdir()
    (base / "README.md").write_text(_HUB_CARD.format(written))
    data = _card(zero2).data.to_dict()
    assert data["base_model"] == "org/name"
    assert (data["license"], data["license_name"], data["license_link"]) == (
        "other",
        "llama3",
        "LICENSE",
    )


@pytest.mark.parametrize(
    "content", ["license: mit\n", "---\nlicense: [&a x]\n---\n", "---\nlicense: mit", ""]
)
def test_a_card_without_a_licence_gives_none(content: str, zero2: Path) -> None:
    base = zero2.parent / "base"
    base.mkdir()
    (base / "README.md").write_text(content)
    assert _card(zero2).data.license is None


@pytest.mark.parametrize("name", ["3.1", "2026-11-22", "0x1f", "no", "1e3", "12", "ä", "_"])
def test_a_name_that_yaml_would_take_for_something_else_stays_a_name(
    name: str, zero2: Path
) -> None:
    base = zero2.parent / "base"
    base.mkdir()
    (base / "README.md").write_text(f"---\nlicense: other\nlicense_name: {name}\n---\n")
    assert _card(zero2).data.license_name == name


def test_a_tag_cannot_write_into_the_card(tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / "ckpt", tag="a`<b>[c](d)")
    card = _card(root)
    assert "<b>" not in str(card)
    assert "`ckpt/a'(b)(c)(d)`" in str(card)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("uni_z2_w2_bf16_odd", "of the universal checkpoint `"),
        ("pp2_z0_w4_fp32_tied", "of the ZeRO-0, 2 pipeline stages checkpoint `"),
        ("z0_w2_bf16", "of the ZeRO-0 checkpoint `"),
        ("z3_w2_bf16", "of the ZeRO-3 checkpoint `"),
    ],
)
def test_a_card_says_what_is_known_of_the_checkpoint_and_no_more(name: str, told: str) -> None:
    text = _card_of(FIXTURES / name / "ckpt", None, None, {}).text
    assert told in text
    assert "None" not in text
    assert "  " not in text
