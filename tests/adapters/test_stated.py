"""An adapter's configuration held against its tensors: what peft would leave out without a word."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.support import checkpoints, peft_models
from tests.support.checkpoints import Run
from tests.support.peft_models import FORMS, Trained
from zexport import ExportOptions, ExportReport, consolidate
from zexport.adapters.named_modules import Modules
from zexport.adapters.peft_format import AdapterConfig
from zexport.adapters.peft_names import read_name
from zexport.errors import DamagedCheckpointError, UnsupportedError, UsageError
from zexport.options import AdapterMode, ExportDType

CHANGED: dict[str, tuple[str, dict[str, object], str]] = {
    "fewer targets": ("plain", {"target_modules": ["q_proj"]}, "v_proj updated"),
    "fewer layers": ("plain", {"layers_to_transform": [0]}, "layers.1.self_attn.q_proj updated"),
    "fewer by a pattern": ("plain", {"target_modules": r".*\.[01]\..*\.q_proj"}, "v_proj updated"),
    "some left out": ("plain", {"exclude_modules": ["v_proj"]}, "v_proj updated"),
    "no experts": ("experts", {"target_parameters": None}, "mlp.experts updated"),
    "another rank": ("plain", {"r": 8}, "q_proj 4 in the adapter's tensors but 8 in"),
    "another rank of one": ("patterns", {"rank_pattern": {}}, "q_proj 7 in"),
    "another rank of experts": ("one_of_the_experts", {"r": 5}, "experts 6 in"),
    "no DoRA": ("dora", {"use_dora": False}, "use_dora"),
    "DoRA": ("plain", {"use_dora": True}, "use_dora"),
    "no biases": ("own_bias", {"lora_bias": False}, "lora_bias"),
    "no copies": ("saved_modules", {"modules_to_save": None}, "lm_head trained whole"),
    "tokens": ("plain", {"trainable_token_indices": [5]}, "trainable_token_indices"),
    "another method": ("plain", {"peft_type": "LOHA"}, "LOHA"),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


def train(tmp_path: Path, form: str = "plain") -> Trained:
    return peft_models.train(FORMS[form], tmp_path, Run(stage=2, exclude_frozen=True))


def change(trained: Trained, **keys: object) -> None:
    path = trained.checkpoint / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def export(trained: Trained, mode: AdapterMode, out: Path) -> ExportReport:
    base = trained.base if mode is AdapterMode.MERGE else None
    return consolidate(trained.checkpoint, out, ExportOptions(adapter=mode, base=base))


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
@pytest.mark.parametrize("case", CHANGED)
def test_a_configuration_that_says_other_things_than_the_tensors_is_refused(
    tmp_path: Path, case: str, mode: AdapterMode
) -> None:
    form, keys, words = CHANGED[case]
    trained = train(tmp_path, form)
    change(trained, **keys)
    with pytest.raises(DamagedCheckpointError, match="does not fit the adapter") as caught:
        export(trained, mode, tmp_path / "out")
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj"},
        {"target_modules": ["self_attn.q_proj", "v_proj", "of_another_model"]},
        {"target_modules": None},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"exclude_modules": ["lm_head"]},
        {"rank_pattern": {"q_proj": 4}, "r": 4},
    ],
)
def test_a_configuration_that_says_the_same_otherwise_is_taken(
    tmp_path: Path, keys: dict[str, object], mode: AdapterMode
) -> None:
    trained = train(tmp_path)
    change(trained, **keys)
    assert export(trained, mode, tmp_path / "out").tensors


def test_a_kept_adapter_whose_file_leaves_much_out_is_told_or_refused(tmp_path: Path) -> None:
    trained = train(tmp_path)
    change(trained, target_modules=None)
    warned = export(trained, AdapterMode.KEEP, tmp_path / "out").warnings
    assert any("peft chooses the modules by the model type" in one for one in warned)
    change(trained, target_modules=["q_proj", "v_proj"], layer_replication=[[0, 2]], r=8)
    with pytest.raises(DamagedCheckpointError, match="q_proj 4 in the adapter's tensors but 8 in"):
        export(trained, AdapterMode.KEEP, tmp_path / "other")


def test_layers_of_the_base_that_were_not_trained_are_of_the_model_as_its_config_counts() -> None:
    lora = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.default.weight"
    parts = {name: read_name(name) for name in (lora.format(0), lora.format(1))}
    base = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(3)]
    for layers, count in ((3, 3), (2, 2), (0, 2)):
        found = Modules.of(parts, parts, [*base, "norm.weight"], layers)
        assert sum("layers" in module for module in found.of_model) == count


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"alpha_pattern": {"self_attn.query": 64}}, "alpha_pattern 'self_attn.query'"),
        ({"rank_pattern": {"qproj": 8}}, "rank_pattern 'qproj'"),
        ({"target_modules": ["q_proj", "v_proj", "of_another"]}, ""),
        ({"modules_to_save": ["classifier", "score"]}, ""),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"], "exclude_modules": ["o_proj"]}, ""),
    ],
)
def test_parts_that_are_named_in_vain_are_told_where_that_may_matter(
    tmp_path: Path, keys: dict[str, object], told: str
) -> None:
    trained = train(tmp_path)
    change(trained, **keys)
    warned = export(trained, AdapterMode.MERGE, tmp_path / "out").warnings
    found = [one for one in warned if "no tensors for" in one]
    assert [told in one for one in found] == [True] * bool(told)


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
@pytest.mark.parametrize("value", ["true", "false", 1])
def test_a_switch_that_is_neither_on_nor_off_is_refused(
    tmp_path: Path, value: object, mode: AdapterMode
) -> None:
    """By peft's truth all three are on: scales would be others than peft's."""
    trained = train(tmp_path)
    change(trained, use_rslora=value)
    with pytest.raises(DamagedCheckpointError, match="no true or false in use_rslora"):
        export(trained, mode, tmp_path / "out")


def test_adapters_that_are_left_out_are_told(tmp_path: Path) -> None:
    run = Run(stage=2, exclude_frozen=True)
    trained = peft_models.train(FORMS["plain"], tmp_path, run, adapters=("default", "other"))
    options = ExportOptions(adapter_name="default")
    notes = consolidate(trained.checkpoint, tmp_path / "out", options).notes
    assert "other adapters of the checkpoint are left out: 'other'" in notes


def test_whose_configuration_an_adapter_goes_by_is_told(tmp_path: Path) -> None:
    run = Run(stage=2, exclude_frozen=True)
    trained = peft_models.train(FORMS["plain"], tmp_path, run, adapters=("default", "other"))
    own = trained.checkpoint / "other" / "adapter_config.json"
    content = own.read_text()

    def told(out: str, file: Path | None = None) -> tuple[str, str]:
        options = ExportOptions(adapter_name="other", adapter_config=file)
        report = consolidate(trained.checkpoint, tmp_path / out, options)
        return "; ".join(report.warnings), "; ".join(report.notes)

    assert told("own") == ("", told("again")[1])
    own.unlink()
    assert "the adapter 'other' in the export but the adapter 'default'" in told("shared")[0]
    own.write_text(content)
    given = trained.checkpoint / "adapter_config.json"
    change(trained, lora_alpha=100)
    warned, noted = told("given", given)
    assert f"lora_alpha 100 in {given}" in warned
    assert "goes by adapter_config.json of --adapter-config" in noted
    kept = json.loads((tmp_path / "given" / "other" / "adapter_config.json").read_text())
    assert kept["lora_alpha"] == 100


def test_an_adapter_with_a_folder_of_its_own_does_not_go_by_the_file_of_another(
    tmp_path: Path,
) -> None:
    """As where a watch of a run of several adapters is given the file of one."""
    run = Run(stage=2, exclude_frozen=True)
    trained = peft_models.train(FORMS["plain"], tmp_path, run, adapters=("default", "other"))
    given = tmp_path / "given" / "adapter_config.json"
    given.parent.mkdir()
    content = json.loads((trained.checkpoint / "adapter_config.json").read_text())
    given.write_text(json.dumps(content | {"lora_alpha": 100}))
    consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(adapter_config=given))
    kept = [tmp_path / "out" / name / "adapter_config.json" for name in ("", "other")]
    alphas = [json.loads(path.read_text())["lora_alpha"] for path in kept]
    assert alphas == [100, content["lora_alpha"]]


def test_a_rename_takes_no_adapter_its_name(tmp_path: Path) -> None:
    options = ExportOptions(renames=((r"\.default\.", "."),))
    with pytest.raises(UsageError, match="default becomes weight"):
        consolidate(train(tmp_path).checkpoint, tmp_path / "out", options)


def test_the_card_of_a_kept_adapter_says_what_was_warned_of(tmp_path: Path) -> None:
    trained = train(tmp_path)
    (trained.checkpoint / "README.md").write_text("[More Information Needed]")
    change(trained, lora_alpha=0)
    export(trained, AdapterMode.KEEP, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "the adapter changes nothing (found lora_alpha 0 in" in card


TARGETS: list[dict[str, object]] = [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["proj"]},
    {
        "target_modules": ["self_attn.q_proj"],
        "exclude_modules": ["model.layers.1.self_attn.q_proj"],
    },
    {"target_modules": "q_proj"},
    {"target_modules": r".*(q_proj|lm_head)"},
    {"target_modules": r".*_proj", "exclude_modules": r".*\.1\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
    {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["self_attn"]},
    {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
]


@pytest.mark.parametrize("keys", TARGETS)
def test_targets_are_those_that_peft_takes(keys: dict[str, object]) -> None:
    modules = [name for name, _ in peft_models.llama().named_modules() if name]
    modules += [name.removeprefix("model.") for name in modules]
    config, theirs = AdapterConfig(Path("adapter_config.json"), keys), LoraConfig(**keys)  # type: ignore[arg-type]
    found = {name for name in modules if config.does_target(name)}
    assert found == {name for name in modules if check_target_module_exists(theirs, name)}


def _trained_with(tmp_path: Path, names: str, **keys: object) -> tuple[Trained, set[str]]:
    """A LoRA run that trained more by hand, as LongLoRA does with norms and embeddings."""
    torch.manual_seed(7)
    base = peft_models.llama(bias=True)
    base.save_pretrained(tmp_path / "base")
    base.load_state_dict({n: peft_models.rounded(v) for n, v in base.state_dict().items()})
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], **keys))
    more = {n: p for n, p in model.named_parameters() if names in n and "lora" not in n}
    for parameter in more.values():
        parameter.requires_grad_(requires_grad=True)
    model.save_pretrained(tmp_path / "live")
    run = Run(stage=2, exclude_frozen=True)
    zero = peft_models.zero_model(model, ("default",))
    root = checkpoints.save(zero, run, tmp_path / "run")
    config = "adapter_config.json"
    (root / config).write_bytes((tmp_path / "live" / config).read_bytes())
    return Trained(model, root, tmp_path / "base", tmp_path / "live"), set(more)


@pytest.mark.parametrize("names", ["norm", "embed_tokens", "k_proj.bias"])
def test_weights_trained_by_hand_are_not_lost_by_keeping_the_adapter(
    tmp_path: Path, names: str
) -> None:
    trained, more = _trained_with(tmp_path, names)
    with pytest.raises(UnsupportedError, match="trained beside the adapter") as caught:
        export(trained, AdapterMode.KEEP, tmp_path / "out")
    assert sorted(more)[0] in str(caught.value)
    assert "--adapter merge" in caught.value.hint


def test_a_merge_has_the_weights_that_were_trained_by_hand(tmp_path: Path) -> None:
    trained, more = _trained_with(tmp_path, "norm")
    export(trained, AdapterMode.MERGE, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    parameters = dict(trained.model.named_parameters())
    for name in more:
        assert torch.equal(found[name.removeprefix("base_model.model.")], parameters[name])


def test_biases_that_peft_trains_are_kept(tmp_path: Path) -> None:
    trained, more = _trained_with(tmp_path, "bias", bias="all")
    export(trained, AdapterMode.KEEP, tmp_path / "out")
    assert more <= load_file(tmp_path / "out" / "adapter_model.safetensors").keys()


def test_a_kept_adapter_says_nothing_of_a_config_that_it_does_not_have(tmp_path: Path) -> None:
    """A model has one of the two, and names which."""
    trained = train(tmp_path)
    config = json.loads((trained.base / "config.json").read_text())
    (trained.checkpoint / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 5})
    )
    told = {}
    for mode in (AdapterMode.KEEP, AdapterMode.MERGE):
        options = ExportOptions(adapter=mode, base=trained.base)
        report = consolidate(trained.checkpoint, tmp_path / mode.value, options)
        told[mode] = [one for one in report.notes if "max_position_embeddings" in one]
    assert not told[AdapterMode.KEEP]
    (said,) = told[AdapterMode.MERGE]
    assert "config.json is the one beside the checkpoint" in said
    assert "max_position_embeddings 5 in the checkpoint's config.json but " in said


def test_rows_that_were_trained_and_that_the_config_does_not_name_are_refused(
    tmp_path: Path,
) -> None:
    torch.manual_seed(7)
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 4])
    model = get_peft_model(peft_models.llama(), config)
    model.save_pretrained(tmp_path / "live")
    zero = peft_models.zero_model(model, ("default",))
    root = checkpoints.save(zero, Run(stage=2, exclude_frozen=True), tmp_path / "run")
    stated = json.loads((tmp_path / "live" / "adapter_config.json").read_text())
    for other in (None, [3, 4, 9], {"embed_tokens": [3]}):
        stated["trainable_token_indices"] = other
        (root / "adapter_config.json").write_text(json.dumps(stated))
        with pytest.raises(DamagedCheckpointError, match="trainable_token_indices"):
            consolidate(root, tmp_path / "out", ExportOptions(adapter=AdapterMode.KEEP))


def test_each_of_several_adapters_has_a_rank_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = get_peft_model(peft_models.llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_dora=True))
    model.save_pretrained(tmp_path / "live")
    zero = peft_models.zero_model(model, ("default", "other"))
    root = checkpoints.save(zero, Run(stage=2, exclude_frozen=True), tmp_path / "run")
    (root / "other").mkdir()
    for name in ("adapter_config.json", "other/adapter_config.json"):
        (root / name).write_bytes((tmp_path / "live" / name).read_bytes())
    consolidate(root, tmp_path / "out")
    for name in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        assert (
            load_file(tmp_path / "out" / name).keys() == load_file(tmp_path / "live" / name).keys()
        )


@pytest.mark.parametrize(
    ("keys", "is_right", "is_told"),
    [
        ({"init_lora_weights": "pissa"}, True, True),
        ({"init_lora_weights": "olora"}, True, True),
        ({"init_lora_weights": "pissa_niter_4"}, False, True),
        ({"layer_replication": [(0, 2), (1, 2)]}, True, False),
    ],
)
def test_a_change_of_the_base_that_peft_may_not_repeat_is_warned_of(
    tmp_path: Path, keys: dict[str, object], is_right: bool, is_told: bool
) -> None:
    torch.manual_seed(7)
    base = peft_models.llama()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], **keys))  # type: ignore[arg-type]
    for parameter in peft_models.trained(model, ("default",)).values():
        parameter.data += torch.randn_like(parameter) / 8
    model.save_pretrained(tmp_path / "live")
    zero = peft_models.zero_model(model, ("default",))
    root = checkpoints.save(zero, Run(stage=2, exclude_frozen=True), tmp_path / "run")
    config = "adapter_config.json"
    (root / config).write_bytes((tmp_path / "live" / config).read_bytes())
    options = ExportOptions(adapter=AdapterMode.KEEP, dtype=ExportDType.FP32)
    report = consolidate(root, tmp_path / "out", options)
    assert any("peft changed the base weights" in one for one in report.warnings) is is_told
    torch.manual_seed(9)
    fresh = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(fresh, str(tmp_path / "out"))
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-4) is is_right


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lora_alpha": 16}, "lora_alpha 6 in"),
        ({"use_rslora": True}, "use_rslora False in"),
        ({"alpha_pattern": {"v_proj": 3}}, "alpha_pattern {} in"),
        ({"rank_pattern": None, "inference_mode": False, "lora_dropout": 0.5}, ""),
    ],
)
def test_files_of_one_adapter_that_differ_are_warned_of(
    tmp_path: Path, keys: dict[str, object], words: str, mode: AdapterMode
) -> None:
    trained = train(tmp_path)
    own = trained.checkpoint / "adapter_config.json"
    other = json.dumps(json.loads(own.read_text()) | keys)
    (trained.checkpoint.parent / "adapter_config.json").write_text(other)
    report = export(trained, mode, tmp_path / "out")
    told = [one for one in report.warnings if "the adapter's configuration differ" in one]
    assert [f"(found {words} {own} but " in one for one in told] == ([True] if words else [])


def test_nodes_with_other_files_of_one_adapter_are_refused_unless_one_is_given(
    tmp_path: Path,
) -> None:
    """Else the order of the words would decide whose lora_alpha the adapter gets."""
    one = train(tmp_path).checkpoint
    other = shutil.copytree(one, tmp_path / "other")
    for node, rank in ((one, 1), (other, 0)):
        for path in node.glob(f"*/*_rank_{rank}_mp_rank_*"):
            path.unlink()
    consolidate([other, one], tmp_path / "alike")
    given = one / "adapter_config.json"
    (other / given.name).write_text(
        given.read_text().replace('"lora_alpha": 6', '"lora_alpha": 16')
    )
    for order in ((one, other), (other, one)):
        with pytest.raises(
            DamagedCheckpointError, match="nodes of one checkpoint have other files"
        ):
            consolidate(order, tmp_path / "out")
    consolidate([other, one], tmp_path / "out", ExportOptions(adapter_config=given))
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert told["lora_alpha"] == 6


def test_a_file_of_the_adapter_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    trained = train(tmp_path)
    (trained.checkpoint.parent / "adapter_config.json").write_text("{")
    assert not export(trained, AdapterMode.KEEP, tmp_path / "out").warnings


def test_the_file_that_is_given_comes_before_the_one_that_lies_there(tmp_path: Path) -> None:
    trained = train(tmp_path)
    given = tmp_path / "mine.json"
    given.write_bytes((trained.checkpoint / "adapter_config.json").read_bytes())
    change(trained, lora_alpha=16)
    options = ExportOptions(adapter_config=given)
    report = consolidate(trained.checkpoint, tmp_path / "out", options)
    assert any(f"(found lora_alpha 6 in {given} but 16 in" in one for one in report.warnings)


@pytest.mark.parametrize(
    ("task", "is_told"),
    [("SEQ_CLS", True), ("SEQ_2_SEQ_LM", False), (None, False), ("FEATURE_EXTRACTION", False)],
)
def test_an_adapter_for_another_task_than_the_base_is_warned_of(
    tmp_path: Path, task: str | None, is_told: bool
) -> None:
    trained = train(tmp_path)
    change(trained, task_type=task)
    report = export(trained, AdapterMode.MERGE, tmp_path / "out")
    told = [one for one in report.warnings if "trained for another task" in one]
    assert len(told) == is_told
    assert all("SEQ_CLS in adapter_config.json but CAUSAL_LM in config.json" in one for one in told)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"((\w|\.|\d)*)*!", False),
        (r".*(q|v)_proj", True),
        (r"^(?!.*visual).*(q_proj|v_proj)$", True),
        (r"^(?!.*layers).*(q_proj|v_proj)$", False),
        (r".*layers\.\d{,2}\..*", True),
    ],
)
def test_a_pattern_of_targets_means_what_it_means_to_peft_and_never_takes_long(
    pattern: str, expected: bool
) -> None:
    name = "model.layers.11.self_attn.q_proj"
    assert AdapterConfig(Path("x"), {"target_modules": pattern}).does_target(name) is expected
    if "!" not in pattern[-1]:
        assert bool(re.fullmatch(pattern, name)) is expected


def test_a_pattern_that_may_take_for_ever_is_refused() -> None:
    config = AdapterConfig(Path("x"), {"target_modules": r"(?!x)((\w|\.|\d)*)*!"})
    with pytest.raises(DamagedCheckpointError, match="for ever"):
        config.does_target("model.layers.11.self_attn.q_proj")
