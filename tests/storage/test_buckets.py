"""Checkpoints and models in a bucket: requests, and what happens when the store refuses."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

import obstore
import pytest

import zexport
from tests.support import cli
from tests.support.buckets import BUCKET, REFUSED, Answer, Fault, Request, Server
from tests.support.checkpoints import Model, Run, save, values
from tests.support.refusing import forget_listings, refused_at_every
from zexport import (
    CheckpointError,
    Engine,
    ExportOptions,
    MissingExtraError,
    NotACheckpointError,
    OutputError,
    ReshardOptions,
    UsageError,
    VerificationError,
    ZexportError,
)

ROOT = Path(__file__).parents[2]
RANKS = ROOT / "fixtures" / "z2_w2_bf16_groups" / "ckpt"
SHARDS = ExportOptions(max_shard_nbytes=1_000_000)
MANIFEST_NAME = "zexport_manifest.json"
LARGE = Model([{f"layers.{n}.w": values((512, 1024), n) for n in range(6)}])
NBYTES = 6 << 21
BLOCK = 8 << 20

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Model([{f"layers.{n}.w": values((300, 300), n) for n in range(8)}])
    return save(model, Run(stage=2), tmp_path_factory.mktemp("run") / "run")


def _first(ending: str, answer: Answer, method: str = "GET") -> Fault:
    """Return a fault that befalls the first request for a key."""
    left = [answer]
    return lambda one: (
        left.pop() if left and one.method == method and one.key.endswith(ending) else None
    )


# --- requests ---


def _asked(one: Request) -> int:
    """Return how many bytes a request asks for by range."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", one.range)
    return int(found[2]) + 1 - int(found[1]) if found else 0


def test_data_moves_once_in_few_large_requests(
    out: str, prefix: str, server: Server, tmp_path: Path
) -> None:
    """Names sort layer 10 before layer 2, unlike the rank files."""
    run = save(LARGE, Run(stage=2), tmp_path / "run")
    far = server.put(run, f"{prefix}-run")
    zexport.open_checkpoint(far)
    opened = [one.key for one in server.requests if one.key.endswith(".pt")]
    assert max(map(opened.count, opened)) <= 5
    server.requests.clear()
    zexport.consolidate(far, out)
    parts = [one for one in server.requests if one.is_part]
    assert len(parts) == 2  # 12 MiB and a header, 8 MiB each
    read = [size for one in server.of("GET") if (size := _asked(one)) > 1 << 16]
    assert 2 * NBYTES <= sum(read) <= 1.02 * 2 * NBYTES  # the checkpoint, and the model again
    assert len(parts) + len(read) <= 4 * NBYTES / BLOCK
    zexport.consolidate(run, tmp_path / "near")
    near = (tmp_path / "near" / "model.safetensors").read_bytes()
    assert server.get(prefix)["model.safetensors"] == near
    blocks = [near[at : at + BLOCK] for at in range(0, len(near), BLOCK)]
    assert {one.sha256 for one in parts} == {sha256(block).hexdigest() for block in blocks}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fsdp2_dcp", "fsdp2_ranks", "fsdp2_safetensors"])
def test_fsdp_in_a_bucket_is_what_it_is_on_a_disk(
    form: str, fsdp: Path, out: str, prefix: str, server: Server, tmp_path: Path
) -> None:
    near = shutil.copytree(fsdp / form / "ckpt", tmp_path / "run" / "step-2")
    far = server.put(tmp_path / "run", f"{prefix}/run")
    zexport.consolidate(near, tmp_path / "near")
    weights = (tmp_path / "near" / "model.safetensors").read_bytes()
    for number in (2, 1):
        zexport.consolidate_part(far, f"{out}/parts", zexport.Share(number, 2))
    assert [*zexport.watch(far, f"{out}/watched", zexport.WatchOptions(once=True, interval_s=0.2))]
    for place in ("parts", "watched/step-2"):
        assert server.get(f"{prefix}/{place}")["model.safetensors"] == weights
        assert zexport.verify_export(f"{out}/{place}", against=near.parent).ok
    assert zexport.verify_export(tmp_path / "near", against=far).ok
    assert zexport.diff_states(far, fsdp / "fsdp2_dcp" / "ckpt").is_equal
    assert not zexport.diff_states(far, fsdp / "fsdp1_dcp" / "ckpt").is_equal


# --- refusals while a checkpoint is read ---


