"""What an adapter's file names beyond its tensors, and files of every method; peft is the judge."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model

from tests.support import checkpoints, peft_models
from tests.support.checkpoints import Run
from tests.support.peft_models import FORMS, Form, Trained
from zexport import ExportOptions, ExportReport, consolidate
from zexport.adapters.named_modules import Modules, row_statements
from zexport.adapters.peft_format import AdapterConfig
from zexport.adapters.peft_names import read_name
from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.options import AdapterMode

QV = ["q_proj", "v_proj"]
METHODS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "ia3": (
        peft.IA3Config,
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "loha": (peft.LoHaConfig, {"r": 4, "target_modules": QV}),
    "lokr": (peft.LoKrConfig, {"r": 2, "target_modules": QV, "decompose_both": True}),
    "hra": (peft.HRAConfig, {"r": 4, "target_modules": QV}),
    "oft": (peft.OFTConfig, {"oft_block_size": 4, "target_modules": QV}),
    "fourierft": (peft.FourierFTConfig, {"n_frequency": 9, "target_modules": QV}),
    "ln_tuning": (peft.LNTuningConfig, {"target_modules": ["input_layernorm"]}),
    "prompt": (peft.PromptTuningConfig, {"num_virtual_tokens": 5}),
    "prompt_of_a_classifier": (
        peft.PromptTuningConfig,
        {"num_virtual_tokens": 5, "task_type": "SEQ_CLS"},
    ),
    "prefix": (peft.PrefixTuningConfig, {"num_virtual_tokens": 3}),
    "tokens": (peft.LoraConfig, {"target_modules": QV, "trainable_token_indices": [3, 9]}),
    "tokens_alone": (peft.TrainableTokensConfig, {"token_indices": [3, 9]}),
}

OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "IA3's targets": ("ia3", {"target_modules": ["k_proj"]}, "down_proj updated"),
    "IA3's kinds": ("ia3", {"feedforward_modules": []}, "feedforward_modules"),
    "LoHa's targets": ("loha", {"target_modules": ["o_proj"]}, "q_proj updated"),
    "LoHa's rank": ("loha", {"r": 64}, "q_proj 4 in the adapter's tensors but 64 in"),
    "LoKr's rank": ("lokr", {"r": 3}, "q_proj 2 in the adapter's tensors but 3 in"),
    "HRA's rank": ("hra", {"r": 2}, "q_proj 4 in"),
    "a spectrum's size": ("fourierft", {"n_frequency": 8}, "q_proj 9 in"),
    "a prompt's length": ("prompt", {"num_virtual_tokens": 50}, "num_virtual_tokens 5 in"),
    "a prompt's width": ("prompt", {"token_dim": 4096}, "token_dim 32 in"),
    "a prefix's layers": ("prefix", {"num_layers": 3}, "token_dim 64 in"),
    "a prompt's method": ("prompt", {"peft_type": "LORA"}, "PROMPT_TUNING"),
    "more tokens": ("tokens", {"trainable_token_indices": [3, 9, 11]}, "embed_tokens 2 in"),
    "more tokens alone": ("tokens_alone", {"token_indices": [3]}, "embed_tokens 2 in"),
    "tokens for none": ("loha", {"trainable_token_indices": [3]}, "no tokens in"),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {name: _trained(*METHODS[name], tmp_path_factory.mktemp(name)) for name in METHODS}


def _trained(method: type[Any], keys: dict[str, Any], folder: Path) -> Trained:
    """A run of a method, of which every part has random values."""
    torch.manual_seed(7)
    is_classifier = keys.get("task_type") == "SEQ_CLS"
    base = peft_models.bert_classifier() if is_classifier else peft_models.llama()
    base.load_state_dict({n: peft_models.rounded(v) for n, v in base.state_dict().items()})
    base.save_pretrained(folder / "base")
    model = get_peft_model(base, method(**{"task_type": "CAUSAL_LM", **keys}))
    for parameter in peft_models.trained(model, ("default",)).values():
        parameter.data += torch.randn_like(parameter) / 64
    model.save_pretrained(folder / "live")
    zero = peft_models.zero_model(model, ("default",))
    root = checkpoints.save(zero, Run(stage=2, exclude_frozen=True), folder / "run")
    name = "adapter_config.json"
    (root / name).write_bytes((folder / "live" / name).read_bytes())
    return Trained(model, root, folder / "base", folder / "live")


def _export(
    trained: Trained, tmp_path: Path, mode: AdapterMode = AdapterMode.KEEP, **keys: object
) -> ExportReport:
    """An export by the run's file with some keys changed."""
    content = json.loads((trained.checkpoint / "adapter_config.json").read_text()) | keys
    (tmp_path / "mine.json").write_text(json.dumps(content))
    base = trained.base if mode is AdapterMode.MERGE else None
    options = ExportOptions(adapter=mode, base=base, adapter_config=tmp_path / "mine.json")
    return consolidate(trained.checkpoint, tmp_path / "out", options)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(8)[None] + 3).logits
    return result


