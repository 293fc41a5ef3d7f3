"""Files of one model that contradict each other: tokenizer, processor, pooling, card, settings."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram

from zexport.facts.statements import Judgement, judge
from zexport.model.config import ConfigFile
from zexport.model.sidecars import find_sidecars
from zexport.model.special_tokens import (
    behind_statements,
    end_statements,
    id_statements,
    lacking_statements,
    pad_statements,
)
from zexport.model.stated import file_facts, named_bases
from zexport.model.token_numbers import token_numbers
from zexport.model.tokenizer import Tokenizer as Rules
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


def tokenizer(folder: Path, words: dict[str, int], *added: str, merges: object = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    found = Tokenizer(BPE(words, list(merges)))  # type: ignore[call-overload]
    found.add_tokens([AddedToken(token, special=True) for token in added])
    found.save(str(folder / "tokenizer.json"))
    return folder


def judged(root: Path, base: Path | None = None, *parts: Path, **named: str) -> Judgement:
    found = find_sidecars(root, base, parts=[(part, Boundary.of(part)) for part in parts])
    return judge(file_facts(found, named | named_bases(found, is_adapter=bool(named))), root)


def warned(root: Path, base: Path | None = None, **named: str) -> list[str]:
    return judged(root, base, **named).warnings


def test_tokens_and_rules_that_a_tokenizer_lost_are_told(root: Path) -> None:
    tokenizer(tokenizer(root, WORDS).parent, WORDS, "<tool>")
    (warning,) = warned(root)
    assert "1 tokens, such as '<tool>', not there in the export's tokenizer.json" in warning
    content = json.loads((root / "tokenizer.json").read_text())
    put(root.parent, tokenizer={**content, "normalizer": {"type": "Lowercase"}})
    (warning,) = warned(root)
    assert "normalizer none" in warning
    assert "Lowercase" in warning


SHIFTED = {**WORDS, "a": 1, "b": 0}


@pytest.mark.parametrize("where", ["above", "base"])
def test_a_tokenizer_of_the_same_size_with_other_numbers_is_told(root: Path, where: str) -> None:
    other = tokenizer(root.parent if where == "above" else root.parents[1] / "base", SHIFTED)
    (warning,) = warned(tokenizer(root, WORDS), other if where == "base" else None)
    assert "2 of 6 tokens, such as 'a', 0 in the export's tokenizer.json but 1 in " in warning


def test_tokenizers_with_the_same_tokens_and_other_merges_are_told(root: Path) -> None:
    words = {**WORDS, "ab": 6, "bc": 7}
    tokenizer(root, words, merges=[("a", "b"), ("b", "c")])
    base = tokenizer(root.parents[1] / "base", words, merges=[("b", "c"), ("a", "b")])
    (warning,) = warned(root, base)
    assert "merges 4 letters (" in warning


def test_the_older_form_of_a_tokenizer_is_held_against_it(root: Path) -> None:
    words = {**WORDS, "ab": 6, "bc": 7}
    tokenizer(root, words, merges=[("a", "b"), ("b", "c")])
    write(put(root, vocab=words), merges_txt="#version: 0.2\na b\nb c\n")
    assert not warned(root)
    write(root, merges_txt="#version: 0.2\nb c\na b\n")
    assert "merges" in warned(root)[0]
    put(root, vocab={**words, "a": 1, "b": 0})
    assert "1 in the export's vocab.json" in warned(root)[0]


def test_a_vocabulary_that_is_copied_is_the_bases_byte_for_byte(root: Path) -> None:
    base = write(root.parents[1] / "base", tokenizer_model="other")
    assert "bytes" in warned(write(root, tokenizer_model="model"), base)[0]
    assert not warned(write(root, tokenizer_model="other"), base)


def test_tokens_that_were_added_and_other_spellings_of_a_file_are_not_told(root: Path) -> None:
    base = tokenizer(root.parents[1] / "base", WORDS)
    content = json.loads((base / "tokenizer.json").read_text())
    put(base, tokenizer=content)
    assert not warned(tokenizer(root, WORDS, "<new>"), base)
    Tokenizer(Unigram([("a", -1.0), ("b", -2.0)])).save(str(base / "tokenizer.json"))
    assert not warned(root, base)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"vocab": 5}}', "[" * 100_000])
def test_a_tokenizer_of_another_form_tells_nothing(root: Path, content: str) -> None:
    base = write(root.parents[1] / "base", tokenizer_json=content)
    assert not warned(tokenizer(root, WORDS), base)


@pytest.mark.parametrize(
    ("settings", "token"),
    [
        ({"pad_token": "[PAD]"}, "[PAD]"),
        ({"extra_special_tokens": ["<image>"]}, "<image>"),
        ({"tokenizer_class": "LlamaTokenizerFast", "unk_token": "<unk>"}, "<s>"),
        ({"tokenizer_class": "BertTokenizer"}, "[CLS]"),
    ],
)
def test_a_special_token_that_the_tokenizer_lacks_is_told(
    root: Path, settings: dict[str, object], token: str
) -> None:
    tokenizer(root, {"a": 0, "b": 1})
    (warning,) = warned(put(root, tokenizer_config=settings))
    assert repr(token) in warning
    put(tokenizer(root, {"a": 0, "b": 1}, "[PAD]", "<image>"), tokenizer_config=settings)
    rest = {"tokenizer_class"} & settings.keys()
    assert bool(warned(root)) == bool(rest)


def test_special_tokens_that_are_there_are_not_told(root: Path) -> None:
    settings = {"tokenizer_class": "LlamaTokenizer", "pad_token": {"content": "<p>"}}
    put(tokenizer(root, WORDS, "<p>"), tokenizer_config=settings)
    assert not warned(root)


def test_marks_of_a_template_that_are_no_tokens_are_noted(root: Path) -> None:
    write(root, chat__template_jinja="")
    (root / "chat_template.jinja").write_text("{{ '<|im_start|>' + m }}<|user|>")
    (note,) = judged(tokenizer(root, WORDS, "<|im_start|>")).notes
    assert "'<|user|>'" in note
    assert "im_start" not in note


def test_configs_of_one_run_that_differ_are_told(root: Path) -> None:
    put(root, config={**CONFIG, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "use_cache": True})
    above = {**CONFIG, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "use_cache": False}
    put(root.parent, config=above)
    (warning,) = warned(root)
    assert "rms_norm_eps 1e-05 in the checkpoint's but 1e-06 in the folder above's" in warning
    assert "rope_theta" in warning
    assert "use_cache" not in warning


def test_what_the_checkpoint_before_says_is_compared(root: Path) -> None:
    tokenizer(put(root, generation_config={"temperature": 0.1}), WORDS)
    before = put(root.parent / "checkpoint-2", config=CONFIG | {"hidden_size": 32})
    tokenizer(put(before, generation_config={"temperature": 1.0}), SHIFTED)
    found = find_sidecars(root, before=before)
    told = "; ".join(judge(file_facts(found, {}), root).warnings)
    assert "hidden_size 64 in the checkpoint's but 32 in checkpoint-2's" in told
    assert "temperature: 0.1 in the export's but 1.0 in checkpoint-2's" in told
    assert "tokenizer.json but 1 in checkpoint-2's tokenizer.json" in told
    assert not {*found.files.values()} & {*before.iterdir()}
    (before / "config.json").write_text('{"model_ty')  # rotation may be removing it
    assert before.name not in find_sidecars(root, before=before).run_configs


def test_how_an_added_token_is_found_is_compared(root: Path) -> None:
    tokenizer(root, WORDS, "<tool>")
    (token,) = json.loads((root / "tokenizer.json").read_text())["added_tokens"]
    put(root, tokenizer_config={"added_tokens_decoder": {"6": token}})
    assert not warned(root)
    put(root, tokenizer_config={"added_tokens_decoder": {"6": token | {"lstrip": True}}})
    (warning,) = warned(root)
    assert "'<tool>', lstrip: False in tokenizer.json but True in tokenizer_config.json" in warning


def test_what_a_config_says_of_its_language_model_twice_is_told(root: Path) -> None:
    inner = {"model_type": "llama", "rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_size": 8}
    put(root, config={"model_type": "llava", "hidden_size": 4, "text_config": inner})
    assert not warned(root)
    put(root, config={"model_type": "llava", "text_config": inner, "rope_theta": 1e6})
    (warning,) = warned(root)
    assert "rope_theta 10000.0 in text_config but 1000000.0 in the config around it" in warning


def test_places_for_an_image_are_those_of_the_model(root: Path) -> None:
    for places, told in ((4, 0), (9999, 1)):
        put(root, config=CONFIG | {"mm_tokens_per_image": 4})
        put(root, processor_config={"image_seq_length": places})
        assert len(warned(root)) == told


def test_a_length_far_below_the_models_positions_is_noted(root: Path) -> None:
    for length, told in ((16, 1), (62, 0)):
        put(root, config=CONFIG | {"max_position_embeddings": 64})
        put(root, tokenizer_config={"model_max_length": length})
        assert len(judged(root).notes) == told


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


def test_settings_of_other_files_of_a_run_are_told_and_of_a_base_noted(root: Path) -> None:
    write(root, tokenizer_model="same")
    put(root, generation_config={"temperature": 0.6}, tokenizer_config={"padding_side": "left"})
    put(root.parent, generation_config={"temperature": 0.9, "transformers_version": "4"})
    base = write(root.parents[1] / "base", tokenizer_model="same")
    put(base, tokenizer_config={"padding_side": "right", "pad_token": {"content": "<p>"}})
    found = judged(root, base)
    (warning,), (note,) = found.warnings, found.notes
    assert "generation_config.json, temperature: 0.6 in the export's but 0.9 in the " in warning
    assert "tokenizer_config.json, padding_side: left in the export's but right in --base's" in note


VISION = {"vision_config": {"image_size": 336, "patch_size": 14, "spatial_merge_size": 2}}


def test_a_processor_that_cuts_images_otherwise_is_told(root: Path) -> None:
    put(root, config={**CONFIG, **VISION})
    put(root, preprocessor_config={"patch_size": {"height": 16, "width": 16}, "merge_size": 2})
    (warning,) = warned(root)
    assert "patch_size 14 in config.json but 16 in preprocessor_config.json" in warning


@pytest.mark.parametrize("size", [448, {"height": 448, "width": 448}, [448, 448]])
def test_a_processor_with_images_of_another_size_is_noted(root: Path, size: object) -> None:
    put(root, config={**CONFIG, **VISION}, preprocessor_config={"size": size})
    (note,) = judged(root).notes
    assert "336 in config.json but 448 in preprocessor_config.json" in note


@pytest.mark.parametrize(
    "content",
    [
        {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 448}},
        {"do_center_crop": True, "crop_size": {"height": 336, "width": 336}, "size": 448},
        {"size": {"height": 336, "width": 448}},
    ],
)
def test_a_processor_that_fits_is_not_told(root: Path, content: object) -> None:
    found = judged(put(root, config={**CONFIG, **VISION}, preprocessor_config=content))
    assert not [*found.warnings, *found.notes]


def test_files_that_name_two_processors_are_told(root: Path) -> None:
    write(put(root, preprocessor_config={"processor_class": "LlavaProcessor"}), vocab_txt="a")
    put(root, tokenizer_config={"processor_class": "Qwen2VLProcessor"})
    (warning,) = warned(root)
    assert "LlavaProcessor in preprocessor_config.json but Qwen2VLProcessor in " in warning


STEPS = [{"path": "", "type": "T"}, {"path": "1_Pooling", "type": "P"}]
DENSE = {"path": "2", "type": "D"}


@pytest.mark.parametrize("key", ["word_embedding_dimension", "embedding_dimension"])
def test_pooling_of_another_size_than_the_model_is_told(root: Path, key: str) -> None:
    put(root, modules=STEPS, **{"1_Pooling__config": {key: 64}})
    assert not warned(root)
    put(root, modules=STEPS, **{"1_Pooling__config": {key: 48}})
    (warning,) = warned(root)
    assert "64 in config.json but 48 in 1_Pooling/config.json" in warning


def test_the_step_after_a_dense_one_takes_what_that_gives(root: Path) -> None:
    dense = {"in_features": 64, "out_features": 32}
    put(root, modules=[*STEPS, DENSE, {"path": "3", "type": "D"}], **{"1_Pooling__config": {}})
    put(root, **{"2__config": dense, "3__config": {"in_features": 32}})
    assert not any("another size" in one for one in warned(root))
    put(root, **{"3__config": {"in_features": 64}})
    assert any("32 in 2/config.json but 64 in 3/config.json" in one for one in warned(root))


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


def test_code_of_the_models_own_is_held_against_that_of_other_folders(root: Path) -> None:
    named = {**CONFIG, "auto_map": {"AutoModel": "modeling_mine.Mine"}}
    base = put(root.parents[1] / "base", config=named)
    for folder, text in ((put(root, config=named), "1"), (root.parent, "1"), (base, "2")):
        (folder / "modeling_mine.py").write_text(text)
    assert "modeling_mine.py: code (" in judged(root, base).notes[0]
    assert not warned(root, base)
    (root.parent / "modeling_mine.py").write_text("3")
    (warning,) = warned(root, base)
    assert "in the folder above's" in warning


def test_a_key_that_stands_twice_in_a_file_is_told(root: Path) -> None:
    text = '{"model_type": "llama", "rms_norm_eps": 1e-06, "a": 1, "rms_norm_eps": 0.01, "a": 1}'
    (root / "config.json").write_text(text)
    (warning,) = warned(root)
    assert "rms_norm_eps 1e-06 in config.json, 1. but 0.01 in config.json, 2." in warning


def test_licences_that_differ_are_told(root: Path) -> None:
    write(root, README_md="---\nlicense: mit\n---\n", LICENSE="\n   Apache License\n Version 2.0")
    base = write(root.parents[1] / "base", README_md="---\nlicense: gemma\n---\n")
    (warning,) = warned(root, base)
    assert "mit in the checkpoint's README.md, gemma in the card of --base but apache" in warning


def test_licences_that_agree_or_are_not_known_are_not_told(root: Path) -> None:
    write(root, README_md="---\nlicense: mit\n---\n", LICENSE="MIT License")
    base = write(root.parents[1] / "base", README_md="---\ntags: [a]\n---\n", LICENSE="Ours")
    assert not warned(root, base)


def test_code_that_is_nowhere_is_told(root: Path) -> None:
    put(root, config={**CONFIG, "auto_map": {"AutoModel": "modeling_mine.Mine"}})
    assert "modeling_mine.py code of its own in config.json but no such" in warned(root)[0]
    write(root, modeling_mine_py="")
    (root / "modeling.mine.py").rename(root / "modeling_mine.py")
    assert not warned(root)


def test_a_card_of_another_task_is_noted(root: Path) -> None:
    put(root, config={**CONFIG, "architectures": ["LlamaForCausalLM"]})
    write(root, README_md="---\npipeline_tag: text-classification\n---\n")
    (note,) = judged(root).notes
    assert "text-generation in config.json, LlamaForCausalLM" in note
    write(root, README_md="---\nlibrary_name: peft\n---\n")
    assert "this is an adapter in the checkpoint's README.md" in judged(root).notes[0]
    write(root, README_md="---\npipeline_tag: text-generation\n---\n")
    assert not judged(root).notes


def test_steps_whose_files_are_not_there_are_told(root: Path) -> None:
    put(root, modules=[*STEPS, DENSE], **{"1_Pooling__config": {}})
    assert "2 a step in modules.json but no files in the export" in warned(root)[0]
    put(root, **{"2__config": {"in_features": 64, "out_features": 32}})
    assert "2 weights of its own in its config but none in the export" in warned(root)[0]


def test_texts_longer_than_the_model_are_told(root: Path) -> None:
    put(root, modules=STEPS[:1], config={**CONFIG, "max_position_embeddings": 512})
    put(root, sentence_bert_config={"max_seq_length": 512})
    assert not warned(root)
    put(root, sentence_bert_config={"max_seq_length": 514})
    assert "514 in sentence_bert_config.json, expected below 513" in warned(root)[0]


def test_a_length_that_a_tokenizer_was_left_with_is_noted(root: Path) -> None:
    left = Tokenizer.from_file(str(tokenizer(root, WORDS) / "tokenizer.json"))
    left.enable_truncation(16)
    left.enable_padding(length=16)
    left.save(str(root / "tokenizer.json"))
    put(root, tokenizer_config={"model_max_length": 10**30})
    assert len(left.encode("ab" * 40)) == len(left.encode("a")) == 16
    (note,) = judged(root).notes
    assert "texts are cut to no length in the other files but 16 in tokenizer.json" in note
    assert "texts are filled up to no length in the other files but 16 in tokenizer.json" in note
    put(root, config={**CONFIG, "max_position_embeddings": 64})
    (note,) = judged(root).notes
    assert "cut to [64] in the other files but 16 in" in note


@pytest.mark.parametrize("padding", [None, {"strategy": "BatchLongest"}, {"strategy": 5}, 5])
def test_a_length_that_is_the_models_or_none_is_not_told(root: Path, padding: object) -> None:
    content = json.loads((tokenizer(root, WORDS) / "tokenizer.json").read_text())
    length = {"max_length": 128, "strategy": "LongestFirst"}
    put(root, tokenizer={**content, "truncation": length, "padding": padding})
    put(root, tokenizer_config={"model_max_length": 512})
    put(root, sentence_bert_config={"max_seq_length": 128})
    put(root, modules=[{"path": "", "type": "Transformer"}])
    assert not judged(root).notes


def test_the_two_files_of_an_image_processor_say_the_same(root: Path) -> None:
    put(root, processor_config={"image_processor": {"do_resize": True, "image_mean": [0.5]}})
    put(root, preprocessor_config={"do_resize": True, "image_mean": [0.4]})
    (warning,) = warned(root)
    assert "image_mean [0.5] in processor_config.json but [0.4] in preprocessor_" in warning


def test_sounds_cut_otherwise_than_the_model_takes_them_are_told(root: Path) -> None:
    put(root, config={**CONFIG, "num_mel_bins": 128}, preprocessor_config={"feature_size": 80})
    assert "feature_size 128 in config.json but 80 in pre" in warned(root)[0]


def named(root: Path, **config: object) -> list[str]:
    said = id_statements(find_sidecars(root).copied, ConfigFile(root, config))  # type: ignore[arg-type]
    return judge(said, root).warnings


def test_numbers_of_special_tokens_that_differ_are_told(root: Path) -> None:
    put(tokenizer(root, WORDS), generation_config={"decoder_start_token_id": 2})
    put(root, processor_config={"image_token": "c"}, tokenizer_config={"bos_token": "<s>"})
    agreeing = {"image_token_id": 2, "bos_token_id": 3, "decoder_start_token_id": 2}
    assert not named(root, **agreeing)
    for key, shown in {
        "image_token_index": "image_token 1 in config.json but 2 in processor_config.json (c)",
        "bos_token_id": "bos_token 1 in config.json but 3 in tokenizer_config.json (<s>)",
        "decoder_start_token_id": "decoder_start_token 1 in config.json but 2 in generation_conf",
    }.items():
        assert shown in named(root, **{key: 1})[0]


def test_special_tokens_that_two_files_name_differently_are_told(root: Path) -> None:
    put(tokenizer(root, WORDS), special_tokens_map={"eos_token": {"content": "</s>"}})
    put(root, tokenizer_config={"eos_token": "<s>"})
    (warning,) = named(root)
    assert "eos_token <s> in tokenizer_config.json but </s> in special_tokens_map.json" in warning


def padded(root: Path, pad: object) -> list[str]:
    config = ConfigFile(root / "config.json", {} if pad is None else {"pad_token_id": pad})  # type: ignore[dict-item]
    return judge(pad_statements(find_sidecars(root).copied, config), root).warnings


def test_a_classifier_without_the_token_that_fills_up_texts_is_told(root: Path) -> None:
    (warning,) = padded(root, None)
    assert "none in config.json" in warning
    assert not padded(root, 5)
    put(tokenizer(root, WORDS), tokenizer_config={"pad_token": "<unk>"})
    (warning,) = padded(root, 3)
    assert "3 in config.json but 5 in tokenizer_config.json (<unk>)" in warning
    assert "none in config.json but 5 in" in padded(root, None)[0]
    assert not padded(root, 5)


def test_tokens_that_only_files_beside_the_tokenizer_add_are_told(root: Path) -> None:
    tokenizer(root, WORDS)
    put(root, added_tokens={"<|im_start|>": 1})
    put(root, tokenizer_config={"added_tokens_decoder": {"2": {"content": "<|im_end|>"}}})
    put(root, processor_config={"image_token": "<image>"})
    (warning,) = warned(root)
    assert "a special token is named that the tokenizer does not have" in warning
    for token in ("<|im_start|>", "<|im_end|>", "<image>"):
        assert repr(token) in warning
    put(root, tokenizer_config={"extra_special_tokens": {"video_token": "<video>"}})
    assert "'<video>'" in warned(root)[0]


def test_parts_of_a_tokenizer_that_number_a_token_otherwise_are_told(root: Path) -> None:
    content = json.loads((tokenizer(root, WORDS, "<s>") / "tokenizer.json").read_text())
    taken = {**content["added_tokens"][0], "content": "<|im_end|>", "id": 1}
    around = {"special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}}}
    put(root, tokenizer={**content, "added_tokens": [taken], "post_processor": around})
    (warning,) = (one for one in warned(root) if "several numbers" in one)
    assert "token 1: '<|im_end|>' in its added_tokens but 'b' in its vocabulary" in warning
    assert "'<s>' 3 in tokenizer.json but 5 in its post_processor" in warning
    put(root, tokenizer={**content, "post_processor": {"processors": [around, 5]}})
    assert "'<s>' 3 in tokenizer.json but 5" in warned(root)[0]


def sentencepiece(folder: Path, *pieces: str) -> Path:
    """A model as SentencePiece writes it: field 1 is a piece, and of that field 1 the text."""
    texts = [b"\x0a" + bytes([len(one)]) + one.encode() + b"\x15\0\0\0\0" for one in pieces]
    model = b"".join(b"\x0a" + bytes([len(text)]) + text for text in texts) + b"\x12\x02\x08\x01"
    (folder / "tokenizer.model").write_bytes(model)
    return folder


def test_vocabularies_of_older_forms_are_held_against_the_tokenizer(root: Path) -> None:
    sentencepiece(tokenizer(root, WORDS), *WORDS, "c")
    assert not warned(root)
    sentencepiece(root, "x", "y", "z", "a")
    (warning,) = warned(root)
    assert "3 of 4 tokens, such as 'x', not there in the export's tokenizer.json" in warning
    (root / "tokenizer.model").unlink()
    write(root, vocab_txt="x\ny\na\n")
    assert "2 of 3 tokens" in warned(root)[0]


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
    put(root, tokenizer_config={"do_lower_case": False})
    (root / "tokenizer.json").write_bytes(b'{%b, "%b": %b}' % (added, part, value))
    assert warned(root) is not None


def test_a_vocabulary_that_is_a_list_numbers_no_tokens() -> None:
    file = b'{"model": {"vocab": [["a", 0.0], [":1", 0.0]]}}'
    assert not [*msgspec.json.decode(file, type=Rules).in_vocabulary({1, 2})]


def test_of_many_lacking_tokens_some_are_told(root: Path) -> None:
    tokenizer(root, WORDS)
    put(root, added_tokens={f"<{number}>": number for number in range(999)})
    assert len([*lacking_statements(find_sidecars(root).copied)]) == 128


def test_rules_that_the_tokenizers_config_has_otherwise_are_told(root: Path) -> None:
    tokenizer(root, WORDS)
    content = json.loads((root / "tokenizer.json").read_text())
    put(root, tokenizer={**content, "normalizer": {"type": "BertNormalizer", "lowercase": True}})
    put(root, tokenizer_config={"do_lower_case": False})
    (warning,) = warned(root)
    assert "do_lower_case True in tokenizer.json but False in tokenizer_config.json" in warning
    assert not warned(put(root, tokenizer_config={"do_lower_case": True}))


def test_texts_longer_than_the_models_positions_are_noted(root: Path) -> None:
    put(root, config={**CONFIG, "max_position_embeddings": 64})
    put(root, tokenizer_config={"model_max_length": 131072}, generation_config={"max_length": 64})
    (note,) = judged(tokenizer(root, WORDS)).notes
    assert "131072 in tokenizer_config.json" in note
    assert "generation" not in note


def test_steps_of_an_encoder_that_differ_in_a_run_are_told(root: Path) -> None:
    steps = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    put(root, modules=steps, **{"1_Pooling__config": {"pooling_mode_cls_token": True}})
    put(root.parent, modules=[*steps, {"type": "a.Normalize", "path": ""}])
    put(root.parent, **{"1_Pooling__config": {"pooling_mode_cls_token": False}})
    (warning,) = warned(root)
    assert "a.Pooling, a.Normalize in the folder above's" in warning
    assert "1_Pooling/config.json, pooling_mode_cls_token: True" in warning


def test_a_model_that_sees_without_a_processor_is_told(root: Path) -> None:
    put(root, config={**CONFIG, "vision_config": {}})
    assert "a processor" in find_sidecars(root).missing
    assert "a processor" not in find_sidecars(put(root, preprocessor_config={})).missing


@pytest.mark.parametrize("number", [1, 50])
def test_inputs_whose_token_is_an_ordinary_one_are_told(root: Path, number: int) -> None:
    tokenizer(root, WORDS, "<image>")
    files = find_sidecars(root).copied
    for said, is_told in ((number, True), (6, False)):
        config = ConfigFile(root / "config.json", {**CONFIG, "image_token_index": said})
        found = judge(id_statements(files, config), root).warnings
        assert bool(found) == is_told


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


def test_an_empty_template_beside_another_is_told(root: Path) -> None:
    put(root, tokenizer_config={"chat_template": "{{ m }}"})
    (root / "chat_template.jinja").write_text("")
    assert "0 characters" in warned(root)[0]


def test_a_model_that_nothing_tells_when_to_end_is_told(root: Path) -> None:
    files = find_sidecars(put(root, tokenizer_config={"eos_token": "</s>"})).copied
    for architecture, is_told in (("LlamaForCausalLM", True), ("BertForMaskedLM", False)):
        config = ConfigFile(root / "config.json", {**CONFIG, "architectures": [architecture]})
        found = judge(end_statements(files, config), root).warnings
        assert bool(found) == is_told


@pytest.mark.parametrize("mark", ["<start_of_turn>", "<\uff5cUser\uff5c>"])
def test_marks_of_every_form_are_known(root: Path, mark: str) -> None:
    put(tokenizer(root, WORDS), tokenizer_config={"chat_template": mark + "{{ m }}"})
    assert any(repr(mark) in one for one in judged(root).notes)


def ended(root: Path, **config: object) -> list[str]:
    files = find_sidecars(put(root, tokenizer_config={"eos_token": "</s>"})).copied
    content = {"architectures": ["LlavaForConditionalGeneration"], **config}
    return judge(end_statements(files, ConfigFile(root / "config.json", content)), root).warnings  # type: ignore[arg-type]


def test_the_end_that_a_language_model_within_has_counts(root: Path) -> None:
    tokenizer(root, WORDS)
    assert not ended(root, text_config={"eos_token_id": 4})
    assert not ended(root, architectures=["CLIPModel"], text_config={"eos_token_id": 3})
    assert (
        "[3] in config.json, text_config but [4] in"
        in ended(root, text_config={"eos_token_id": 3})[0]
    )
    twice = {"eos_token_id": 4, "text_config": {"eos_token_id": 3}}
    assert "[4] in config.json but [3] in config.json, text_config" in ended(root, **twice)[0]
    put(root, generation_config={"eos_token_id": 4})
    assert not ended(root, **twice)
    put(root, generation_config={"do_sample": True})
    assert "none in generation_config.json but [4] in" in ended(root, eos_token_id=4)[0]
    put(root, generation_config={"_from_model_config": True})
    assert not ended(root, eos_token_id=4)


def test_a_word_that_ends_texts_is_told(root: Path) -> None:
    tokenizer(root, WORDS, "</s>")
    (warning,) = ended(root, eos_token_id=[4, 1])
    assert "'b' 1 ends a text in config.json but a word in tokenizer.json" in warning
    assert not ended(root, eos_token_id=[4, 3])


def test_lists_of_special_tokens_that_differ_are_told(root: Path) -> None:
    put(tokenizer(root, WORDS), special_tokens_map={"additional_special_tokens": ["<s>", "</s>"]})
    put(root, tokenizer_config={"extra_special_tokens": [{"content": "</s>"}]})
    (warning,) = named(root)
    assert "'<s>' not named in tokenizer_config.json but special in special_tokens_map" in warning
    assert "'</s>'" not in warning
    put(root, tokenizer_config={"bos_token": "<s>"})
    assert not named(root)


def test_a_word_that_is_named_as_a_special_token_is_noted(root: Path) -> None:
    put(tokenizer(root, WORDS, "pad"), tokenizer_config={"unk_token": "b", "pad_token": "pad"})
    (note,) = judged(root).notes
    assert "'b' a special token in tokenizer_config.json but a word in tokenizer.json" in note
    assert "'pad'" not in note


def test_a_processor_of_another_kind_of_model_is_noted(root: Path) -> None:
    put(root, preprocessor_config={"image_processor_type": "SiglipImageProcessorFast"})
    for seeing, is_told in (("clip_vision_model", True), ("siglip_vision_model", False)):
        put(root, config={**CONFIG, "vision_config": {"model_type": seeing}})
        notes = judged(root).notes
        assert any("clip in config.json but siglip in pre" in one for one in notes) == is_told


def test_what_a_tokenizer_was_left_with_is_told(root: Path) -> None:
    content = json.loads((tokenizer(root, WORDS) / "tokenizer.json").read_text())
    assert not warned(root)
    put(root, tokenizer={**content, "model": {**content["model"], "dropout": 0.3}})
    put(root, tokenizer_config={"split_special_tokens": True})
    (warning,) = warned(root)
    for by in ("split_special_tokens in tokenizer_config.json", "dropout in tokenizer.json"):
        assert by in warning


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"post_processor": {"type": "ByteLevel"}}, "post_processor none ("),
        ({"decoder": {"type": "Fuse"}}, "decoder none ("),
        ({"ignore_merges": True}, "the model's ignore_merges None"),
        ({"ignore_merges": False}, ""),
    ],
)
def test_tokenizers_of_one_run_that_go_by_other_rules_are_told(
    root: Path, changed: dict[str, object], told: str
) -> None:
    content = json.loads((tokenizer(root, WORDS) / "tokenizer.json").read_text())
    is_of_model = "ignore_merges" in changed
    whole = {"model": {**content["model"], **changed}} if is_of_model else changed
    put(root.parent, tokenizer={**content, **whole})
    found = warned(root)
    assert told in found[0] if told else not found


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


def byte_level(root: Path, **changed: object) -> Path:
    """A tokenizer of bytes as GPT-2's are, and what else is in it."""
    words = {f"\u0120{letter}": number for number, letter in enumerate("abcdefghijklmnopqrst")}
    content = json.loads((tokenizer(root, words) / "tokenizer.json").read_text())
    both = {"pre_tokenizer": {"type": "ByteLevel"}, "decoder": {"type": "ByteLevel"}}
    return put(root, tokenizer={**content, **both, **changed})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"decoder": None}, "what joins tokens"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "what cuts texts"),
    ],
)
def test_a_mark_of_words_that_no_step_makes_or_takes_back_is_told(
    root: Path, changed: dict[str, object], told: str
) -> None:
    warnings = warned(byte_level(root, **changed))
    assert len(warnings) == bool(told)
    assert all(told in one for one in warnings)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_decoder_whose_tokenizer_ends_every_text_is_told(
    root: Path, architecture: str, *, is_embedding: bool
) -> None:
    content = json.loads((tokenizer(root, WORDS, "</s>") / "tokenizer.json").read_text())
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>"}}]
    around = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    put(root, tokenizer={**content, "post_processor": around})
    put(root, tokenizer_config={"eos_token": "</s>"})
    put(root, **({"modules": []} if is_embedding else {}))
    found = find_sidecars(root)
    config = ConfigFile(root, {"architectures": [architecture]})
    files = {**found.copied, **({"modules.json": root} if is_embedding else {})}
    told = judge(behind_statements(files, config), root).warnings
    assert len(told) == (architecture == "LlamaForCausalLM" and not is_embedding)
    assert all("'</s>' in the post_processor of tokenizer.json" in one for one in told)
