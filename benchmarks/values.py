"""The numbers in a generated checkpoint: a known function of a seed and a place in the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.llama import Parameter

_BLOCK = 1 << 16  # elements made from one seeding
_STD = 0.02


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``begin`` to ``begin + numel`` of a weight, at ``start`` of a rank's flat data."""

    parameter: Parameter
    begin: int
    start: int
    numel: int


def master(parameter: Parameter, seed: int) -> torch.Tensor:
    """The fp32 values a reader must find; a frozen weight's are those of its 16-bit storage."""
    value = torch.empty(parameter.numel)
    _fill(value, seed, parameter.start)
    value = value.view(parameter.shape)
    return value.bfloat16().float() if parameter.frozen else value


def flat_data(fragments: Iterable[Fragment], numel: int, seed: int) -> torch.Tensor:
    """A rank's flat fp32 data: its fragments in place, zeros for padding."""
    flat = torch.zeros(numel)
    for part in fragments:
        where = flat[part.start : part.start + part.numel]
        _fill(where, seed, part.parameter.start + part.begin)
    return flat


def _fill(out: torch.Tensor, seed: int, start: int) -> None:
    """Put the model's elements from ``start`` on into ``out``; alike however they are cut up."""
    stop = start + out.numel()
    generator = torch.Generator()
    block = torch.empty(_BLOCK)
    for index in range(start // _BLOCK, -(-stop // _BLOCK)):
        # torch's CPU generator takes 32 bits of a seed, so the two are mixed into those.
        generator.manual_seed((seed * 1_000_003 + index) % 2**32)
        block.normal_(0, _STD, generator=generator)
        origin = index * _BLOCK
        begin, end = max(start, origin), min(stop, origin + _BLOCK)
        out[begin - start : end - start] = block[begin - origin : end - origin]
