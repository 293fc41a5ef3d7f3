"""Links and odd files in the folders handed over: followed within, refused beyond, not awaited."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import save_file

import zexport
from tests.support.checkpoints import Run, save, small_model
from zexport.checkpoint.open import open_checkpoint
from zexport.cli.main import cli
from zexport.errors import OutputError, UnsafeError, ZexportError
from zexport.inspect.inspect import inspect_checkpoint
from zexport.options import ExportOptions, NameLayout

TAG = "global_step2"
RANK_0 = f"{TAG}/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL_0 = f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt"
FIXTURES = Path(__file__).parents[2] / "fixtures"


def _options(base: Path | None = None, *, overwrite: bool = False) -> ExportOptions:
    """With the names in memory: to learn those of the hub takes seconds."""
    return ExportOptions(layout=NameLayout.MEMORY, base=base, overwrite=overwrite)


def _move_out(path: Path) -> Path:
    """Put a file or folder elsewhere, and a link in its place."""
    elsewhere = path.parents[len(path.parts) - path.parts.index("run")] / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    target = elsewhere / path.name
    shutil.move(path, target)
    path.symlink_to(target)
    return target


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with all that an export copies."""
    root = save(small_model(), Run(), tmp_path / "run")
    (root / "config.json").write_text(
        '{"model_type": "odd", "architectures": ["Odd"], "auto_map": {"AutoModel": "code.Odd"}}'
    )
    (root / "tokenizer.json").write_text("{}")
    (root / "code.py").write_text("")
    (root / "LICENSE").write_text("")
    return root


@pytest.mark.parametrize(
    "name",
    ["latest", TAG, RANK_0, MODEL_0, "config.json", "tokenizer.json", "code.py", "LICENSE"],
)
def test_a_link_that_leads_outside_is_refused_until_the_user_says_otherwise(
    name: str, run: Path, tmp_path: Path
) -> None:
    target = _move_out(run / name)
    for action in (
        lambda: zexport.consolidate(run, tmp_path / "out", _options()),
        lambda: zexport.plan_export(zexport.open_checkpoint(run), tmp_path / "out", _options()),
        lambda: inspect_checkpoint(run),
    ):
        with pytest.raises(UnsafeError, match="--follow-symlinks") as caught:
            action()
        assert caught.value.exit_code == 5
        assert caught.value.path == run / name
        assert caught.value.found == str(target)
    assert not (tmp_path / "out").exists()
    zexport.consolidate(run, tmp_path / "out", _options(), follow_symlinks=True)
    assert inspect_checkpoint(run, follow_symlinks=True).checkpoint is not None
    if name != "latest":  # the manifest says which tag it was
        with pytest.raises(UnsafeError):
            zexport.verify_export(tmp_path / "out", against=run)
    assert zexport.verify_export(tmp_path / "out", against=run, follow_symlinks=True).ok


def test_a_link_to_a_secret_puts_none_of_it_into_the_output_or_the_message(
    run: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"password": "xyzzy"}')
    for name in ("tokenizer.json", "config.json", "LICENSE", "chat_template.jinja", "latest"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
        with pytest.raises(UnsafeError) as caught:
            zexport.consolidate(run, tmp_path / "out", _options())
        assert "xyzzy" not in str(caught.value)
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)


@pytest.mark.parametrize("command", ["consolidate", "inspect", "verify"])
def test_every_command_that_reads_has_the_flag(command: str, run: Path, tmp_path: Path) -> None:
    zexport.consolidate(run, tmp_path / "out", _options())
    _move_out(run / RANK_0)
    words = {
        "consolidate": [str(run), str(tmp_path / "new"), "-q", "--layout", "memory"],
        "inspect": [str(run)],
        "verify": [str(tmp_path / "out"), "--against", str(run)],
    }[command]
    refused = CliRunner().invoke(cli, [command, *words])
    assert isinstance(refused.exception, UnsafeError)
    assert CliRunner().invoke(cli, [command, *words, "--follow-symlinks"]).exit_code == 0


def test_links_within_the_checkpoint_are_followed(run: Path, tmp_path: Path) -> None:
    (run / "store").mkdir()
    for name in (RANK_0, "config.json", "latest"):
        target = run / "store" / Path(name).name
        (run / name).rename(target)
        (run / name).symlink_to(os.path.relpath(target, (run / name).parent))
    zexport.consolidate(run, tmp_path / "out", _options())


