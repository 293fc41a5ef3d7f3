"""Splitting a tensor again undoes joining its parts, and the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from zexport.checkpoint.boxes import in_file
from zexport.checkpoint.state import MASTER, Parameter, Role
from zexport.checkpoint.zero.expert_layers import cut_experts, join_experts
from zexport.checkpoint.zero.records import model_states
from zexport.checkpoint.zero.tensor_parallel import tensor_ranks
from zexport.formats.torch_file import read_torch_file
from zexport.ranges.reader import SourceReader

_NAME = "layer.weight"


@st.composite
def _splits(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]:
    """A tensor, its slices as tensor ranks have them, and the record of how it is split."""
    ranks, kind = draw(st.integers(1, 4)), draw(st.sampled_from([*_KINDS]))
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    return _KINDS[kind](ranks, rows, columns, draw)


def _numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _by_rows(ranks: int, rows: int, columns: int, draw: st.DrawFn) -> Any:
    heights = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    whole = _numbered(sum(heights) + rows, columns)
    return whole, list(whole.split([*heights[:-1], heights[-1] + rows])), {}


def _by_columns(ranks: int, rows: int, columns: int, _: st.DrawFn) -> Any:
    whole = _numbered(rows + 1, ranks * columns)
    record = {"parameter_with_row_parallelism_patterns": [r"layer\.weight$"]}
    return whole, list(whole.chunk(ranks, 1)), record


def _replicated(ranks: int, rows: int, columns: int, _: st.DrawFn) -> Any:
    whole = _numbered(rows, columns)
    return whole, [whole] * ranks, {"tp_replicated_parameter_patterns": ["layer.weight$"]}


def _fused(ranks: int, _: int, columns: int, draw: st.DrawFn) -> Any:
    part = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)
    widths = draw(st.lists(part, min_size=1, max_size=3))
    whole = _numbered(sum(map(sum, widths)), columns)
    fused = whole.split([*map(sum, widths)])
    parts = [own.split(row) for own, row in zip(fused, widths, strict=True)]
    record = {
        "universal_checkpoint_version": 0.5,
        "parameter_with_sub_params": [{"patterns": ["layer.weight$"], "partition_dim": 0}],
        "sub_param_shard_widths": {"layer.weight$": widths},
    }
    return whole, [torch.cat(own) for own in zip(*parts, strict=True)], record


def _mapped(ranks: int, rows: int, columns: int, draw: st.DrawFn) -> Any:
    """Heads that some ranks share, as key and value heads of grouped attention are."""
    heads = draw(st.integers(1, ranks))
    height = rows + 1
    whole = _numbered(heads * height, columns)
    own = [rank * heads // ranks for rank in range(ranks)]
    pieces = {
        rank: {
            "shard_shape": [height, columns],
            "pieces": [
                {
                    "shape": [height, columns],
                    "source": (head * height * columns, (columns, 1)),
                    "dest": (0, (columns, 1)),
                }
            ],
        }
        for rank, head in enumerate(own)
    }
    entry = {"logical_shape": list(whole.shape), "ranks": pieces}
    record = {"affine_map": {"version": 1, "params": {"layer.weight$": entry}}}
    return whole, [whole[head * height : (head + 1) * height] for head in own], record


def _padded(ranks: int, rows: int, columns: int, draw: st.DrawFn) -> Any:
    size, height = draw(st.integers(1, ranks * (rows + 1))), rows + 1
    padded = torch.zeros(ranks * height, columns)
    padded[:size] = _numbered(size, columns)
    record = {
        "original_vocab_size": size,
        "vocabulary_parameter_patterns": ["layer.weight$"],
    }
    return padded, list(padded.split(height)), record


_KINDS = {
    "rows": _by_rows,
    "columns": _by_columns,
    "replicated": _replicated,
    "fused": _fused,
    "mapped": _mapped,
    "padded": _padded,
}


def _stored(folder: Path, parts: Sequence[torch.Tensor]) -> list[Parameter]:
    found = []
    for rank, part in enumerate(parts):
        torch.save({"weight": part.contiguous().clone()}, folder / f"{rank}.pt")
        file = read_torch_file(folder / f"{rank}.pt")
        found.append(in_file(file, _NAME, file.value["weight"], Role.TRAINABLE, MASTER))
    return found


def _values(one: Parameter, files: Sequence[Parameter]) -> torch.Tensor:
    source = one.source(MASTER)
    buffer = bytearray(source.nbytes)
    with SourceReader([file for part in files for file, _ in _places(part)]) as reader:
        reader.read_into(source, 0, memoryview(buffer))
    return torch.frombuffer(buffer or bytearray(4), dtype=torch.float32)[
        : source.nbytes // 4
    ].reshape(one.shape)


def _places(part: Parameter) -> Sequence[Any]:
    return [*part.held[0].places.values()]  # type: ignore[attr-defined]


@given(_splits())
def test_split_undoes_join_of_tensor_ranks(
    case: tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]],
) -> None:
    whole, slices, record = case
    with TemporaryDirectory() as folder:
        models = []
        for rank, own in enumerate(slices):
            states = {
                "module": {_NAME: torch.zeros(own.shape)},
                "universal_checkpoint_info": {"original_vocab_size": 1 << 20, **record},
            }
            torch.save(states, Path(folder) / f"mp_rank_{rank:02d}_model_states.pt")
            file = read_torch_file(Path(folder) / f"mp_rank_{rank:02d}_model_states.pt")
            models.append(model_states(file))
        parts = _stored(Path(folder), slices)
        ranks = tensor_ranks(models, {_NAME: [tuple(own.shape) for own in slices]})
        joined, copies = ranks.join(parts)
        assert torch.equal(_values(joined, parts), whole)
        for copy in copies:
            assert torch.equal(_values(copy.kept, parts), _values(copy.other, parts))
        for one in (joined, ranks.trim(joined)):
            for rank, own in enumerate(slices):
                assert torch.equal(_values(ranks.split(one, rank), parts), own)
        again, _ = ranks.join([ranks.split(joined, rank) for rank in range(len(slices))])
        assert torch.equal(_values(again, parts), whole)


@given(st.permutations(range(6)), st.sampled_from([1, 2, 3, 6]), st.integers(0, 3))
def test_split_undoes_join_of_experts(order: Sequence[int], ranks: int, columns: int) -> None:
    count = len(order) // ranks
    held = tuple(tuple(order[rank * count : (rank + 1) * count]) for rank in range(ranks))
    layer: Any = SimpleNamespace(held=held, num_experts=len(order))
    whole = _numbered(len(order), 2, columns)
    with TemporaryDirectory() as folder:
        parts = _stored(Path(folder), [whole[list(own)] for own in held])
        joined = join_experts(parts, layer)
        assert torch.equal(_values(joined, parts), whole)
        cut = [cut_experts(joined, own) for own in held]
        for one, own in zip(cut, held, strict=True):
            assert torch.equal(_values(one, parts), whole[list(own)])
        assert torch.equal(_values(join_experts(cut, layer), parts), whole)
