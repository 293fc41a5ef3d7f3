from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Run, save, small_model
from tests.support.real_cases import deepspeed_state, facts, on_every_real_checkpoint
from zexport import FrozenLeftOutError
from zexport.compat import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

State = dict[str, torch.Tensor]


def eager(root: Path, *, exclude_frozen_parameters: bool = False) -> State:
    state = get_fp32_state_dict_from_zero_checkpoint(
        root, exclude_frozen_parameters=exclude_frozen_parameters
    )
    assert type(state) is dict
    return state


def sharing(state: State) -> set[frozenset[str]]:
    """The sets of names that stand for one tensor object."""
    return {frozenset(n for n in state if state[n] is state[name]) for name in state}


# --- against DeepSpeed ---


@pytest.mark.deepspeed
@pytest.mark.parametrize("exclude_frozen", [False, True])
@on_every_real_checkpoint
def test_it_gives_what_deepspeed_gives_and_what_deepspeed_loses(
    root: Path, exclude_frozen: bool
) -> None:
    try:
        theirs = dict(deepspeed_state(root, exclude_frozen_parameters=exclude_frozen))
    except (ValueError, RuntimeError):
        theirs = {}
    if zexport.open_checkpoint(root).frozen_left_out and not exclude_frozen:
        with pytest.raises(ValueError, match="exclude_frozen_parameters=True"):
            eager(root)
        return
    ours = eager(root, exclude_frozen_parameters=exclude_frozen)
    lost = ours.keys() - theirs.keys()
    assert facts({n: t for n, t in ours.items() if n not in lost}) == facts(theirs)
    if not lost:
        assert list(ours) == list(theirs)
        assert sharing(ours) == sharing(theirs)


@pytest.mark.deepspeed
@pytest.mark.parametrize("checkpoint", ["zero2", "zero3"])
def test_lazy_tensors_have_the_shapes_types_and_values_of_the_eager_ones(
    checkpoint: str, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue(checkpoint)
    lazy = get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
    assert type(lazy) is OrderedDict
    assert lazy["head.weight"] is lazy["emb.weight"]
    theirs = deepspeed_state(root, lazy_mode=True)
    assert [(n, t.shape, t.dtype) for n, t in lazy.items()] == [
        (n, t.shape, t.dtype) for n, t in theirs.items()
    ]
    assert facts({n: t.contiguous() for n, t in lazy.items()}) == facts(
        {n: t.contiguous() for n, t in theirs.items()}
    )


def _two_tags(root: Path) -> None:
    (root / "latest").unlink()
    shutil.copytree(root / "global_step2", root / "global_step4")


def _without(pattern: str) -> Callable[[Path], None]:
    def remove(root: Path) -> None:
        for path in root.glob(f"global_step2/{pattern}"):
            path.unlink()

    return remove


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("harm", "tag"),
    [
        (_two_tags, None),
        (lambda root: (root / "latest").write_text("global_step9"), None),
        (_without("*rank_1_*_optim_states.pt"), None),
        (_without("*_optim_states.pt"), None),
        (_without("*_model_states.pt"), None),
        (shutil.rmtree, None),
        (lambda _: None, "global_step9"),
    ],
)
def test_what_is_missing_raises_the_type_of_error_that_deepspeed_raises(
    zero3: Path, harm: Callable[[Path], object], tag: str | None
) -> None:
    from deepspeed.utils import zero_to_fp32

    harm(zero3)
    with pytest.raises((ValueError, OSError)) as theirs, redirect_stdout(io.StringIO()):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(zero3), tag)
    with pytest.raises((ValueError, OSError)) as ours:
        get_fp32_state_dict_from_zero_checkpoint(str(zero3), tag)
    assert ours.type is theirs.type


# --- where DeepSpeed is wrong ---


def test_frozen_weights_of_zero1_are_there(tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=1), tmp_path / "zero1")
    state = eager(root)
    assert facts({n: state[n] for n in small_model().frozen}) == facts(small_model().frozen)


def test_integers_bools_and_doubles_among_the_buffers_keep_their_values(tmp_path: Path) -> None:
    wide = {"wide": torch.tensor([0.1, 1e300], dtype=torch.float64)}
    model = replace(small_model(), buffers={**small_model().buffers, **wide})
    state = eager(save(model, Run(), tmp_path / "run"))
    assert facts({n: state[n] for n in ("mask", "big", "wide")}) == facts(
        {n: model.buffers[n] for n in ("mask", "big", "wide")}
    )
    assert facts({"mean": state["mean"]}) == facts({"mean": model.buffers["mean"].float()})


