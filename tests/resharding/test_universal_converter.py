"""Universal checkpoints of ours beside DeepSpeed's own converter and loader: where these err."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import pytest

import zexport
from tests.support.oracles import same
from tests.support.raw_states import States, raw_states, universal_states
from tests.support.real_cases import FIXTURES
from tests.support.resharding import Move, departures
from tests.support.sharded_runs import Job, Spec, run_jobs, run_ranks
from zexport import ReshardOptions, ResumeFormat, open_checkpoint
from zexport.resharding.plan import plan_reshard

_RIGHT = ("z1_w2_bf16opt", "z2_w2_bf16_groups", "z2_w3_bf16_odd", "z3_w2_bf16", "z3_w4_bf16_odd")

_SPLIT = (
    *("tp2_z1_w2_bf16_fused", "tp2_z3_w4_bf16", "pp2_z1_w4_bf16_tied"),
    *("autoep_z2_w4_ep2", "autoep_z3_w4_ep2"),
)
"""Of several tensor ranks, stages or expert-parallel ranks, whose parameters both make whole."""

_DEALT_OUT = Spec(2, 2, parts=frozenset(), zero={"round_robin_gradients": True})


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


def _trained(states: States, names: set[str]) -> States:
    """The states of what is trained; the converter makes files of all else in the module, too."""
    return {key: one for key, one in states.items() if key.split("|")[0] in names}


@pytest.mark.deepspeed
@pytest.mark.slow
def test_states_are_those_that_the_converter_makes_and_right_where_it_deals_them_out_wrongly(
    tmp_path: Path,
) -> None:
    run_jobs(2, [Job(_DEALT_OUT, tmp_path / "run")], tmp_path / "ranks")
    roots = {name: FIXTURES / name / "ckpt" for name in (*_RIGHT, *_SPLIT)}
    roots["dealt out"] = tmp_path / "run" / "saved"
    tags = {name: open_checkpoint(root).location.tag_dir for name, root in roots.items()}
    converted = {name: tmp_path / "converted" / name for name in roots}
    folders = {tags[name]: out for name, out in converted.items()}
    run_ranks(1, partial(_convert, folders=folders), tmp_path / "converter")
    differing = {}
    for name, root in roots.items():
        options = ReshardOptions(format=ResumeFormat.UNIVERSAL)
        zexport.reshard(root, tmp_path / "ours" / name, options)
        ours = universal_states(tmp_path / "ours" / name / tags[name].name)
        saved = ours if name in _SPLIT else raw_states(tags[name])
        assert not [key for key in saved if not same(saved[key], ours[key])]
        names = {key.split("|")[0] for key in saved}
        theirs = _trained(universal_states(converted[name]), names)
        assert len(theirs) >= 3 * len(names)
        differing[name] = [key for key, one in theirs.items() if not same(ours[key], one)]
    assert len(differing.pop("dealt out")) > 10
    assert {*map(tuple, differing.values())} == {()}


@pytest.mark.deepspeed
@pytest.mark.slow
def test_deepspeed_deals_out_wrongly_what_it_loads(tmp_path: Path) -> None:
    """Should this fail, DeepSpeed is right at last, and nobody need be warned any more."""
    move = Move(_DEALT_OUT, _DEALT_OUT, is_universal=True)
    (differences,) = departures([move], tmp_path).values()
    assert differences[0].startswith("module: ")
    plan = plan_reshard(
        open_checkpoint(tmp_path / "source0" / "saved"),
        tmp_path / "out",
        ReshardOptions(format=ResumeFormat.UNIVERSAL),
    )
    assert "round_robin_gradients is on" in plan.warnings[0]
