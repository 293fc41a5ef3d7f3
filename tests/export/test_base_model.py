"""``--base`` must be the model that training started from; another one is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from tests.support import peft_models
from tests.support.checkpoints import Model, Run, save, small_model
from tests.support.exports import edit_json, export, manifest_of, mentions, refused, verify
from tests.support.peft_models import FORMS, Trained, llama
from zexport import FrozenLeftOutError, UnsafeError, UsageError

WITHOUT_FROZEN = Run(stage=2, exclude_frozen=True)
WITH_FROZEN = Run(stage=2)
COMMIT, LATER = "a" * 40, "b" * 40


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """A LoRA checkpoint without the frozen weights."""
    return peft_models.train(FORMS["plain"], tmp_path / "run", WITHOUT_FROZEN)


def merge_refused(trained: Trained, base: Path, out: Path, word: str = "") -> None:
    options = ("--adapter", "merge", "--base", base)
    refused(trained.checkpoint, out, *options, kind="usage", word=word, finding="base-mismatch")


def name_base(trained: Trained, name: object, **more: object) -> None:
    path = trained.checkpoint / "adapter_config.json"
    edit_json(path, base_model_name_or_path=str(name), **more)


def copy(base: Path, folder: Path, **config: object) -> Path:
    shutil.copytree(base, folder)
    edit_json(folder / "config.json", **config)
    return folder


def retrained(base: Path, folder: Path) -> Path:
    """The base after more training: every weight is about 1 % off."""
    copy(base, folder)
    torch.manual_seed(0)
    weights = load_file(base / "model.safetensors")
    moved = {n: t + 0.01 * t.abs().mean() * torch.randn_like(t) for n, t in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


def hub_cache(cache: Path, commits: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with snapshots of acme/small; the last commit is main."""
    model = cache / "models--acme--small"
    for commit, folder in commits.items():
        copy(folder, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(list(commits)[-1])
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return model / "snapshots"


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("model_type", {"model_type": "qwen2"}),
        ("num_key_value_heads", {"num_key_value_heads": 4}),
    ],
)
@pytest.mark.parametrize("known_from", ["checkpoint", "named base"])
def test_base_with_another_config_is_refused(
    key: str, config: dict[str, object], known_from: str, trained: Trained, tmp_path: Path
) -> None:
    if known_from == "checkpoint":
        shutil.copy(trained.base / "config.json", trained.checkpoint)
    else:
        name_base(trained, trained.base)
    merge_refused(trained, copy(trained.base, tmp_path / "other", **config), tmp_path / "out", key)


