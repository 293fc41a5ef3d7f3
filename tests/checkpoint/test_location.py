"""From any level a user may hand over to one tag folder, and never outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zexport.checkpoint.find import locate, locate_all
from zexport.checkpoint.location import Framework, TagChoice
from zexport.errors import (
    AmbiguousTagError,
    CheckpointError,
    DamagedCheckpointError,
    NotACheckpointError,
    UnsafeError,
    UsageError,
)
from zexport.inspect.inspect import inspect_checkpoint


def _tag(root: Path, tag: str) -> Path:
    folder = root / tag
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").touch()
    return folder


def _trainer_run(path: Path, *steps: int) -> Path:
    for step in steps:
        root = path / f"checkpoint-{step}"
        _tag(root, f"global_step{step}")
        (root / "latest").write_text(f"global_step{step}")
        (root / "trainer_state.json").write_text("{}")
    return path


def test_every_level_leads_to_the_same_tag(tmp_path: Path) -> None:
    run = _trainer_run(tmp_path / "run", 100)
    root = run / "checkpoint-100"
    found = [locate(path) for path in (run, root, root / "global_step100")]
    assert {location.tag_dir for location in found} == {root / "global_step100"}
    assert {location.framework for location in found} == {Framework.HF_TRAINER}
    assert [location.chosen for location in found] == [
        TagChoice.LATEST,
        TagChoice.LATEST,
        TagChoice.HANDED_OVER,
    ]


def test_the_folder_above_accelerates_states_is_enough(tmp_path: Path) -> None:
    _tag(tmp_path / "checkpoints" / "checkpoint_0", "pytorch_model")
    location = locate(tmp_path / "checkpoints")
    assert (location.tag, location.framework) == ("pytorch_model", Framework.ACCELERATE)


@pytest.mark.parametrize(
    ("root", "tag", "framework"),
    [
        ("epoch=1-step=20.ckpt", "checkpoint", Framework.LIGHTNING),
        ("run/_actor", "global_step20", Framework.OPENRLHF),
        ("run/_critic", "global_step20", Framework.OPENRLHF),
        ("epoch=1-step=20.ckpt", "global_step20", Framework.DEEPSPEED),
        ("checkpoints", "checkpoint", Framework.DEEPSPEED),
        ("run/actor", "global_step20", Framework.DEEPSPEED),
    ],
)
def test_frameworks_are_known_by_how_they_name_folders(
    root: str, tag: str, framework: Framework, tmp_path: Path
) -> None:
    folder = _tag(tmp_path / root, tag)
    (tmp_path / root / "latest").write_text(tag)
    found = [locate(path) for path in (tmp_path / root, folder)]
    assert [(location.tag_dir, location.framework) for location in found] == [
        (folder, framework)
    ] * 2


@pytest.mark.parametrize("find", [locate, locate_all])
def test_none_of_several_models_of_accelerate_is_chosen(
    find: Callable[[Path], object], tmp_path: Path
) -> None:
    for tag in ("pytorch_model", "pytorch_model_1"):
        _tag(tmp_path, tag)
    (tmp_path / "latest").write_text("pytorch_model_1")
    with pytest.raises(AmbiguousTagError, match=r"several models.*pytorch_model, pytorch_model_1"):
        find(tmp_path)
    location = locate(tmp_path, "pytorch_model_1")
    assert (location.tag, location.framework) == ("pytorch_model_1", Framework.ACCELERATE)


def test_the_folder_above_an_actor_is_enough(tmp_path: Path) -> None:
    folder = _tag(tmp_path / "_actor", "global_step20")
    assert locate(tmp_path).tag_dir == folder


def test_a_converted_checkpoint_is_named_by_a_file_of_its_own(tmp_path: Path) -> None:
    for tag in ("global_step20", "global_step20_universal"):
        _tag(tmp_path, tag)
    (tmp_path / "latest_universal").write_text("global_step20_universal")
    location = locate(tmp_path)
    assert (location.tag, location.chosen) == ("global_step20_universal", TagChoice.LATEST)
    (tmp_path / "latest").write_text("global_step20")
    assert locate(tmp_path).tag == "global_step20"


def test_latest_universal_never_leads_outside_either(tmp_path: Path) -> None:
    _tag(tmp_path / "root", "global_step20_universal")
    _tag(tmp_path, "outside")
    (tmp_path / "root" / "latest_universal").write_text("../outside")
    with pytest.raises(UnsafeError, match="outside"):
        locate(tmp_path / "root")


def test_latest_decides_between_tags_and_may_end_its_line(tmp_path: Path) -> None:
    for step in (2, 10):
        _tag(tmp_path, f"global_step{step}")
    (tmp_path / "latest").write_text("global_step2\n")
    assert locate(tmp_path).tag == "global_step2"
    assert locate(tmp_path, "global_step10").tag == "global_step10"


def test_a_tag_may_be_any_name_with_blanks(tmp_path: Path) -> None:
    _tag(tmp_path, "step 2 of many")
    (tmp_path / "latest").write_text("step 2 of many")
    assert locate(tmp_path).tag == "step 2 of many"


def test_the_only_tag_is_taken_without_latest(tmp_path: Path) -> None:
    _tag(tmp_path, "final")
    assert locate(tmp_path).chosen is TagChoice.ONLY


def test_several_tags_without_latest_are_listed_newest_last(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        _tag(tmp_path, f"global_step{step}")
    with pytest.raises(AmbiguousTagError, match="--tag global_step100") as caught:
        locate(tmp_path)
    assert caught.value.found == "global_step9, global_step20, global_step100"
    assert caught.value.exit_code == 2


def test_several_checkpoints_of_a_run_are_listed_newest_last(tmp_path: Path) -> None:
    _trainer_run(tmp_path, 500, 1000)
    with pytest.raises(AmbiguousTagError, match="--tag checkpoint-1000") as caught:
        locate(tmp_path)
    assert caught.value.found == "checkpoint-500, checkpoint-1000"
    assert locate(tmp_path, "checkpoint-500").tag == "global_step500"


def test_all_tags_come_newest_first(tmp_path: Path) -> None:
    run = _trainer_run(tmp_path / "run", 9, 10)
    assert [location.tag for location in locate_all(run)] == ["global_step10", "global_step9"]
    _tag(run / "checkpoint-9", "global_step8")
    assert [location.tag for location in locate_all(run / "checkpoint-9")] == [
        "global_step9",
        "global_step8",
    ]
    only = run / "checkpoint-9" / "global_step8"
    assert [location.tag_dir for location in locate_all(only)] == [only]


def test_beside_tags_the_checkpoints_of_the_run_are_found_and_latest_stays_the_choice(
    tmp_path: Path,
) -> None:
    run = _trainer_run(tmp_path, 7, 9)
    _tag(run, "global_step8")
    (run / "latest").write_text("global_step8")
    assert locate(run).tag_dir == run / "global_step8"
    assert locate(run, "checkpoint-9").tag_dir == run / "checkpoint-9" / "global_step9"
    assert [location.tag for location in locate_all(run)] == [
        "global_step9",
        "global_step8",
        "global_step7",
    ]
    with pytest.raises(CheckpointError, match="found global_step8, checkpoint-7, checkpoint-9"):
        locate(run, "checkpoint-8")


def test_beside_tags_other_folders_are_other_models(tmp_path: Path) -> None:
    _tag(tmp_path, "global_step8")
    _tag(tmp_path / "critic", "global_step9")
    _tag(tmp_path / "stage2", "global_step9")
    assert [location.tag_dir for location in locate_all(tmp_path)] == [tmp_path / "global_step8"]
    assert locate(tmp_path, "critic").tag_dir == tmp_path / "critic" / "global_step9"


def test_a_latest_that_lost_its_tag_points_to_the_checkpoints_of_the_run(tmp_path: Path) -> None:
    run = _trainer_run(tmp_path, 7, 9)
    (run / "latest").write_text("global_step10")
    with pytest.raises(CheckpointError, match="Export another with --tag checkpoint-9"):
        locate(run)
    assert [location.tag for location in locate_all(run)] == ["global_step9", "global_step7"]


def test_the_newest_of_states_of_several_models_is_not_guessed(tmp_path: Path) -> None:
    for state in ("checkpoint_0", "checkpoint_1"):
        for tag in ("pytorch_model", "pytorch_model_1"):
            _tag(tmp_path / state, tag)
    with pytest.raises(AmbiguousTagError, match="several models"):
        locate_all(tmp_path)


def test_a_tag_that_one_checkpoint_of_a_run_holds_is_found_there(tmp_path: Path) -> None:
    run = _trainer_run(tmp_path, 7, 9)
    for own in ("", "global_step5"):
        if own:
            _tag(run, own)
        assert locate(run, "global_step7").tag_dir == run / "checkpoint-7" / "global_step7"
    _tag(run / "checkpoint-9", "global_step7")
    with pytest.raises(AmbiguousTagError, match=r"several checkpoints.*checkpoint-7, checkpoint-9"):
        locate(run, "global_step7")
    _tag(run, "global_step7")
    assert locate(run, "global_step7").tag_dir == run / "global_step7"


@pytest.mark.parametrize("own", [None, "global_step10"])
def test_a_tag_is_not_looked_for_in_other_models(tmp_path: Path, own: str | None) -> None:
    if own is not None:
        _tag(tmp_path, own)
    else:
        _tag(tmp_path / "actor", "global_step10")
    _tag(tmp_path / "critic", "global_step20")
    with pytest.raises(CheckpointError, match="no tag or checkpoint 'global_step20'"):
        locate(tmp_path, "global_step20")


def test_checkpoints_of_several_models_are_no_ages_of_one_run(tmp_path: Path) -> None:
    for model in ("_actor", "_critic"):
        _tag(tmp_path / model, "global_step2")
    for choose in (locate_all, locate):
        with pytest.raises(AmbiguousTagError, match=r"Choose one with --tag\.$") as caught:
            choose(tmp_path)
        assert caught.value.found == "_actor, _critic"


def test_latest_that_names_nothing_names_what_there_is(tmp_path: Path) -> None:
    _tag(tmp_path, "global_step2")
    (tmp_path / "latest").write_text("global_step4")
    with pytest.raises(CheckpointError, match="--tag global_step2") as caught:
        locate(tmp_path)
    assert caught.value.path == tmp_path / "latest"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["../outside", "..", ".", "/etc", "a/b", "a\\b", "a\0b"])
def test_latest_never_leads_outside(name: str, tmp_path: Path) -> None:
    _tag(tmp_path / "root", "global_step2")
    _tag(tmp_path, "outside")
    (tmp_path / "root" / "latest").write_text(name)
    with pytest.raises(UnsafeError, match="outside") as caught:
        locate(tmp_path / "root")
    assert caught.value.exit_code == 5
    with pytest.raises(UsageError, match="outside"):
        locate(tmp_path / "root", name)


@pytest.mark.parametrize("content", [b"", b" \n", b"a\nb", b"\xff\xfe", b"x" * 5000])
def test_latest_that_is_no_line_of_text_is_damaged(content: bytes, tmp_path: Path) -> None:
    _tag(tmp_path, "global_step2")
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="does not name a tag"):
        locate(tmp_path)


def test_an_unknown_tag_is_answered_with_those_there_are(tmp_path: Path) -> None:
    _tag(tmp_path, "global_step2")
    with pytest.raises(CheckpointError, match="global_step2"):
        locate(tmp_path, "global_step3")


def test_a_tag_folder_and_the_name_of_another_contradict_each_other(tmp_path: Path) -> None:
    folder = _tag(tmp_path, "global_step2")
    assert locate(folder, "global_step2").tag_dir == folder
    with pytest.raises(UsageError, match="--tag names another"):
        locate(folder, "global_step3")


def test_what_is_no_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "latest.txt").touch()
    for path in (tmp_path, tmp_path / "latest.txt", tmp_path / "nothing"):
        with pytest.raises(NotACheckpointError) as caught:
            locate(path)
        assert caught.value.path == path
        assert caught.value.hint


def test_of_several_runs_in_a_folder_none_is_taken(tmp_path: Path) -> None:
    """One saved by DeepSpeed alone has its tags a level above those of a Trainer's."""
    _tag(tmp_path / "plain", "global_step2")
    assert locate(tmp_path).tag == "global_step2"
    _tag(tmp_path / "trainer" / "checkpoint-4", "global_step4")
    for choose in (locate, locate_all):
        with pytest.raises(AmbiguousTagError, match="whole runs") as caught:
            choose(tmp_path)
        assert caught.value.found == "trainer, plain"
        assert str(tmp_path / "trainer") in (caught.value.hint or "")
    assert locate(tmp_path, "plain").tag == "global_step2"
    _tag(tmp_path / "checkpoint-3", "global_step3")
    assert locate(tmp_path, "checkpoint-3").tag == "global_step3"


