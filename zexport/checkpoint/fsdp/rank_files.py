"""Rank files: ``torch.save(state_dict)`` of each rank, or sharded safetensors.

A DTensor records its whole shape, its mesh and the coordinate of the rank: these give the boxes of
its local tensor. A ShardedTensor records its box. Every other tensor is whole in every file.

Source: torch 2.4 to 2.13, ``distributed/tensor/placement_types.py``, ``_shard`` and
``checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, product
from math import prod
from operator import mul
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.boxes import Bound, Piece, in_file, join_boxes
from zexport.checkpoint.fsdp.tree import (
    Joined,
    Keys,
    Tree,
    count,
    damaged,
    fields,
    item,
    leaves,
    missing,
    piece,
    refuse_unknown,
)
from zexport.checkpoint.state import MASTER, Role
from zexport.checkpoint.zero.file_names import ranges
from zexport.errors import UnsupportedError
from zexport.formats.pickle_values import Global, Opaque, TensorRef
from zexport.formats.pickle_view import PickleView, view
from zexport.formats.safetensors import read_header
from zexport.formats.torch_file import read_torch_file
from zexport.ranges.dtypes import Shape
from zexport.ranges.source import row_major
from zexport.storage.files import is_file
from zexport.storage.json import as_table, read_json_object

_KNOWN = (
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_wrapper_subclass",
    "torch.serialization._get_layout",
    "torch.distributed.tensor.",
    "torch.distributed._tensor.",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout.",
    "torch.distributed._shard.",
    "torch.distributed.remote_device._remote_device",
    "__builtin__.getattr",  # of ShardedTensor.ProcessGroupState
    "builtins.getattr",
)
SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_MODULE = "torch._utils"
"""Has the functions that rebuild other tensors, such as complex128, quantized and sparse ones."""

_BOXES_MAX = 1 << 12

Runs = tuple[tuple[int, int], ...]
"""Indices along one dimension as half-open ranges, in order."""

Box = tuple[Shape, ...]
"""First index in the whole tensor, first index in the local tensor, size."""

Mesh = tuple[Shape, Shape, int | None, int]
"""Ranks per dimension, coordinate and rank that wrote the file, world size."""


class Local(Struct, frozen=True):
    """One rank's part of a tensor: tensors with their boxes, and the rank if it records that."""

    shape: Shape
    pieces: Sequence[tuple[TensorRef, Box]]
    rank: int | None = None
    world_size: int = 0


def read_rank_files(
    files: Mapping[int, Path], world_size: int | None, form: str, *, of_optimizer: bool = False
) -> Tree:
    """Return the state dicts of all ranks, joined.

    ``world_size`` is the number of ranks by the file names; if they have none, the mesh counts.
    """
    opened = {rank: read_torch_file(path) for rank, path in sorted(files.items())}
    parts: dict[Keys, dict[int, Local]] = {}
    others: dict[Keys, object] = {}
    for rank, file in opened.items():
        refuse_unknown(file.path, file.unknown_globals, _KNOWN)
        meshes: dict[int, Mesh] = {}
        for keys, value in leaves(view(file, "state dict")).items():
            local = _local(PickleView(file.path, ".".join(keys), value), meshes)
            if local is None:
                callee = getattr(value, "callee", None)
                if not of_optimizer and getattr(callee, "module", "") == _REBUILD_MODULE:
                    raise UnsupportedError(
                        f"dtype or kind of tensor {'.'.join(keys)!r} is not supported",
                        path=file.path,
                        hint="Save it in another dtype",
                    )
                others.setdefault(keys, value)
                continue
            parts.setdefault(keys, {})[rank] = local
            if local.rank not in (None, rank):
                problem = "file was written by another rank than its name says"
                raise damaged(problem, file.path, f"rank {local.rank}, by its mesh")
    by_mesh = max((one.world_size for own in parts.values() for one in own.values()), default=0)
    world_size = world_size or by_mesh or len(opened)
    if len(opened) < world_size:
        found, expected = f"ranks {ranges(opened)}", f"ranks 0-{world_size - 1}"
        raise missing("rank files are missing", files[min(files)].parent, found, expected)
    if of_optimizer and not by_mesh:  # of FSDP1: each rank has its pieces of flattened parameters
        parts = {keys: dict([*own.items()][:1]) for keys, own in parts.items()}
    tensors: dict[Keys, Joined] = {}
    for keys, own in parts.items():
        name, shape = ".".join(keys), next(iter(own.values())).shape
        pieces = [
            Piece(in_file(opened[rank], name, ref, Role.TRAINABLE, MASTER), *box)
            for rank, local in own.items()
            for ref, box in local.pieces
        ]
        tensors[keys] = join_boxes(name, shape, Role.TRAINABLE, pieces)
    return Tree(
        tensors=tensors,
        others=others,
        files=tuple(opened.values()),
        form=form,
        aliases=_aliases(parts),
        is_sharded=by_mesh > 0,
        world_size=world_size,
    )


