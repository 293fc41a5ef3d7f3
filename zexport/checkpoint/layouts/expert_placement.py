"""Who holds which expert of a layer: by what AutoEP writes down, or in equal shares.

Source: DeepSpeed 0.19.8, ``checkpoint/autoep_affine.py`` (``make_autoep_placement_descriptor``,
``autoep_placement_to_affine_map``); versions before wrote down the number of shares alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from zexport.checkpoint.layouts.splits import AFFINE_VERSION, box_of
from zexport.checkpoint.untrusted import Value
from zexport.errors import LayoutError, UnsupportedError
from zexport.ranges.dtypes import Shape

_PLACEMENT_VERSION = 1
_MAX_EXPERTS = 1 << 20

Held = tuple[tuple[int, ...], ...]
"""The experts of each expert-parallel rank, in the order of its tensors."""


def held_by(layer: Value) -> Held:
    """Who holds which expert of a layer that AutoEP records.

    The affine maps of its weights say it, and its placement, which must agree; where a version
    writes neither, they are equal shares.
    """
    said = dict(_by_maps(layer))
    if layer.has("expert_placement"):
        said["expert_placement"] = _by_placement(layer.get("expert_placement"))
    found = [*said.items()] or [("", _in_equal_shares(layer))]
    for about, held in found[1:]:
        if held != found[0][1]:
            layer.fail(f"has another placement of experts in {about} than in {found[0][0]}")
    return found[0][1]


def _in_equal_shares(layer: Value) -> Held:
    count, ep_size = layer.need("num_experts").number(), layer.need("ep_size").number()
    if not 0 < ep_size <= count <= _MAX_EXPERTS:
        layer.fail("states impossible numbers of experts", f"{count} experts on {ep_size}")
    return tuple(tuple(share) for share in uniform(count, ep_size))


def _by_maps(layer: Value) -> Iterator[tuple[str, Held]]:
    maps = layer.get("affine_maps")
    if maps.is_none:
        return
    if (version := maps.need("version").number()) != AFFINE_VERSION:
        raise unknown_version(layer, "affine_maps", version)
    for name, one in maps.need("params").entries():
        yield f"the affine map of {name!r}", _by_map(one)


def _by_map(one: Value) -> Held:
    """The runs of experts that a weight's map gives each rank."""
    whole = one.need("logical_shape").shape()
    ranks = one.need("ranks").by_number()
    if not whole or whole[0] > _MAX_EXPERTS or sorted(ranks) != [*range(len(ranks))]:
        one.fail("is no map of experts to ranks", f"{len(ranks)} ranks of {list(whole)}")
    return tuple(tuple(_of_rank(rank, ranks[rank], whole)) for rank in range(len(ranks)))


def _of_rank(rank: int, said: Value, whole: Shape) -> list[int]:
    shard = said.need("shard_shape").shape()
    held: list[int] = []
    for piece in said.need("pieces").items():
        box = box_of(rank, piece, whole, shard)
        if (
            box is None
            or (box.shape[1:], box.origin[0]) != (whole[1:], len(held))
            or piece.has("scale")
        ):
            piece.fail("is no run of whole experts behind those before it")
        held += range(box.start[0], box.start[0] + box.shape[0])
    if shard[:1] != (len(held),):
        said.fail(f"does not fill the shard of rank {rank}", f"{len(held)} experts")
    return held


def _by_placement(placement: Value) -> Held:
    version = placement.need("version").number()
    if version != _PLACEMENT_VERSION:
        raise unknown_version(placement, "expert_placement", version)
    ranks = {
        item.need("rank").number(): tuple(one.number() for one in item.need("experts").items())
        for item in placement.need("ranks").items()
    }
    if sorted(ranks) != list(range(len(ranks))):
        placement.fail("does not name each expert-parallel rank once", f"{sorted(ranks)}")
    return tuple(ranks[rank] for rank in sorted(ranks))


def unknown_version(said: Value, key: str, version: object) -> UnsupportedError:
    """That experts are stored in a form of another version."""
    return UnsupportedError(
        "stores its experts in a form of AutoEP that this version does not know",
        path=said.path,
        found=f"{key} {version}",
        expected="1",
        hint="Look for a newer zexport",
    )


def uniform(num_experts: int, ep_size: int) -> list[range]:
    """The experts of each expert-parallel rank, dealt in equal and consecutive shares."""
    if ep_size < 1 or num_experts % ep_size:
        raise LayoutError(
            "the experts cannot be dealt out equally", f"{num_experts} experts", f"{ep_size} shares"
        )
    count = num_experts // ep_size
    return [range(e * count, (e + 1) * count) for e in range(ep_size)]
