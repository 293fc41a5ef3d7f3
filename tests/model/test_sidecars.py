"""The files around the weights: where they are taken from, and what is edited in the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zexport.errors import DamagedCheckpointError, NotACheckpointError
from zexport.model.sidecars import find_sidecars

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


def test_the_code_of_a_kind_comes_from_its_folder_with_all_that_it_imports(tmp_path: Path) -> None:
    root = _put(
        tmp_path / "run" / "root",
        config__json={**_CONFIG, "auto_map": {"AutoModel": "modeling_x.X"}},
        tokenizer__json={},
        tokenizer_config__json={"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}},
        processor_config__json={"auto_map": {"AutoProcessor": "processing_x.X"}},
    )
    _write(
        root / "modeling_x.py", "import os, json\nfrom .layers.norm import (\n  Norm, # (a)\n)\n"
    )
    _write(root / "tokenization_x.py", "if True: from . import shared, ABSENT\n")
    _write(root / "processing_x.py", "from ..outside import x\nfrom .missing import y\n")
    _write(root / "layers" / "__init__.py", "")
    _write(root / "layers" / "norm.py", "from ..shared import z\nfrom ...outside import w\n")
    _write(root / "shared.py", '"""Text\nfrom . a sentence.\n"""\n')
    _write(root / "unused.py", "")
    _write(root.parent / "outside.py", "")
    _write(tmp_path / "outside.py", "")
    assert {n for n in find_sidecars(root).copied if n.endswith(".py")} == {
        "modeling_x.py",
        "tokenization_x.py",
        "processing_x.py",
        "layers/norm.py",
        "shared.py",
    }


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_code_that_does_not_lie_with_its_config_comes_from_the_base(tmp_path: Path) -> None:
    config = {**_CONFIG, "auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": "o/r--other.C"}}
    root = _put(tmp_path / "run" / "root", config__json=config)
    base = _put(tmp_path / "base", config__json=_CONFIG, modeling_x__py=1, other__py=1)
    assert find_sidecars(root, base).copied == {"modeling_x.py": base / "modeling_x.py"}


def test_no_module_of_any_size_is_read(tmp_path: Path) -> None:
    config = {**_CONFIG, "auto_map": {"AutoModel": "modeling_x.X"}}
    root = _put(tmp_path / "root", config__json=config)
    (root / "modeling_x.py").write_bytes(b"\n" * (5 << 20))
    with pytest.raises(DamagedCheckpointError, match="too large for a Python module"):
        find_sidecars(root)


def test_a_file_of_absurd_size_is_refused(tmp_path: Path) -> None:
    with (_put(tmp_path / "root") / "tokenizer.model").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(DamagedCheckpointError, match="too large for a file of its kind"):
        find_sidecars(tmp_path / "root")


def test_a_folder_with_a_vocabulary_has_the_tokenizer_not_one_with_settings_alone(
    tmp_path: Path,
) -> None:
    root = _put(tmp_path / "run" / "root", tokenizer_config__json={}, chat_template__json={})
    base = _put(tmp_path / "base", tokenizer_config__json={}, tokenizer__json={})
    assert set(find_sidecars(root).copied) == {"tokenizer_config.json", "chat_template.json"}
    assert set(find_sidecars(root, base).copied.values()) == {
        base / "tokenizer_config.json",
        base / "tokenizer.json",
    }


def test_what_makes_an_encoder_comes_along_and_nothing_from_outside(tmp_path: Path) -> None:
    kinds = ("", "1_Pooling", "../secret", "2_Normalize", "/etc", 3)
    steps = [{"idx": 0, "path": path, "type": "sentence_transformers.X"} for path in kinds]
    root = _put(tmp_path / "run" / "root")
    base = _put(tmp_path / "base", modules__json=steps, sentence_bert_config__json={})
    _put(base, config_sentence_transformers__json={})
    _put(base / "1_Pooling", config__json={}, weights__bin={})
    _put(tmp_path / "secret", config__json={})
    _put(root.parent, modules__json={"of": "something else"})
    assert set(find_sidecars(root, base).copied) == {
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
    }


def test_licences_are_those_of_the_checkpoint_or_else_of_the_base(tmp_path: Path) -> None:
    root = _put(tmp_path / "run" / "root")
    base = _put(tmp_path / "base", LICENSE={}, NOTICE__txt={}, USE_POLICY__md={}, LICENSES__py={})
    _put(root.parent, LICENSE={}, README__md={})
    _put(base, README__md={})
    assert set(find_sidecars(root, base).copied) == {"LICENSE", "NOTICE.txt", "USE_POLICY.md"}
    _put(root, LICENSE__txt={}, README__md={})
    assert set(find_sidecars(root, base).copied) == {"LICENSE.txt", "README.md"}


def test_every_vocabulary_file_that_transformers_knows_is_copied(tmp_path: Path) -> None:
    import re

    import transformers

    package = Path(transformers.__file__).parent
    tables = [
        table
        for path in package.rglob("tokenization_*.py")
        for table in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", path.read_text(), re.DOTALL)
    ]
    names = {name for table in tables for name in re.findall(r':\s*"([^"]+)"', table)}
    assert len(names) > 20
    _put(tmp_path / "root", tokenizer__json={}, qwen__tiktoken={})
    for name in names:
        _write(tmp_path / "root" / name, "{}")
    copied = find_sidecars(tmp_path / "root").copied
    assert names | {"qwen.tiktoken"} == set(copied)
