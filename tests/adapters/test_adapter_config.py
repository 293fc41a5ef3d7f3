"""adapter_config.json: which one is used, and that it fits the adapter's tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import peft_models
from tests.support.checkpoints import Run
from tests.support.exports import edit_json, export, read_json, refused, verify
from tests.support.live_models import files_of
from tests.support.peft_models import FORMS, Form, Trained

pytestmark = pytest.mark.filterwarnings("ignore")
WITHOUT_BASE = Run(stage=2, exclude_frozen=True)
CONFIG = "adapter_config.json"
BOTH_MODES = pytest.mark.parametrize("mode", ["keep", "merge"])
TOKENS = Form(peft_models.llama, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]})

OF_ANOTHER_RUN: dict[str, tuple[Form, dict[str, object], str]] = {
    "fewer targets": (FORMS["plain"], {"target_modules": ["q_proj"]}, "v_proj"),
    "excluded": (FORMS["plain"], {"exclude_modules": ["v_proj"]}, "v_proj"),
    "other rank": (FORMS["plain"], {"r": 8}, "8"),
    "other rank of one": (FORMS["patterns"], {"rank_pattern": {}}, "7"),
    "no experts": (FORMS["experts"], {"target_parameters": None}, "experts"),
    "not DoRA": (FORMS["dora"], {"use_dora": False}, "use_dora"),
    "DoRA": (FORMS["plain"], {"use_dora": True}, "use_dora"),
    "no biases": (FORMS["own_bias"], {"lora_bias": False}, "lora_bias"),
    "no copies": (FORMS["saved_modules"], {"modules_to_save": None}, "lm_head"),
    "more tokens": (TOKENS, {"trainable_token_indices": [3, 4, 9]}, "trainable_token_indices"),
    "text for a switch": (FORMS["plain"], {"use_rslora": "false"}, "use_rslora"),
}


def train(folder: Path, form: Form = FORMS["plain"], *adapters: str) -> Trained:
    return peft_models.train(form, folder, WITHOUT_BASE, adapters=("default", *adapters))


def words_for(mode: str, trained: Trained) -> tuple[object, ...]:
    return ("--adapter", mode, *(("--base", trained.base) if mode == "merge" else ()))


@BOTH_MODES
@pytest.mark.parametrize("case", OF_ANOTHER_RUN)
def test_config_of_another_run_is_rejected(case: str, mode: str, tmp_path: Path) -> None:
    form, keys, word = OF_ANOTHER_RUN[case]
    trained = train(tmp_path, form)
    edit_json(trained.checkpoint / CONFIG, **keys)
    words = words_for(mode, trained)
    refused(trained.checkpoint, tmp_path / "out", *words, kind="damaged", word=word)


@BOTH_MODES
@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj"},
        {"target_modules": ["self_attn.q_proj", "v_proj", "of_another_model"]},
        {"target_modules": None},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"modules_to_save": ["classifier", "score"]},
        {"rank_pattern": {"q_proj": 4}, "r": 4},
    ],
    ids=str,
)
def test_equivalent_targets_are_accepted(
    keys: dict[str, object], mode: str, tmp_path: Path
) -> None:
    trained = train(tmp_path)
    plain, named = (tmp_path / name for name in ("plain", "named"))
    export(trained.checkpoint, plain, *words_for(mode, trained))
    edit_json(trained.checkpoint / CONFIG, **keys)
    export(trained.checkpoint, named, *words_for(mode, trained))
    found, wanted = files_of(named), files_of(plain)
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(value) for name, value in wanted.items())


def test_patterns_are_matched_in_bounded_time(tmp_path: Path) -> None:
    trained = train(tmp_path)
    for pattern in (r"((\w|\.|\d)*)*!", r"(?!x)((\w|\.|\d)*)*!"):
        edit_json(trained.checkpoint / CONFIG, target_modules=pattern)
        refused(trained.checkpoint, tmp_path / "out", kind="damaged")


def test_adapter_config_option_takes_any_file_name(tmp_path: Path) -> None:
    trained = train(tmp_path)
    given = (trained.checkpoint / CONFIG).rename(tmp_path / "mine.json")
    export(trained.checkpoint, tmp_path / "out", "--adapter-config", given)
    wanted = read_json(given) | {"inference_mode": True}
    assert read_json(tmp_path / "out" / CONFIG) == wanted
    words = ("--against", trained.checkpoint, "--adapter-config", given)
    assert verify(tmp_path / "out", *words)["ok"]


@pytest.mark.parametrize("where", ["base", "checkpoint"])
def test_adapter_without_a_config_is_rejected(where: str, tmp_path: Path) -> None:
    """Accelerate saves none. With a model's config.json it would load without its weights."""
    trained, out = train(tmp_path), tmp_path / "out"
    (trained.checkpoint / CONFIG).unlink()
    words = ["--base", trained.base] if where == "base" else []
    if where == "checkpoint":
        (trained.base / "config.json").rename(trained.checkpoint / "config.json")
    for more in ([], ["--adapter", "keep"]):
        error = refused(
            trained.checkpoint, out, *words, *more, kind="not_a_checkpoint", word=CONFIG
        )
        assert "--adapter-config" in error.hint
    export(trained.checkpoint, out, "--layout", "memory", "--exclude-frozen")
    assert (out / "model.safetensors").is_file()
