"""``--engine deepspeed``: DeepSpeed's converter rebuilds the weights; unknown code never runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import optimizer_file, small_model
from tests.support.forked import typed
from tests.support.oracles import differences
from tests.support.real_cases import Facts, deepspeed_state, facts, on_every_real_checkpoint
from tests.support.stopping import flip
from zexport import (
    DamagedCheckpointError,
    Engine,
    NameLayout,
    UnsafeError,
    UnsupportedError,
    ZexportError,
    consolidate,
)

pytestmark = pytest.mark.deepspeed


def _exported(root: Path, out: Path, engine: Engine = Engine.DEEPSPEED) -> dict[str, torch.Tensor]:
    consolidate(root, out, engine=engine, layout=NameLayout.MEMORY, jobs=2)
    return {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}


def _outcome(root: Path, out: Path, engine: Engine) -> Facts | type:
    try:
        return facts(_exported(root, out, engine))
    except ZexportError as error:
        assert not out.exists()
        return type(error)


@on_every_real_checkpoint
def test_both_engines_export_the_same_if_deepspeed_rebuilds_every_tensor(
    root: Path, tmp_path: Path
) -> None:
    expected = _outcome(root, tmp_path / "native", Engine.NATIVE)
    try:
        given = {*deepspeed_state(root)}
    except (ValueError, RuntimeError):
        given = set()
    if isinstance(expected, dict) and not expected.keys() <= given:
        expected = UnsupportedError
    assert _outcome(root, tmp_path / "reference", Engine.DEEPSPEED) == expected


def test_command_prints_nothing_that_deepspeed_prints(zero3: Path, tmp_path: Path) -> None:
    done = typed("consolidate", zero3, tmp_path / "out", "--engine", "deepspeed", "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    wanted = small_model().tensors
    wanted |= {name: value.float() for name, value in small_model().frozen.items()}
    assert differences(load_file(tmp_path / "out" / "model.safetensors"), wanted) == []


def test_flipped_bit_is_refused_although_deepspeed_does_not_check(
    zero3: Path, tmp_path: Path
) -> None:
    path = optimizer_file(zero3 / "global_step2", small_model(), 1)
    some = small_model().trained["emb.weight"].reshape(-1)[31:40].numpy().tobytes()
    flip(path, path.read_bytes().rindex(some))
    with pytest.raises(DamagedCheckpointError, match="CRC-32"):
        _exported(zero3, tmp_path / "out")


# --- unknown code ---


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["stray_optim_states.pt", "old copy_optim_states.pt"])
def test_file_with_an_unknown_global_is_refused(zero3: Path, tmp_path: Path, name: str) -> None:
    """DeepSpeed loads all files that match its patterns."""
    torch.save({"module": _Bomb(tmp_path / "ran")}, zero3 / "global_step2" / name)
    with pytest.raises(UnsafeError, match=r"mkdir") as caught:
        _exported(zero3, tmp_path / "out")
    assert caught.value.path == zero3 / "global_step2" / name
    assert not (tmp_path / "ran").exists()


# --- inexact values ---


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.pop("lin.weight"), "leaves out 'lin.weight'"),
        (lambda state: state.update(scale=torch.ones(2)), "another shape"),
        (lambda state: state.update(big=state["big"].float()), "may round it"),
        (lambda state: state["no"], "found KeyError: 'no'"),
    ],
)
def test_value_that_may_not_be_the_stored_one_is_refused(
    change: Callable[[dict[str, torch.Tensor]], object],
    reason: str,
    zero3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.utils import zero_to_fp32

    name = "get_fp32_state_dict_from_zero_checkpoint"
    whole = getattr(zero_to_fp32, name)

    def convert(*given: object, **options: object) -> dict[str, torch.Tensor]:
        state = dict(whole(*given, **options))
        change(state)
        return state

    monkeypatch.setattr(zero_to_fp32, name, convert)
    with pytest.raises(UnsupportedError, match=reason):
        _exported(zero3, tmp_path / "out")
    assert not (tmp_path / "out").exists()
