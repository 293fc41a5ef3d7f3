from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import accuracy
from benchmarks.llama import fit

_LAYOUTS = [(2, False), (2, True), (3, False), (3, True)]


@pytest.mark.deepspeed
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(("stage", "frozen"), _LAYOUTS)
def test_deepspeed_reads_generated_checkpoints(
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


@pytest.mark.parametrize("numel", [10**5, 10**7, 4 * 10**8])
def test_generated_names_and_shapes_equal_transformers(numel: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = fit(numel)
    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(**model.config()))
    expected = [(name, tuple(weight.shape)) for name, weight in module.named_parameters()]
    assert [(p.name, p.shape) for p in model.parameters()] == expected
    assert model.numel == sum(weight.numel() for weight in module.parameters())


@pytest.mark.deepspeed
def test_accuracy_distinguishes_right_weights_wrong_weights_and_errors(tmp_path: Path) -> None:
    case = accuracy.FIXTURES / "z2_w2_bf16_groups"
    flipped = accuracy.damaged(case, tmp_path)
    convert = accuracy.CONVERTERS
    ended = {
        name: [accuracy.outcome(convert[name], root, case) for root in (case / "ckpt", flipped)]
        for name in convert
    }
    right, wrong, error = accuracy.Outcome
    assert ended == {"zexport": [right, error], "zero_to_fp32": [right, wrong]}