def test_weights_left_out_at_save_time_are_refused_unless_that_is_asked_for(tmp_path: Path) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "run")
    with pytest.raises(ValueError, match="exclude_frozen_parameters=True") as caught:
        eager(root)
    assert isinstance(caught.value.__cause__, FrozenLeftOutError)
    with pytest.raises(ValueError, match="exclude_frozen_parameters=True"):
        convert_zero_checkpoint_to_fp32_state_dict(root, tmp_path / "out")
    state = eager(root, exclude_frozen_parameters=True)
    assert state.keys() == {*small_model().trained, *small_model().buffers, "head.weight"}


def test_every_level_of_the_folders_is_accepted(zero3: Path) -> None:
    assert facts(eager(zero3 / "global_step2")) == facts(eager(zero3))
    assert facts(eager(zero3.parent)) == facts(eager(zero3))


def test_what_a_user_should_know_of_a_checkpoint_is_a_warning(tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=3), tmp_path / "run", "global_step9")
    with pytest.warns(UserWarning, match="step"):
        get_fp32_state_dict_from_zero_checkpoint(root)


# --- into a model ---


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(7, 5)
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.extra = torch.nn.Parameter(torch.ones(1))


def test_a_model_gets_its_weights_and_a_warning_names_what_does_not_fit(zero3: Path) -> None:
    net = Net()
    with (
        pytest.warns(UserWarning, match=r"no value for extra$"),
        pytest.warns(UserWarning, match=r"values unknown to the model: .*emb\.weight"),
    ):
        assert load_state_dict_from_zero_checkpoint(net, zero3) is net
    trained = small_model().trained
    assert facts({n: p for n, p in net.state_dict().items() if n != "extra"}) == facts(
        {n: trained[n] for n in ("scale", "lin.weight", "lin.bias")}
    )


# --- into files ---


def converted_by_deepspeed(root: Path, out: Path, **options: object) -> None:
    from deepspeed.utils import zero_to_fp32

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(root), str(out), **options)


def untied(stage: int, root: Path) -> Path:
    return save(replace(small_model(), tied={}), Run(stage=stage), root)


@pytest.mark.deepspeed
@pytest.mark.parametrize("max_shard_size", ["5GB", 300, None])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_files_and_their_contents_are_deepspeeds(
    tmp_path: Path, stage: int, safe: bool, max_shard_size: int | str | None
) -> None:
    root = (untied if safe else lambda s, r: save(small_model(), Run(stage=s), r))(
        stage, tmp_path / "run"
    )
    options = {"max_shard_size": max_shard_size, "safe_serialization": safe}
    converted_by_deepspeed(root, tmp_path / "theirs", **options)
    convert_zero_checkpoint_to_fp32_state_dict(
        root, tmp_path / "ours", max_shard_size, safe_serialization=safe
    )
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    assert max_shard_size != 300 or len(names) > 2
    for name in names:
        ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
        if name.endswith(".json"):
            assert ours.read_bytes() == theirs.read_bytes()
        else:
            read = load_file if safe else torch.load
            assert facts(read(ours)) == facts(read(theirs))


def test_tied_weights_are_stored_once_in_bin_files_and_twice_in_safetensors(
    zero3: Path, tmp_path: Path
) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(zero3, tmp_path, safe_serialization=False)
    convert_zero_checkpoint_to_fp32_state_dict(zero3, tmp_path, safe_serialization=True)
    pickled = torch.load(tmp_path / "pytorch_model.bin")
    assert pickled["head.weight"].data_ptr() == pickled["emb.weight"].data_ptr()
    assert facts(load_file(tmp_path / "model.safetensors")) == facts(pickled)


def test_shards_of_tied_weights_have_an_index_of_every_name(zero3: Path, tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(zero3, tmp_path, 300, safe_serialization=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {*small_model().tensors, "head.weight"}
    for name, filename in index["weight_map"].items():
        assert name in load_file(tmp_path / filename)


def test_the_module_is_imported_without_torch() -> None:
    code = "import sys, zexport.compat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("older", "size", "is_warned"),
    [
        ("model.safetensors", None, True),
        ("pytorch_model.bin", 300, True),
        ("pytorch_model.bin", None, False),
        ("pytorch_model.bin.index.json", None, False),
    ],
)
def test_older_weights_that_from_pretrained_prefers_are_warned_about(
    older: str, size: int | None, is_warned: bool, zero3: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / older).write_text("older")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_zero_checkpoint_to_fp32_state_dict(zero3, tmp_path / "out", size)
    found = [str(one.message) for one in caught if "from_pretrained" in str(one.message)]
    assert len(found) == is_warned
    assert all(f"loads {older} instead of pytorch_model.bin" in one for one in found)