@pytest.mark.parametrize("method", METHODS)
def test_peft_loads_what_is_kept_of_every_method(
    runs: dict[str, Trained], tmp_path: Path, method: str
) -> None:
    trained = runs[method]
    report = _export(trained, tmp_path)
    assert not [one for one in report.warnings if "adapter" in one and "differ" not in one]
    base = type(trained.model.get_base_model()).from_pretrained(trained.base)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    torch.testing.assert_close(_logits(loaded), _logits(trained.model))


@pytest.mark.parametrize("case", OTHERS)
def test_another_runs_file_is_refused_whatever_the_method(
    runs: dict[str, Trained], tmp_path: Path, case: str
) -> None:
    method, keys, words = OTHERS[case]
    with pytest.raises(DamagedCheckpointError, match="does not fit the adapter") as caught:
        _export(runs[method], tmp_path, **keys)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = tmp_path_factory.mktemp("plain")
        return peft_models.train(FORMS["plain"], folder, Run(stage=2, exclude_frozen=True))


UNUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "targets": ({"target_modules": [*QV, "o_proj"]}, "layers.0.self_attn.o_proj updated in"),
    "a pattern": ({"target_modules": r".*\.[qvo]_proj"}, "layers.1.self_attn.o_proj updated in"),
    "copies": (
        {"modules_to_save": ["embed_tokens"]},
        "modules_to_save 'embed_tokens' no tensors in",
    ),
    "rows": ({"trainable_token_indices": [5, 6]}, "no tokens in"),
    "layers": ({"layers_to_transform": [0, 1, 5]}, None),
    "ranks": ({"rank_pattern": {"qproj": 8}}, None),
    "scales": ({"alpha_pattern": {"self_attn.query": 64}}, None),
}


@pytest.mark.parametrize("case", UNUSED)
def test_what_the_file_names_and_no_tensor_has_is_told(
    plain: Trained, tmp_path: Path, case: str
) -> None:
    """Refused where the base has it: then the file is another run's."""
    keys, refusal = UNUSED[case]
    if refusal is not None:
        with pytest.raises(DamagedCheckpointError) as caught:
            _export(plain, tmp_path, AdapterMode.MERGE, **keys)
        assert refusal in str(caught.value)
    if case in ("a pattern", "rows"):  # without the base, a pattern may be right
        return
    report = _export(plain, tmp_path, **keys)
    (told,) = (one for one in report.warnings if "has no tensors for" in one)
    assert f"found {next(iter(keys))} " in told


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
def test_lists_of_usual_names_are_taken(plain: Trained, tmp_path: Path, mode: AdapterMode) -> None:
    keys = {"target_modules": [*QV, "c_attn", "query_key_value"], "modules_to_save": ["score"]}
    report = _export(plain, tmp_path, mode, **keys)
    told = [one for one in report.warnings if "has no tensors for" in one]
    assert len(told) == (mode is AdapterMode.KEEP)  # without the base, nothing tells
    assert all("'c_attn'" in one and "score" not in one for one in told)


