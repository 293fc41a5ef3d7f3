"""Which checkpoint a path and --tag select."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zexport
from tests.support.checkpoints import edit
from tests.support.exports import invoke
from zexport import ZexportError

REAL = Path(__file__).parents[2] / "fixtures" / "z2_w3_bf16_odd" / "ckpt" / "global_step2"


def bare(root: Path, tag: str, latest: str | None = None) -> Path:
    """An incomplete tag folder."""
    (root / tag).mkdir(parents=True)
    (root / tag / "mp_rank_00_model_states.pt").touch()
    if latest is not None:
        (root / "latest").write_text(latest)
    return root / tag


def real(root: Path, tag: str, step: int, *, is_whole: bool = True) -> Path:
    """A complete tag of another step, or one without the optimizer states of rank 1."""
    folder = Path(shutil.copytree(REAL, root / tag))
    edit(folder / "mp_rank_00_model_states.pt", lambda state: state.update(global_steps=step))
    if not is_whole:
        next(folder.glob("*rank_1*optim*")).unlink()
    return folder


def trainer_run(run: Path, own: int, *steps: int) -> Path:
    """A Trainer's output folder; with ZeRO-3, ``save_model`` adds a tag next to checkpoint-N."""
    for step in steps:
        real(run / f"checkpoint-{step}", f"global_step{step}", step)
    real(run, f"global_step{own}", own)
    (run / "latest").write_text(f"global_step{own}")
    return run


def found(path: Path, tag: str | None = None) -> Path:
    return zexport.open_checkpoint(path, tag=tag).location.tag_dir


def refusal(path: Path, tag: str | None = None) -> ZexportError:
    with pytest.raises(ZexportError) as caught:
        zexport.open_checkpoint(path, tag=tag)
    return caught.value


@pytest.mark.parametrize(
    ("root", "tag", "latest", "framework"),
    [
        ("checkpoint-100", "global_step100", "global_step100\n", "DEEPSPEED"),
        ("checkpoints/checkpoint_0", "pytorch_model", None, "ACCELERATE"),
        ("epoch=1-step=20.ckpt", "checkpoint", None, "LIGHTNING"),
        ("_actor", "step 2 of many", "step 2 of many", "OPENRLHF"),
    ],
)
def test_run_checkpoint_and_tag_folder_select_the_tag(
    root: str, tag: str, latest: str | None, framework: str, tmp_path: Path
) -> None:
    folder = bare(tmp_path / root, tag, latest)
    chosen = "LATEST" if latest else "ONLY"
    for path, how in ((tmp_path, chosen), (folder.parent, chosen), (folder, "HANDED_OVER")):
        location = zexport.open_checkpoint(path).location
        assert (location.tag_dir, location.framework.name) == (folder, framework)
        assert location.chosen.name == how


def test_tag_names_a_tag_or_a_checkpoint_or_a_tag_in_one(tmp_path: Path) -> None:
    one = bare(tmp_path / "checkpoint-7", "global_step7")
    bare(tmp_path / "checkpoint-9", "global_step9")
    own = bare(tmp_path, "global_step8", "global_step8")
    (tmp_path / "latest_universal").write_text("global_step7")
    assert found(tmp_path) == own
    assert found(tmp_path, "checkpoint-7") == found(tmp_path, "global_step7") == one
    bare(tmp_path / "checkpoint-9", "global_step7")
    assert refusal(tmp_path, "global_step7").found == "checkpoint-7, checkpoint-9"
    one.parent.rename(tmp_path / "pruned-checkpoint-7")
    assert found(tmp_path, "checkpoint-7").parent.name == "pruned-checkpoint-7"
    assert "pass" in refusal(tmp_path / "checkpoint-7").hint
    assert refusal(own, "global_step7").kind == "usage"


@pytest.mark.parametrize(
    ("tags", "newest"),
    [
        (["actor", "critic"], None),
        (["checkpoint-9/a", "checkpoint-100/a", "checkpoint-20/a"], "checkpoint-100"),
        (["global_step9", "global_step100", "global_step20"], "global_step100"),
        (["actor/a", "critic/a"], None),
    ],
)
def test_several_checkpoints_are_listed_newest_last(
    tags: list[str], newest: str | None, tmp_path: Path
) -> None:
    for tag in tags:
        bare((tmp_path / tag).parent, Path(tag).name)
    error = refusal(tmp_path)
    assert (error.kind, error.exit_code) == ("ambiguous_tag", 2)
    assert (error.found or "").endswith(newest or "critic")
    example = f"--tag {newest} or --tag newest"
    assert (example in error.hint) == (newest is not None)
    if newest is None:  # two models: neither newest, nor a tag in only one of them
        assert refusal(tmp_path, "newest").kind == "ambiguous_tag"
        bare(tmp_path / "critic", "b")
        assert refusal(tmp_path, "b").kind == "checkpoint"


