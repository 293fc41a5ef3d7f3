"""zexport's universal checkpoints compared with those of DeepSpeed's own converter."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import pytest

import zexport
from tests.support.oracles import same
from tests.support.raw_states import universal_states
from tests.support.real_cases import FIXTURES
from tests.support.sharded_runs import run_ranks
from zexport import ResumeFormat, open_checkpoint

_NAMES = (
    *("z1_w2_bf16opt", "z2_w2_bf16_groups", "z3_w4_bf16_odd", "tp2_z1_w2_bf16_fused"),
    *("tp2_z3_w4_bf16", "pp2_z1_w4_bf16_tied", "autoep_z2_w4_ep2", "autoep_z3_w4_ep2"),
)


def _convert(_rank: int, folders: dict[Path, Path]) -> None:
    """What ``ds_to_universal`` does, without processes of its own."""
    from deepspeed.checkpoint import ds_to_universal

    for source, out in folders.items():
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(source),
                output_folder=str(out),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


@pytest.mark.deepspeed
@pytest.mark.slow
def test_states_equal_those_of_deepspeeds_converter(tmp_path: Path) -> None:
    tags = {name: open_checkpoint(FIXTURES / name / "ckpt").location.tag_dir for name in _NAMES}
    folders = {tag: tmp_path / "converted" / name for name, tag in tags.items()}
    run_ranks(1, partial(_convert, folders=folders), tmp_path / "converter")
    for name, tag in tags.items():
        out = tmp_path / "ours" / name
        zexport.reshard(FIXTURES / name / "ckpt", out, format=ResumeFormat.UNIVERSAL)
        ours, theirs = universal_states(out / tag.name), universal_states(folders[tag])
        # The converter also writes files for buffers and frozen weights.
        names = {key.split("|")[0] for key in ours}
        theirs = {key: one for key, one in theirs.items() if key.split("|")[0] in names}
        assert len(theirs) >= 3 * len(names)
        assert [key for key, one in theirs.items() if not same(ours[key], one)] == []
