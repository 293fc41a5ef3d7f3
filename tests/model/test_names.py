"""A model's names, from the training's sidecar and from transformers, against transformers."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from zexport import extras
from zexport.errors import MissingExtraError
from zexport.model.fit import ModelNames, NamesUnknown
from zexport.model.names import Learner
from zexport.model.names_client import NamesClient, _cache_name, _digest
from zexport.model.sidecars import Sidecars, find_sidecars
from zexport.ranges.dtypes import DType
from zexport.store.json import Json

_TINY_LLAMA: dict[str, Json] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 11,
    "tie_word_embeddings": True,
}


def _learn(
    sidecars: Sidecars, stored: Mapping[str, tuple[int, ...] | None]
) -> ModelNames | NamesUnknown:
    with NamesClient() as transformers:
        return Learner(sidecars.source, transformers).names(sidecars.config, stored)


def _sidecars(folder: Path, config: Mapping[str, Json]) -> Sidecars:
    (folder / "config.json").write_text(json.dumps(config))
    return find_sidecars(folder)


def _source(**more: Json) -> Mapping[str, Json]:
    return {
        "schema": 1,
        "architecture": "Small",
        "model": {
            "architecture": "Small",
            "shapes": {"a": [2, 3], "inner.b": [], "c": [2, 3]},
            "buffers": ["inner.b"],
            "tied": {"c": "a"},
            "unsaved": [],
            "keep_fp32": {"bfloat16": ["a"], "float16": []},
            "layouts": [
                {
                    "label": "",
                    "sources": ["a", "inner.b"],
                    "parts": [],
                    "tensors": {"a.0": [[3], [0]], "a.1": [[3], [0, 3]], "b": 1},
                    "aliases": {"c": "c"},
                }
            ],
            **more,
        },
    }


def _learn_from_source(source: Mapping[str, Json]) -> ModelNames | NamesUnknown:
    return _learn(Sidecars(None, source, {}, (), None), {})


def test_the_trainings_sidecar_is_enough() -> None:
    names = _learn_from_source(_source())
    assert isinstance(names, ModelNames)
    assert names.shapes == {"a": (2, 3), "inner.b": (), "c": (2, 3)}
    assert (names.tied, names.buffers) == ({"c": "a"}, {"inner.b"})
    assert names.layouts[0].shapes == {"a.0": (3,), "a.1": (3,), "b": ()}
    assert names.layouts[0].tensors["a.1"].boxes[0].offset == 3
    assert names.kept_in_fp32("a") == {DType.BF16}


def test_an_early_sidecar_is_enough_where_names_in_memory_are_the_files() -> None:
    source: dict[str, Json] = {
        "schema": 1,
        "architecture": "Small",
        "tensors": {"a": {"shape": [2, 3], "stored_name": "a"}, "b": {"shape": []}},
        "tied": {"c": "a"},
        "buffers": ["b"],
        "names_match_memory": True,
    }
    names = _learn_from_source(source)
    assert isinstance(names, ModelNames)
    assert names.shapes == {"a": (2, 3), "b": (), "c": (2, 3)}
    assert names.hub_is_memory
    for change in ({"names_match_memory": False}, {"tensors": None}, {"tensors": {"a": 3}}):
        assert isinstance(_learn_from_source({**source, **change}), NamesUnknown)


_ODD_LAYOUTS: list[Json] = [
    {"sources": ["x"], "parts": [], "tensors": {}},
    {"sources": ["a"], "parts": [], "tensors": {"a": 1}},
    {"sources": ["a"], "parts": [], "tensors": {"a": True}},
    {"sources": ["a"], "parts": [], "tensors": {"a": []}},
    {"sources": ["a"], "parts": [], "tensors": {"a": [[2], [0, -1]]}},
    {"sources": ["a"], "parts": [], "tensors": {"a": [[2], [0, 0, [1, 1]]]}},
    {"sources": ["a"], "parts": [], "tensors": {"a": [[2], 0]}},
    {"sources": ["a"], "parts": [], "tensors": {"a": [[-2], [0]]}},
    {"sources": ["a"], "parts": [], "tensors": {"a": [[1] * 17, [0]]}},
    {"sources": ["a"], "parts": [[[2], [1]]], "tensors": {}},
    {"sources": ["a"], "parts": [], "tensors": []},
]


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": None},
        {"shapes": {"a": 3}},
        {"shapes": {"a": [-3]}},
        {"tied": {"c": "nowhere"}},
        {"buffers": {}},
        *({"layouts": [layout]} for layout in _ODD_LAYOUTS),
    ],
)
def test_a_sidecar_of_another_form_says_nothing(change: dict[str, Json]) -> None:
    assert isinstance(_learn_from_source(_source(**change)), NamesUnknown)


@pytest.mark.parametrize("change", [{"adapter": True}, {"model": None}])
def test_a_sidecar_of_an_adapter_or_an_older_version_says_nothing(change: dict[str, Json]) -> None:
    assert isinstance(_learn_from_source({**_source(), **change}), NamesUnknown)


def test_without_a_config_nothing_is_known() -> None:
    names = _learn(Sidecars(None, None, {}, (), None), {})
    assert names == NamesUnknown("there is no config.json")


@pytest.mark.slow
def test_names_are_those_of_the_model_that_transformers_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {**_TINY_LLAMA, "architectures": ["LlamaForCausalLM"]}
    sidecars = _sidecars(tmp_path, config)
    names = _learn(sidecars, {})
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(dict(config)))
    assert isinstance(names, ModelNames)
    assert names.shapes == {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert names.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert names.hub_is_memory

    monkeypatch.setattr(subprocess, "Popen", None)  # what is cached is not asked for again
    assert _learn(sidecars, {}) == names


@pytest.mark.slow
@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_config_with_an_endless_limit_is_read_as_transformers_wrote_it(
    is_tagged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import Mamba2Config, Mamba2ForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 8, "num_heads": 4, "head_dim": 4, "n_groups": 1, "state_size": 4}
    config = Mamba2Config(**sizes, vocab_size=11, num_hidden_layers=1)
    config.architectures = ["Mamba2ForCausalLM"]
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    if not is_tagged:  # as transformers 4 wrote it
        content["time_step_limit"][1] = float("inf")
    names = _learn(_sidecars(tmp_path, content), {})
    with torch.device("meta"):
        model = Mamba2ForCausalLM(config)
    assert isinstance(names, ModelNames)
    assert names.shapes == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.slow
def test_without_an_architecture_the_class_that_fits_is_found(tmp_path: Path) -> None:
    sidecars = _sidecars(tmp_path, {**_TINY_LLAMA, "tie_word_embeddings": False})
    hidden, inner, vocab = 8, 12, 11
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (4, hidden),
        "self_attn.v_proj": (4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    stored = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()} | {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    names = _learn(sidecars, stored)
    assert isinstance(names, ModelNames)
    assert names.architecture == "LlamaForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({**_TINY_LLAMA, "architectures": ["OwnForCausalLM"]}, "OwnForCausalLM"),
        (
            {**_TINY_LLAMA, "architectures": ["LlamaForCausalLM"], "hidden_size": "x"},
            "transformers",
        ),
    ],
)
def test_a_config_that_transformers_cannot_build_says_why_and_runs_nothing(
    config: dict[str, Json], word: str, tmp_path: Path
) -> None:
    own = "import pathlib\npathlib.Path(__file__).with_name('PWNED').touch()\n"
    (tmp_path / "modeling_own.py").write_text(own)
    auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    names = _learn(_sidecars(tmp_path, {**config, "auto_map": auto_map}), {})
    assert isinstance(names, NamesUnknown)
    assert word in names.reason
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size", "words"),
    [("llama", "num_hidden_layers", "too long"), ("mixtral", "num_local_experts", "memory")],
)
def test_a_config_of_absurd_size_ends_in_a_sentence(
    model: str, size: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that the process began with holds too: with one, the first need not take a minute."""
    limits = {"num_hidden_layers": 15}
    start = subprocess.Popen

    def limited_start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = limits.get(size, hard)
        limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (soft, hard))
        return start(*args, preexec_fn=limit, **options)

    monkeypatch.setattr(subprocess, "Popen", limited_start)
    architecture = f"{model.title()}ForCausalLM"
    config = {**_TINY_LLAMA, "model_type": model, "architectures": [architecture], size: 10**9}
    names = _learn(_sidecars(tmp_path, config), {})
    assert isinstance(names, NamesUnknown)
    assert words in names.reason
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"hidden_size": "64"},
        {"vocab_size": 10**30},
        {"architectures": ["pipeline"]},
        {"architectures": [5]},
        {"model_type": ["llama"]},
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_ends_in_a_sentence(
    more: dict[str, Json], tmp_path: Path
) -> None:
    config = {**_TINY_LLAMA, "architectures": ["LlamaForCausalLM"], **more}
    names = _learn(_sidecars(tmp_path, config), {})
    assert isinstance(names, NamesUnknown)
    assert re.search("[a-z]{3}", names.reason)
    assert "\n" not in names.reason