@pytest.mark.parametrize("known_from", ["checkpoint", "named folder", "named on the Hub"])
def test_base_with_other_weights_is_refused(
    known_from: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WITH_FROZEN if known_from == "checkpoint" else WITHOUT_FROZEN
    trained = peft_models.train(FORMS["plain"], tmp_path / "run", run)
    if known_from == "named folder":
        name_base(trained, trained.base)
    elif known_from == "named on the Hub":
        hub_cache(tmp_path / "hub", {COMMIT: trained.base}, monkeypatch)
        name_base(trained, "acme/small")
    other = retrained(trained.base, tmp_path / "other")
    merge_refused(trained, other, tmp_path / "out", "weights")
    assert not export(trained.checkpoint, tmp_path / "out", "--base", trained.base)["findings"]


def test_adapter_names_the_revision_of_its_base(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = retrained(trained.base, tmp_path / "later")
    commits = {COMMIT: trained.base, LATER: later}
    snapshots = hub_cache(tmp_path / "hub", commits, monkeypatch)
    name_base(trained, "acme/small", revision=COMMIT)
    merge_refused(trained, snapshots / LATER, tmp_path / "out", "weights")
    merge_refused(trained, Path("acme/small"), tmp_path / "out", "weights")
    export(trained.checkpoint, tmp_path / "out", "--base", snapshots / COMMIT)


def test_verify_finds_the_base_that_the_manifest_records(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, out = trained.base, tmp_path / "a" / "models" / "out"
    (tmp_path / "b" / "models").mkdir(parents=True)
    root = trained.checkpoint.rename(tmp_path / "b" / "models" / "run")
    export(root, out, "--base", copy(away, tmp_path / "models" / "small"))
    (tmp_path / "c" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "c" / "models")
    parents = (*(tmp_path / one / "models" for one in "abc"), root)
    for base in [
        *(one / "models" / "small" for one in parents),
        *(one / "small" for one in parents),
    ]:
        shutil.rmtree(tmp_path / "models", ignore_errors=True)
        copy(away, base)
        if base != root / "small":  # the manifest has the folder's last two names
            verify(out, "--against", root)
            shutil.rmtree(base)
    with pytest.raises(FrozenLeftOutError, match="Pass the base model of the export"):
        verify(out, "--against", root)
    decoy = retrained(away, Path("models", "small"))
    report = verify(out, "--against", root, code=7)
    assert report["base"]["name"] == "models/small"
    assert "in the checkpoint, or in the base, than" in report["problems"][0]["problem"]
    named = copy(away, root / "models" / "small")
    edit_json(root / "adapter_config.json", base_model_name_or_path=str(named))
    verify(out, "--against", root)
    with pytest.raises(UsageError, match="Pass the base model of the export"):
        verify(out, "--against", root, "--base", decoy)
    recorded = {**manifest_of(out)["options"], "adapter_name": "of another run"}
    edit_json(out / "zexport_manifest.json", options=recorded)
    with pytest.raises(UsageError, match="no adapter is named") as caught:
        verify(out, "--against", root)
    assert "--base" not in caught.value.hint
    (tmp_path / "elsewhere").write_text("{")
    (root / "adapter_config.json").unlink()
    (root / "adapter_config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError):
        verify(out, "--against", root)


def test_verify_finds_the_base_in_the_hub_cache(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {COMMIT: trained.base, LATER: retrained(trained.base, tmp_path / "later")}
    snapshots = hub_cache(tmp_path / "hub", commits, monkeypatch)
    export(trained.checkpoint, tmp_path / "out", "--base", snapshots / COMMIT)
    verify(tmp_path / "out", "--against", trained.checkpoint)


def test_verify_asks_for_the_base_that_gave_the_names(tmp_path: Path) -> None:
    model = peft_models.mixtral()
    model.save_pretrained(tmp_path / "base")
    root = save(Model([dict(model.state_dict())]), WITH_FROZEN, tmp_path / "run")
    export(root, tmp_path / "out", "--base", tmp_path / "base")
    away = (tmp_path / "base").rename(tmp_path / "away")
    with pytest.raises(UsageError, match=r"base model was not found.*--base MODEL"):
        verify(tmp_path / "out", "--against", root)
    verify(tmp_path / "out", "--against", root, "--base", away)
    model = llama()
    model.save_pretrained(tmp_path / "config")
    root = save(Model([dict(model.state_dict())]), WITH_FROZEN, tmp_path / "llama")
    export(root, tmp_path / "named", "--base", tmp_path / "config")
    (tmp_path / "config").rename(tmp_path / "moved")
    verify(tmp_path / "named", "--against", root)


def test_another_hub_model_with_equal_weights_is_refused(trained: Trained, tmp_path: Path) -> None:
    name_base(trained, "meta-llama/Llama-3.1-8B")
    instruct = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / COMMIT
    merge_refused(trained, copy(trained.base, instruct), tmp_path / "out", "8B-Instruct")


def test_adapter_is_not_merged_twice(trained: Trained, tmp_path: Path) -> None:
    name_base(trained, "acme/merged")
    merged = tmp_path / "merged"
    export(trained.checkpoint, merged, "--base", trained.base)
    merge_refused(trained, merged, tmp_path / "out", "merged")


def partly_trained(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint without its frozen layer, the model it started from, and an unrelated one."""
    torch.manual_seed(1)
    base, other = llama(), llama()
    base.save_pretrained(tmp_path / "base")
    other.save_pretrained(tmp_path / "other")
    tensors = dict(base.state_dict())
    frozen = {name: one for name, one in tensors.items() if "layers.0." in name}
    trained = {name: one + 1e-3 for name, one in tensors.items() if name not in frozen}
    root = save(Model([trained], frozen), WITHOUT_FROZEN, tmp_path / "run")
    shutil.copy(tmp_path / "base" / "config.json", root)
    return root, tmp_path / "base", tmp_path / "other"


def test_frozen_weights_of_an_unrelated_base_are_refused(tmp_path: Path) -> None:
    """The frozen weights are not in the checkpoint, so the trained ones are compared."""
    root, base, other = partly_trained(tmp_path)
    to_other = ("--base", other)
    refused(root, tmp_path / "out", *to_other, kind="usage", finding="base-mismatch", word="cosine")
    (other / "generation_config.json").unlink()
    assert not export(root, tmp_path / "trained", *to_other, "--exclude-frozen")["from_base"]
    assert len(export(root, tmp_path / "out", "--base", base)["from_base"]) == 9


def test_base_without_a_config_supplies_weights(tmp_path: Path) -> None:
    root, base, other = partly_trained(tmp_path)
    for folder in (base, other):
        (folder / "config.json").unlink()
    refused(root, tmp_path / "out", "--base", other, kind="usage", finding="base-mismatch")
    assert len(export(root, tmp_path / "out", "--base", base)["from_base"]) == 9


def test_unrelated_base_gives_no_model_files(tmp_path: Path) -> None:
    """All weights are in the checkpoint and no config is, as Accelerate saves."""
    base = llama()
    base.save_pretrained(tmp_path / "base")
    root = save(Model([dict(base.state_dict())]), Run(), tmp_path / "run")
    torch.manual_seed(9)
    llama().save_pretrained(tmp_path / "other")
    out, options = tmp_path / "out", ("--base", tmp_path / "other")
    refused(root, out, *options, kind="usage", finding="base-mismatch", word="weights")
    allowed = export(root, tmp_path / "allowed", *options, "--allow", "base-mismatch")
    found = [(one["kind"], one["accepted"]) for one in allowed["findings"]]
    assert found == [("base-mismatch", True)]
    assert manifest_of(tmp_path / "allowed")["findings"] == allowed["findings"]
    assert "base-mismatch" in (tmp_path / "allowed" / "README.md").read_text()
    export(root, out, "--base", tmp_path / "base")
    assert (out / "config.json").exists()


def test_base_of_which_nothing_is_used_is_noted(tmp_path: Path) -> None:
    base = llama()
    for folder in ("run", "base"):
        base.save_pretrained(tmp_path / folder)
    root = save(Model([dict(base.state_dict())]), Run(), tmp_path / "run")
    report = export(root, tmp_path / "out", "--base", tmp_path / "base")
    assert mentions(report, "--base is not used")


def test_report_manifest_and_card_name_the_base(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache(tmp_path / "hub", {COMMIT: trained.base}, monkeypatch)
    name_base(trained, "acme/small")
    out = tmp_path / "out"
    report = export(trained.checkpoint, out, "--base", "acme/small")
    assert report["base"] == {"name": "acme/small", "commit": COMMIT}
    assert verify(out)["base"] == report["base"]
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "acme/small"
    written = (out / "zexport_manifest.json").read_text() + str(card)
    assert str(tmp_path) not in written


@pytest.mark.parametrize(
    ("kind", "word", "files"),
    [
        ("frozen_left_out", "adapter", {"adapter_config.json": b"{}"}),
        ("frozen_left_out", "index.json", {"model-00001-of-00002.safetensors": b""}),
        ("damaged", "lfs", {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}),
        ("unsafe", "../b", {"model.safetensors.index.json": b'{"weight_map": {"a": "../b"}}'}),
    ],
)
def test_folder_without_usable_weights_is_no_base(
    kind: str, word: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    (base := tmp_path / "base").mkdir()
    for name, content in files.items():
        (base / name).write_bytes(content)
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "run")
    options = ("--base", base, "--layout", "memory")
    refused(root, tmp_path / "out", *options, kind=kind, word=word)
