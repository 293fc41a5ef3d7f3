"""Kept adapters equal what PEFT saves, and load in PEFT with the outputs of the trained model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.support import peft_models
from tests.support.checkpoints import Model, Run, edit, save, values
from tests.support.exports import export, read_json, refused, verify
from tests.support.oracles import differences
from tests.support.peft_models import ATTENTION, FORMS, Form, Trained

WITHOUT_BASE, WITH_BASE = Run(stage=2, exclude_frozen=True), Run(stage=3)
pytestmark = pytest.mark.filterwarnings("ignore")
KEEP = ("--adapter", "keep")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

METHODS: dict[str, Form] = {
    name: Form(peft_models.llama, keys, method=method)
    for name, (method, keys) in {
        "ia3": (
            peft.IA3Config,
            {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        ),
        "loha": (peft.LoHaConfig, {"r": 4, "target_modules": ATTENTION}),
        "lokr": (peft.LoKrConfig, {"r": 2, "target_modules": ATTENTION, "decompose_both": True}),
        "oft": (peft.OFTConfig, {"oft_block_size": 4, "target_modules": ATTENTION}),
        "prompt": (peft.PromptTuningConfig, {"num_virtual_tokens": 5}),
        "tokens": (LoraConfig, {"target_modules": ATTENTION, "trainable_token_indices": [3, 9]}),
    }.items()
}
METHODS["prompt of a classifier"] = Form(
    peft_models.bert_classifier,
    {"num_virtual_tokens": 5, "task_type": "SEQ_CLS"},
    method=peft.PromptTuningConfig,
)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(8)[None] + 3).logits
    return result


def assert_loads(folder: Path, trained: Trained) -> None:
    """peft loads the folder onto the base without a missing key, with the trained outputs."""
    base = type(trained.model.get_base_model()).from_pretrained(trained.base)
    base.load_state_dict({n: peft_models.rounded(t) for n, t in base.state_dict().items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
        loaded = PeftModel.from_pretrained(base, str(folder))
    torch.testing.assert_close(logits(loaded), logits(trained.model))


def unlike(out: Path, trained: Trained, folder: str = "") -> list[str]:
    """Names in the files of which the export and peft's own save differ."""
    pair = (load_file(top / folder / WEIGHTS) for top in (out, trained.live))
    return differences(*pair)


@pytest.mark.parametrize("run", [WITHOUT_BASE, WITH_BASE], ids=["without base", "with base"])
@pytest.mark.parametrize("form", FORMS)
def test_kept_adapter_equals_what_peft_saves(form: str, run: Run, tmp_path: Path) -> None:
    trained, out = peft_models.train(FORMS[form], tmp_path, run), tmp_path / "out"
    export(trained.checkpoint, out, *KEEP)
    left_out = [n for n in unlike(out, trained) if run is WITH_BASE or ".base_layer." not in n]
    assert left_out == []
    assert not (out / "config.json").exists()
    assert read_json(out / CONFIG) == read_json(trained.checkpoint / CONFIG)
    assert verify(out, "--against", trained.checkpoint)["ok"]
    assert_loads(out, trained)


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_equal_what_peft_saves(method: str, tmp_path: Path) -> None:
    trained, out = peft_models.train(METHODS[method], tmp_path, WITHOUT_BASE), tmp_path / "out"
    export(trained.checkpoint, out)
    assert unlike(out, trained) == []
    assert_loads(out, trained)
    if "tokens" not in method:
        words = ("--adapter", "merge", "--base", trained.base)
        kind = read_json(trained.checkpoint / CONFIG)["peft_type"]
        refused(trained.checkpoint, tmp_path / "merged", *words, kind="unsupported", word=kind)


@pytest.mark.parametrize("mode", ["keep", "merge"])
def test_method_that_saves_more_than_tensors_is_rejected(mode: str, tmp_path: Path) -> None:
    name = "base_model.model.q_proj.vblora_logits_A.default"
    root = save(Model([{name: torch.ones(3)}]), Run(), tmp_path / "run")
    (root / CONFIG).write_text(json.dumps({"peft_type": "VBLORA"}))
    refused(root, tmp_path / "out", "--adapter", mode, kind="unsupported", word="VBLORA")


@pytest.mark.parametrize("names", ["norm", "embed_tokens", "k_proj.bias"])
def test_weights_trained_outside_the_adapter_are_not_lost(names: str, tmp_path: Path) -> None:
    keys = {"target_modules": ["q_proj"]}
    form = Form(lambda: peft_models.llama(bias=True), keys, by_hand=names)
    trained = peft_models.train(form, tmp_path, WITHOUT_BASE)
    refused(trained.checkpoint, tmp_path / "out", *KEEP, kind="unsupported", word=names)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_prefix_of_a_wrapper_is_removed(prefix: str, tmp_path: Path) -> None:
    trained, out = peft_models.train(FORMS["plain"], tmp_path, WITHOUT_BASE), tmp_path / "out"
    for path in trained.checkpoint.rglob("*model_states.pt"):
        edit(path, lambda state: wrap(state, prefix))
    export(trained.checkpoint, out, *KEEP)
    assert unlike(out, trained) == []


def wrap(state: dict[str, Any], prefix: str) -> None:
    """Give every weight of a model states file a prefix."""
    state["param_shapes"] = [
        {prefix + n: s for n, s in one.items()} for one in state["param_shapes"]
    ]
    for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
        state[key] = {prefix + name: one for name, one in (state.get(key) or {}).items()}


def test_several_adapters_are_kept_in_their_folders(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = get_peft_model(peft_models.llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=8, target_modules=ATTENTION, use_dora=True))
    model.save_pretrained(tmp_path / "live")
    zero = peft_models.zero_model(model, ("default", "other"))
    root = save(zero, WITHOUT_BASE, tmp_path / "run")
    for folder in ("", "other"):
        (root / folder).mkdir(exist_ok=True)
        config = (tmp_path / "live" / folder / CONFIG).read_bytes()
        (root / folder / CONFIG).write_bytes(config)
    export(root, tmp_path / "out")
    trained = Trained(model, root, tmp_path, tmp_path / "live")
    for folder in ("", "other"):
        assert unlike(tmp_path / "out", trained, folder) == []
        assert (tmp_path / "out" / folder / CONFIG).is_file()
    export(root, tmp_path / "one", "--adapter-name", "default")
    assert not (tmp_path / "one" / "other").exists()


@pytest.mark.parametrize("mode", ["keep", "merge"])
def test_adapter_option_without_an_adapter_is_rejected(mode: str, zero2: Path) -> None:
    refused(zero2, zero2.parent / "out", "--adapter", mode, kind="usage")


def test_adapter_name_that_leads_elsewhere_is_rejected(tmp_path: Path) -> None:
    names = [f"base_model.model.x.lora_{factor}./elsewhere.weight" for factor in "AB"]
    trained = {name: values((2, 2), seed) for seed, name in enumerate(names)}
    root = save(Model([trained]), WITHOUT_BASE, tmp_path / "run")
    (root / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    refused(root, tmp_path / "out", kind="unsafe", word="/elsewhere")
