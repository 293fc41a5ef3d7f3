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

_CODE = {
    "configuration_own.py": "from transformers import LlamaConfig\n"
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
    "modeling_own.py": "from transformers import LlamaForCausalLM\n"
    "from .configuration_own import OwnConfig\nfrom .parts import NAME\n"
    "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n    part = NAME\n",
    "parts.py": "NAME = 'a part'\n",
}


def test_model_with_its_own_code_and_tokenizer_loads_from_the_output_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        PreTrainedTokenizerFast,
    )

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
    words = Tokenizer(models.WordLevel({"<unk>": 0, "be": 1}, unk_token="<unk>"))  # noqa: S106
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")  # noqa: S106
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(root)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(root)

    zexport.consolidate(root, out := tmp_path / "out")
    shutil.rmtree(root)
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert differing(loaded, model) == []
    assert loaded.part == "a part"
    found = AutoTokenizer.from_pretrained(out)
    assert found("be")["input_ids"] == tokenizer("be")["input_ids"] == [1]
    assert found.chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(out).temperature == 0.25