def test_experts_that_are_one_module_in_memory_were_no_targets(tmp_path: Path) -> None:
    """In the base's files each has modules of its own, by the names of a usual list."""
    form = Form(peft_models.mixtral, {"target_modules": ["q_proj"]})
    trained = peft_models.train(form, tmp_path, Run(stage=2, exclude_frozen=True))
    report = _export(trained, tmp_path, AdapterMode.MERGE, target_modules=["q_proj", "w1", "w2"])
    assert report.tensors


def test_a_prefix_that_a_network_makes_is_not_kept(tmp_path: Path) -> None:
    keys = {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 8}
    trained = _trained(peft.PrefixTuningConfig, keys, tmp_path)
    with pytest.raises(UnsupportedError, match="not just tensors of the module"):
        _export(trained, tmp_path)


@pytest.mark.parametrize(
    ("trained_on", "is_told"),
    [("Qwen2ForCausalLM", True), ("LlamaModel", False), ("LlamaForSequenceClassification", False)],
)
def test_an_adapter_of_another_class_of_model_is_warned_of(
    plain: Trained, tmp_path: Path, trained_on: str, *, is_told: bool
) -> None:
    mapping = {"base_model_class": trained_on, "parent_library": "transformers"}
    warned = _export(plain, tmp_path, AdapterMode.MERGE, auto_mapping=mapping).warnings
    assert any(f"{trained_on} in adapter_config.json but Llama" in one for one in warned) is is_told


@pytest.mark.parametrize(
    ("base", "is_told"),
    [("/data/old/base", True), ("../base", True), (None, True), ("org/base", False)],
)
def test_a_base_by_a_path_is_noted_where_the_adapter_is_kept(
    plain: Trained, tmp_path: Path, base: str | None, *, is_told: bool
) -> None:
    notes = _export(plain, tmp_path, base_model_name_or_path=base).notes
    assert any("does not name the base as other" in one for one in notes) is is_told


def test_a_trained_head_tells_the_task(tmp_path: Path) -> None:
    run = Run(stage=2, exclude_frozen=True)
    trained = peft_models.train(FORMS["saved_modules"], tmp_path, run)
    tasks = ("SEQ_CLS", True), ("CAUSAL_LM", False), (None, False), ({"a": 1}, True)
    for task, is_told in tasks:
        (folder := tmp_path / str(task)).mkdir()
        report = _export(trained, folder, task_type=task)
        assert any("trained for another task" in one for one in report.warnings) is is_told


def test_layers_of_the_base_that_no_model_was_loaded_with_were_no_targets() -> None:
    """Such as those that predict several tokens, which transformers passes over."""
    layers = ("model.layers.0", "model.layers.1")
    q, k = "self_attn.q_proj", "self_attn.k_proj"
    parts = {f"{one}.{q}.lora_A.weight": read_name(f"{one}.{q}.lora_A.weight") for one in layers}
    beside = ("model.layers.2", "mtp.layers.0")
    base = [f"{one}.{name}.weight" for one in (*layers, *beside) for name in (q, k)]
    found = Modules.of(parts, [*parts], [*base, "lm_head.weight"])
    assert found.are_all
    assert found.of_model == {*(f"{one}.{name}" for one in layers for name in (q, k)), "lm_head"}


def test_a_layers_number_of_many_digits_is_none() -> None:
    config = AdapterConfig(Path("adapter_config.json"), {})
    assert config.layer_of("model.layers.12.self_attn.q_proj") == 12
    assert config.layer_of(f"model.layers.{'9' * 5000}.self_attn.q_proj") is None


def test_rows_and_embeddings_of_no_dimension_are_told() -> None:
    row, base = "model.embed_tokens.token_adapter.trainable_tokens_delta", "model.embed_tokens"
    content = {"trainable_token_indices": [3]}
    config = AdapterConfig(Path("adapter_config.json"), content)
    shapes: dict[str, tuple[int, ...]] = {row: (), f"{base}.weight": ()}
    told = row_statements(config, "file", {row: read_name(row)}, shapes)
    assert [one.value for one in told] == [0, 1]
