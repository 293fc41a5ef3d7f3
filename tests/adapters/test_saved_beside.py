"""Embeddings that were resized before an adapter was trained, and that peft's file alone has."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from tests.support import peft_models
from tests.support.checkpoints import Run
from tests.support.peft_models import ATTENTION, Form, Trained
from zexport import ExportOptions, consolidate, verify_export
from zexport.errors import FrozenLeftOutError
from zexport.filenames import ADAPTER_FILE
from zexport.findings import FindingKind
from zexport.options import AdapterMode, CheckMode

ROWS, RESIZED = 50, 57
EMBEDDINGS = {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"}
WITHOUT_BASE = Run(stage=2, exclude_frozen=True)
FORM = Form(peft_models.llama, {"target_modules": ATTENTION}, rows=RESIZED)
FORMS = {
    "resized": FORM,
    "tied": Form(lambda: peft_models.llama(tied=True), FORM.keys, rows=RESIZED),
    "one_of_them_trained": Form(
        peft_models.llama, {**FORM.keys, "modules_to_save": ["lm_head"]}, rows=RESIZED
    ),
    "targeted": Form(
        peft_models.llama, {"target_modules": ["embed_tokens", "lm_head"]}, rows=RESIZED
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


def train(
    tmp_path: Path,
    form: Form = FORM,
    run: Run = WITHOUT_BASE,
    *,
    adapters: tuple[str, ...] = ("default",),
) -> Trained:
    """As the Trainer saves it: peft's file lies beside the checkpoint, of 16 bits."""
    trained = peft_models.train(form, tmp_path, run, adapters=adapters)
    for path in trained.live.rglob(ADAPTER_FILE):
        tensors = {name: value.bfloat16() for name, value in load_file(path).items()}
        save_file(tensors, trained.checkpoint / path.relative_to(trained.live), {"format": "pt"})
    return trained


def merge(trained: Trained, out: Path, **options: object) -> tuple[str, ...]:
    """What the export tells."""
    chosen = ExportOptions(adapter=AdapterMode.MERGE, base=trained.base, **options)  # type: ignore[arg-type]
    report = consolidate(trained.checkpoint, out, chosen)
    return report.warnings + report.notes


