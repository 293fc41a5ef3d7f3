"""Model files: which are copied, from which folder, and which are rejected."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import transformers

import zexport
from tests.support.exports import export, invoke, refused, warns

CONFIG = {"model_type": "no_such_model"}
MADE = {"README.md", "config.json", "zexport_manifest.json", "model.safetensors"}
TOKENIZER = "tokenizer.json"


@pytest.fixture
def root(zero2: Path, tmp_path: Path) -> Path:
    """A checkpoint in a folder of its run, with a config."""
    (tmp_path / "run").mkdir()
    root = zero2.rename(tmp_path / "run" / "checkpoint-2")
    return put(root, {"config.json": CONFIG})


def put(folder: Path, files: dict[str, object]) -> Path:
    """Files of text, or of JSON."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def copied(root: Path, base: Path | None = None) -> dict[str, str]:
    """The text of the copied files of an export, by name."""
    out = root.parents[1] / "out"
    export(root, out, "--overwrite", *([] if base is None else ["--base", base]))
    files = {str(p.relative_to(out)): p for p in out.rglob("*") if p.is_file()}
    return {name: path.read_text() for name, path in files.items() if name not in MADE}


def test_all_files_of_a_kind_come_from_the_nearest_folder(root: Path) -> None:
    base = put(root.parents[1] / "base", {"config.json": CONFIG, "preprocessor_config.json": {}})
    put(base, {TOKENIZER: {"base": 1}, "generation_config.json": {"top_k": 3}, "LICENSE": "base"})
    put(root.parent, {TOKENIZER: {"above": 1}, "merges.txt": "above", "LICENSE": "above"})
    assert copied(root, base) == {
        TOKENIZER: '{"above": 1}',
        "merges.txt": "above",
        "preprocessor_config.json": "{}",
        "generation_config.json": '{"top_k": 3}',
        "LICENSE": "base",
    }
    put(root, {TOKENIZER: {"own": 1}, "LICENSE.txt": "own", "NOTICE": "own"})
    found = copied(root, base)
    assert (found[TOKENIZER], "merges.txt" in found) == ('{"own": 1}', False)
    assert {name for name in found if name.isupper() or "LICENSE" in name} == {
        "LICENSE.txt",
        "NOTICE",
    }


def test_folder_with_a_vocabulary_comes_before_one_with_settings(root: Path) -> None:
    put(root, {"tokenizer_config.json": {"own": 1}, "chat_template.jinja": "own"})
    assert copied(root) == {"tokenizer_config.json": '{"own": 1}', "chat_template.jinja": "own"}
    base = put(root.parents[1] / "base", {"tokenizer_config.json": {}, TOKENIZER: {}})
    assert copied(root, base) == {"tokenizer_config.json": "{}", TOKENIZER: "{}"}


def test_every_vocabulary_file_of_transformers_is_copied(root: Path) -> None:
    package = Path(transformers.__file__).parent
    tables = [
        table
        for path in package.rglob("tokenization_*.py")
        for table in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", path.read_text(), re.DOTALL)
    ]
    names = {name for table in tables for name in re.findall(r':\s*"([^"]+)"', table)}
    assert len(names) > 20
    names |= {"qwen.tiktoken", "chat_template.jinja", "additional_chat_templates/tool.jinja"}
    put(root, dict.fromkeys(names, "{}"))
    assert copied(root).keys() == names


def test_code_is_copied_with_what_it_imports(root: Path) -> None:
    named = {"AutoModel": "modeling_x.X", "AutoConfig": "../evil.C", "AutoModelForX": "o/r--y.Z"}
    code = {
        "modeling_x.py": "import os\nfrom .layers.norm import (\n  Norm, # (a)\n)\n",
        "tokenization_x.py": "if True: from . import shared, ABSENT\n",
        "processing_x.py": "from ..outside import x\nfrom .missing import y\n",
        "layers/norm.py": "from ..shared import z\nfrom ...outside import w\n",
        "shared.py": '"""Text\nfrom . a sentence.\n"""\n',
    }
    put(root, {**code, "config.json": {**CONFIG, "auto_map": named}, TOKENIZER: {}})
    put(
        root, {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}}
    )
    put(root, {"processor_config.json": {"auto_map": {"AutoProcessor": "processing_x.X"}}})
    put(root, {"unused.py": "", "layers/__init__.py": ""})
    for folder in (root.parent, root.parents[1]):
        put(folder, {"outside.py": "", "evil.py": ""})
    found = copied(root)
    assert {name: text for name, text in found.items() if name.endswith(".py")} == code


def test_missing_code_comes_from_the_base_or_causes_a_warning(root: Path) -> None:
    put(root, {"config.json": {**CONFIG, "auto_map": {"AutoModel": "modeling_x.X"}}})
    assert warns(export(root, root.parent / "out"), "modeling_x.py")
    base = put(root.parents[1] / "base", {"config.json": CONFIG, "modeling_x.py": "1"})
    assert copied(root, base) == {"modeling_x.py": "1"}


def test_sentence_transformers_files_are_copied_and_nothing_from_outside(root: Path) -> None:
    paths = ("", "1_Pooling", "../secret", "/etc", 3)
    steps = [{"idx": 0, "path": path, "type": "sentence_transformers.X"} for path in paths]
    base = put(root.parents[1] / "base", {"modules.json": steps, "sentence_bert_config.json": {}})
    put(base, {"1_Pooling/config.json": {}, "1_Pooling/weights.bin": {}})
    put(base.parent, {"secret/config.json": {}})
    names = {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    assert copied(root, base).keys() == names


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000], ids=range(3))
def test_config_that_is_no_object_is_rejected(content: bytes, root: Path) -> None:
    (root / "config.json").write_bytes(content)
    error = refused(root, root.parent / "out", kind="damaged")
    assert error.path == root / "config.json"


def test_files_from_a_folder_above_that_is_no_run_cause_a_warning(root: Path) -> None:
    """RUN_FOLDER."""
    put(root.parent, {TOKENIZER: {}})
    assert not warns(export(root, root.parents[1] / "one"), TOKENIZER)
    root = root.rename(root.parent / "mine")
    assert warns(export(root, root.parents[1] / "two"), TOKENIZER)
    put(root.parent, {"training_args.bin": ""})
    assert not warns(export(root, root.parents[1] / "three"), TOKENIZER)


@pytest.mark.parametrize(
    ("name", "contents", "is_rejected"),
    [
        ("config.json", [{**CONFIG, "hidden_size": n} for n in (64, 65)], True),
        ("tokenizer_config.json", [{"padding_side": n} for n in ("left", "right")], True),
        ("README.md", ["a", "b"], False),
    ],
)
def test_nodes_with_different_files_are_rejected(
    name: str, contents: list[object], is_rejected: bool, root: Path
) -> None:
    """NODE_FILE: the order of the arguments would decide."""
    other, out = shutil.copytree(root, root.parents[1] / "other"), root.parents[1] / "out"
    for node, rank in ((root, 1), (other, 0)):
        next(node.glob(f"*/*_rank_{rank}_mp_rank_*")).unlink()
    for node, content in zip((root, other), contents, strict=True):
        put(node, {TOKENIZER: {}, name: content})
    if not is_rejected:
        invoke("consolidate", root, other, out)
        return
    for order in ((root, other), (other, root)):
        with pytest.raises(zexport.DamagedCheckpointError, match=name):
            invoke("consolidate", *order, out)
        assert not out.exists()
