"""A base that is not the one that training began from, told by configs, weights and names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from tests.support import peft_models
from tests.support.checkpoints import Model, Run, save
from tests.support.peft_models import FORMS, Trained
from zexport import ExportOptions, ExportReport, consolidate, verify_export
from zexport.errors import FrozenLeftOutError, UsageError
from zexport.findings import FindingKind
from zexport.options import AdapterMode, ExportDType, NameLayout
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Extent
from zexport.ranges.replicas import CastReplica, cosines

WITHOUT_BASE = Run(stage=2, exclude_frozen=True)
WITH_BASE = Run(stage=2)


def train(tmp_path: Path, run: Run = WITHOUT_BASE) -> Trained:
    return peft_models.train(FORMS["plain"], tmp_path / "run", run)


def names_its_base(trained: Trained, name: str) -> None:
    path = trained.checkpoint / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": name}))


def copied(trained: Trained, folder: Path) -> Path:
    """The same base at another place."""
    folder.mkdir(parents=True)
    for path in trained.base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def sibling(trained: Trained, folder: Path) -> Path:
    """The base, trained on: a hundredth of every weight away."""
    copied(trained, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    moved = {n: t + 0.01 * t.abs().mean() * torch.randn_like(t) for n, t in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_config(folder: Path, **changed: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder


def beside(trained: Trained) -> None:
    """Put the model's config beside the checkpoint, as the Trainer does."""
    (trained.checkpoint / "config.json").write_text((trained.base / "config.json").read_text())


def merge(trained: Trained, base: Path, out: Path, *allow: FindingKind) -> ExportReport:
    options = ExportOptions(adapter=AdapterMode.MERGE, base=base, allow=frozenset(allow))
    return consolidate(trained.checkpoint, out, options)