@pytest.mark.slow
def test_a_config_chooses_no_code_but_that_of_its_class(tmp_path: Path) -> None:
    code: dict[str, Json] = {
        "_attn_implementation": "owner/kernels",
        "attn_implementation": "owner/kernels",
    }
    config = {**_TINY_LLAMA, "architectures": ["LlamaForCausalLM"], **code}
    assert isinstance(_learn(_sidecars(tmp_path, config), {}), ModelNames)


@pytest.mark.slow
def test_what_transformers_does_not_know_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecars = _sidecars(tmp_path, {"model_type": "odd", "architectures": ["Odd"]})
    first = _learn(sidecars, {})
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("asked again"))
    assert _learn(sidecars, {}) == first


@pytest.mark.slow
def test_one_process_answers_for_several_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noting_start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noting_start)
    config = {**_TINY_LLAMA, "architectures": ["LlamaForCausalLM"]}
    sizes: list[Json] = [7, "x", 9]  # of the second no model can be made
    with NamesClient() as transformers:
        learner = Learner(None, transformers)
        told = [
            learner.names(_sidecars(tmp_path, {**config, "vocab_size": size}).config, {})
            for size in sizes
        ]
    assert isinstance(told[1], NamesUnknown)
    for size, names in ((7, told[0]), (9, told[2])):
        assert isinstance(names, ModelNames)
        assert names.shapes["model.embed_tokens.weight"] == (size, 8)
    assert len(started) == 2  # another one after the failure alone
    assert [one.returncode is not None for one in started] == [True, True]


