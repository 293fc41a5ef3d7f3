"""Names of DeepSpeed's rank files: kind, data-parallel rank, model-parallel index.

A name must match completely: ``layer_0_expert_1_mp_rank_00_model_states.pt`` and stray copies end
like rank files too. Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_get_ckpt_name``,
``_get_zero_ckpt_name``, ``_get_expert_ckpt_name``), ``runtime/pipe/module.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.state import FileKind
from zexport.checkpoint.zero.records import model_states
from zexport.errors import DamagedCheckpointError
from zexport.formats.pickle_reader import Pickle
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.storage.files import children, is_file, same_bytes

MODEL_FILES = (FileKind.MODEL, FileKind.MODEL_PER_RANK)

_FORMS = {
    FileKind.OPTIMIZER: "{prefix}zero_pp_rank_{rank}_mp_rank_{mp}_optim_states.pt",
    FileKind.MODEL_PER_RANK: "zero_pp_rank_{rank}_mp_rank_{mp}_model_states.pt",
    FileKind.MODEL: "mp_rank_{mp}_model_states.pt",
    FileKind.EXPERT: "layer_{layer}_expert_{expert}_mp_rank_{mp}_model_states.pt",
    FileKind.EXPERT_OPTIMIZER: "expp_rank_{rank}_mp_rank_{mp}_optim_states.pt",
    FileKind.PIPELINE_LAYER: "layer_{layer2}{shard}-model_states.pt",
}
_GROUPS = {
    "prefix": "(?P<prefix>(?:bf16_)?)",
    "rank": r"(?P<rank>\d{1,9})",
    "mp": r"(?P<mp>\d{2,9})",
    "layer": r"(?P<layer>\d{1,9})",
    "expert": r"(?P<expert>\d{1,9})",
    "layer2": r"(?P<layer>\d{2,9})",
    "shard": r"(?:-model_(?P<mp>\d{2,9}))?",
}
_PATTERNS = {
    kind: re.compile(form.replace(".", r"\.").format(**_GROUPS), re.ASCII)
    for kind, form in _FORMS.items()
}


class RankFile(Struct, frozen=True):
    """A file by its name; 0 stands for what the name does not contain.

    Attributes:
        rank: data-parallel or expert-parallel rank.
        mp: model-parallel index; of a pipeline's layer file its tensor rank.
        layer: layer of the pipeline, or number of the layer among those with experts.
        prefix: ``bf16_`` of an optimizer states file, or nothing.
    """

    path: Path
    kind: FileKind
    rank: int = 0
    mp: int = 0
    layer: int = 0
    expert: int = 0
    prefix: str = ""


def rank_file_name(
    kind: FileKind,
    rank: int = 0,
    mp: int | None = 0,
    *,
    layer: int = 0,
    expert: int = 0,
    prefix: str = "",
) -> str:
    """Return DeepSpeed's name of a file; without ``mp``, a layer file has no tensor rank."""
    padded, two = f"{layer:02d}", f"{mp or 0:02d}"
    shard = "" if mp is None else f"-model_{two}"
    return _FORMS[kind].format(
        prefix=prefix, rank=rank, mp=two, layer=layer, expert=expert, layer2=padded, shard=shard
    )


def parse_name(path: Path) -> RankFile | None:
    """Parse a file name; ``None`` if DeepSpeed writes no such name."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(path.name):
            fields = match.groupdict()
            prefix = fields.pop("prefix", "")
            numbers = {field: int(digits or 0) for field, digits in fields.items()}
            return RankFile(path, kind, prefix=prefix, **numbers)
    return None


def original_name(file: TorchFile) -> RankFile | None:
    """Return the name that a file was written under, which its zip's root folder keeps.

    The root is ``archive`` for a file written through a stream (torch 2.13, ``serialization.py``,
    ``_open_zipfile_writer_buffer``) and arbitrary for one that was renamed after writing.
    """
    return parse_name(file.path.with_name(f"{file.root}.pt"))


def read_rank_file(name: RankFile, known: dict[bytes, Pickle] | None = None) -> TorchFile:
    """Open a rank file.

    Raises:
        DamagedCheckpointError: it was written under another rank file's name.
    """
    file = read_torch_file(name.path, known)
    first = original_name(file)
    if first is not None and first.path != name.path:
        raise DamagedCheckpointError(
            "file was renamed",
            path=name.path,
            found=f"{file.root}.pt inside",
            expected=name.path.name,
            hint="Restore the original names of the rank files, or copy them again",
        )
    return file


def rank_files(*folders: Path) -> list[RankFile]:
    """Return the rank files directly in the folders of one tag, by kind, then by rank.

    Several are a node-local checkpoint: with ``use_node_local_storage`` every rank saves to its own
    node, and with ZeRO-1/2 the first rank of each node saves the model states file; only rank 0's
    names tied weights (DeepSpeed 0.19, ``runtime/engine.py``, ``_configure_checkpointing``,
    ``_get_shared_params``). Of files with one name the one next to rank 0's optimizer states file
    is returned; others must be equal, or model states files with the same weights and step.
    """
    parsed = (parse_name(path) for folder in folders for path in children(folder))
    found = [one for one in parsed if one is not None and is_file(one.path)]
    optimizers = [
        one for one in reversed(found) if one.kind is FileKind.OPTIMIZER and one.rank == 0
    ]
    first = {one.mp: one.path.parent for one in optimizers}
    kinds = list(FileKind)
    found.sort(key=lambda o: (kinds.index(o.kind), o.mp, o.rank, o.path.name))
    kept = []
    for _, group in groupby(found, key=lambda one: one.path.name):
        one, *others = sorted(group, key=lambda one: one.path.parent != first.get(one.mp))
        for other in others:
            is_model = one.kind is FileKind.MODEL
            if not (
                same_bytes(one.path, other.path) or (is_model and _model(one) == _model(other))
            ):
                raise DamagedCheckpointError(
                    "file differs from the one of the same name in another folder",
                    path=other.path,
                    found=f"other contents in {one.path.parent}",
                    expected="parts of one checkpoint",
                    hint="Leave out the folder of the other checkpoint",
                )
        kept.append(one)
    return kept


def _model(name: RankFile) -> tuple[object, ...]:
    """Return what the model states files of all nodes have in common."""
    one = model_states(read_rank_file(name))
    shapes = {name: (ref.dtype, ref.shape) for name, ref in one.module.items()}
    groups = [[*group.items()] for group in one.param_shapes]
    return one.steps, one.version, groups, one.frozen_shapes, one.buffers, shapes


def name_ranks(numbers: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 7``."""
    numbers = set(numbers)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers)}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as ``0-3, 7, 9-10``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
