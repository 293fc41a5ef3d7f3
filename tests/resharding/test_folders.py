"""What goes along with the rank files of a framework's checkpoint, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zexport.checkpoint.resolve import Location, TagChoice, location_of
from zexport.errors import UnsafeError
from zexport.resharding.folders import Beside, Ranks, beside
from zexport.store.boundary import Boundary


def _trainer(root: Path, ranks: int) -> Location:
    names = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
    names += ["trainer_state.json", "scheduler.pt", "config.json", "model.safetensors", "latest"]
    names += ["model.safetensors.index.json", "adapter_model.safetensors", "other/adapter.json"]
    names += ["export/zexport_manifest.json", "export/model.safetensors", ".cache"]
    return _location(root, "global_step4", *names)


def _location(root: Path, tag: str, *names: str) -> Location:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / tag).mkdir()
    (root / tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    return location_of(root / tag, TagChoice.LATEST, Boundary.of(root))


def _origins(found: Beside) -> dict[str, str]:
    return {file.filename: file.origin.name for file in found.files if file.origin is not None}


@pytest.mark.parametrize(
    ("before", "after", "states"),
    [
        (2, 3, {"rng_state_0.pth": "rng_state_0.pth", "rng_state_1.pth": "rng_state_1.pth"}),
        (3, 2, {"rng_state_0.pth": "rng_state_0.pth", "rng_state_1.pth": "rng_state_1.pth"}),
        (3, 1, {"rng_state.pth": "rng_state_0.pth"}),
        (1, 2, {"rng_state_0.pth": "rng_state.pth"}),
        (1, 1, {"rng_state.pth": "rng_state.pth"}),
    ],
)
def test_trainers_random_states_get_the_names_that_so_many_ranks_look_for(
    tmp_path: Path, before: int, after: int, states: dict[str, str]
) -> None:
    found = beside(_trainer(tmp_path, before), Ranks(before, after), 2, 4)
    copied = _origins(found)
    assert {name: copied[name] for name in copied if "rng" in name} == states


def test_random_states_for_any_number_of_ranks_keep_their_names_but_for_accelerates(
    tmp_path: Path,
) -> None:
    found = beside(_trainer(tmp_path / "trainer", 2), Ranks(2, None), None, 4)
    assert [name for name in _origins(found) if "rng" in name] == [
        "rng_state_0.pth",
        "rng_state_1.pth",
    ]
    location = _location(tmp_path / "accelerate", "pytorch_model", "random_states_0.pkl")
    torch.save({"last_epoch": 6}, location.root / "scheduler.bin")
    found = beside(location, Ranks(2, None), None, 3)
    assert _origins(found) == {"scheduler.bin": "scheduler.bin"}
    assert "counts ranks x updates (2 x 3 = 6)" in found.warnings[0]


def test_a_trainers_folder_comes_along_but_for_the_gathered_model(tmp_path: Path) -> None:
    found = beside(_trainer(tmp_path, 2), Ranks(2, 2), 2, 4)
    assert sorted(_origins(found)) == [
        "adapter_model.safetensors",
        "config.json",
        "other/adapter.json",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "trainer_state.json",
    ]
    assert found.notes == (
        "not copied (gathered weights, or of other ranks): model.safetensors, "
        "model.safetensors.index.json",
        "rng_state_0.pth, rng_state_1.pth, scheduler.pt: copied unchecked. Loading a pickle can "
        "run code",
    )


def test_the_best_checkpoint_that_trainer_will_load_is_named(tmp_path: Path) -> None:
    """With load_best_model_at_end, Trainer stops there where it is for other ranks."""
    location = _trainer(tmp_path / "checkpoint-4", 2)
    state = location.root / "trainer_state.json"
    for best in ("out/checkpoint-2", None):
        state.write_text(json.dumps({"global_step": 4, "best_model_checkpoint": best}))
        warnings = beside(location, Ranks(2, 3), 2, 4).warnings
        assert [best is not None and best in warning for warning in warnings] == [True] * bool(best)


def test_a_link_that_leads_out_of_the_folder_is_not_copied_from(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    location = _trainer(tmp_path / "checkpoint-4", 2)
    (location.root / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeError):
        beside(location, Ranks(2, 3), 2, 4)


@pytest.mark.parametrize("epochs", [(6, 3, 6), (3, 3, 6), (3, 3, 3)])
def test_accelerates_counts_of_one_number_of_ranks_are_left_out_or_warned_of(
    tmp_path: Path, epochs: tuple[int, ...]
) -> None:
    names = ("random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl")
    location = _location(tmp_path, "pytorch_model", "latest", *names)
    schedulers = ("scheduler.bin", "scheduler_1.bin", "scheduler_2.bin")
    for name, epoch in zip(schedulers, epochs, strict=True):
        torch.save({"last_epoch": epoch, "_step_count": epoch + 1}, tmp_path / name)
    same, other = (beside(location, Ranks(2, ranks), 3, 3) for ranks in (2, 3))
    assert set(_origins(same)) == {*names, *schedulers}
    assert same.warnings == ()
    assert set(_origins(other)) == {"custom_checkpoint_0.pkl", *schedulers}
    assert other.notes[0].endswith("random_states_0.pkl, random_states_1.pkl")
    counting = [name for name, epoch in zip(schedulers, epochs, strict=True) if epoch == 6]
    assert [text.split()[0] for text in other.warnings] == counting


def test_the_options_of_a_run_of_zexport_train_are_put_right_for_the_new_ranks(
    tmp_path: Path,
) -> None:
    """What was typed for the run with ``--ds-config`` is among them, and must say nothing else."""
    location = _location(tmp_path, "global_step4", "latest", "zexport_source.json", "config.json")
    (tmp_path / "gathered").mkdir()
    (tmp_path / "gathered" / "model.safetensors").touch()
    typed = {"zero_optimization": {"stage": 3, "sub_group_size": 9}, "train_batch_size": 8}
    stored = {"world_size": 2, "lr": 0.5, "stage": 3, "ds_config": typed}
    (tmp_path / "zexport_train.json").write_text(json.dumps(stored))
    found = beside(location, Ranks(2, 5), 1, 4)
    contents = {file.filename: file.content for file in found.files}
    assert set(contents) == {"config.json", "zexport_source.json", "zexport_train.json"}
    options = json.loads(contents["zexport_train.json"] or b"")
    typed["zero_optimization"]["stage"] = 1
    assert options == {"world_size": 5, "lr": 0.5, "stage": 1, "ds_config": typed}
    given = {"zero_optimization": {"stage": 1}, "train_batch_size": 20, "bf16": {"enabled": "auto"}}
    (file,) = (one for one in beside(location, Ranks(2, 5), 1, 4, given).files if one.content)
    assert json.loads(file.content or b"")["ds_config"] == {
        "zero_optimization": {"stage": 1},
        "train_batch_size": 20,
        "bf16": {},
    }