def test_inspection_of_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    for run in ("run_9", "one_10"):  # as names, which numbers in them do not order
        _tag(tmp_path / run / "checkpoint-4", "global_step4")
    with pytest.raises(AmbiguousTagError, match="whole runs") as caught:
        inspect_checkpoint(tmp_path)
    assert caught.value.found == "one_10, run_9"


def test_unfinished_work_of_ours_is_no_finished_model(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    with pytest.raises(NotACheckpointError, match="holds a finished model"):
        locate(folder)
    (tmp_path / "out.partial.lock").touch()
    with pytest.raises(NotACheckpointError, match=r"out\.partial: is not finished"):
        locate(folder)


@pytest.mark.parametrize("below", [".", "checkpoint-2"])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "adapter_model.safetensors"])
def test_a_finished_model_is_named_as_such(tmp_path: Path, below: str, name: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / below / name).touch()
    for tag in (None, "global_step2"):
        with pytest.raises(NotACheckpointError, match="holds a finished model") as caught:
            locate(tmp_path, tag)
        assert caught.value.found == str(Path(below, name))
    _tag(tmp_path, "global_step2")
    assert locate(tmp_path).tag == "global_step2"


def test_an_unreadable_neighbour_does_not_matter_but_an_unreadable_tag_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tag(tmp_path, "global_step2")
    (tmp_path / "lost+found").mkdir()
    barred = {tmp_path / "lost+found"}
    iterdir = Path.iterdir

    def guarded(path: Path) -> object:
        if path in barred:
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    assert locate(tmp_path).tag == "global_step2"
    barred.add(tmp_path / "global_step2")
    (tmp_path / "latest").write_text("global_step2")
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        locate(tmp_path)
    assert caught.value.path == tmp_path / "global_step2"