def add_tokens(folder: Path, tokens: int = RESIZED) -> None:
    """A tokenizer of so many tokens, the last of which were added."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(ROWS)}))
    added = [AddedToken(f"<{number}>", special=True) for number in range(tokens - ROWS)]
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))


def spoil(trained: Trained, name: str = "lora_B") -> None:
    """Make the file beside that of another step."""
    path = trained.checkpoint / ADAPTER_FILE
    tensors = load_file(path)
    spoilt = next(key for key in tensors if name in key)
    tensors[spoilt][-1, -1] += 1
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("form", FORMS)
def test_a_kept_adapter_has_the_embeddings_that_peft_saved(tmp_path: Path, form: str) -> None:
    trained = train(tmp_path, FORMS[form])
    out = tmp_path / "out"
    consolidate(trained.checkpoint, out, ExportOptions(adapter=AdapterMode.KEEP))
    found, wanted = load_file(out / ADAPTER_FILE), load_file(trained.live / ADAPTER_FILE)
    wanted = {n: v for n, v in wanted.items() if "original_module" not in n and "_save." not in n}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert verify_export(out, against=trained.checkpoint).ok
    manifest = json.loads((out / "zexport_manifest.json").read_text())
    assert [s["blake3"] for s in manifest["sources"] if s["path"] == ADAPTER_FILE] != [None]


def test_each_of_several_adapters_has_those_of_its_own_file(tmp_path: Path) -> None:
    trained = train(tmp_path, adapters=("default", "other"))
    consolidate(trained.checkpoint, tmp_path / "out", ExportOptions(adapter=AdapterMode.KEEP))
    for folder in (".", "other"):
        found = load_file(tmp_path / "out" / folder / ADAPTER_FILE)
        wanted = load_file(trained.live / folder / ADAPTER_FILE)
        assert wanted.keys() > EMBEDDINGS
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_embeddings_that_the_checkpoint_holds_are_kept_as_peft_keeps_them(tmp_path: Path) -> None:
    trained = train(tmp_path, run=Run(stage=2))
    report = consolidate(
        trained.checkpoint, tmp_path / "out", ExportOptions(adapter=AdapterMode.KEEP)
    )
    found = load_file(tmp_path / "out" / ADAPTER_FILE)
    assert found.keys() == load_file(trained.live / ADAPTER_FILE).keys() > EMBEDDINGS
    assert not any(ADAPTER_FILE in warning for warning in report.warnings)


@pytest.mark.parametrize("form", FORMS)
def test_a_merge_is_made_of_the_embeddings_that_peft_saved(tmp_path: Path, form: str) -> None:
    trained = train(tmp_path, FORMS[form])
    out = tmp_path / "out"
    add_tokens(trained.checkpoint)
    warnings_ = merge(trained, out)
    trained.model.merge_and_unload().save_pretrained(tmp_path / "peft")
    found, wanted = (load_file(f / "model.safetensors") for f in (out, tmp_path / "peft"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert found["model.embed_tokens.weight"].shape[0] == RESIZED
    assert json.loads((out / "config.json").read_text())["vocab_size"] == RESIZED
    assert any("model.embed_tokens.weight: not in the checkpoint" in told for told in warnings_)
    assert verify_export(out, against=trained.checkpoint, base=trained.base).ok


@pytest.mark.parametrize("check", CheckMode)
def test_the_file_of_another_step_is_not_taken(tmp_path: Path, check: CheckMode) -> None:
    trained = train(tmp_path)
    spoil(trained)
    out = tmp_path / "out"
    options = ExportOptions(adapter=AdapterMode.KEEP, check=check)
    report = consolidate(trained.checkpoint, out, options)
    assert not load_file(out / ADAPTER_FILE).keys() & EMBEDDINGS
    assert any("of another step or run" in warning for warning in report.warnings)
    with pytest.raises(FrozenLeftOutError, match="an adapter that is not its own"):
        merge(trained, tmp_path / "merged")
    told = merge(trained, tmp_path / "merged", exclude_frozen=True)
    (once,) = (one for one in told if "--exclude-frozen" in one or "missing" in one)
    assert "so this is no whole model and will not load as one: " in once


def test_weights_of_the_bases_shape_are_then_the_bases(tmp_path: Path) -> None:
    form = Form(peft_models.llama, {"target_modules": ["embed_tokens", "q_proj"]})
    trained = train(tmp_path, form)
    told = merge(trained, tmp_path / "one")
    assert any("taken from peft's" in warning for warning in told)
    spoil(trained, "q_proj.lora_A")
    told = merge(trained, tmp_path / "two")
    assert any("nor taken from" in warning for warning in told)
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_file_of_half_an_adapter_or_none_or_elsewhere_is_not_taken(tmp_path: Path) -> None:
    trained = train(tmp_path)
    path = trained.checkpoint / ADAPTER_FILE
    tensors, whole = load_file(path), path.read_bytes()
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes(whole)

    def kept(number: int) -> set[str]:
        out = tmp_path / f"out{number}"
        consolidate(trained.checkpoint, out, ExportOptions(adapter=AdapterMode.KEEP))
        return set(load_file(out / ADAPTER_FILE))

    del tensors[next(name for name in tensors if "lora_A" in name)]
    save_file(tensors, path)
    assert not kept(1) & EMBEDDINGS
    path.write_bytes(b"")
    assert not kept(2) & EMBEDDINGS
    path.unlink()
    path.symlink_to(elsewhere)
    assert not kept(3) & EMBEDDINGS


def test_a_base_without_rows_for_added_tokens_is_refused(tmp_path: Path) -> None:
    trained = train(tmp_path, run=Run(stage=3, exclude_frozen=True))
    (trained.checkpoint / ADAPTER_FILE).unlink()  # as ZeRO-3 leaves it, without embeddings
    add_tokens(trained.checkpoint)
    with pytest.raises(FrozenLeftOutError, match=f"{RESIZED - 1} .*, expected below {ROWS}"):
        merge(trained, tmp_path / "out")
    merge(trained, tmp_path / "out", exclude_frozen=True)
    options = ExportOptions(adapter=AdapterMode.KEEP, base=trained.base)
    report = consolidate(trained.checkpoint, tmp_path / "kept", options)
    assert any("without the embedding, which was resized" in told for told in report.warnings)


@pytest.mark.parametrize("tokens", [ROWS, RESIZED])
def test_a_base_that_has_such_tokens_itself_is_not(tmp_path: Path, tokens: int) -> None:
    """Nor is one whose tokens all have a row."""
    form = Form(peft_models.llama, FORM.keys)
    trained = train(tmp_path, form, Run(stage=3, exclude_frozen=True))
    add_tokens(trained.checkpoint, tokens)
    add_tokens(trained.base, tokens)
    told = merge(trained, tmp_path / "out")
    assert any("tokens up to" in warning for warning in told) == (tokens > ROWS)


def test_an_embedding_of_the_checkpoints_own_is_none_of_the_bases(tmp_path: Path) -> None:
    form = Form(peft_models.llama, {**FORM.keys, "modules_to_save": ["embed_tokens"]})
    trained = train(tmp_path, form, Run(stage=3, exclude_frozen=True))
    add_tokens(trained.checkpoint)
    told = merge(trained, tmp_path / "out")
    assert any("tokens up to" in warning for warning in told)


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_file_beside_that_differs_from_the_masters_is_told(
    tmp_path: Path, mode: AdapterMode, is_spoilt: bool
) -> None:
    trained = train(tmp_path, peft_models.FORMS["plain"])
    if is_spoilt:
        spoil(trained)
    base = trained.base if mode is AdapterMode.MERGE else None
    options = ExportOptions(adapter=mode, base=base)
    report = consolidate(trained.checkpoint, tmp_path / "out", options)
    kinds = {one.kind for one in report.findings}
    assert kinds == ({FindingKind.GATHERED_MISMATCH} if is_spoilt else set())
    assert all("lora_B" in one.tensor for one in report.findings)


def test_an_empty_file_beside_tells_nothing(tmp_path: Path) -> None:
    """As ZeRO-3 may leave one."""
    trained = train(tmp_path, peft_models.FORMS["plain"])
    path = trained.checkpoint / ADAPTER_FILE
    save_file({name: torch.empty(0) for name in load_file(path)}, path)
    assert not consolidate(trained.checkpoint, tmp_path / "out").findings
