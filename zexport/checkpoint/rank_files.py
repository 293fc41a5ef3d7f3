"""The names DeepSpeed gives its files, and what each says about the rank that wrote it.

Names are parsed whole: ``layer_0_expert_1_mp_rank_00_model_states.pt`` and stray copies end like
rank files without being them. Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py``
(``_get_ckpt_name``, ``_get_zero_ckpt_name``, ``_get_expert_ckpt_name``) and
``runtime/pipe/module.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from msgspec import Struct

from zexport.errors import DamagedCheckpointError
from zexport.formats.pickles import Pickle
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.store.folders import children, is_file


class RankFileKind(Enum):
    """What a file of a tag folder holds."""

    OPTIMIZER = "optimizer partition"
    MODEL_PER_RANK = "model states of one rank (ZeRO-3)"
    MODEL = "model states"
    EXPERT = "expert"
    EXPERT_OPTIMIZER = "expert optimizer"
    PIPELINE_LAYER = "pipeline layer"
    PARAMETER = "parameter of all ranks"
    """Of a universal checkpoint; its name is that of its folder."""


MODEL_FILES = (RankFileKind.MODEL, RankFileKind.MODEL_PER_RANK)
"""The two kinds of what a model-parallel index says of its weights."""


class RankFile(Struct, frozen=True):
    """One file of a tag folder, as its name describes it; 0 stands for what the name does not say.

    Attributes:
        path: the file.
        kind: what it holds.
        rank: data-parallel or expert-parallel rank.
        mp_rank: model-parallel index: tensor rank or pipeline stage.
        layer: number of the layer, among all of a pipeline or among those with experts.
        expert: number of the expert in its layer.
        tensor_rank: tensor rank that a pipeline's layer file is of.
        prefix: what precedes the rank: ``bf16_`` for BF16_Optimizer.
    """

    path: Path
    kind: RankFileKind
    rank: int = 0
    mp_rank: int = 0
    layer: int = 0
    expert: int = 0
    tensor_rank: int = 0
    prefix: str = ""


_FORMS = {
    RankFileKind.OPTIMIZER: "{prefix}zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt",
    RankFileKind.MODEL_PER_RANK: "zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_model_states.pt",
    RankFileKind.MODEL: "mp_rank_{mp_rank:02d}_model_states.pt",
    RankFileKind.EXPERT: "layer_{layer}_expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt",
    RankFileKind.EXPERT_OPTIMIZER: "expp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt",
    RankFileKind.PIPELINE_LAYER: "layer_{layer:02d}{shard}-model_states.pt",
}
_SHARD = "-model_{tensor_rank:02d}"
_FIELD = re.compile(r"\\\{(\w+)(:02d)?\\\}")


def rank_file_name(
    kind: RankFileKind,
    rank: int = 0,
    mp_rank: int = 0,
    *,
    layer: int = 0,
    expert: int = 0,
    tensor_rank: int | None = None,
    prefix: str = "",
) -> str:
    """The name that DeepSpeed gives a file; a layer file's tells of tensor ranks if there are."""
    shard = "" if tensor_rank is None else _SHARD.format(tensor_rank=tensor_rank)
    return _FORMS[kind].format(
        rank=rank, mp_rank=mp_rank, layer=layer, expert=expert, shard=shard, prefix=prefix
    )


def _pattern(form: str) -> str:
    """What matches the names of a form: numbers as they are, or padded to two digits."""

    def field(match: re.Match[str]) -> str:
        if match[1] == "prefix":
            return "(?P<prefix>(?:bf16_)?)"
        if match[1] == "shard":
            return f"(?:{_pattern(_SHARD)})?"
        return rf"(?P<{match[1]}>\d{{{2 if match[2] else 1},9}})"

    return _FIELD.sub(field, re.escape(form))


_PATTERNS = {kind: re.compile(_pattern(form), re.ASCII) for kind, form in _FORMS.items()}


def parse_rank_file(path: Path) -> RankFile | None:
    """What the name of ``path`` says, or ``None`` if it is no name that DeepSpeed writes."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(path.name):
            said = match.groupdict()
            prefix = said.pop("prefix", "")
            numbers = {field: int(digits or 0) for field, digits in said.items()}
            return RankFile(path, kind, prefix=prefix, **numbers)
    return None


def written_as(file: TorchFile) -> RankFile | None:
    """What the name says that a file was written under, which its zip's root folder keeps.

    A root that is no rank file's name says nothing: it is ``archive`` for a file written through a
    stream (torch 2.13, ``torch/serialization.py``, ``_open_zipfile_writer_buffer``), and any word
    for one that was written beside its place and then renamed into it.
    """
    return parse_rank_file(file.path.with_name(f"{file.root}.pt"))


def read_rank_file(file: RankFile, known: dict[bytes, Pickle] | None = None) -> TorchFile:
    """What a rank file holds (``read_torch_file``); one with another's name is refused."""
    read = read_torch_file(file.path, known)
    first = written_as(read)
    if first is not None and first.path != file.path:
        raise DamagedCheckpointError(
            "was written under another name",
            path=file.path,
            found=f"{read.root}.pt inside",
            expected=file.path.name,
            hint="Give the rank files their own names back, or copy them again",
        )
    return read


def list_rank_files(folder: Path) -> tuple[RankFile, ...]:
    """The rank files directly in ``folder``, by kind and then by rank; strays are left out."""
    parsed = (parse_rank_file(path) for path in children(folder))
    return tuple(in_order(file for file in parsed if file is not None and is_file(file.path)))


def in_order(files: Iterable[RankFile]) -> list[RankFile]:
    """The files by kind, then by rank."""
    kinds = list(RankFileKind)
    return sorted(files, key=lambda f: (kinds.index(f.kind), f.mp_rank, f.rank, f.path.name))


def name_ranks(numbers: Iterable[int]) -> str:
    """The ranks in words: ``rank 3`` or ``ranks 0-3, 7``."""
    numbers = set(numbers)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges_of(numbers)}"


def ranges_of(numbers: Iterable[int]) -> str:
    """Numbers as people write them: ``0-3, 7, 9-10``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
