"""The output folder as transformers sees it: config, tokenizer and code are the source's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zexport
from tests.support.hf_models import (
    differing,
    tiny_config,
    tiny_model,
    write_checkpoint,
    write_config,
)

pytestmark = pytest.mark.slow

_TEXT = "to be or not to be"
_UNKNOWN = "<unk>"


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([_UNKNOWN, *sorted(set(_TEXT.split()))])}
    plain = Tokenizer(models.WordLevel(words, unk_token=_UNKNOWN))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=_UNKNOWN)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<step>"]})
    tokenizer.save_pretrained(folder)


def _checkpoint(folder: Path) -> Path:
    config = tiny_config("Llama")
    model = tiny_model("LlamaForCausalLM", config)
    root = write_checkpoint(model, folder)
    write_config(root, config, architectures=["LlamaForCausalLM"])
    return root


def test_config_tokenizer_and_processor_are_those_of_the_source(tmp_path: Path) -> None:
    from transformers import (
        AutoConfig,
        AutoProcessor,
        AutoTokenizer,
        GenerationConfig,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2Processor,
    )

    root = _checkpoint(tmp_path / "run" / "checkpoint-2")
    _tokenizer(root)
    extractor = Wav2Vec2FeatureExtractor(feature_size=1, sampling_rate=7000)
    tokenizer = AutoTokenizer.from_pretrained(root)
    Wav2Vec2Processor(extractor, tokenizer).save_pretrained(root)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(root)
    out = tmp_path / "out"
    zexport.consolidate(root, out)
    ours, source = (AutoConfig.from_pretrained(folder).to_dict() for folder in (out, root))
    differing_keys = {key for key, value in ours.items() if source[key] != value}
    assert differing_keys - {"_name_or_path"} == {"dtype"}
    assert ours["dtype"] == "float32"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (out, root)]
    assert tokenizers[0](_TEXT + "<step>") == tokenizers[1](_TEXT + "<step>")
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert set(tokenizers[0].chat_template) == {"default", "tools"}
    processors = [AutoProcessor.from_pretrained(folder) for folder in (out, root)]
    assert processors[0].to_dict() == processors[1].to_dict()
    assert processors[0].feature_extractor.sampling_rate == 7000
    assert GenerationConfig.from_pretrained(out).temperature == 0.25


def test_a_tokenizer_of_the_trainers_folder_above_comes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    root = _checkpoint(tmp_path / "run" / "checkpoint-2")
    _tokenizer(root.parent)
    zexport.consolidate(root, tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(set(_TEXT.split())) + 2


_CODE = {
    "configuration_own.py": "from transformers import LlamaConfig\n"
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
    "modeling_own.py": "from transformers import LlamaForCausalLM\n"
    "from .configuration_own import OwnConfig\nfrom .parts import NAME\n"
    "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n    part = NAME\n",
    "parts.py": "NAME = 'a part'\n",
    "unrelated.py": "raise SystemExit\n",
}


def test_a_model_with_code_of_its_own_loads_from_the_output_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config("Llama")
    model = tiny_model("LlamaForCausalLM", config)
    root = write_checkpoint(model, tmp_path / "checkpoint")
    auto_map = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    write_config(
        root, config, architectures=["OwnForCausalLM"], model_type="own", auto_map=auto_map
    )
    for name, code in _CODE.items():
        (root / name).write_text(code)
    out = tmp_path / "out"
    zexport.consolidate(root, out)
    assert {path.name for path in out.glob("*.py")} == set(_CODE) - {"unrelated.py"}
    shutil.rmtree(root)
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert differing(loaded, model) == []
    assert loaded.part == "a part"
