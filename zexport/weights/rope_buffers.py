"""How positions were rotated in training, where a buffer of the checkpoint still has it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zexport.checkpoint.state import Role, StoredTensor
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import CONFIG
from zexport.model.config import ConfigFile, settings_of
from zexport.model.config_facts import rope_of
from zexport.store.contents import read_range
from zexport.weights.named import Weights

_FREQUENCIES = re.compile(r"(?!.*vis(?:ion|ual))(?:.*\.)?rotary_emb\.inv_freq")
_NEAR = 1.1
"""By so much two bases of one model may differ, as half precision has them."""


_BASE_MAX = 1e30
"""No model has a larger one; the powers of what is no base at all have no number."""


def rope_buffer_statements(stored: Weights, config: ConfigFile | None) -> Iterator[Statement]:
    """The base of the frequencies of a buffer, and the config's, where that changes none of them.

    Source: transformers before 4.32, and code of models' own, which save
    ``inv_freq[i] = rope_theta ** (-i / n)``.
    """
    content = settings_of(config)
    inner = content.get("text_config")
    ropes = [rope_of(table) for table in (content, inner) if isinstance(table, dict)]
    told = [one.get("rope_theta") for one in ropes if one.get("rope_type") == "default"]
    stated = [float(one) for one in told if isinstance(one, int | float) and 1 < one < _BASE_MAX]
    buffers = (t for n, t in stored.tensors.items() if _FREQUENCIES.fullmatch(n))
    held = next((base for one in buffers if (base := _base_of(one)) is not None), None)
    if stated and held is not None and not any(_are_near(held, one) for one in stated):
        yield Statement(Fact.BUFFER_ROPE, stated[0], f"{CONFIG}, rope_theta")
        yield Statement(Fact.BUFFER_ROPE, f"{held:.2g}", "the checkpoint's rotary_emb.inv_freq")


def _base_of(buffer: StoredTensor) -> float | None:
    """The base of frequencies, by the one in their middle, which every type holds well."""
    if buffer.role is not Role.BUFFER or buffer.source is None or not buffer.dtype.is_floating:
        return None
    middle, size = buffer.numel // 2, buffer.dtype.itemsize
    if len(buffer.shape) != 1 or not middle:
        return None
    import numpy as np  # noqa: PLC0415

    from zexport.ranges.casts import NUMPY  # noqa: PLC0415 - most models have no such buffer

    extents = buffer.source.extents(middle * size, (middle + 1) * size)
    raw = b"".join(read_range(one.path, one.offset, one.nbytes) for one in extents)
    value = float(np.frombuffer(raw, NUMPY[buffer.dtype])[0])
    return value ** (-buffer.numel / middle) if 1 / _BASE_MAX < value < 1 else None


def _are_near(one: float, other: float) -> bool:
    return one <= other * _NEAR and other <= one * _NEAR
