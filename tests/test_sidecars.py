"""The files around the weights: where they are taken from, and what is edited in the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zexport.dtypes import DType
from zexport.errors import DamagedCheckpointError, NotACheckpointError
from zexport.model.sidecars import ConfigFile, find_sidecars

_CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _put(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder


def test_each_kind_comes_from_the_nearest_folder_that_has_it(tmp_path: Path) -> None:
    root = _put(tmp_path / "run" / "checkpoint-2", tokenizer__json=1)
    parent = _put(root.parent, config__json=_CONFIG, tokenizer__json=2, merges__txt=2)
    base = _put(tmp_path / "base", config__json={**_CONFIG, "base": 1}, preprocessor_config__json=3)
    found = find_sidecars(root, base)
    assert found.config is not None
    assert found.config.path.parent == parent
    assert found.copied == {
        "tokenizer.json": root / "tokenizer.json",
        "preprocessor_config.json": base / "preprocessor_config.json",
    }
    assert found.missing == ()


def test_what_is_nowhere_is_named(tmp_path: Path) -> None:
    root = _put(tmp_path / "run" / "checkpoint-2")
    assert find_sidecars(root).missing == ("config.json", "a tokenizer")


def test_tokenizer_parts_templates_and_own_code_come_along(tmp_path: Path) -> None:
    auto_map = {"AutoModel": "modeling_x.X", "AutoTokenizer": ["tokenization_x.X", None]}
    root = _put(
        tmp_path / "run" / "root",
        config__json={**_CONFIG, "auto_map": {**auto_map, "AutoConfig": "../evil.C"}},
        tokenizer__json=1,
        special_tokens_map__json=1,
        modeling_x__py=1,
        tokenization_x__py=1,
        unrelated__py=1,
        generation_config__json=1,
    )
    _put(root / "additional_chat_templates", tool__jinja=1)
    assert sorted(find_sidecars(root).copied) == [
        "additional_chat_templates/tool.jinja",
        "generation_config.json",
        "modeling_x.py",
        "special_tokens_map.json",
        "tokenization_x.py",
        "tokenizer.json",
    ]


def test_a_config_of_something_else_is_no_models_config(tmp_path: Path) -> None:
    root = _put(tmp_path / "run" / "root", config__json={"train_batch_size": 8})
    parent = _put(root.parent, config__json=_CONFIG)
    found = find_sidecars(root).config
    assert found is not None
    assert found.path.parent == parent


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_models_config_that_is_no_json_object_is_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="not a JSON object") as caught:
        find_sidecars(tmp_path)
    assert caught.value.path == tmp_path / "config.json"


def test_another_kind_of_config_above_the_checkpoint_does_not_matter(tmp_path: Path) -> None:
    root = _put(tmp_path / "run")
    (tmp_path / "config.json").write_text("// settings of the training\n{}")
    assert find_sidecars(root).config is None


def test_a_base_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="--base"):
        find_sidecars(tmp_path, tmp_path / "nothing")


def test_only_the_element_type_is_edited() -> None:
    content = {
        "torch_dtype": "bfloat16",
        "rope": {"theta": 1e-06, "dtype": "kept"},
        "text_config": {"dtype": "bfloat16", "hidden_size": 8},
        "quantization_config": {"dtype": "kept"},
        "architectures": ["X"],
        "name": "ä",
    }
    edited = json.loads(ConfigFile(Path("config.json"), content).edited(DType.F32, "Y"))
    assert edited == {
        **content,
        "dtype": "float32",
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32", "hidden_size": 8},
    }
    assert list(edited) == [*content, "dtype"]


def test_the_architecture_is_written_where_there_is_none() -> None:
    edited = ConfigFile(Path("config.json"), {"model_type": "x"}).edited(DType.BF16, "Y")
    assert json.loads(edited) == {"model_type": "x", "dtype": "bfloat16", "architectures": ["Y"]}
