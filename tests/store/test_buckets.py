"""Checkpoints and models in object storage: moto's server answers, over real HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import obstore
import pytest
from click.testing import CliRunner

import zexport
from tests.support.buckets import BUCKET, Answer, Request, Server
from tests.support.checkpoints import Model, Run, save, values
from zexport.cli.main import cli
from zexport.errors import CheckpointError, MissingExtraError, UsageError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.options import Engine, ExportOptions
from zexport.store import client, objects
from zexport.store.address import Address, place
from zexport.store.folders import children

_MODEL = Model([{f"layers.{n}.w": values((64, 48), n) for n in range(12)}], {"f": values((5,), 99)})
FIXTURE = Path(__file__).parents[2] / "fixtures" / "z2_w2_bf16_groups" / "ckpt"
_LARGE = Model([{f"layers.{n}.w": values((512, 1024), n) for n in range(6)}])


pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks, on disk."""
    return save(_MODEL, Run(stage=3, world_size=3), tmp_path_factory.mktemp("stage3") / "run")


@pytest.fixture(scope="module")
def address(saved: Path, running_server: Server) -> str:
    """The same in the bucket."""
    return running_server.put(saved, "stage3/run")


def _content(folder: Path) -> dict[str, bytes]:
    """Every file; of the manifest what does not tell when the sources were put where they are."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}
    name = "zexport_manifest.json"
    found[name] = re.sub(rb'"mtime_ns": \d+|  "blake3": "\w+",\n', b"", found[name])
    return found


def test_an_export_from_a_bucket_is_that_from_a_disk(
    saved: Path, address: str, tmp_path: Path
) -> None:
    zexport.consolidate(saved, tmp_path / "near")
    zexport.consolidate(address, tmp_path / "far")
    assert _content(tmp_path / "far") == _content(tmp_path / "near")
    assert zexport.verify_export(tmp_path / "near", against=address).ok


def test_a_rank_file_costs_three_small_requests_before_its_data(
    address: str, server: Server
) -> None:
    zexport.open_checkpoint(address)
    files = [one for one in server.requests if one.key.endswith(".pt")]
    assert max(sum(o.key == f.key for o in files) for f in files) <= 3


def test_data_is_fetched_once_in_few_large_requests(server: Server, tmp_path: Path) -> None:
    far = server.put(save(_LARGE, Run(stage=2, world_size=2), tmp_path / "run"), "large")
    server.requests.clear()
    zexport.consolidate(far, tmp_path / "out")
    ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", one.range) for one in server.of("GET")]
    sizes = [int(found[2]) + 1 - int(found[1]) for found in ranges if found]
    large = [size for size in sizes if size > 1 << 20]
    assert sum(large) < 1.02 * sum(w.nbytes for w in _LARGE.groups[0].values())
    assert len(large) <= 6
    assert sum(sizes) < 1.1 * sum(large)


def test_a_model_in_a_bucket_is_verified_compared_and_taken_as_a_base(
    server: Server, tmp_path: Path
) -> None:
    run = save(_MODEL, Run(stage=2), tmp_path / "run")
    far_run = server.put(run, "trained")
    zexport.consolidate(run, tmp_path / "model")
    model = server.put(tmp_path / "model", "verified/model")
    assert zexport.verify_export(model, against=far_run).ok
    assert zexport.diff_models(model, tmp_path / "model").verdict.cause is zexport.Cause.NONE
    left_out = save(_MODEL, Run(stage=2, exclude_frozen=True), tmp_path / "left")
    zexport.consolidate(left_out, tmp_path / "whole", ExportOptions(base=place(model)))
    assert zexport.verify_export(tmp_path / "whole", against=left_out, base=model).ok


def test_a_base_whose_export_is_not_finished_is_refused(
    saved: Path, server: Server, tmp_path: Path
) -> None:
    """In a bucket it has its name already, and may have all its weights."""
    zexport.consolidate(saved, tmp_path / "model")
    base = server.put(tmp_path / "model", "unfinished")
    obstore.delete(server.store, f"unfinished/{MANIFEST_NAME}")
    obstore.put(server.store, f"unfinished/{RECEIPTS}/plan", b"")
    with pytest.raises(CheckpointError, match="is not finished"):
        zexport.consolidate(saved, tmp_path / "out", ExportOptions(base=place(base)))


@pytest.mark.parametrize("is_short", [True, False], ids=["as if whole", "told"])
def test_a_listing_that_is_cut_off_is_asked_for_again(is_short: bool, server: Server) -> None:
    for number in range(4):
        obstore.put(server.store, f"listed/{number}/x", b"")
    folder = place(f"s3://{BUCKET}/listed")
    assert isinstance(folder, Address)
    cut = Answer(cut=300, is_short=is_short)

    def after(times: int) -> None:
        objects.forget_listings()
        numbers = count()
        is_list = lambda one: "list-type" in one.query  # noqa: E731
        server.fault = lambda one: cut if is_list(one) and next(numbers) < times else None

    after(1)
    assert [path.name for path in children(folder)] == ["0", "1", "2", "3"]
    after(2)
    assert len([*objects.below(folder)]) == 4
    after(99)
    with pytest.raises(OSError, match="the store's listing was cut off"):
        children(folder)


_AT_ONCE = [Answer("403 Forbidden", "AccessDenied"), Answer("404 Not Found", "NoSuchKey")]


@pytest.mark.parametrize("answer", _AT_ONCE, ids=lambda answer: answer.code)
def test_a_refusal_of_a_file_beside_the_weights_is_not_taken_for_its_content(
    answer: Answer, server: Server, tmp_path: Path
) -> None:
    far = server.put(FIXTURE, f"beside-{answer.code}")
    numbers = count()

    def refuse(one: Request) -> Answer | None:
        is_asked = one.method == "GET" and one.key.endswith("/tokenizer.json")
        return answer if is_asked and next(numbers) == 0 else None

    server.fault = refuse
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read: the"):
        zexport.consolidate(far, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_whose_listing_is_refused_is_not_passed_over_for_an_older(
    server: Server,
) -> None:
    for step in (2, 4):
        far = server.put(FIXTURE, f"refused/checkpoint-{step}").rpartition("/")[0]
    numbers = count()

    def refuse(one: Request) -> Answer | None:
        is_asked = "checkpoint-4" in one.query and next(numbers) == 0
        return Answer("403 Forbidden", "AccessDenied") if is_asked else None

    server.fault = refuse
    with pytest.raises(CheckpointError, match="checkpoint-4: cannot be read: the store refuses"):
        zexport.open_checkpoint(far, tag="newest")


def test_files_of_torchs_old_layout_are_read_by_range(server: Server, tmp_path: Path) -> None:
    old = save(_LARGE, Run(stage=2, legacy=True), tmp_path / "old")
    far = server.put(old, "old")
    server.requests.clear()
    zexport.consolidate(far, tmp_path / "far")
    zexport.consolidate(old, tmp_path / "near")
    assert _content(tmp_path / "far") == _content(tmp_path / "near")
    whole = sum(path.stat().st_size for path in old.rglob("*.pt"))
    asked = (re.fullmatch(r"bytes=(\d+)-(\d+)", one.range) for one in server.of("GET"))
    assert sum(int(one[2]) + 1 - int(one[1]) for one in asked if one) < whole
    cut = (key := f"old/{next(old.rglob('*optim_states.pt')).relative_to(old)}", server.get("old"))
    obstore.put(server.store, key, cut[1][key.removeprefix("old/")][:5000])
    with pytest.raises(CheckpointError, match=re.escape(key.rpartition("/")[2])):
        zexport.consolidate(far, tmp_path / "cut")


def test_an_object_that_changes_while_it_is_read_is_refused(
    saved: Path, address: str, server: Server, tmp_path: Path
) -> None:
    plan = zexport.plan_export(zexport.open_checkpoint(address), tmp_path / "out")
    one = next(path for path in saved.rglob("*optim_states.pt"))
    key = f"{address.removeprefix(f's3://{BUCKET}/')}/{one.relative_to(saved)}"
    content = bytearray(one.read_bytes())
    content[-1] ^= 1
    obstore.put(server.store, key, bytes(content))
    with pytest.raises(CheckpointError, match=r"was replaced meanwhile|was changed"):
        zexport.run_export(plan)
    assert not (tmp_path / "out").exists()
    obstore.put(server.store, key, one.read_bytes())


_BUSY = ("500 Internal Server Error", "503 Service Unavailable", "429 Too Many Requests")


@pytest.mark.parametrize(
    "answer",
    [*(Answer(status, headers=(("Retry-After", "1"),)) for status in _BUSY), Answer(cut=1000)],
    ids=lambda answer: answer.status if answer.cut is None else "cut",
)
def test_what_passes_is_tried_again(
    answer: Answer, address: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "fault", lambda one: answer if one.count == 0 else None)
    zexport.consolidate(address, tmp_path / "out")
    assert zexport.verify_export(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Answer("403 Forbidden", "AccessDenied"), "the store refuses access"),
        (Answer("404 Not Found", "NoSuchKey"), "there is no such object"),
        (Answer("412 Precondition Failed", "PreconditionFailed"), "it was replaced meanwhile"),
        (Answer("500 Internal Server Error", "InternalError"), "the store answers 500"),
        (Answer("503 Service Unavailable", "SlowDown"), "the store answers 503"),
        (Answer("429 Too Many Requests", "SlowDown"), "the store answers 429"),
        (Answer(cut=1000), "the store's answer was cut off"),
        (Answer(cut=1000, is_short=True), "the store's answer is too short"),
    ],
    ids=lambda one: getattr(one, "status", None),
)
def test_what_does_not_pass_is_one_sentence(
    answer: Answer, told: str, address: str, server: Server, tmp_path: Path
) -> None:
    def of_data(one: Request) -> Answer | None:
        return answer if one.method == "GET" and one.key.endswith("optim_states.pt") else None

    plan = zexport.plan_export(zexport.open_checkpoint(address), tmp_path / "out")
    server.fault = of_data
    with pytest.raises(CheckpointError) as caught:
        zexport.run_export(plan)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(address)
    assert not (tmp_path / "out").exists()


def test_a_file_of_which_too_little_came_is_not_copied(
    address: str, server: Server, tmp_path: Path
) -> None:
    """Though the answer says of itself that it is whole."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "tokenizer.json").write_text('{"model": {}, "added_tokens": []}' + " " * 2000)
    far = place(server.put(base, "short/base"))
    server.fault = lambda one: (
        Answer(cut=1000, is_short=True) if one.key.endswith("tokenizer.json") else None
    )
    with pytest.raises(CheckpointError, match="the store's answer is too short"):
        zexport.consolidate(address, tmp_path / "out", ExportOptions(base=far))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (f"s3://{BUCKET}/nothing/here", "does not exist"),
        ("s3://no-such-bucket/run", "there is no such bucket"),
    ],
)
def test_what_is_not_there_is_told(given: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as caught:
        zexport.open_checkpoint(given)
    assert str(caught.value).startswith(given)


def test_a_store_out_of_reach_and_no_credentials_are_told(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    client.use_storage_options(
        {"metadata_endpoint": "http://169.254.169.254:1", "connect_timeout": "1s"}
    )
    told = "cannot be read: there are no credentials. Set AWS_ACCESS_KEY_ID"
    assert _refusal(address).startswith(f"{address}: {told}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    client.use_storage_options({})
    told = "cannot be read: the store cannot be reached. Check the network"
    assert _refusal(address).startswith(f"{address}: {told}")


def test_missing_bucket_and_wrong_region_are_refused_with_the_cure(
    address: str, server: Server
) -> None:
    told = "cannot be read: there is no such bucket. Check its name"
    assert _refusal("s3://no-such-bucket/run").startswith(f"s3://no-such-bucket/run: {told}")
    server.fault = lambda _: Answer("301 Moved Permanently", "PermanentRedirect")
    told = "cannot be read: the bucket is in another region. Set AWS_REGION"
    assert _refusal(address).startswith(f"{address}: {told}")


def _refusal(given: str) -> str:
    return str(CliRunner().invoke(cli, ["inspect", given]).exception)


def test_a_profile_of_aws_is_taken_with_its_region(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_REGION")
    (tmp_path / "credentials").write_text(
        "[team]\naws_access_key_id = a\naws_secret_access_key = b\nregion = eu-west-1\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    client.use_storage_options({})
    assert zexport.open_checkpoint(address).global_steps is not None
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    client.use_storage_options({})
    with pytest.raises(UsageError, match="the AWS profile cannot be used"):
        zexport.open_checkpoint(address)


def test_settings_are_given_on_the_command_line(address: str, server: Server) -> None:
    settings = ["endpoint=" + server.url, "access_key_id=user", "secret_access_key=secret"]
    words = [word for one in settings for word in ("--storage-option", one)]
    command = [sys.executable, "-m", "zexport", "inspect", address, *words]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert "Verdict: exportable" in done.stdout
    command += ["--storage-option", "colour=red"]
    bad = subprocess.run(command, env={}, capture_output=True, check=False)
    assert bad.returncode == 2
    assert b"'colour' is not valid" in bad.stderr


def test_deepspeeds_own_engine_takes_no_addresses(address: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reads and writes files of this machine alone"):
        zexport.consolidate(address, tmp_path / "out", ExportOptions(engine=Engine.DEEPSPEED))


def test_an_address_never_becomes_a_path_of_this_machine() -> None:
    one = place("s3://bucket//run/./x.pt")
    assert isinstance(one, Address)
    assert str(one.parent / "y") == "s3://bucket/run/y"
    assert place(str(one)) == place(one) == place(Path("s3://bucket/run/x.pt")) == one
    assert str(one.relative_to(place("s3://bucket"))) == "run/x.pt"
    for act in (one.exists, one.read_bytes, lambda: open(one)):  # noqa: PTH123, SIM115
        with pytest.raises(TypeError, match="is an address, not a path on this machine"):
            act()
    for wrong in ("s3://", "gs:///", "s3:///run/out", "s3://b/../c", "s3://b/a\tb"):
        with pytest.raises(UsageError, match="is no address"):
            place(wrong)


def test_what_the_store_library_lacks_or_does_not_know_is_told(
    address: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.use_storage_options({"colour": "red"})
    with pytest.raises(UsageError, match="'colour' is not valid"):
        zexport.open_checkpoint(address)
    client.use_storage_options({})
    monkeypatch.setattr("zexport.store.address.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="addresses need obstore"):
        zexport.open_checkpoint(address)
    assert zexport.open_checkpoint(saved).global_steps is not None