def test_links_on_the_way_to_what_the_user_names_are_his_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(run)
    zexport.consolidate(tmp_path / "mine", tmp_path / "out", _options())
    (tmp_path / "step").symlink_to(run / TAG)
    zexport.consolidate(tmp_path / "step", tmp_path / "another", _options())


def test_links_that_have_nothing_to_do_with_the_weights_do_not_matter(
    run: Path, tmp_path: Path
) -> None:
    (run / "runs").symlink_to("/")
    (run / "notes.txt").symlink_to("/etc/hostname")
    (run / "global_step1").symlink_to(tmp_path)
    zexport.consolidate(run, tmp_path / "out", _options())
    inspect_checkpoint(run)


def test_a_tag_that_lies_elsewhere_is_named_but_not_looked_into(run: Path, tmp_path: Path) -> None:
    other = save(small_model(), Run(), tmp_path / "elsewhere", "global_step1")
    (run / "global_step1").symlink_to(other / "global_step1")
    tags = {tag.name: tag.world_size for tag in inspect_checkpoint(run).tags}
    assert tags == {TAG: 2, "global_step1": None}
    tags = {t.name: t.world_size for t in inspect_checkpoint(run, follow_symlinks=True).tags}
    assert tags == {TAG: 2, "global_step1": 2}


def _cached(folder: Path, cache: Path) -> Path:
    """The folder as huggingface_hub keeps it: a snapshot of links to blobs beside it."""
    blobs, snapshot = cache / "models--org--name" / "blobs", cache / "models--org--name/snapshots/1"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def test_a_checkpoint_and_a_base_in_the_hubs_cache_are_read(run: Path, tmp_path: Path) -> None:
    zexport.consolidate(_cached(run, tmp_path / "hub"), tmp_path / "out", _options())
    lacking = save(small_model(), Run(exclude_frozen=True), tmp_path / "lacking")
    (model := tmp_path / "model").mkdir()
    save_file(
        {n: t.contiguous() for n, t in small_model().tensors.items()}, model / "model.safetensors"
    )
    base = _cached(model, tmp_path / "base")
    zexport.consolidate(lacking, tmp_path / "filled", _options(base=base))


def test_a_snapshot_does_not_lead_out_of_its_own_model(run: Path, tmp_path: Path) -> None:
    snapshot = _cached(run, tmp_path / "hub")
    (tmp_path / "hub" / "token").write_text("secret")
    (snapshot / "LICENSE").unlink()
    (snapshot / "LICENSE").symlink_to("../../../token")
    with pytest.raises(UnsafeError):
        zexport.consolidate(snapshot, tmp_path / "out", _options())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "config.json"]
)
def test_a_base_with_a_link_to_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "run")
    (base := tmp_path / "base").mkdir()
    (tmp_path / "far").write_text('{"model_type": "odd"}')
    (base / name).symlink_to(tmp_path / "far")
    if name != "config.json":
        (base / "config.json").write_text("{}")
    with pytest.raises(UnsafeError) as caught:
        zexport.consolidate(root, tmp_path / "out", _options(base=base))
    assert caught.value.path == base / name