def refusal(trained: Trained, base: Path, out: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        merge(trained, base, out)
    assert caught.value.finding is FindingKind.BASE_MISMATCH
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("model_type", {"model_type": "qwen2"}),
        ("rms_norm_eps", {"rms_norm_eps": 1e-5}),
        ("num_key_value_heads", {"num_key_value_heads": 4}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("rope_theta", {"rope_parameters": None, "rope_theta": 5e5}),
        ("rope_type", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
)
def test_a_base_that_is_built_otherwise_is_refused(
    tmp_path: Path, key: str, changed: dict[str, object]
) -> None:
    trained = train(tmp_path)
    beside(trained)
    other = with_config(copied(trained, tmp_path / "other"), **changed)
    assert f"{key} " in str(refusal(trained, other, tmp_path / "out"))


def test_the_sibling_of_a_base_is_told_by_the_frozen_weights_that_were_saved(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path, WITH_BASE)
    error = refusal(trained, sibling(trained, tmp_path / "sibling"), tmp_path / "out")
    assert "weights differ" in str(error)


def test_the_sibling_of_a_base_is_told_by_the_weights_of_the_base_that_the_adapter_names(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path)
    names_its_base(trained, str(trained.base))
    error = refusal(trained, sibling(trained, tmp_path / "sibling"), tmp_path / "out")
    assert "weights differ" in str(error)


def test_a_base_of_equal_weights_that_is_built_otherwise_is_told_by_the_config_of_the_one_named(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path)
    names_its_base(trained, str(trained.base))
    other = with_config(copied(trained, tmp_path / "other"), model_type="qwen3", rms_norm_eps=1e-5)
    told = str(refusal(trained, other, tmp_path / "out"))
    assert "model_type llama" in told
    assert "qwen3 in the base's" in told
    assert "rms_norm_eps" in told


def test_the_base_that_the_adapter_names_is_looked_for_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(tmp_path)
    names_its_base(trained, "acme/llama-small")
    cached = tmp_path / "hub" / "models--acme--llama-small"
    copied(trained, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "weights differ" in str(
        refusal(trained, sibling(trained, tmp_path / "sibling"), tmp_path / "out")
    )
    assert not merge(trained, trained.base, tmp_path / "out").findings
    monkeypatch.chdir(tmp_path)
    edited = sibling(trained, tmp_path / "acme" / "llama-small")  # of the same name
    assert "weights differ" in str(refusal(trained, edited, tmp_path / "other"))


@pytest.mark.parametrize("place", ["working", "run", "runs"])
def test_a_base_of_a_relative_name_is_looked_for_where_training_was_run(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(tmp_path)
    places = {"working": tmp_path / "here", "run": tmp_path / "run", "runs": tmp_path}
    copied(trained, places[place] / "models" / "one")
    names_its_base(trained, "models/one")
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    other = sibling(trained, tmp_path / "other" / "one")
    assert "models/one (named in adapter_config.json)" in str(
        refusal(trained, other, tmp_path / "out")
    )


def partly_trained(tmp_path: Path, **said: object) -> tuple[Path, Path]:
    """A checkpoint without the frozen part, beside its config, and the model it began from."""
    model = peft_models.llama()
    model.save_pretrained(tmp_path / "began")
    tensors = dict(model.state_dict())
    frozen = {name: one for name, one in tensors.items() if "layers.0." in name}
    masters = {name: one + 1e-3 for name, one in tensors.items() if name not in frozen}
    root = save(Model([masters], frozen), WITHOUT_BASE, tmp_path / "run")
    (root / "config.json").write_text((tmp_path / "began" / "config.json").read_text())
    return with_config(root, **said), tmp_path / "began"


def test_a_stranger_is_no_base_for_what_was_frozen(tmp_path: Path) -> None:
    root, began = partly_trained(tmp_path)
    torch.manual_seed(7)
    stranger = peft_models.llama()
    stranger.save_pretrained(tmp_path / "stranger")
    with pytest.raises(UsageError, match=r"weights differ.*mean cosine") as caught:
        consolidate(root, tmp_path / "out", ExportOptions(base=tmp_path / "stranger"))
    assert caught.value.finding is FindingKind.BASE_MISMATCH
    options = ExportOptions(base=tmp_path / "stranger", exclude_frozen=True)
    (tmp_path / "stranger" / "generation_config.json").unlink()
    told = consolidate(root, tmp_path / "trained", options).warnings
    assert any("weights differ" in one and "no weight of it" in one for one in told)
    report = consolidate(root, tmp_path / "out", ExportOptions(base=began))
    assert "no name in config.json but began in --base" in report.warnings[0]


def test_a_stranger_gives_neither_config_nor_tokenizer(tmp_path: Path) -> None:
    """All weights are in the checkpoint, and no config is: as Accelerate and DeepSpeed save."""
    model, began = peft_models.llama(), tmp_path / "began"
    model.save_pretrained(began)
    root = save(Model([dict(model.state_dict())]), Run(), tmp_path / "run")
    torch.manual_seed(7)
    stranger = peft_models.llama()
    stranger.save_pretrained(tmp_path / "stranger")
    for layout in NameLayout:
        options = ExportOptions(base=tmp_path / "stranger", layout=layout)
        with pytest.raises(UsageError, match=r"weights differ.*mean cosine") as caught:
            consolidate(root, tmp_path / "out", options)
        assert caught.value.finding is FindingKind.BASE_MISMATCH
    allowed = replace(options, allow=frozenset({FindingKind.BASE_MISMATCH}))
    assert [one.kind for one in consolidate(root, tmp_path / "all", allowed).findings] == [
        FindingKind.BASE_MISMATCH
    ]
    (tmp_path / "stranger" / "model.safetensors").unlink()  # a model that began from random weights
    for base in (began, tmp_path / "stranger"):
        report = consolidate(root, tmp_path / base.name / "out", ExportOptions(base=base))
        assert report.notes == ("from --base: config.json, generation_config.json",)
        assert not any("another model" in one for one in report.warnings)


def test_a_base_of_other_sizes_gives_no_file_that_says_something_of_a_model(
    tmp_path: Path,
) -> None:
    model, began = peft_models.llama(), tmp_path / "began"
    model.save_pretrained(began)
    root = save(Model([dict(model.state_dict())]), Run(), tmp_path / "run")
    (root / "config.json").write_text((began / "config.json").read_text())
    (began / "model.safetensors").unlink()
    (with_config(began, rms_norm_eps=0.1) / "LICENSE").write_text("as it is")
    with pytest.raises(UsageError, match="rms_norm_eps") as caught:
        consolidate(root, tmp_path / "out", ExportOptions(base=began))
    assert caught.value.finding is FindingKind.BASE_MISMATCH
    (began / "generation_config.json").unlink()
    told = consolidate(root, tmp_path / "out", ExportOptions(base=began)).warnings
    assert any("rms_norm_eps" in one and "only LICENSE" in one for one in told)


def test_a_base_that_the_config_names_fills_in_what_was_frozen(tmp_path: Path) -> None:
    root, began = partly_trained(tmp_path, _name_or_path="acme/began")
    report = consolidate(root, tmp_path / "out", ExportOptions(base=began))
    assert not any("the base is" in one or "nothing shows" in one for one in report.warnings)
    cached = tmp_path / "models--acme--sibling" / "snapshots" / "abc"
    cached.parent.mkdir(parents=True)
    began.rename(cached)
    with pytest.raises(UsageError, match=r"acme/began in config\.json but acme/sibling in --base"):
        consolidate(root, tmp_path / "other", ExportOptions(base=cached))


def test_a_base_that_was_moved_and_renamed_is_told_by_its_weights(tmp_path: Path) -> None:
    trained = train(tmp_path)
    names_its_base(trained, str(trained.base))
    report = merge(trained, copied(trained, tmp_path / "moved"), tmp_path / "out")
    assert not any("base" in one and "shows" in one for one in report.warnings)


def test_two_models_of_the_hub_are_two_models(tmp_path: Path) -> None:
    trained = train(tmp_path)
    names_its_base(trained, "meta-llama/Llama-3.1-8B")
    instruct = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / "abc"
    error = refusal(trained, copied(trained, instruct), tmp_path / "out")
    assert "meta-llama/Llama-3.1-8B-Instruct in --base" in str(error)


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("unsloth/Llama-3.1-8B-bnb-4bit", "models--unsloth--Llama-3.1-8B/snapshots/abc"),
        ("meta-llama/Llama-3.1-8B", "instruct"),
        ("/cluster/models/base-v2", "base-v3"),
        ("", "base"),
    ],
)
def test_where_nothing_shows_that_it_is_the_base_that_is_the_first_warning(
    tmp_path: Path, named: str, given: str
) -> None:
    trained = train(tmp_path)
    names_its_base(trained, named)
    report = merge(trained, copied(trained, tmp_path / given), tmp_path / "out")
    assert report.warnings[0].startswith("nothing shows that the base is the model")
    assert (named or "no name") in report.warnings[0]


@pytest.mark.parametrize("named", ["acme/small", "/cluster/small"])
def test_a_folder_of_the_name_that_the_adapter_gives_is_taken(tmp_path: Path, named: str) -> None:
    trained = train(tmp_path)
    names_its_base(trained, named)
    report = merge(trained, copied(trained, tmp_path / "small"), tmp_path / "out")
    assert not any("nothing shows" in one for one in report.warnings)


def test_another_base_is_merged_where_that_is_allowed_and_the_manifest_says_so(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path, WITH_BASE)
    other = sibling(trained, tmp_path / "sibling")
    report = merge(trained, other, tmp_path / "out", FindingKind.BASE_MISMATCH)
    assert [(one.kind, one.accepted) for one in report.findings] == [
        (FindingKind.BASE_MISMATCH, True)
    ]
    manifest = json.loads((tmp_path / "out" / "zexport_manifest.json").read_text())
    assert manifest["findings"][0]["kind"] == "base-mismatch"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Exported although base-mismatch was found" in card
    assert str(tmp_path) not in card


def test_a_merged_model_is_verified_with_its_base_and_says_so_without(tmp_path: Path) -> None:
    trained = train(tmp_path)
    names_its_base(trained, f"elsewhere/{trained.base.name}")
    merge(trained, trained.base, tmp_path / "out")
    other = with_config(copied(trained, tmp_path / "other"), rms_norm_eps=1e-5)
    beside(trained)
    moved = trained.base.rename(tmp_path / "moved")
    for base in (None, other):
        with pytest.raises((FrozenLeftOutError, UsageError)) as caught:
            verify_export(tmp_path / "out", against=trained.checkpoint, base=base)
        told = "Name the model that the export was given, as in --base MODEL"
        assert caught.value.hint == told
        assert "--a" not in str(caught.value)
    moved.rename(trained.base)
    retrained = sibling(trained, tmp_path / "other" / trained.base.name)
    found = verify_export(tmp_path / "out", against=trained.checkpoint, base=retrained)
    (told,) = {problem.problem for problem in found.problems}
    assert told == "has other values in the checkpoint, or in the base"
    assert verify_export(tmp_path / "out", against=trained.checkpoint, base=trained.base).ok


def test_the_card_of_a_merged_adapter_says_what_came_from_the_base(tmp_path: Path) -> None:
    trained = train(tmp_path, WITH_BASE)
    names_its_base(trained, "Qwen/Qwen2.5-0.5B")
    moved = tmp_path / "Qwen2.5-0.5B"
    trained.base.rename(moved)
    merge(trained, moved, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert card.data.to_dict()["base_model_relation"] == "finetune"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    base = load_file(moved / "model.safetensors")
    same = sum(torch.equal(one, base[name].bfloat16().float()) for name, one in tensors.items())
    told = f"of {len(tensors)} tensors, {same} are the base model's, as training had them"
    assert told in " ".join(card.text.split())


def test_a_base_that_gives_no_weight_is_only_warned_of(tmp_path: Path) -> None:
    trained = train(tmp_path)
    other = with_config(copied(trained, tmp_path / "other"), rms_norm_eps=1e-5)
    options = ExportOptions(adapter=AdapterMode.KEEP, base=other)
    beside(trained)
    report = consolidate(trained.checkpoint, tmp_path / "kept", options)
    assert any("rms_norm_eps" in warning for warning in report.warnings)
    assert report.notes[0].endswith("not a model; --adapter merge makes one")
    assert not any(note.startswith("from --base") for note in report.notes)
    alone = consolidate(trained.checkpoint, tmp_path / "alone")
    assert alone.notes[0].endswith("not a model; --base MODEL makes one")


def test_a_base_with_more_digits_than_training_kept_is_the_same(tmp_path: Path) -> None:
    trained = train(tmp_path, WITH_BASE)
    assert not merge(trained, trained.base, tmp_path / "out").findings


def cached(trained: Trained, cache: Path, commits: dict[str, Path]) -> None:
    """Snapshots of a model in the hub's cache; the last one is that of its main branch."""
    model = cache / "models--acme--llama-small"
    for commit, weights in commits.items():
        copied(trained, model / "snapshots" / commit)
        (model / "snapshots" / commit / "model.safetensors").write_bytes(weights.read_bytes())
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(list(commits)[-1])


def test_the_revision_that_the_adapter_names_is_the_base_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(tmp_path)
    old, new = "a" * 40, "b" * 40
    later = sibling(trained, tmp_path / "later") / "model.safetensors"
    commits = {old: trained.base / "model.safetensors", new: later}
    cached(trained, tmp_path / "hub", commits)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = trained.checkpoint / "adapter_config.json"
    stated = {"base_model_name_or_path": "acme/llama-small", "revision": old}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    snapshots = tmp_path / "hub" / "models--acme--llama-small" / "snapshots"
    assert "weights differ" in str(refusal(trained, snapshots / new, tmp_path / "out"))
    assert "weights differ" in str(refusal(trained, Path("acme/llama-small"), tmp_path / "out"))
    told = merge(trained, snapshots / old, tmp_path / "out").warnings
    assert not any("base is" in warning for warning in told)


def test_an_export_says_for_ever_of_which_base_it_is_and_what_it_was_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, commit = train(tmp_path), "a" * 40
    names_its_base(trained, "/there/she/models/other")
    cached(trained, tmp_path / "hub", {commit: trained.base / "model.safetensors"})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    of_hub = f"acme/llama-small at commit {commit}"
    for given, told in (("acme/llama-small", of_hub), (trained.base, "run/base")):
        out = tmp_path / f"merged {told[0]}"
        report = merge(trained, Path(given), out)
        assert str(report.base) == told
        manifest = (out / "zexport_manifest.json").read_text()
        card = " ".join((out / "README.md").read_text().split())
        assert f"is merged into its base model ({told})" in card
        assert f"These files are the base model's ({told}): config.json" in card
        assert str(tmp_path) not in manifest + card
        assert "/there/she" not in manifest + card
        found = verify_export(out)
        assert str(found.base) == told
        (warned,) = (one for one in found.notes if "nothing shows that the base is" in one)
        assert warned.startswith("when it was made: ")
        assert "models/other in adapter_config.json" in warned
        assert warned.removeprefix("when it was made: ") in card


def test_a_config_that_is_not_the_adapters_bases_is_told_of_also_where_it_is_not_written(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path)
    names_its_base(trained, "acme/small")
    beside(trained)
    quantized = {"quant_method": "bitsandbytes"}
    with_config(trained.checkpoint, _name_or_path="acme/other", quantization_config=quantized)
    kept = consolidate(trained.checkpoint, tmp_path / "kept").warnings
    assert any("acme/small in adapter_config.json but acme/other in config.json" in w for w in kept)
    notes = merge(trained, trained.base, tmp_path / "out").notes
    assert any("bitsandbytes in config.json but plain in --base" in one for one in notes)


def test_what_a_base_says_of_itself_is_told(tmp_path: Path) -> None:
    trained = train(tmp_path)
    names_its_base(trained, "acme/small")
    base = copied(trained, tmp_path / "small")
    (base / "README.md").write_text("---\nbase_model: acme/small\n---\n# Small, instructed\n")
    (base / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    told = merge(trained, base, tmp_path / "out").warnings
    assert any("made of acme/small in the card of the base" in one for one in told)
    assert any("weights and adapter_config.json in the base" in one for one in told)
    (trained.checkpoint / "latest").write_text("global_step4")
    (trained.checkpoint / "global_step2").rename(trained.checkpoint / "global_step4")
    manifest = tmp_path / "out" / "zexport_manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sources": []}))
    told = merge(trained, tmp_path / "out", tmp_path / "again").warnings
    (warning,) = (one for one in told if "the adapter of another checkpoint" in one)
    assert "the adapter of run/global_step2, merged" in warning


def test_an_adapter_is_not_merged_twice(tmp_path: Path) -> None:
    trained = train(tmp_path)
    names_its_base(trained, "acme/merged")
    merge(trained, trained.base, tmp_path / "merged")
    error = refusal(trained, tmp_path / "merged", tmp_path / "out")
    assert "merged into it already" in str(error)
    renamed = trained.checkpoint.rename(tmp_path / "archived")
    error = refusal(replace(trained, checkpoint=renamed), tmp_path / "merged", tmp_path / "out")
    assert "the adapter of run/global_step2, merged" in str(error)


LONGER = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


def test_a_base_of_the_same_weights_may_have_been_trained_for_longer_texts(tmp_path: Path) -> None:
    trained = train(tmp_path, WITH_BASE)
    beside(trained)
    other = with_config(copied(trained, tmp_path / "other"), **LONGER)
    told = merge(trained, other, tmp_path / "out").warnings
    (warning,) = (one for one in told if "rotates" in one)
    assert "right only if this run was trained so" in warning
    assert "rope_theta" in warning
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_parameters"]["rope_theta"] != LONGER["rope_parameters"]["rope_theta"]


def test_another_type_of_the_base_than_the_trainings_is_told(tmp_path: Path) -> None:
    trained = train(tmp_path)
    options = ExportOptions(
        adapter=AdapterMode.MERGE, base=trained.base, base_dtype=ExportDType.FP16
    )
    warnings = consolidate(trained.checkpoint, tmp_path / "out", options).warnings
    assert any("float16 in --base-dtype but bfloat16 in DeepSpeed's" in one for one in warnings)


def test_infinite_values_make_no_angle(tmp_path: Path) -> None:
    values = np.array([np.inf, 1, -np.inf, 2], np.float32)
    (path := tmp_path / "values").write_bytes(values.tobytes())
    source = Extent(path, 0, 16)
    copy = CastReplica("w", path, source, DType.F32, source, DType.F32)

    def read(_: ByteSource, start: int, buffer: memoryview) -> None:
        buffer[:] = values.tobytes()[start : start + len(buffer)]

    assert cosines([copy], read) == [pytest.approx(1)]