@pytest.mark.slow
def test_what_libraries_print_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as they are imported, and not as a model is built."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, transformers\n"
        "os.write(1, b'{}\\n' * 3)\n"
        "init = transformers.LlamaForCausalLM.__init__\n"
        "def printing_init(self, config):\n"
        "    os.write(1, b'{}\\n' * 3)\n"
        "    print('{}', flush=True)\n"
        "    init(self, config)\n"
        "transformers.LlamaForCausalLM.__init__ = printing_init\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {**_TINY_LLAMA, "architectures": ["LlamaForCausalLM"]}
    names = _learn(_sidecars(tmp_path, config), {})
    assert isinstance(names, ModelNames)
    assert names.architecture == "LlamaForCausalLM"


@pytest.mark.slow
def test_a_question_without_an_answer_is_put_once_for_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {**_TINY_LLAMA, "architectures": ["LlamaForCausalLM"], "hidden_size": "x"}
    sidecars = _sidecars(tmp_path, config)
    with NamesClient() as transformers:
        learner = Learner(None, transformers)
        first = learner.names(sidecars.config, {})
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("asked again"))
        assert learner.names(sidecars.config, {}) == first
    assert isinstance(first, NamesUnknown)
    assert re.search(r"failed: \w+Error", first.reason)
    assert not list(tmp_path.glob("cache/**/*.json"))


