"""Sharded safetensors: one file per rank with its boxes, and no index.

``DCP_SHARDING_INFO`` in a header has the first index of each box. No file records whole shapes: if
the last rank's file is missing, only the optimizer's shapes or ``config.json`` show it.

Source: torch 2.13, ``distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from zexport.checkpoint.boxes import Piece, Sources, join_boxes
from zexport.checkpoint.fsdp.tree import Joined, Keys, Tree, damaged, missing, piece
from zexport.checkpoint.state import MASTER, Parameter, Role
from zexport.checkpoint.zero.file_names import ranges
from zexport.formats.pickle_view import PickleView
from zexport.formats.safetensors import SafetensorsHeader, read_header
from zexport.storage.contents import read_json_object
from zexport.storage.files import is_file

NAME = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", re.ASCII)


def read_shards(paths: Sequence[Path]) -> Tree:
    """Return the tensors of all ranks' files, joined."""
    _check_all_ranks(paths)
    headers = [read_header(path) for path in paths]
    pieces: dict[str, list[Piece]] = {}
    for header in headers:
        info = _sharding_info(header)
        for name, one in header.tensors.items():
            start = info.need(name).need("saved_offsets").shape()
            held = Sources(MASTER, one.dtype, header.source(name))
            pieces.setdefault(name, []).append(piece(name, start, one.shape, held))
    tensors: dict[Keys, Joined] = {}
    for name, own in pieces.items():
        ends = [map(sum, zip(one.start, one.shape, strict=False)) for one in own]
        shape = tuple(map(max, zip(*ends, strict=False)))
        tensors[(name,)] = join_boxes(name, shape, Role.TRAINABLE, own)
    notes = _check_config(paths[0].parent / "config.json", [one for one, _ in tensors.values()])
    return Tree(tensors, {}, tuple(headers), "sharded safetensors", notes=notes)


def _check_all_ranks(paths: Sequence[Path]) -> None:
    """Raise unless all numbers of ranks, and of files that a rank may write, occur."""
    numbers = [map(int, re.findall(r"\d+", path.name)) for path in paths]
    ranks, parts, counts = map(set, zip(*numbers, strict=True))
    for what, have, count in (("ranks", ranks, max(ranks)), ("parts", parts, max(counts))):
        if len(have) < count:
            found, expected = f"{what} {ranges(have)}", f"{what} 1-{count}"
            raise missing("shard files are missing", paths[0].parent, found, expected)


def _check_config(path: Path, weights: Sequence[Parameter]) -> tuple[str, ...]:
    """Raise if no weight has as many rows as the vocabulary; return a note if that is not known."""
    config = read_json_object(path) if is_file(path) else {}
    text = config.get("text_config")
    rows = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if type(rows) is not int:
        return ("A missing file of the last rank is not noticed: no file has the number of ranks.",)
    most = max((one.shape[0] for one in weights if one.shape), default=0)
    if most < rows:
        problem = "no weight has vocab_size rows: the shard file of the last rank is missing"
        raise missing(problem, path.parent, f"at most {most} rows", f"{rows}, by config.json")
    return ()


def _sharding_info(header: SafetensorsHeader) -> PickleView:
    try:
        info = json.loads(header.metadata.get("DCP_SHARDING_INFO", "null"))
    except (ValueError, RecursionError) as cause:
        raise damaged("DCP_SHARDING_INFO is not JSON", header.path) from cause
    return PickleView(header.path, "DCP_SHARDING_INFO", info)
