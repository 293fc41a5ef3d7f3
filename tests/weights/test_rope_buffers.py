"""A buffer that still has how positions were rotated is held against the config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.plans import torch_dtype
from zexport.checkpoint.state import Role, StoredTensor
from zexport.facts.statements import judge
from zexport.model.config import ConfigFile
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.store.json import JsonObject
from zexport.weights.named import Weights
from zexport.weights.rope_buffers import rope_buffer_statements

_ROPE: JsonObject = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize(
    ("name", "theta", "config", "told"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", 1e6, {"rope_parameters": _ROPE}, "1e+06"),
        ("model.rotary_emb.inv_freq", 1e4, {"rope_theta": 1e4}, ""),
        ("model.rotary_emb.inv_freq", 1e6, {"text_config": {"rope_theta": 1e6}}, ""),
        ("model.rotary_emb.inv_freq", 1e6, {"rope_parameters": {**_ROPE, "rope_type": "yarn"}}, ""),
        ("visual.rotary_emb.inv_freq", 1e6, {"rope_theta": 1e4}, ""),
        ("model.rotary_emb.inv_freq", 1e6, {}, ""),
        ("model.rotary_emb.inv_freq", 1e6, {"rope_theta": 10**400}, ""),
    ],
)
def test_a_base_that_is_another_than_the_configs_is_told(
    tmp_path: Path, dtype: DType, *, name: str, theta: float, config: JsonObject, told: str
) -> None:
    values = theta ** -(torch.arange(0, 64, 2) / 64)
    path = tmp_path / "rank.pt"
    path.write_bytes(b"x" + values.to(torch_dtype(dtype)).view(torch.uint8).numpy().tobytes())
    source = Extent(path, 1, 32 * dtype.itemsize)
    weights = Weights({name: StoredTensor(name, (32,), dtype, Role.BUFFER, source)}, {})
    stated = rope_buffer_statements(weights, ConfigFile(tmp_path, config))
    (warning,) = judge(stated, None).warnings or ("",)
    assert told in warning if told else not warning