def _cached(folder: Path) -> Path:
    (path,) = folder.glob("cache/zexport/*")
    return path


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_text('{"candidates": [{}]}'),
        lambda path: path.write_text('{"a":' * 100_000),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut", "another", "deep", "pipe", "folder"],
)
def test_a_spoilt_cache_is_asked_anew_and_leaves_nothing_behind(
    spoil: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sidecars = _sidecars(tmp_path, {"model_type": "odd", "architectures": ["Odd"]})
    first = _learn(sidecars, {})
    spoil(_cached(tmp_path))
    assert _learn(sidecars, {}) == first
    assert _cached(tmp_path).name.endswith(".json")


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment as one that has none."""
    monkeypatch.setattr(extras, "installed", lambda _: None)


def _remember(cache: Path, config: bytes, version: str, candidates: object) -> None:
    content = json.dumps({"candidates": candidates}).encode()
    path = cache / "zexport" / _cache_name(config, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_digest(content).encode() + b"\n" + content)


@pytest.mark.usefixtures("without_transformers")
def test_names_that_another_environment_learnt_need_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest version's that was asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sidecars = _sidecars(tmp_path, {"model_type": "odd"})
    assert sidecars.config is not None
    for version in ("5.9.0", "5.10.1", "5.2.0"):
        model = {"architecture": "Small", "shapes": {f"of {version}": []}, "buffers": []}
        answer = {**model, "tied": {}, "unsaved": [], "keep_fp32": {}}
        _remember(tmp_path / "cache", sidecars.config.serialized(), version, [answer])
    names = _learn(sidecars, {})
    assert isinstance(names, ModelNames)
    assert (*names.shapes, names.provenance) == ("of 5.10.1", "Small of transformers 5.10.1")


@pytest.mark.parametrize(
    ("lack", "line"),
    [
        ("no transformers", "Type pip install '.[hub]' in a clone of zexport; or"),
        ("transformers 4.57.6", "Type uv tool install '.[hub]', or pipx install '.[hub]', in a"),
        ("no torch", "Type pip install '.[hub]' in a clone of zexport; or"),
    ],
    ids=["no transformers", "transformers 4.57.6", "no torch"],
)
def test_names_that_cannot_be_asked_for_are_never_guessed(
    lack: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"transformers 4.57.6": "4.57.6", "no torch": "5.23.0"}
    monkeypatch.setattr(extras, "installed", lambda _: versions.get(lack))
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    sidecars = _sidecars(tmp_path, {"model_type": "odd"})
    with pytest.raises(MissingExtraError, match=re.escape(line)) as caught:
        _learn(sidecars, {})
    assert (caught.value.exit_code, caught.value.found) == (2, lack)
    with NamesClient(are_needed=False) as transformers:
        names = Learner(None, transformers).names(sidecars.config, {})
    assert isinstance(names, NamesUnknown)
    assert transformers.lacked == lack


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "content", "words"),
    [
        ("transformers", "raise ImportError('spoilt')", "ImportError: spoilt"),
        ("torch", "raise OSError('no libc10')", "OSError: no libc10"),
    ],
)
def test_a_transformers_that_cannot_be_imported_is_no_reason_to_guess(
    package: str, content: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(MissingExtraError, match=words):
        _learn(_sidecars(tmp_path, {"model_type": "odd"}), {})


def test_a_user_without_a_folder_for_caches_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    names = _learn(_sidecars(tmp_path, {"model_type": "odd", "architectures": ["Odd"]}), {})
    assert isinstance(names, NamesUnknown)
    assert "odd" in names.reason


def test_what_cannot_be_remembered_is_told_once_and_no_home_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for home, cache, why in (
        (tmp_path / "nobody", "", "there is no home folder"),
        (tmp_path, str(tmp_path / "file" / "cache"), "Not a directory"),
    ):
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        caplog.clear()
        with NamesClient() as transformers:
            for kind in ("odd", "odder"):
                transformers.describe(json.dumps({"model_type": kind}).encode())
        (told,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert why in told
        assert "XDG_CACHE_HOME" in told
        assert not home.exists() or home == tmp_path


@pytest.mark.slow
def test_every_question_has_the_whole_time_and_memory() -> None:
    code = (
        "import resource, zexport.model.names_process as asked\n"
        "limits = (resource.RLIMIT_CPU, resource.RLIMIT_AS)\n"
        "asked.bound_work()\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "before = [resource.getrlimit(limit)[0] for limit in limits]\n"
        "kept, end = bytearray(1 << 26), resource.getrusage(resource.RUSAGE_SELF).ru_utime + 2\n"
        "while resource.getrusage(resource.RUSAGE_SELF).ru_utime < end: pass\n"
        "asked.bound_work()\n"
        "after = [resource.getrlimit(limit)[0] for limit in limits]\n"
        "print(before[0] - used.ru_utime - used.ru_stime < 60, before[1] >> 30 < 12)\n"
        "print(*(a > b for a, b in zip(after, before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "True True\n" * 2
