"""Checkpoints that DeepSpeed itself wrote: those in ``fixtures/``, and a folder of one's own.

Name that folder in ZEXPORT_CASES; it holds folders of the same form (``ckpt/`` and ``case.json``).
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from zexport import TrainingState
from zexport.ranges.source import ByteSource

FIXTURES = Path(__file__).parents[2] / "fixtures"
_GROUPS = ("z1_", "z2_", "z3_", "hf_trainer_", "accelerate_")


def _cases() -> list[Path]:
    folders = [FIXTURES]
    if own := os.environ.get("ZEXPORT_CASES"):
        folders.append(Path(own))
    found = [file.parent for folder in folders for file in folder.glob("*/case.json")]
    return sorted(case for case in found if case.name.startswith(_GROUPS))


def copied(name: str, tmp_path: Path) -> Path:
    """A fixture's checkpoint, to be damaged."""
    return shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "ckpt")


def file_of(root: Path, pattern: str) -> Path:
    """The one file of a checkpoint's tag that a pattern means."""
    (path,) = root.glob(f"global_step*/{pattern}")
    return path


def handed_over(case: Path) -> Path:
    """The folder that holds ``latest``."""
    described = json.loads((case / "case.json").read_text())
    return case / "ckpt" / described.get("hand_over", "")


on_every_real_checkpoint = pytest.mark.parametrize(
    "root", [pytest.param(handed_over(case), id=case.name) for case in _cases()]
)


def deepspeed_state(root: Path, **options: bool) -> Mapping[str, torch.Tensor]:
    """What DeepSpeed's own function makes of a checkpoint."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from deepspeed.utils import zero_to_fp32

        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(root), **options)
    assert isinstance(state, Mapping)
    return state


Facts = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def facts(tensors: Mapping[str, torch.Tensor]) -> Facts:
    """Type, shape and bytes of every tensor, so that NaN compares, and -0.0 is not 0.0."""
    return {
        name: (value.dtype, tuple(value.shape), _bits(value)) for name, value in tensors.items()
    }


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def facts_of(state: TrainingState) -> Facts:
    """Type, shape and bytes of every tensor of a checkpoint, tied names included."""
    found = {}
    for tensor in state.tensors:
        assert tensor.source is not None
        dtype = getattr(torch, tensor.dtype.torch_name)
        found[tensor.name] = (dtype, tensor.shape, read_bytes(tensor.source))
    return found | {alias: found[name] for alias, name in state.aliases.items()}


def read_bytes(source: ByteSource) -> bytes:
    """All bytes of a source, by plain positioned reads."""
    parts = []
    for extent in source.extents(0, source.nbytes):
        descriptor = os.open(extent.path, os.O_RDONLY)
        parts.append(os.pread(descriptor, extent.nbytes, extent.offset))
        os.close(descriptor)
    return b"".join(parts)
