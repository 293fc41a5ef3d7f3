"""Casts and statistics against torch, on all 16-bit values, midpoints and noise."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from zexport.ranges.cast import Statistics, cast_into, statistics_of
from zexport.ranges.dtypes import DType

FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
PAIRS = [pair for pair in itertools.product(FLOATS, FLOATS) if pair[0] is not pair[1]]
_SINGLES = torch.tensor(
    [0.0, -0.0, 1e-9, 1e-7, -1e-7, 65504.0, -65520.0, 65536.0, 3.38e38, -np.inf, np.nan]
)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, 65504.0, 65519.99, 65520.0, 65520.01, -65520.0, 3.4e38)


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


def _cast(stored: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    out = bytearray(stored.numel() * target.itemsize)
    data = stored.view(torch.uint8).numpy().tobytes() if stored.numel() else b""
    cast_into(memoryview(bytearray(data)), source, target, memoryview(out))
    return torch.frombuffer(out, dtype=torch_dtype(target))


def _look(values: torch.Tensor, source: DType, target: DType) -> Statistics:
    data = memoryview(bytearray(values.view(torch.uint8).numpy().tobytes()))
    out = data
    if source is not target:
        out = memoryview(bytearray(values.numel() * target.itemsize))
        cast_into(data, source, target, out)
    return statistics_of(data, source, target, out)


def _patterns(dtype: DType) -> torch.Tensor:
    if dtype in (DType.F16, DType.BF16):
        bits = np.arange(1 << 16, dtype=np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(torch_dtype(dtype))
    wide: npt.NDArray[np.floating] = _wide_patterns()
    if dtype is DType.F32:
        return torch.from_numpy(wide.astype(np.float32))
    noise = np.random.default_rng(1).integers(0, 1 << 64, 200_000, dtype=np.uint64)
    near = np.concatenate([wide, np.nextafter(wide, np.inf), np.nextafter(wide, -np.inf)])
    return torch.from_numpy(np.concatenate([near, noise.view(np.float64)]))


def _wide_patterns() -> npt.NDArray[np.float64]:
    every = [_patterns(dtype).to(torch.float64).numpy() for dtype in (DType.F16, DType.BF16)]
    parts = [np.array(SPECIAL)]
    with np.errstate(all="ignore"):
        for values in every:
            ordered = np.unique(values[np.isfinite(values)])
            middle = (ordered[1:] / 2 + ordered[:-1] / 2).astype(np.float32)
            parts += [values, middle, np.nextafter(middle, np.float32(np.inf))]
            parts += [np.nextafter(middle, np.float32(-np.inf))]
        noise = np.random.default_rng(0).integers(0, 1 << 32, 500_000, dtype=np.uint32)
        parts.append(noise.view(np.float32))
        return np.concatenate([part.astype(np.float64) for part in parts])


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.name)
def test_cast_equals_torch(source: DType, target: DType) -> None:
    values = _patterns(source)
    expected = values.to(torch_dtype(target))
    found = _cast(values, source, target)
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[target.itemsize]
    assert torch.equal(found.view(raw)[~is_nan], expected.view(raw)[~is_nan])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("source", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("target", FLOATS, ids=lambda dtype: dtype.name)
def test_statistics_equal_counts_of_torch(source: DType, target: DType) -> None:
    values = _patterns(source)
    cast = values.to(torch_dtype(target))
    values, cast = (
        torch.cat([_SINGLES.to(values), values]),
        torch.cat([_SINGLES.to(values).to(cast), cast]),
    )
    sizes = [1] * len(_SINGLES) + [4099] * ((len(values) - len(_SINGLES)) // 4099)
    sizes.append(len(values) - sum(sizes))
    for part, result in zip(values.split(sizes), cast.split(sizes), strict=True):
        found = _look(part.clone(), source, target)
        assert found.nan == int(part.isnan().sum())
        assert found.inf == int(part.isinf().sum())
        assert found.overflow == int((part.isfinite() & result.isinf()).sum())
        assert found.all_zero == bool((part == 0).all())
        vanished = int(((part != 0) & (result == 0)).sum())
        assert found.underflow == (vanished if target is DType.F16 else 0)


def test_statistics_of_parts_add_up() -> None:
    whole = torch.tensor([0.0, float("nan"), float("inf"), 1e6, 0.0, 0.0])
    parts = [_look(part.clone(), DType.F32, DType.F16) for part in torch.split(whole, 2)]
    assert parts[0] + parts[1] + parts[2] == _look(whole, DType.F32, DType.F16)