def test_folder_of_runs_is_rejected_with_a_list(tmp_path: Path) -> None:
    bare(tmp_path / "plain", "global_step2")
    bare(tmp_path / "trainer" / "checkpoint-4", "global_step4")
    for tag in (None, "newest"):
        error = refusal(tmp_path, tag)
        assert (error.kind, error.found) == ("ambiguous_tag", "trainer, plain")
    assert found(tmp_path, "plain").name == "global_step2"


def test_several_models_in_one_checkpoint_need_a_tag(tmp_path: Path) -> None:
    for tag in ("pytorch_model", "pytorch_model_1"):  # of Accelerate
        bare(tmp_path / "checkpoint_0", tag, "pytorch_model_1")
    for which in (None, "newest"):
        assert refusal(tmp_path, which).found == "pytorch_model, pytorch_model_1"


@pytest.mark.parametrize("content", [b"", b" \n", b"a\nb", b"\xff\xfe", b"x" * 5000])
def test_latest_without_a_tag_name_is_damaged(content: bytes, tmp_path: Path) -> None:
    bare(tmp_path, "global_step2")
    (tmp_path / "latest").write_bytes(content)
    assert refusal(tmp_path).kind == "damaged"


@pytest.mark.parametrize("name", ["../outside", "..", "/etc", "a\\b", "a\0b"])
@pytest.mark.parametrize("file", ["latest", "latest_universal"])
def test_latest_outside_its_folder_is_rejected(name: str, file: str, tmp_path: Path) -> None:
    bare(tmp_path / "root", "global_step2")
    bare(tmp_path, "outside")
    (tmp_path / "root" / file).write_text(name)
    assert refusal(tmp_path / "root").kind == "unsafe"
    assert refusal(tmp_path / "root", name).kind == "usage"


def test_folder_without_checkpoint_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "nothing"):
        error = refusal(path)
        assert (error.kind, error.path) == ("not_a_checkpoint", path)


# --- newest ---


def test_newest_has_the_highest_step(tmp_path: Path) -> None:
    for tag, step in (("global_step2", 2), ("final", 4), ("best", 1)):
        real(tmp_path, tag, step)
    assert found(tmp_path, "newest").name == "final"
    shown = invoke("inspect", tmp_path)
    tags = [(one["name"], one["step"]) for one in shown["tags"]]
    assert tags == [("best", 1), ("global_step2", 2), ("final", 4)]
    assert shown["verdict"]["next_step"].endswith("--tag final")
    assert "for example --tag final" in refusal(tmp_path).hint


def test_newest_skips_incomplete_checkpoints_and_names_them(tmp_path: Path) -> None:
    run = trainer_run(tmp_path, 6, 4)
    broken = real(run / "checkpoint-8", "global_step8", 8, is_whole=False)
    for tag in ("newest", None):
        opened = zexport.open_checkpoint(run, tag=tag)
        assert opened.location.tag == "global_step6"
        (skipped,) = opened.newer
        assert skipped.startswith("checkpoint-8 (step 8) was skipped: ")
    assert not zexport.open_checkpoint(run, tag="global_step6").newer
    for folder in (run / "global_step6", run / "checkpoint-4" / "global_step4"):
        next(folder.glob("*rank_1*optim*")).unlink()
    assert found(run, "newest") == broken


def test_newer_complete_checkpoint_is_named(tmp_path: Path) -> None:
    run = trainer_run(tmp_path, 6, 6, 8)
    shown = invoke("inspect", run)
    newer = shown["checkpoint"]["warnings"][0]
    assert all(word in newer for word in ("step 8", "global_step6", "--tag checkpoint-8"))
    tags = {one["name"]: (one["step"], one["chosen"]) for one in shown["tags"]}
    expected = {"checkpoint-6": 6, "global_step6": 6, "checkpoint-8": 8}
    assert tags == {name: (step, name == "global_step6") for name, step in expected.items()}
