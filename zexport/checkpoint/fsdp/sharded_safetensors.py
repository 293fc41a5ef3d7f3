"""Sharded safetensors: one file per rank with its boxes, and no index.

``DCP_SHARDING_INFO`` in a header has the first index of each tensor's box. No file records the
whole shape: it is the largest first index plus size. If the last rank's file is missing, only the
optimizer's shapes or ``config.json`` show it.

Source: torch 2.13, ``distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from zexport.checkpoint.boxes import Piece, Sources, join_boxes
from zexport.checkpoint.fsdp.tree import Keys, Tree, damaged
from zexport.checkpoint.state import MASTER, Copy, Parameter, Role
from zexport.checkpoint.zero.file_names import ranges
from zexport.errors import IncompleteCheckpointError
from zexport.formats.pickle_view import PickleView
from zexport.formats.safetensors_file import SafetensorsHeader, read_header
from zexport.store.contents import read_json_object
from zexport.store.folders import is_file

NAME = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


def read_shards(paths: Sequence[Path]) -> Tree:
    """Return the tensors of all ranks' files, joined."""
    _check_all_ranks(paths)
    headers = [read_header(path) for path in paths]
    pieces: dict[str, list[Piece]] = {}
    for header in headers:
        info = _sharding_info(header)
        for name, one in header.tensors.items():
            held = Sources(MASTER, one.dtype, header.source(name))
            part = Parameter(name, one.shape, Role.TRAINABLE, (held,))
            start = info.need(name).need("saved_offsets").shape()
            piece = Piece(part, start, (0,) * len(one.shape), one.shape)
            pieces.setdefault(name, []).append(piece)
    tensors: dict[Keys, Parameter] = {}
    copies: dict[Keys, list[Copy]] = {}
    for name, own in pieces.items():
        ends = [map(sum, zip(one.start, one.shape, strict=False)) for one in own]
        shape = tuple(map(max, zip(*ends, strict=False)))
        tensors[(name,)], copies[(name,)] = join_boxes(name, shape, Role.TRAINABLE, own)
    notes = _check_config(paths[0].parent / "config.json", [*tensors.values()])
    return Tree(tensors, {}, tuple(headers), "sharded safetensors", copies, notes=notes)


def _check_all_ranks(paths: Sequence[Path]) -> None:
    """Raise unless all numbers of ranks, and of files that a rank may write, occur."""
    numbers = [tuple(map(int, found.groups())) for one in paths if (found := NAME.match(one.name))]
    ranks, parts, counts = (set(column) for column in zip(*numbers, strict=True))
    for what, have, count in (("ranks", ranks, max(ranks)), ("parts", parts, max(counts))):
        if len(have) < count:
            raise IncompleteCheckpointError(
                f"shard files of some {what} are missing",
                path=paths[0].parent,
                found=f"{what} {ranges(have)}",
                expected=f"{what} 1-{count}",
                hint="Copy them from the nodes that wrote them",
            )


def _check_config(path: Path, weights: Sequence[Parameter]) -> tuple[str, ...]:
    """Raise if no weight has as many rows as the vocabulary; return a note if that is not known."""
    config = read_json_object(path) if is_file(path) else {}
    text = config.get("text_config")
    rows = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if type(rows) is not int:
        return ("A missing file of the last rank is not noticed: no file has the number of ranks.",)
    most = max((one.shape[0] for one in weights if one.shape), default=0)
    if most < rows:
        raise IncompleteCheckpointError(
            "no weight has vocab_size rows: the shard file of the last rank is missing",
            path=path.parent,
            found=f"at most {most} rows",
            expected=f"{rows}, by config.json",
            hint="Copy it from the node that wrote it",
        )
    return ()


def _sharding_info(header: SafetensorsHeader) -> PickleView:
    try:
        info = json.loads(header.metadata.get("DCP_SHARDING_INFO", "null"))
    except (ValueError, RecursionError) as cause:
        raise damaged("DCP_SHARDING_INFO is not JSON", header.path) from cause
    return PickleView(header.path, "DCP_SHARDING_INFO", info)
