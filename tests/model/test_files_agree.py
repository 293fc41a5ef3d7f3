"""Files of one model in several folders: which are used, and which contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from zexport.facts.statements import Judgement, judge
from zexport.model.sidecars import find_sidecars
from zexport.model.small_files import choice_notes
from zexport.model.stated import file_facts, named_bases
from zexport.model.token_numbers import token_numbers
from zexport.model.tokenizer import older_tokens
from zexport.store.boundary import Boundary

CONFIG = {"model_type": "llama", "hidden_size": 64}
WORDS = {"a": 0, "b": 1, "c": 2, "<s>": 3, "</s>": 4, "<unk>": 5}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint's folder in a run's."""
    return put(tmp_path / "run" / "checkpoint-4", config=CONFIG)


def put(folder: Path, **files: object) -> Path:
    """Files of JSON; ``__`` stands for what no name may have."""
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def write(folder: Path, **files: str) -> Path:
    """Files of text: ``README_md``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def tokenizer(folder: Path, words: dict[str, int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(BPE(words, [])).save(str(folder / "tokenizer.json"))
    return folder


def judged(root: Path, base: Path | None = None, *parts: Path, **named: str) -> Judgement:
    found = find_sidecars(root, base, parts=[(part, Boundary.of(part)) for part in parts])
    return judge(file_facts(found, named | named_bases(found, is_adapter=bool(named))), root)


def warned(root: Path, base: Path | None = None, **named: str) -> list[str]:
    return judged(root, base, **named).warnings


SHIFTED = {**WORDS, "a": 1, "b": 0}


def test_the_folder_of_a_file_that_other_folders_have_otherwise_is_noted(root: Path) -> None:
    base = put(root.parents[1] / "base", generation_config={"top_k": 1})
    write(tokenizer(root, WORDS), README_md="one", LICENSE="one", vocab_txt="a")
    write(tokenizer(base, WORDS), README_md="two", LICENSE="two", vocab_txt="b")
    put(tokenizer(root.parent, SHIFTED), generation_config={"top_k": 2})
    found = find_sidecars(root, base)
    (note,) = choice_notes(found.copied, found.folders)
    for told in (
        "tokenizer.json of the checkpoint (not of the folder above",
        "vocab.txt of the checkpoint (not of --base",
        "generation_config.json of the folder above (not of --base",
    ):
        assert told in note
    assert not {"README.md", "LICENSE"} & {*note.split()}
    assert not [*choice_notes(find_sidecars(base).copied, find_sidecars(base).folders)]


def test_configs_of_one_run_that_differ_are_told(root: Path) -> None:
    put(root, config={**CONFIG, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "use_cache": True})
    above = {**CONFIG, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "use_cache": False}
    put(root.parent, config=above)
    (warning,) = warned(root)
    assert "rms_norm_eps 1e-05 in the checkpoint's but 1e-06 in the folder above's" in warning
    assert "rope_theta" in warning
    assert "use_cache" not in warning


def test_what_the_checkpoint_before_says_is_compared(root: Path) -> None:
    tokenizer(root, WORDS)
    before = put(root.parent / "checkpoint-2", config=CONFIG | {"hidden_size": 32})
    tokenizer(before, SHIFTED)
    found = find_sidecars(root, before=before)
    told = "; ".join(judge(file_facts(found, {}), root).warnings)
    assert "hidden_size 64 in the checkpoint's but 32 in checkpoint-2's" in told
    assert "not of checkpoint-2" in next(choice_notes(found.copied, found.folders))
    assert not {*found.files.values()} & {*before.iterdir()}
    (before / "config.json").write_text('{"model_ty')  # rotation may be removing it
    assert before.name not in find_sidecars(root, before=before).run_configs


def test_what_a_config_says_of_its_language_model_twice_is_told(root: Path) -> None:
    inner = {"model_type": "llama", "rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_size": 8}
    put(root, config={"model_type": "llava", "hidden_size": 4, "text_config": inner})
    assert not warned(root)
    put(root, config={"model_type": "llava", "text_config": inner, "rope_theta": 1e6})
    (warning,) = warned(root)
    assert "rope_theta 10000.0 in text_config but 1000000.0 in the config around it" in warning


def test_files_from_above_are_told_where_nothing_there_is_of_a_run(root: Path) -> None:
    tokenizer(root.parent, WORDS)
    assert not warned(root)
    root = root.rename(root.parent / "mine")
    (warning,) = warned(root)
    assert "tokenizer.json in the export but nothing of a training in the folder above" in warning
    for name in ("training_args.bin", "checkpoint-7", "config.json"):
        (root.parent / name).write_text(json.dumps(CONFIG))
        assert not warned(root)
        (root.parent / name).unlink()


def test_a_config_of_something_else_above_is_not_held_against_it(root: Path) -> None:
    put(root.parent, config={"hidden_size": 3})
    assert not warned(root)


def test_element_types_that_a_config_tells_twice_are_noted(root: Path) -> None:
    put(root, config={**CONFIG, "dtype": "bfloat16", "torch_dtype": "float16"})
    (note,) = judged(root).notes
    assert "bfloat16 in dtype but float16 in torch_dtype" in note


def test_a_card_that_names_another_base_is_told(root: Path) -> None:
    write(root, README_md="---\nbase_model: acme/small\n---\n")
    (warning,) = warned(root, **{"adapter_config.json": "acme/large"})
    assert "acme/small in the checkpoint's README.md but acme/large in adapter_config" in warning
    for same in ("acme/Small", "acme/small-bnb-4bit", "/models/large", ""):
        assert not warned(root, **{"adapter_config.json": same})


def test_all_who_name_the_base_are_held_against_each_other(root: Path) -> None:
    put(root, config={**CONFIG, "_name_or_path": "acme/small"})
    put(root.parent, config={**CONFIG, "_name_or_path": "acme/large"})
    hub = root.parents[1] / "models--acme--small-instruct" / "snapshots" / "a"
    base = put(hub, config={**CONFIG, "_name_or_path": "acme/older"})
    (warning,) = warned(root, base)
    assert "acme/small in config.json, acme/large in the folder above's config.json but " in warning
    assert "acme/small-instruct in --base" in warning
    assert "acme/older" not in warning
    (warning,) = warned(root, base, **{"adapter_config.json": "acme/small"})
    assert "--base" not in warning


def test_what_nodes_have_beside_their_parts_has_to_be_the_same(root: Path) -> None:
    node = put(root.parents[1] / "node", config={**CONFIG, "hidden_size": 65})
    put(root, tokenizer_config={"padding_side": "left"})
    put(node, tokenizer_config={"padding_side": "right"})
    write(tokenizer(root, WORDS), chat_template_jinja="a", merges_txt="a b")
    write(tokenizer(node, SHIFTED), chat_template_jinja="b", README_md="other")
    for folder in (root, node):
        (folder / "chat.template.jinja").rename(folder / "chat_template.jinja")
    (refused,) = judged(root, None, node).refused
    told = str(refused)
    for found in ("hidden_size: 64 in", "padding_side: left in", "tokenizer.json, model:"):
        assert found in told
    assert "chat_template.jinja: 1 bytes" in told
    assert "folder 2 of the checkpoint" in told
    assert not {"README.md", "merges.txt"} & {*told.replace(":", " ").split()}


def test_a_key_that_stands_twice_in_a_file_is_told(root: Path) -> None:
    text = '{"model_type": "llama", "rms_norm_eps": 1e-06, "a": 1, "rms_norm_eps": 0.01, "a": 1}'
    (root / "config.json").write_text(text)
    (warning,) = warned(root)
    assert "rms_norm_eps 1e-06 in config.json, 1. but 0.01 in config.json, 2." in warning


def test_code_that_is_nowhere_is_told(root: Path) -> None:
    put(root, config={**CONFIG, "auto_map": {"AutoModel": "modeling_mine.Mine"}})
    assert "modeling_mine.py code of its own in config.json but no such" in warned(root)[0]
    write(root, modeling_mine_py="")
    (root / "modeling.mine.py").rename(root / "modeling_mine.py")
    assert not warned(root)


def sentencepiece(folder: Path, *pieces: str) -> Path:
    """A model as SentencePiece writes it: field 1 is a piece, and of that field 1 the text."""
    texts = [b"\x0a" + bytes([len(one)]) + one.encode() + b"\x15\0\0\0\0" for one in pieces]
    model = b"".join(b"\x0a" + bytes([len(text)]) + text for text in texts) + b"\x12\x02\x08\x01"
    (folder / "tokenizer.model").write_bytes(model)
    return folder


def test_vocabularies_of_older_forms_need_rows(root: Path) -> None:
    write(sentencepiece(root, *WORDS), vocab_txt="a\nb\nc\n")
    found = {one.by: one.number for one in token_numbers(find_sidecars(root).copied)}
    assert found == {"tokenizer.model": 5, "vocab.txt": 2}
    for spoilt in (b"\x0a\xff", b"\x0a\x02\x0a\x7f" * 99, b"\x0a" + b"\xff" * 10_000_000):
        (root / "tokenizer.model").write_bytes(spoilt)
        assert "tokenizer.model" not in older_tokens(find_sidecars(root).copied)


@pytest.mark.parametrize("spoilt", [b'"\xff"', b"1e999", b"[" * 100_000 + b"]" * 100_000])
@pytest.mark.parametrize("part", [b"normalizer", b"model"])
def test_a_tokenizer_with_a_part_that_cannot_be_read_is_taken(
    root: Path, part: bytes, spoilt: bytes
) -> None:
    value = b'{"vocab": {%b: 1}}' % spoilt if part == b"model" else spoilt
    added = b'"added_tokens": [{"id": 1, "content": "a"}]'
    (root / "tokenizer.json").write_bytes(b'{%b, "%b": %b}' % (added, part, value))
    assert {one.number for one in token_numbers(find_sidecars(root).copied)} <= {1}


def test_a_model_that_sees_without_a_processor_is_told(root: Path) -> None:
    put(root, config={**CONFIG, "vision_config": {}})
    assert "a processor" in find_sidecars(root).missing
    assert "a processor" not in find_sidecars(put(root, preprocessor_config={})).missing


def test_configs_of_one_run_with_classes_in_another_order_are_told(root: Path) -> None:
    put(root, config={**CONFIG, "id2label": {"0": "neg", "1": "pos"}})
    put(root.parent, config={**CONFIG, "id2label": {"0": "pos", "1": "neg"}})
    (warning,) = warned(root)
    assert "class 0 neg in the checkpoint's config.json but pos in the folder above's" in warning


def test_a_config_that_tells_twice_how_positions_are_rotated_is_told(root: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    put(root, config={**CONFIG, "rope_theta": 1e6, "rope_parameters": rope})
    (warning,) = warned(root)
    assert "rope_theta 10000.0 in rope_parameters but 1000000.0 in rope_theta" in warning
    scaling = {"rope_type": "yarn", "factor": 4.0}
    put(root, config={**CONFIG, "rope_scaling": scaling, "rope_parameters": rope})
    assert "rope_type default" in warned(root)[0]
    put(root, config={**CONFIG, "rope_theta": 1e4, "rope_parameters": rope})
    assert not warned(root)


def test_positions_that_kinds_of_layers_rotate_otherwise_are_told(root: Path) -> None:
    for folder, theta in ((root, 1e4), (root.parent, 7777.0)):
        kinds = {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        put(folder, config={**CONFIG, "rope_parameters": kinds})
    (warning,) = warned(root)
    assert "full_attention.rope_theta 10000.0 in the checkpoint's but 7777.0 in" in warning
    assert "sliding" not in warning