@pytest.mark.parametrize(
    "answer",
    [REFUSED, Answer(cut=1, is_short=True)],
    ids=["403", "short"],
)
def test_refused_tokenizer_is_not_left_out(
    answer: Answer, server: Server, prefix: str, tmp_path: Path
) -> None:
    far = server.put(RANKS, prefix)
    server.fault = _first("/tokenizer.json", answer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read: the"):
        zexport.consolidate(far, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refused_listing_does_not_lead_to_an_older_checkpoint(server: Server, prefix: str) -> None:
    for step in (2, 4):
        far = server.put(RANKS, f"{prefix}/checkpoint-{step}").rpartition("/")[0]
    server.fault = lambda one: REFUSED if "checkpoint-4" in one.query else None
    with pytest.raises(CheckpointError, match="checkpoint-4: cannot be read: the store refuses"):
        zexport.open_checkpoint(far, tag="newest")


# --- refusals while a model is written ---


def test_every_refused_request_ends_with_an_error_or_a_complete_folder(
    prefix: str, server: Server
) -> None:
    """One request in 53 of a resharding; ``make torture`` tries all."""
    far = server.put(RANKS, f"{prefix}/ranks/ckpt")
    act = partial(zexport.reshard, far, options=ReshardOptions(world_size=3))
    assert refused_at_every(53, server, prefix, act) > 2


@pytest.mark.parametrize("ending", [MANIFEST_NAME, "model.safetensors"])
def test_upload_whose_answer_was_lost_is_done(
    ending: str, out: str, prefix: str, server: Server, tmp_path: Path
) -> None:
    run = save(Model([{"w": values((2048, 1200), 1)}]), Run(stage=2), tmp_path / "run")
    lost = [Answer("500 Internal Server Error", "InternalError", is_done=True)]

    def lose(one: Request) -> Answer | None:
        is_last = one.method == "PUT" or (one.method == "POST" and "uploadId" in one.query)
        is_lost = lost and is_last and one.key.endswith(ending) and not one.is_part
        return lost.pop() if is_lost else None

    server.fault = lose
    zexport.consolidate(run, out)
    assert not lost
    assert zexport.verify_export(out, against=run).ok
    assert not any(name.startswith(".zexport") for name in server.get(prefix))


def test_unfinished_folder_is_refused_by_all_that_read_one(
    run: Path, out: str, prefix: str, server: Server
) -> None:
    server.fault = lambda one: REFUSED if one.writes("model-00003-of-00004.safetensors") else None
    with pytest.raises(OutputError):
        zexport.consolidate(run, out, SHARDS)
    server.fault = lambda one: REFUSED if one.writes("/latest") else None
    with pytest.raises(OutputError):
        zexport.reshard(RANKS, f"{out}-ranks", ReshardOptions(world_size=3))
    server.fault = lambda _: None
    based = ExportOptions(base=out)  # type: ignore[arg-type]
    for act, error in (
        (lambda: zexport.verify_export(out), VerificationError),
        (lambda: zexport.diff_models(out, run), CheckpointError),
        (lambda: zexport.consolidate(run, f"{out}-2", based), CheckpointError),
        (lambda: zexport.finish_export(out), OutputError),
        (lambda: zexport.open_checkpoint(f"{out}-ranks"), NotACheckpointError),
    ):
        with pytest.raises(error, match=out):
            act()
    assert not server.get(f"{prefix}-2")


def test_foreign_files_in_an_unfinished_folder_are_not_removed(
    out: str, prefix: str, server: Server
) -> None:
    server.fault = lambda one: REFUSED if one.writes("/latest") else None
    with pytest.raises(OutputError):
        zexport.reshard(RANKS, out, ReshardOptions(world_size=3))
    server.fault = lambda _: None
    obstore.put(server.store, f"{prefix}/global_step2/mine.safetensors", b"mine")
    forget_listings()
    with pytest.raises(OutputError, match=r"mine\.safetensors"):
        zexport.reshard(RANKS, out, ReshardOptions(world_size=2))
    assert server.get(prefix)["global_step2/mine.safetensors"] == b"mine"
    obstore.delete(server.store, f"{prefix}/global_step2/mine.safetensors")
    forget_listings()
    zexport.reshard(RANKS, out, ReshardOptions(world_size=2))
    assert zexport.verify_export(out, against=RANKS).ok


def test_second_of_two_exports_does_not_replace_the_first(
    run: Path, out: str, prefix: str, server: Server
) -> None:
    def publish_another(one: Request) -> None:
        if one.writes(MANIFEST_NAME):
            server.fault = lambda _: None
            obstore.put(server.store, f"{prefix}/{MANIFEST_NAME}", b"another's")

    server.fault = publish_another
    with pytest.raises(OutputError):
        zexport.consolidate(run, out, SHARDS)
    assert server.get(prefix)[MANIFEST_NAME] == b"another's"


def test_nothing_fails_once_the_manifest_is_there(run: Path, out: str, server: Server) -> None:
    there: list[Request] = []

    def stop_then(one: Request) -> Answer | None:
        if there:
            return REFUSED
        if one.writes(MANIFEST_NAME):
            there.append(one)
        return None

    server.fault = stop_then
    done = zexport.consolidate(run, out, SHARDS)
    server.fault = lambda _: None
    assert "cannot be removed (the store refuses" in done.warnings[-1]
    assert zexport.verify_export(out, against=run).ok


def test_parts_are_not_finished_with_a_replaced_shard(
    run: Path, out: str, prefix: str, server: Server
) -> None:
    zexport.consolidate_part(run, out, zexport.Share(2, 2), SHARDS)
    server.fault = lambda one: REFUSED if one.writes(MANIFEST_NAME) else None
    with pytest.raises(OutputError, match="the store refuses access"):
        zexport.consolidate_part(run, out, zexport.Share(1, 2), SHARDS)
    server.fault = lambda _: None
    shard = f"{prefix}/model-00002-of-00004.safetensors"
    content = bytes(obstore.get(server.store, shard).bytes())
    obstore.put(server.store, shard, content[:-1] + b"x")
    forget_listings()
    with pytest.raises(OutputError, match="missing"):
        zexport.finish_export(out)
    assert MANIFEST_NAME not in server.get(prefix)
    obstore.put(server.store, shard, content)
    forget_listings()
    with suppress(OutputError):  # the shard may need to be written again
        zexport.finish_export(out)
    zexport.consolidate_part(run, out, zexport.Share(2, 2), SHARDS)
    assert zexport.verify_export(out, against=run).ok


# --- settings and credentials ---


def _refusal(given: str) -> str:
    with pytest.raises(ZexportError) as caught:
        cli.run("inspect", given).or_raise()
    assert str(caught.value).startswith(given)
    return str(caught.value)


def test_unusable_store_is_refused_with_a_hint(
    server: Server, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    address = server.put(RANKS, "hint/run")
    assert "does not exist" in _refusal(f"{address}/nothing/here")
    assert "there is no such bucket. Check its name" in _refusal("s3://no-such-bucket/run")
    with pytest.raises(OutputError, match="there is no such bucket"):
        zexport.consolidate(run, "s3://no-such-bucket/model", ExportOptions(overwrite=True))
    server.fault = lambda _: Answer("301 Moved Permanently", "PermanentRedirect")
    assert "is in another region. Set AWS_REGION" in _refusal(address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    zexport.use_storage_options({})
    assert "cannot be reached. Check the network" in _refusal(address)


def test_aws_profile_gives_keys_and_region(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = server.put(RANKS, "profile/run")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_REGION"):
        monkeypatch.delenv(name)
    keys = "aws_access_key_id = a\naws_secret_access_key = b\nregion = eu-west-1\n"
    (tmp_path / "credentials").write_text(f"[team]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    zexport.use_storage_options({})
    assert zexport.open_checkpoint(address).global_steps is not None
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    zexport.use_storage_options({})
    with pytest.raises(UsageError, match="AWS profile"):
        zexport.open_checkpoint(address)


def test_storage_options_are_given_on_the_command_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.put(RANKS, "settings/run")
    for name in server.environment:
        monkeypatch.delenv(name)
    settings = ["endpoint=" + server.url, "access_key_id=user", "secret_access_key=secret"]
    words = ["inspect", address, *(w for one in settings for w in ("--storage-option", one))]
    assert "Verdict: exportable" in cli.run(*words).stdout


def test_invalid_address_or_missing_obstore_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="only reads and writes local files"):
        zexport.consolidate(run, f"s3://{BUCKET}/o", ExportOptions(engine=Engine.DEEPSPEED))
    for wrong in ("s3://", "gs:///", "s3:///run/out", "s3://b/../c", "s3://b/a\tb"):
        with pytest.raises(UsageError, match="address"):
            zexport.open_checkpoint(wrong)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match="obstore"):
        zexport.open_checkpoint(f"s3://{BUCKET}/run")
