"""One checkpoint out of the parts that several nodes kept on their own disks.

With ``use_node_local_storage`` every rank saves to its own node, and under ZeRO-1/2 the first rank
of every node saves the model file, which so exists several times; only that of rank 0 names the
tied weights. Source: DeepSpeed 0.19, ``runtime/engine.py`` (``_configure_checkpointing``,
``_get_shared_params``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from zexport.checkpoint.candidates import is_tag_dir, list_ages, list_run_checkpoints, list_tags
from zexport.checkpoint.find import run_folder
from zexport.checkpoint.location import NEWEST, Location
from zexport.checkpoint.model_states import ModelStates, read_model_states
from zexport.checkpoint.pruned import original_name
from zexport.checkpoint.rank_files import RankFile, RankFileKind, in_order, list_rank_files
from zexport.errors import DamagedCheckpointError, UsageError
from zexport.formats.torch_file import read_torch_file
from zexport.printable import shell_word, some
from zexport.store.contents import same_bytes
from zexport.store.folders import absolute, is_folder


def unite(locations: Sequence[Location]) -> tuple[RankFile, ...]:
    """The rank files of one tag in several folders, each name once.

    Files of one name must be equal byte for byte. Model files that every node saves may differ in
    what only rank 0 knows: of those, the one that lies with the optimizer file of rank 0 is taken,
    and the others must describe the same weights at the same step. Whether all ranks are there is
    for ``zexport.checkpoint.ranks.read_ranks`` to say.
    """
    tags = sorted({original_name(location.tag) for location in locations})
    if len(tags) > 1:
        raise UsageError(
            "the folders mean different tags",
            path=locations[0].root,
            found=", ".join(tags),
            expected="parts of one checkpoint",
            hint="Name the tag with --tag",
        )
    # A stable sort keeps copies in the order of the folders.
    found = in_order(file for location in locations for file in list_rank_files(location.tag_dir))
    return tuple(
        _one_of(list(copies), found) for _, copies in groupby(found, key=lambda f: f.path.name)
    )


def check_parts(paths: Sequence[Path], tag: str | None) -> None:
    """Refuse folders that hold no parts of one checkpoint, and a newest tag among several parts.

    Raises:
        UsageError: no tag is in all of them, or ``tag`` is to be the newest.
    """
    if not all(map(is_folder, paths)):
        return  # to open it says so, and what may be meant
    held = [_names_in(run_folder(absolute(path))) for path in paths]
    common = [name for name in held[0] if all(name in names for names in held)]
    if not common and all(held):
        one = shell_word(paths[-1])
        raise UsageError(
            "the folders hold different checkpoints, and several folders are the parts of one",
            found="; ".join(
                f"{some(names, 3)} in {path}" for path, names in zip(paths, held, strict=True)
            ),
            hint=f"Give one checkpoint alone, for example {one}",
        )
    if tag == NEWEST:
        raise UsageError(
            "of several folders none tells which tag is the newest",
            found=some(common),
            hint="Name the tag with --tag",
        )


def _names_in(path: Path) -> tuple[str, ...]:
    """What ``--tag`` may name in a folder; of a tag folder itself, its own name.

    Names are those from before a pruning, which may have been stopped at some of the parts.
    """
    if is_tag_dir(path):
        return (original_name(path.name),)
    tags = [tag for run in list_ages(path) for tag in list_tags(path / run)]
    names = (*list_tags(path), *list_run_checkpoints(path), *tags)
    return tuple(dict.fromkeys(map(original_name, names)))


def _one_of(copies: list[RankFile], found: Sequence[RankFile]) -> RankFile:
    """The copy to be read of a file that several nodes have."""
    if copies[0].kind is RankFileKind.MODEL:
        copies.sort(key=lambda copy: not _lies_with_rank_0(copy, found))
    for other in copies[1:]:
        if not (same_bytes(copies[0].path, other.path) or _same_model(copies[0], other)):
            raise DamagedCheckpointError(
                "is another file than the one of the same name",
                path=other.path,
                found=f"other contents in {copies[0].path.parent}",
                expected="the parts of one save",
                hint="Leave out the folder of the other save",
            )
    return copies[0]


def _lies_with_rank_0(copy: RankFile, found: Sequence[RankFile]) -> bool:
    return any(
        file.kind is RankFileKind.OPTIMIZER
        and (file.rank, file.mp_rank) == (0, copy.mp_rank)
        and file.path.parent == copy.path.parent
        for file in found
    )


def _same_model(one: RankFile, other: RankFile) -> bool:
    """Whether two model files are of one save, as far as what is recorded in them."""
    if one.kind is not RankFileKind.MODEL:
        return False
    return _described(one) == _described(other)


def _described(file: RankFile) -> tuple[object, ...]:
    states: ModelStates = read_model_states(read_torch_file(file.path))
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in states.module.items()}
    return (
        states.global_steps,
        states.ds_version,
        [list(group.items()) for group in states.param_shapes],
        states.frozen_shapes,
        states.buffer_names,
        shapes,
    )
