from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import accuracy
from benchmarks.cases import Case, masters_start
from benchmarks.llama import fit
from benchmarks.measure import Sample

_ROOT = Path(__file__).parents[2]
_LAYOUTS = [(2, False), (2, True), (3, False), (3, True)]


def _samples(*seconds: float, megabytes: float = 100) -> list[Sample]:
    return [Sample(each, 2 * each, int(megabytes * 1e6), 1_000_000) for each in seconds]


@pytest.mark.deepspeed
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(("stage", "frozen"), _LAYOUTS)
def test_deepspeed_reads_from_a_generated_checkpoint_the_values_that_were_generated(
    tmp_path: Path, stage: int, frozen: bool, world_size: int
) -> None:
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from benchmarks.generate import generate
    from benchmarks.values import master

    folder = tmp_path / "checkpoint"
    model = generate(folder, numel=10**5, world_size=world_size, stage=stage, frozen=frozen, seed=5)
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    parameters = model.parameters(frozen=frozen)
    assert set(found) == {parameter.name for parameter in parameters}
    for parameter in parameters:
        expected = master(parameter, 5)
        assert expected.std() > 0.01
        assert found[parameter.name].shape == expected.shape
        assert torch.equal(found[parameter.name].float(), expected), parameter.name


@pytest.mark.deepspeed
def test_deepspeed_reads_a_generated_zero3_checkpoint_of_several_sub_groups(tmp_path: Path) -> None:
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from benchmarks.generate import generate
    from benchmarks.values import master

    folder = tmp_path / "checkpoint"
    model = generate(folder, numel=10**5, world_size=3, stage=3, sub_group_numel=5000)
    path = next(folder.rglob("bf16_zero_pp_rank_1_*"))
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    assert len(state["fp32_flat_groups"]) > 2
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    for parameter in model.parameters():
        assert torch.equal(found[parameter.name], master(parameter, 0)), parameter.name


