"""The names DeepSpeed gives its files, and what each says about the rank that wrote it.

Names are parsed whole: ``layer_0_expert_1_mp_rank_00_model_states.pt`` and stray copies end like
rank files without being them. Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py``
(``_get_ckpt_name``, ``_get_zero_ckpt_name``, ``_get_expert_ckpt_name``) and
``runtime/pipe/module.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


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


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of a tag folder, as its name describes it.

    Attributes:
        path: the file.
        kind: what it holds.
        rank: data-parallel rank (0 where the name carries none).
        mp_rank: model-parallel index: tensor rank or pipeline stage (0 where the name carries
            none).
    """

    path: Path
    kind: RankFileKind
    rank: int
    mp_rank: int


_RANK = r"(?P<rank>\d{1,9})"
_MP = r"(?P<mp>\d{2,9})"
_PATTERNS = {
    RankFileKind.OPTIMIZER: rf"(?:bf16_)?zero_pp_rank_{_RANK}_mp_rank_{_MP}_optim_states\.pt",
    RankFileKind.MODEL_PER_RANK: rf"zero_pp_rank_{_RANK}_mp_rank_{_MP}_model_states\.pt",
    RankFileKind.MODEL: rf"mp_rank_{_MP}_model_states\.pt",
    RankFileKind.EXPERT: rf"layer_\d+_expert_\d+_mp_rank_{_MP}_model_states\.pt",
    RankFileKind.EXPERT_OPTIMIZER: rf"expp_rank_{_RANK}_mp_rank_{_MP}_optim_states\.pt",
    RankFileKind.PIPELINE_LAYER: r"layer_\d{2,}(?:-model_\d{2,})?-model_states\.pt",
}
_COMPILED = {kind: re.compile(pattern, re.ASCII) for kind, pattern in _PATTERNS.items()}


def parse_rank_file(path: Path) -> RankFile | None:
    """What the name of ``path`` says, or ``None`` if it is no name that DeepSpeed writes."""
    for kind, pattern in _COMPILED.items():
        if match := pattern.fullmatch(path.name):
            named = match.groupdict()
            return RankFile(path, kind, int(named.get("rank") or 0), int(named.get("mp") or 0))
    return None


def list_rank_files(folder: Path) -> tuple[RankFile, ...]:
    """The rank files directly in ``folder``, by kind and then by rank; strays are left out."""
    parsed = (parse_rank_file(path) for path in folder.iterdir())
    kinds = list(RankFileKind)
    return tuple(
        sorted(
            (file for file in parsed if file is not None and file.path.is_file()),
            key=lambda file: (kinds.index(file.kind), file.mp_rank, file.rank, file.path.name),
        )
    )


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
