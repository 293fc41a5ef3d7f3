"""A padded vocabulary that is split again has the slices it was joined from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from zexport.checkpoint.boxes import in_file
from zexport.checkpoint.state import MASTER, Parameter, Role
from zexport.checkpoint.zero.records import model_states
from zexport.checkpoint.zero.tensor_parallel import tensor_ranks
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.reader import SourceReader

_NAME = "layer.weight"


def _values(one: Parameter, files: Sequence[TorchFile]) -> torch.Tensor:
    source = one.source(MASTER)
    buffer = bytearray(source.nbytes)
    with SourceReader(files) as reader:
        reader.read_into(source, 0, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch.float32).reshape(one.shape)


@pytest.mark.parametrize(("ranks", "height", "size"), [(1, 3, 2), (2, 3, 4), (3, 2, 3), (4, 1, 4)])
def test_split_undoes_join_of_a_padded_vocabulary(
    ranks: int, height: int, size: int, tmp_path: Path
) -> None:
    whole = torch.zeros(ranks * height, 2)
    whole[:size] = torch.arange(1.0, 1 + 2 * size).reshape(size, 2)
    slices = [own.clone() for own in whole.split(height)]
    record = {"original_vocab_size": size, "vocabulary_parameter_patterns": ["layer.weight$"]}
    files = []
    for rank, own in enumerate(slices):
        path = tmp_path / f"mp_rank_{rank:02d}_model_states.pt"
        module = {_NAME: torch.zeros(own.shape)}
        torch.save({"module": module, "universal_checkpoint_info": record, "w": own}, path)
        files.append(read_torch_file(path))
    states = [model_states(file) for file in files]
    split = tensor_ranks(states, {_NAME: [tuple(own.shape) for own in slices]})
    parts = [in_file(f, _NAME, f.value["w"], Role.TRAINABLE, MASTER) for f in files]  # type: ignore[index]
    joined, _ = split.join(parts)
    assert torch.equal(_values(joined, files), whole)
    assert _values(split.trim(joined), files).shape == (size, 2)
    for one in (joined, split.trim(joined)):
        for rank, own in enumerate(slices):
            assert torch.equal(_values(split.split(one, rank), files), own)