def test_an_index_of_a_base_does_not_lead_through_a_link(tmp_path: Path) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "run")
    (base := tmp_path / "base").mkdir()
    save_file(small_model().frozen, tmp_path / "far.safetensors")
    (base / "a.safetensors").symlink_to(tmp_path / "far.safetensors")
    index = {"weight_map": dict.fromkeys(small_model().frozen, "a.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsafeError):
        zexport.consolidate(root, tmp_path / "out", _options(base=base))


def test_a_weight_of_a_universal_checkpoint_is_not_read_through_a_link(tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(FIXTURES / "uni_z2_w2_bf16_odd" / "ckpt", root)
    weight = next(root.glob("*/zero/*/fp32.pt"))
    _move_out(weight)
    with pytest.raises(UnsafeError) as caught:
        zexport.consolidate(root, tmp_path / "out", _options())
    assert caught.value.path == weight


def test_an_export_with_a_link_to_elsewhere_is_not_verified(run: Path, tmp_path: Path) -> None:
    zexport.consolidate(run, out := tmp_path / "out", _options())
    (out / "LICENSE").unlink()
    (out / "LICENSE").symlink_to("/etc/hostname")
    with pytest.raises(UnsafeError):
        zexport.verify_export(out)


def test_links_in_a_circle_and_broken_ones_end_in_a_sentence(run: Path, tmp_path: Path) -> None:
    (run / RANK_0).unlink()
    (run / RANK_0).symlink_to(Path(RANK_0).name)
    with pytest.raises(ZexportError, match="optimizer states files of rank 0 are missing"):
        zexport.consolidate(run, tmp_path / "out", _options())
    (run / RANK_0).unlink()
    (run / RANK_0).symlink_to("nothing")
    with pytest.raises(ZexportError, match="optimizer states files of rank 0 are missing"):
        zexport.consolidate(run, tmp_path / "out", _options())


# --- what is no file at all ---


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_pipe, _socket, _device, _folder])
@pytest.mark.parametrize(
    "name",
    ["latest", RANK_0, MODEL_0, "config.json", "tokenizer.json", "code.py", "zexport_source.json"],
)
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(
    name: str, make: Callable[[Path], None], run: Path, tmp_path: Path
) -> None:
    (run / name).unlink(missing_ok=True)
    make(run / name)
    for follow in (False, True):
        try:
            zexport.consolidate(run, tmp_path / f"out{follow}", _options(), follow_symlinks=follow)
        except ZexportError as error:
            assert error.exit_code in (3, 5)  # noqa: PT017 - an export without the file is right, too
        inspect = CliRunner().invoke(cli, ["inspect", str(run)])
        assert inspect.exception is None or isinstance(inspect.exception, ZexportError)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_pipe, _device, _folder])
def test_no_file_of_a_base_or_an_export_is_waited_for(
    make: Callable[[Path], None], run: Path, tmp_path: Path
) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "lacking")
    (base := tmp_path / "base").mkdir()
    make(base / "a.safetensors")
    index = {"weight_map": {"norm.weight": "a.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ZexportError) as caught:
        zexport.consolidate(root, tmp_path / "filled", _options(base=base))
    assert caught.value.exit_code in (3, 5)
    zexport.consolidate(run, out := tmp_path / "out", _options())
    for name in ("model.safetensors", "zexport_manifest.json", "LICENSE"):
        (out / name).unlink()
        make(out / name)
        try:
            assert not zexport.verify_export(out).ok
        except UnsafeError:
            assert make is _device


# --- the output beside what is read ---


def test_an_output_beside_the_tags_leaves_the_checkpoint_as_it_was(run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    zexport.consolidate(run, run / "hf", _options())
    assert {p: p.stat().st_mtime_ns for p in before} == before
    zexport.consolidate(run, run / "hf", _options(overwrite=True))
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_overwriting_the_folder_that_a_tokenizer_comes_from_is_refused(
    run: Path, tmp_path: Path
) -> None:
    (base := tmp_path / "base").mkdir()
    (base / "generation_config.json").write_text("{}")
    with pytest.raises(OutputError, match="would be mixed"):
        zexport.consolidate(run, base, _options(base=base, overwrite=True))
    assert [path.name for path in base.iterdir()] == ["generation_config.json"]


def test_a_link_beside_a_checkpoint_is_a_second_name_of_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(small_model(), Run(), run / "checkpoint-4")
    (run / "last").symlink_to("checkpoint-4")
    for checkpoint, tag in ((run, None), (run / "last", None), (run, "last"), (run, "newest")):
        assert open_checkpoint(checkpoint, tag=tag).location.tag == "global_step2"


def test_a_folder_elsewhere_that_a_link_leads_to_is_to_be_given_itself(tmp_path: Path) -> None:
    real = save(small_model(), Run(), tmp_path / "disk" / "checkpoint-4")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint-4").symlink_to(real)
    with pytest.raises(UnsafeError) as caught:
        open_checkpoint(run)
    assert f"Give {real} itself" in str(caught.value)
    for given in (real, run / "checkpoint-4"):
        assert open_checkpoint(given).location.tag == "global_step2"