def _aliases(parts: Mapping[Keys, Mapping[int, Local]]) -> dict[Keys, Keys]:
    """Return tied names: torch saves a storage that two tensors share only once."""
    first: dict[tuple[int, TensorRef], Keys] = {}
    found = {}
    for keys, own in parts.items():
        filled = ((rank, ref) for rank, one in own.items() for ref, _ in one.pieces if ref.numel)
        if (key := next(filled, None)) is not None and first.setdefault(key, keys) != keys:
            found[keys] = first[key]
    return found


def _local(value: PickleView, meshes: dict[int, Mesh]) -> Local | None:
    """Return one rank's part of a tensor; ``None`` for any other value."""
    one = value.value
    if isinstance(one, TensorRef):
        zero = (0,) * len(one.shape)
        return Local(one.shape, [(one, (zero, zero, one.shape))])
    if not isinstance(one, Opaque) or one.callee != _REBUILD:
        return None
    args = PickleView(value.path, value.where, one.args)
    kind, inner, state = (item(args, index) for index in (1, 2, 3))
    shape = item(inner, 2).shape()
    if isinstance(kind.value, Global) and kind.value.name == "DTensor":
        return _of_dtensor(shape, item(state, 1), meshes)
    return _of_sharded(shape, state)


def _of_dtensor(shape: Shape, state: PickleView, meshes: dict[int, Mesh]) -> Local:
    """Return the part that placements and the coordinate in the mesh describe."""
    ref = state.need("_local_tensor").tensor()
    spec = fields(state.need("_spec"), "DTensorSpec")
    raw = spec.need("mesh")
    mesh = meshes.get(id(raw.value)) or meshes.setdefault(id(raw.value), _mesh(raw))
    sizes, coordinate, rank, world_size = mesh
    placements = spec.need("placements").items()
    dims: list[Runs] = [((0, size),) for size in shape]
    for one, size, index in zip(placements, sizes, coordinate, strict=False):
        placement = fields(one, "Shard", "_StridedShard", "Replicate")
        if "Replicate" in placement.where:
            continue
        dim = count(placement.need("dim"))
        pieces = count(placement.need("split_factor")) if "_Strided" in placement.where else 1
        if dim >= len(shape) or not 0 < pieces * max(prod(map(len, dims)), 1) <= _BOXES_MAX:
            placement.fail("does not fit the tensor", f"dim {dim}, split_factor {pieces}")
        dims[dim] = _shard(dims[dim], size, index, pieces)
    if ref.shape != tuple(sum(b - a for a, b in runs) for runs in dims):
        state.fail("has another shape than its placements describe", f"{list(ref.shape)}")
    per_dim = []
    for runs in dims:
        begins = accumulate((b - a for a, b in runs), initial=0)
        per_dim.append([(a, begin, b - a) for (a, b), begin in zip(runs, begins, strict=False)])
    boxes = [tuple(zip(*box, strict=True)) or ((), (), ()) for box in product(*per_dim)]
    return Local(shape, [(ref, box) for box in boxes], rank, world_size)


def _mesh(value: PickleView) -> Mesh:
    """Return a pickled ``DeviceMesh``, read by the fields that the version of torch wrote."""
    mesh = fields(value, "DeviceMesh")
    if mesh.has("_layout"):
        axes = fields(mesh.get("_layout"), "_MeshLayout").need("axes").items()
        sizes = tuple(prod(fields(one, "_FlatLayout").need("shape").shape()) for one in axes)
    else:  # torch 2.4
        sizes = mesh.need("mesh").tensor().shape
    at = mesh.need("_coordinate_on_dim").shape()
    if len(at) != len(sizes) or any(i >= n for i, n in zip(at, sizes, strict=True)):
        mesh.fail("does not contain its coordinate", f"{at} in a mesh of {sizes}")
    root = mesh.get("_root_mesh")
    whole = mesh if root.value is None else fields(root, "DeviceMesh")
    name = "_flatten_rank_map" if whole.has("_flatten_rank_map") else "_flatten_mesh_list"
    ranks = [count(one) for one in whole.need(name).items()]
    rank = mesh.get("_rank").number_or(None)
    if rank is None and len(ranks) == prod(sizes):  # in row-major order of the mesh
        rank = ranks[sum(map(mul, at, row_major(sizes)))]
    return sizes, at, rank, max(ranks, default=-1) + 1