_TRAIN = """
import json, sys
import deepspeed, torch
from transformers import LlamaConfig, LlamaForCausalLM
from benchmarks.llama import fit
from zexport.train.collectives import prepare_cpu

folder, layouts = sys.argv[1], json.loads(sys.argv[2])
model = fit(10**5)
prepare_cpu()
deepspeed.init_distributed("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
for stage, frozen in layouts:
    net = LlamaForCausalLM(LlamaConfig(**model.config()))
    still = {p.name for p in model.parameters(frozen=frozen) if p.frozen}
    for name, weight in net.named_parameters():
        weight.requires_grad_(name not in still)
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 1_000_000,
            "bf16": {"enabled": True},
        },
    )
    words = torch.arange(16).view(1, 16)
    for _ in range(2):
        engine.backward(engine(input_ids=words, labels=words).loss)
        engine.step()
    engine.save_checkpoint(f"{folder}/{stage}{frozen}")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one rank in every layout, by DeepSpeed itself, one folder each."""
    folder = tmp_path_factory.mktemp("trained")
    layouts = str([list(layout) for layout in _LAYOUTS]).lower()
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONPATH": str(_ROOT)}
    env["DS_ACCELERATOR"] = "cpu"
    argv = [sys.executable, "-c", _TRAIN, str(folder), layouts]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def _outline(value: object) -> object:
    """A value's types and keys in order, without the numbers."""
    import torch

    kind = type(value)
    if isinstance(value, torch.Tensor):
        facts = (value.dtype, value.requires_grad, value.storage_offset() > 0)
        return kind, facts, tuple(value.shape), value.untyped_storage().nbytes(), list(vars(value))
    if isinstance(value, dict):
        return kind, [(key, _outline(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return kind, [_outline(inner) for inner in value]
    return kind, str(value) if hasattr(value, "__dict__") else None


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "frozen"), _LAYOUTS)
def test_a_generated_checkpoint_differs_from_deepspeeds_own_in_its_numbers_only(
    trained: Path, tmp_path: Path, stage: int, frozen: bool
) -> None:
    import torch

    from benchmarks.generate import generate

    real = trained / f"{stage}{frozen}"
    folder = tmp_path / "checkpoint"
    generate(folder, numel=10**5, world_size=1, stage=stage, frozen=frozen)
    names = {path.relative_to(real) for path in real.rglob("*_states.pt")}
    assert names == {path.relative_to(folder) for path in folder.rglob("*_states.pt")}
    assert (folder / "latest").read_text() == (real / "latest").read_text()
    for name in names:
        ours, theirs = (torch.load(root / name, weights_only=False) for root in (folder, real))
        assert _outline(ours) == _outline(theirs), name
        assert _records(folder / name) == _records(real / name)


def _records(path: Path) -> list[tuple[str, int, int]]:
    """The zip's records but the pickle's size, which depends on the numbers in it."""
    with zipfile.ZipFile(path) as archive:
        return [
            (info.filename, info.flag_bits, 0 if info.filename.endswith(".pkl") else info.file_size)
            for info in archive.infolist()
        ]


@pytest.mark.deepspeed
@pytest.mark.parametrize(("stage", "frozen"), _LAYOUTS)
def test_what_is_read_to_warm_the_cache_holds_all_masters(
    tmp_path: Path, stage: int, frozen: bool
) -> None:
    case = Case(tmp_path, 10**6, 2, stage, frozen)
    case.make({**os.environ, "PYTHONPATH": str(_ROOT)})
    for path in case.folder.rglob("*_optim_states.pt"):
        with zipfile.ZipFile(path) as archive:
            data = [info for info in archive.infolist() if "/data/" in info.filename]
        masters, before = data[-1], data[-2]
        assert masters.file_size == before.file_size > path.stat().st_size * 0.3
        assert before.header_offset < masters_start(path) <= masters.header_offset


@pytest.mark.parametrize("numel", [10**5, 10**7, 4 * 10**8])
def test_transformers_makes_the_same_names_and_shapes_of_the_config(numel: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = fit(numel)
    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(**model.config()))
    expected = [(name, tuple(weight.shape)) for name, weight in module.named_parameters()]
    assert [(p.name, p.shape) for p in model.parameters()] == expected
    assert model.numel == sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize("numel", [10**7, 4 * 10**8, 16 * 10**8, 7 * 10**9])
def test_a_model_is_within_one_percent_of_the_size_asked_for(numel: int) -> None:
    assert fit(numel).numel == pytest.approx(numel, rel=0.01)


def test_a_server_that_leaves_tensors_or_parameters_out_is_told(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from benchmarks.servers import Loaded, examine

    tensors = {name: torch.randn(3, 3) for name in ("0.weight", "1.weight")}
    save_file(tensors, tmp_path / "model.safetensors")

    def server(*taken: str) -> Loaded:
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in "01"))

        def load() -> None:
            state = {name: tensors[name] for name in taken}
            model.load_state_dict(state, strict=False)

        return examine(tmp_path, lambda _: (model, load))

    assert server(*tensors) == Loaded("Sequential", "", [], [])
    assert server("1.weight") == Loaded("Sequential", "", ["0.weight"], ["0.weight"])
    assert str(server("1.weight")).endswith("1 unset: 0.weight; 1 skipped: 0.weight")
    assert server("no.weight").error.startswith("KeyError")


@pytest.mark.deepspeed
def test_accuracy_tells_right_weights_from_wrong_ones_and_from_errors(tmp_path: Path) -> None:
    case = accuracy.FIXTURES / "z2_w2_bf16_groups"
    flipped = accuracy.damaged(case, tmp_path)
    convert = accuracy.CONVERTERS
    ended = {
        name: [accuracy.outcome(convert[name], root, case) for root in (case / "ckpt", flipped)]
        for name in convert
    }
    right, wrong, error = accuracy.Outcome
    assert ended == {"zexport": [right, error], "zero_to_fp32": [right, wrong]}
