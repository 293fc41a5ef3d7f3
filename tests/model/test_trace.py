"""What a traced conversion records, against the same conversion of numbered elements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from zexport.checkpoint.state import Role, StoredTensor
from zexport.model.hub_layout import StoredLayout
from zexport.model.trace import Trace, UntraceableError
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.weights.hub_tensors import lay_out

Tensors = dict[str, torch.Tensor]
Conversion = Callable[[Tensors], Tensors]

_SHAPES = {"a": (4, 6, 2), "b": (6, 5), "c": (3, 5), "s": ()}

_CONVERSIONS: dict[str, Conversion] = {
    "nothing": lambda t: {"x": t["a"], "s": t["s"]},
    "split": lambda t: {str(i): part for i, part in enumerate(t["a"].chunk(3, dim=1))},
    "split and copied": lambda t: {
        str(i): part.contiguous().squeeze(1)[1] for i, part in enumerate(t["a"].chunk(6, dim=1))
    },
    "unbound": lambda t: {str(i): part for i, part in enumerate(t["a"].unbind(0))},
    "transposed": lambda t: {"x": t["a"].transpose(0, 2).contiguous()},
    "permuted, narrowed and indexed": lambda t: {
        "x": t["a"].permute(2, 0, 1)[1, 1:3].narrow(1, 2, 3)
    },
    "every other": lambda t: {"x": t["b"][::2, 1::3]},
    "joined": lambda t: {"x": torch.cat([t["b"], t["c"]], dim=0)},
    "joined last": lambda t: {"x": torch.cat([t["b"].t(), t["c"].t()], dim=-1)},
    "stacked": lambda t: {"x": torch.stack([t["b"][:3], t["c"]], dim=1)},
    "reshaped": lambda t: {"x": t["b"].reshape(3, 10), "y": t["a"].flatten(1)},
    "interleaved": lambda t: {
        "x": t["b"].reshape(2, 3, 5).transpose(0, 1).reshape(6, 5).contiguous()
    },
    "interleaved and joined": lambda t: {
        "x": torch.cat([t["b"].view(2, 3, 5).transpose(0, 1).reshape(6, 5), t["c"]])
    },
    "joined and split again": lambda t: {
        str(i): part for i, part in enumerate(torch.cat([t["b"], t["c"]]).split([4, 5]))
    },
    "joined and reshaped": lambda t: {"x": torch.cat([t["b"], t["c"]]).view(45)},
    "scalar given a dimension": lambda t: {"x": t["s"].unsqueeze(0)},
}


def _numbered() -> Tensors:
    return {
        name: torch.arange(100 * n, 100 * n + torch.Size(shape).numel(), dtype=torch.int32).view(
            shape
        )
        for n, (name, shape) in enumerate(_SHAPES.items())
    }


def _stored(tensors: Tensors) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            name, tuple(t.shape), DType.I32, Role.TRAINABLE, Extent(Path(name), 0, t.nbytes)
        )
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("kind", _CONVERSIONS)
def test_ranges_hold_what_the_conversion_gives(kind: str) -> None:
    convert, numbered = _CONVERSIONS[kind], _numbered()
    with Trace(_SHAPES) as trace:
        results = convert(dict(trace.tensors))
    described = {
        "label": "",
        "sources": list(_SHAPES),
        "parts": trace.parts(),
        "tensors": {name: trace.entry_of(tensor) for name, tensor in results.items()},
    }
    layout = msgspec.json.decode(json.dumps(described), type=StoredLayout).unfolded(_SHAPES)
    data = {name: value.numpy().tobytes() for name, value in numbered.items()}
    made = lay_out(_stored(numbered), layout, _SHAPES)
    for name, expected in convert(numbered).items():
        source = made[name].source
        assert source is not None
        found = b"".join(
            data[e.path.name][e.offset : e.offset + e.nbytes]
            for e in source.extents(0, source.nbytes)
        )
        assert made[name].shape == tuple(expected.shape)
        assert found == expected.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "convert",
    [
        lambda t: t["b"] + 1,
        lambda t: t["b"].to(torch.float16),
        lambda t: t["b"].sum(),
        lambda t: t["b"].copy_(t["b"]),
        lambda t: t["b"].flip(0),
    ],
)
def test_what_computes_is_refused(convert: Callable[[Tensors], torch.Tensor]) -> None:
    with pytest.raises(UntraceableError), Trace(_SHAPES) as trace:
        convert(trace.tensors)


def test_a_result_of_something_else_is_refused() -> None:
    trace = Trace(_SHAPES)
    with pytest.raises(UntraceableError, match="none of the tensors"):
        trace.entry_of(torch.empty(3, device="meta"))


@pytest.mark.parametrize("twice", [False, True])
def test_a_description_that_unfolds_without_end_is_refused(twice: bool) -> None:
    """Each part is made of the one before it, once or twice."""
    shape, box = [1], [[number] for number in range(3000)]
    parts = [[shape, one, one] if twice else [shape, one] for one in box]
    described = {"label": "", "sources": ["x"], "parts": parts, "tensors": {"y": 3000}}
    layout = msgspec.convert(described, StoredLayout)
    with pytest.raises(ValueError, match=r"not a description of a model's files: .* deep"):
        layout.unfolded({"x": (1,)})
