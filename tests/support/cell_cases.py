"""Real checkpoints read cell by cell, one a model-parallel index, and their bytes and the truth."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open

from tests.support.real_cases import Facts, facts
from zexport.checkpoint.candidates import is_tag_dir
from zexport.checkpoint.contents import Inventory
from zexport.checkpoint.rank_files import list_rank_files
from zexport.checkpoint.ranks import RankStates, read_ranks
from zexport.ranges.extents import ByteSource


def cases_named(*prefixes: str) -> list[Path]:
    """Cases of ``fixtures/`` and of ZEXPORT_CASES whose names begin so."""
    folders = [Path(__file__).parents[2] / "fixtures"]
    if own := os.environ.get("ZEXPORT_CASES"):
        folders.append(Path(own))
    found = [file.parent for folder in folders for file in folder.glob("*/case.json")]
    return sorted(case for case in found if case.name.startswith(prefixes))


def tag_of(case: Path) -> Path:
    """The one tag folder of a case."""
    (tag,) = (path for path in (case / "ckpt").iterdir() if is_tag_dir(path))
    return tag


def read_cells(tag: Path) -> dict[int, RankStates]:
    """The states of every model-parallel index."""
    files = list_rank_files(tag)
    indices = sorted({file.mp_rank for file in files})
    return {mp: read_ranks(tag, [f for f in files if f.mp_rank == mp]) for mp in indices}


def read_bytes(source: ByteSource) -> bytes:
    """All bytes of a source, by plain positioned reads."""
    parts = []
    for extent in source.extents(0, source.nbytes):
        descriptor = os.open(extent.path, os.O_RDONLY)
        parts.append(os.pread(descriptor, extent.nbytes, extent.offset))
        os.close(descriptor)
    return b"".join(parts)


def facts_of(inventory: Inventory) -> Facts:
    """Type, shape and bytes of every tensor, tied names included."""
    found = {}
    for tensor in inventory.tensors:
        assert tensor.source is not None
        dtype = getattr(torch, tensor.dtype.torch_name)
        found[tensor.name] = (dtype, tensor.shape, read_bytes(tensor.source))
    return found | {alias: found[name] for alias, name in inventory.aliases.items()}


def truth_of(case: Path) -> Facts:
    """Type, shape and bytes of the live weights."""
    with safe_open(case / "truth.safetensors", "pt") as file:
        return facts({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