@lru_cache(maxsize=4096)
def _shard(runs: Runs, ranks: int, index: int, pieces: int) -> Runs:
    """Return the indices of one rank: its chunk of each of ``pieces`` equal pieces.

    Source: torch 2.13, ``placement_types.py``, ``_local_shard_size_and_offset`` of ``Shard`` (one
    piece) and ``_StridedShard``.
    """
    own = (_chunk(_chunk(runs, pieces, number), ranks, index) for number in range(pieces))
    return tuple(chain.from_iterable(own))


def _chunk(runs: Runs, chunks: int, index: int) -> Runs:
    """Return one of several chunks: all of the length ceil(n / chunks), the last ones shorter."""
    length = -(-sum(b - a for a, b in runs) // chunks)
    begin, found = index * length, []  # relative to the run
    for a, b in runs:
        first, last = a + max(begin, 0), min(a + begin + length, b)
        if first <= last:
            found.append((first, last))
        begin -= b - a
    return tuple(found)


def _of_sharded(shape: Shape, state: PickleView) -> Local:
    """Return the part of a ShardedTensor (FSDP1): one box, or none on a rank without rows."""
    shards, _, group = (item(state, index) for index in range(3))
    pieces = []
    for one in shards.items():
        shard = fields(one, "Shard")
        ref = shard.need("tensor").tensor()
        start = fields(shard.need("metadata"), "ShardMetadata").need("shard_offsets").shape()
        pieces.append((ref, (start, (0,) * len(ref.shape), ref.shape)))
    writer = PickleView(group.path, group.where, getattr(group.value, "state", None))
    rank, world = count(writer.need("global_rank")), count(writer.need("global_world_size"))
    return Local(shape, pieces, rank, world)


def read_shards(paths: Sequence[Path]) -> Tree:
    """Return the weights in sharded safetensors; their headers have the first index of each box.

    No file records whole shapes: if the last rank's file is missing, only the optimizer's shapes or
    ``config.json`` show it.
    """
    folder = paths[0].parent
    numbers = [map(int, re.findall(r"\d+", path.name)) for path in paths]
    ranks, parts, counts = map(set, zip(*numbers, strict=True))
    for what, have, due in (("ranks", ranks, max(ranks)), ("parts", parts, max(counts))):
        if len(have) < due:
            found, expected = f"{what} {ranges(have)}", f"{what} 1-{due}"
            raise missing("shard files are missing", folder, found, expected)
    headers = [read_header(path) for path in paths]
    pieces: dict[str, list[Piece]] = {}
    for header in headers:
        try:
            record = json.loads(header.metadata.get("DCP_SHARDING_INFO", "null"))
        except (ValueError, RecursionError) as cause:
            raise damaged("DCP_SHARDING_INFO is not JSON", header.path) from cause
        info = PickleView(header.path, "DCP_SHARDING_INFO", record)
        for name, one in header.tensors.items():
            start = info.need(name).need("saved_offsets").shape()
            stored = Bound(one.dtype, header.source(name))
            pieces.setdefault(name, []).append(piece(name, start, one.shape, stored))
    tensors: dict[Keys, Joined] = {}
    most = 0
    for name, own in pieces.items():
        ends = [map(sum, zip(one.start, one.shape, strict=False)) for one in own]
        shape = tuple(map(max, zip(*ends, strict=False)))
        tensors[(name,)] = join_boxes(name, shape, Role.TRAINABLE, own)
        most = max(most, 0, *shape[:1])
    notes: tuple[str, ...] = ()
    path = folder / "config.json"
    config = read_json_object(path) if is_file(path) else {}
    rows = config.get("vocab_size", as_table(config.get("text_config")).get("vocab_size"))
    if type(rows) is not int:
        notes = ("The last rank's file may be missing: no file records the world size.",)
    elif most < rows:
        problem = "no weight has vocab_size rows: the shard file of the last rank is missing"
        raise missing(problem, folder, f"at most {most} rows", f"{rows}, by config.json")
    return Tree(tensors, {}, tuple(headers), "sharded safetensors", notes=notes)
