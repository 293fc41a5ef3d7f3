"""What an interrupted export leaves in a bucket: told for what it is, with what to do next."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import obstore
import pytest
from click.testing import CliRunner

import zexport
from tests.support.buckets import BUCKET, Answer, Request, Server
from tests.support.checkpoints import Model, Run, save, values
from tests.support.refusing import refused_at_every
from zexport.cli.main import cli
from zexport.errors import CheckpointError, NotACheckpointError, OutputError, VerificationError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.options import ExportDType, ExportOptions, ReshardOptions
from zexport.run import receipts
from zexport.run.shares import Share
from zexport.store import objects

_MODEL = Model([{f"layers.{n}.w": values((300, 300), n) for n in range(8)}])
_REAL = Path(__file__).parents[2] / "fixtures" / "z2_w2_bf16_groups" / "ckpt"
_SHARDS = ExportOptions(max_shard_nbytes=1_000_000)

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(_MODEL, Run(stage=2), tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name).strip("-")


@pytest.fixture
def out(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


def _stopped(server: Server, at: Callable[[Request], bool], act: Callable[[], object]) -> None:
    """Have an export refused at a request, and from then on all is as it was."""
    refused = Answer("403 Forbidden", "AccessDenied")
    server.fault = lambda one: refused if at(one) else None
    with pytest.raises(OutputError):
        act()
    server.fault = lambda _: None
    objects.forget_listings()


def _writes(ending: str) -> Callable[[Request], bool]:
    return lambda one: one.method == "PUT" and one.key.endswith(ending)


def test_an_unfinished_export_is_told_as_such_by_all_that_read_one(
    run: Path, out: str, server: Server
) -> None:
    stop = _writes("model-00003-of-00004.safetensors")
    _stopped(server, stop, lambda: zexport.consolidate(run, out, _SHARDS))
    told = (
        rf"{out}: is not finished \(found unfinished work in {out}/\{RECEIPTS}\)\. Run the .* again"
    )
    with pytest.raises(VerificationError, match=told):
        zexport.verify_export(out)
    with pytest.raises(VerificationError, match=told):
        zexport.verify_export(out, against=run)
    with pytest.raises(CheckpointError, match=told):
        zexport.diff_models(out, out)
    told = r"no parts .*found unfinished work of one process.* without --part: it goes on from"
    with pytest.raises(OutputError, match=told):
        zexport.finish_export(out)
    zexport.consolidate(run, out, _SHARDS)
    assert zexport.verify_export(out, against=run).ok
    with pytest.raises(OutputError, match=r"found a complete folder.*It needs nothing more"):
        zexport.finish_export(out)


def test_an_unfinished_resharding_is_taken_for_no_checkpoint(out: str, server: Server) -> None:
    options = ReshardOptions(world_size=3)
    _stopped(server, _writes("/latest"), lambda: zexport.reshard(_REAL, out, options))
    with pytest.raises(NotACheckpointError, match=rf"{out}: is not finished"):
        zexport.open_checkpoint(out)
    zexport.reshard(_REAL, out, options)
    assert zexport.open_checkpoint(out).ranks == 3


def test_what_is_refused_anything_ends_with_one_sentence_or_well(
    name: str, server: Server, tmp_path: Path
) -> None:
    """At one request in 17 of a resharding; at all of them, and of an export, in torture."""
    run = shutil.copytree(_REAL, tmp_path / "checkpoint-2")
    (run / "trainer_state.json").write_text('{"global_step": 2}')
    far, options = server.put(run, f"{name}/run"), ReshardOptions(world_size=3)
    work = partial(zexport.reshard, far, options=options)
    assert refused_at_every(17, server, f"{name}/out", work)


def test_a_bucket_that_is_not_there_is_told_whatever_is_asked_of_it(run: Path) -> None:
    nowhere = "s3://no-such-bucket/model"
    told = "there is no such bucket"
    with pytest.raises(OutputError, match=told):
        zexport.consolidate(run, nowhere, ExportOptions(overwrite=True))
    with pytest.raises(OutputError, match=told):
        zexport.finish_export(nowhere)
    with pytest.raises(CheckpointError, match=told):
        zexport.diff_models(nowhere, run)
    done = CliRunner().invoke(cli, ["diff", nowhere, str(run)])
    assert told in str(done.exception)


def test_parts_of_another_plan_are_told_by_what_is_other_in_it(
    run: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zexport.consolidate_part(run, out, Share(1, 2), _SHARDS)
    other = ExportOptions(max_shard_nbytes=1_000_000, dtype=ExportDType.BF16)
    told = r"another plan \(found dtype fp32, expected dtype bf16\)\. Run .* the same versions"
    with pytest.raises(OutputError, match=told):
        zexport.consolidate_part(run, out, Share(2, 2), other)
    with monkeypatch.context() as patch:
        patch.setattr(receipts, "__version__", "9.9")
        patch.setattr("zexport.export.plan_digest.__version__", "9.9")
        now = re.escape(zexport.__version__)
        told = rf"found zexport {now}, expected zexport 9\.9\)\. Run .* with zexport {now},"
        with pytest.raises(OutputError, match=told):
            zexport.consolidate_part(run, out, Share(2, 2), _SHARDS)
    zexport.consolidate_part(run, out, Share(2, 2), _SHARDS)
    assert zexport.verify_export(out, against=run).ok


def test_parts_are_told_what_is_in_their_way_and_who_replaces_it(
    run: Path, out: str, name: str, server: Server
) -> None:
    obstore.put(server.store, f"{name}/mine.txt", b"mine")
    with pytest.raises(OutputError, match=r"found mine\.txt, .* without --part, and with --overw"):
        zexport.consolidate_part(run, out, Share(1, 2), _SHARDS)
    assert server.get(name) == {"mine.txt": b"mine"}
    zexport.consolidate(run, f"{out}-2", _SHARDS)
    overwrite = ExportOptions(overwrite=True)
    with pytest.raises(OutputError, match="no part of an export may empty it"):
        zexport.consolidate_part(run, f"{out}-2", Share(1, 2), overwrite)
    zexport.consolidate(run, f"{out}-2", overwrite)
    assert zexport.verify_export(f"{out}-2", against=run).ok


@pytest.mark.parametrize("kept", ["", "-n", "latest"])
def test_what_a_stopped_replacement_has_left_of_the_older_is_removed_by_the_rerun(
    kept: str, out: str, name: str, server: Server
) -> None:
    """Else it would be a checkpoint of nobody, which nothing replaces."""
    zexport.reshard(_REAL, out, ReshardOptions(world_size=3))
    options = ReshardOptions(world_size=2, overwrite=True)
    deletions = 0

    def second(one: Request) -> bool:
        nonlocal deletions
        deletions += one.method == "POST" and "delete" in one.query
        return deletions == 2

    _stopped(server, second, lambda: zexport.reshard(_REAL, out, options))
    left = server.get(name)
    assert MANIFEST_NAME not in left
    obstore.delete(server.store, [f"{name}/{one}" for one in left if kept and kept in one])
    objects.forget_listings()
    report = zexport.reshard(_REAL, out, options)
    assert "a stopped export was cleared up" in " ".join(report.warnings)
    assert zexport.verify_export(out, against=_REAL).ok
    assert not any(one.startswith(RECEIPTS) for one in server.get(name))
