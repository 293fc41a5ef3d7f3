"""Models written into object storage: moto's server takes them, over real HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path

import obstore
import pytest
import torch

import zexport
from tests.support.buckets import BUCKET, Answer, Request, Server
from tests.support.checkpoints import Model, Run, save, values
from tests.support.real_cases import copied, file_of
from zexport.cli.main import cli
from zexport.errors import DamagedCheckpointError, OutputError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.findings import FindingKind
from zexport.options import ExportOptions, NameLayout, ReshardOptions
from zexport.run import receipts
from zexport.run.shares import Share
from zexport.store import client, objects
from zexport.store.blocks import BLOCK_NBYTES

_MODEL = Model([{f"layers.{n}.w": values((300, 300), n) for n in range(8)}])
_REAL = Path(__file__).parents[2] / "fixtures" / "z2_w2_bf16_groups" / "ckpt"
_SHARDS = ExportOptions(max_shard_nbytes=1_000_000)
_OVERWRITE = ExportOptions(max_shard_nbytes=1_000_000, overwrite=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and a base with a config, by which there is more than weights to write."""
    return save(_MODEL, Run(stage=2), tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A prefix in the bucket of the test's own."""
    return re.sub(r"\W+", "-", request.node.name).strip("-")


pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def out(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


def _asked(request: Request) -> int:
    """How many bytes are asked for by range."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range)
    return int(found[2]) + 1 - int(found[1]) if found else 0


def _files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


def test_a_model_in_a_bucket_is_that_on_a_disk_and_its_manifest_comes_last(
    run: Path, out: str, name: str, server: Server, tmp_path: Path
) -> None:
    zexport.consolidate(run, tmp_path / "near", _SHARDS)
    report = zexport.consolidate(run, out, _SHARDS)
    assert server.get(name) == _files(tmp_path / "near")
    written = [one.key.rpartition("/")[2] for one in server.of("PUT")]
    assert written[-2:] == ["model.safetensors.index.json", MANIFEST_NAME]
    assert str(report.out_dir) == out
    assert zexport.verify_export(out, against=run).ok


def test_a_large_shard_is_uploaded_in_parts_and_read_back_in_blocks(
    out: str, name: str, server: Server, tmp_path: Path
) -> None:
    """Of what moves, each 8 MiB take one request, and a fifth more at most."""
    large = Model([{f"layers.{n}.w": values((1024, 1024), n) for n in range(12)}])
    run = save(large, Run(stage=2), tmp_path / "run")
    far = server.put(run, f"{name}-run")
    server.requests.clear()
    zexport.consolidate(far, out)
    parts = [one for one in server.of("PUT") if "partNumber" in one.query]
    assert len(parts) == 7  # 48 MiB and a header, 8 MiB each
    read = [size for one in server.of("GET") if (size := _asked(one)) > 1 << 16]
    nbytes = sum(weights.nbytes for weights in large.groups[0].values())
    assert 2 * nbytes <= sum(read) <= 1.02 * 2 * nbytes  # the checkpoint, and the model again
    assert len(parts) + len(read) <= 1.2 * 3 * nbytes / BLOCK_NBYTES
    zexport.consolidate(run, tmp_path / "near")
    near = (tmp_path / "near" / "model.safetensors").read_bytes()
    assert server.get(name)["model.safetensors"] == near
    size = 8 << 20
    blocks = [near[at : at + size] for at in range(0, len(near), size)]
    assert {one.sha256 for one in parts} == {sha256(block).hexdigest() for block in blocks}


def _of_shard(number: int, answer: Answer) -> Callable[[Request], Answer | None]:
    ending = f"model-0000{number}-of-00004.safetensors"
    return lambda one: answer if one.method == "PUT" and one.key.endswith(ending) else None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Answer("403 Forbidden", "AccessDenied"), "the store refuses access"),
        (Answer("404 Not Found", "NoSuchBucket"), "there is no such bucket"),
        (Answer("503 Service Unavailable", "SlowDown"), "the store answers 503"),
    ],
    ids=["403", "404", "503"],
)
def test_a_rerun_goes_on_from_whole_shards(
    answer: Answer, told: str, run: Path, out: str, server: Server
) -> None:
    name = out.removeprefix(f"s3://{BUCKET}/")
    server.fault = _of_shard(3, answer)
    with pytest.raises(OutputError, match=told) as caught:
        zexport.consolidate(run, out, _SHARDS)
    assert caught.value.exit_code == 6
    left = server.get(name)
    assert MANIFEST_NAME not in left
    assert "model.safetensors.index.json" not in left
    server.fault = lambda _: None
    report = zexport.consolidate(run, out, _SHARDS)
    assert report.resumed
    assert f"{len(report.resumed)} finished shards were kept" in " ".join(report.warnings)
    assert not any(name.startswith(".zexport") for name in server.get(name))
    assert zexport.verify_export(out, against=run).ok


_READ_AGAIN = {
    "model-00004-of-00004.safetensors": lambda ckpt, out: zexport.consolidate(ckpt, out, _SHARDS),
    "zero_pp_rank_1_mp_rank_00_optim_states.pt": lambda ckpt, out: zexport.reshard(
        ckpt, out, ReshardOptions(world_size=3)
    ),
}


@pytest.mark.parametrize("ending", _READ_AGAIN)
@pytest.mark.parametrize("before", range(3))
def test_a_refusal_to_read_what_was_written_is_the_stores_and_drops_nothing(
    ending: str, before: int, run: Path, name: str, server: Server
) -> None:
    """Whatever is read of a file before: its header, or a zip's directory; or its tensors."""
    out = f"s3://{BUCKET}/{name}"
    act, source = _READ_AGAIN[ending], _REAL if ending.endswith(".pt") else run
    act(source, f"{out}-whole")

    numbers = count()

    def refuse(one: Request) -> Answer | None:
        is_read = one.method == "GET" and one.key.endswith(ending)
        is_refused = is_read and next(numbers) >= before
        return Answer("403 Forbidden", "AccessDenied") if is_refused else None

    server.fault = refuse
    with pytest.raises(OutputError, match="cannot be read: the store refuses access") as caught:
        act(source, out)
    assert caught.value.exit_code == 6
    assert any("Kept" in note for note in caught.value.__notes__)
    server.fault = lambda _: None
    assert act(source, out).resumed
    assert server.get(name) == server.get(f"{name}-whole")


_PASSING = (
    Answer("500 Internal Server Error", "InternalError"),
    Answer("503 Service Unavailable", "SlowDown", (("Retry-After", "1"),)),
    Answer("429 Too Many Requests", "SlowDown"),
    Answer(cut=0),
)


@pytest.mark.parametrize(
    "answer", _PASSING, ids=lambda one: one.status if one.cut is None else "cut"
)
def test_what_passes_is_tried_again(
    answer: Answer, run: Path, out: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(client.RETRIES, "max_retries", 8)
    numbers = count()
    server.fault = lambda one: answer if next(numbers) % 3 == 0 and one.method != "GET" else None
    zexport.consolidate(run, out, _SHARDS)
    server.fault = lambda _: None
    assert zexport.verify_export(out, against=run).ok


@pytest.mark.parametrize("ending", [MANIFEST_NAME, "model.safetensors"])
def test_what_was_done_though_its_answer_was_lost_is_done(
    ending: str, out: str, name: str, server: Server, tmp_path: Path
) -> None:
    """The library asks again: of the manifest, which is only to be there once, and of an upload."""
    large = Model([{"w": values((2048, 1200), 1)}])
    run = save(large, Run(stage=2), tmp_path / "run")

    def lose(one: Request) -> Answer | None:
        is_last = one.method == "PUT" or (one.method == "POST" and "uploadId" in one.query)
        if not (is_last and one.key.endswith(ending) and "partNumber" not in one.query):
            return None
        server.fault = lambda _: None
        return Answer("500 Internal Server Error", "InternalError", is_done=True)

    server.fault = lose
    zexport.consolidate(run, out)
    assert zexport.verify_export(out, against=run).ok
    assert not any(name.startswith(".zexport") for name in server.get(name))


def test_an_upload_that_is_refused_since_somebody_was_first_is_ended(
    out: str, name: str, server: Server, tmp_path: Path
) -> None:
    run = save(Model([{"w": values((2048, 1200), 1)}]), Run(stage=2), tmp_path / "run")
    server.fault = lambda one: (
        Answer("412 Precondition Failed", "PreconditionFailed")
        if one.method == "POST" and "uploadId" in one.query
        else None
    )
    with pytest.raises(OutputError, match="cannot be written: it was replaced meanwhile"):
        zexport.consolidate(run, out)
    assert [one for one in server.of("DELETE") if "uploadId" in one.query]
    assert not server.get(name)
    server.fault = lambda _: None
    zexport.consolidate(run, out)
    assert zexport.verify_export(out, against=run).ok


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_server_that_stops_for_good_is_told_and_nothing_looks_whole(
    method: str, run: Path, out: str, name: str, server: Server
) -> None:
    numbers = count()
    dead = Answer("502 Bad Gateway", "Gone")

    def stop(one: Request) -> Answer | None:
        return dead if one.method == method and next(numbers) >= 8 else None

    server.fault = stop
    with pytest.raises(OutputError, match="the store answers 502") as caught:
        zexport.consolidate(run, out, _SHARDS)
    assert caught.value.exit_code == 6
    server.fault = lambda _: None
    assert MANIFEST_NAME not in server.get(name)
    zexport.consolidate(run, out, _SHARDS)
    assert zexport.verify_export(out, against=run).ok


def test_a_killed_export_leaves_nothing_that_looks_whole(
    run: Path, out: str, name: str, server: Server
) -> None:
    command = [sys.executable, "-m", "zexport", "consolidate", str(run), out, "-q"]
    words = [*command, "--max-shard-size", "1MB"]
    process: list[subprocess.Popen[bytes]] = []

    def kill(one: Request) -> None:
        if one.method == "PUT" and one.key.endswith("model-00004-of-00004.safetensors"):
            process[0].kill()

    server.fault = kill
    process.append(subprocess.Popen(words, env={**os.environ, **server.environment}))
    assert process[0].wait(60) == -9
    assert MANIFEST_NAME not in server.get(name)
    server.fault = lambda _: None
    zexport.consolidate(run, out, _SHARDS)
    assert zexport.verify_export(out, against=run).ok
    assert not any(name.startswith(".zexport") for name in server.get(name))


def test_overwriting_removes_the_old_manifest_before_all_else(
    run: Path, out: str, name: str, server: Server, tmp_path: Path
) -> None:
    zexport.consolidate(run, out, _SHARDS)
    with pytest.raises(OutputError, match="exists and is not empty"):
        zexport.consolidate(run, out, _SHARDS)
    server.requests.clear()
    other = save(Model([{"w": values((3, 4), 1)}]), Run(stage=2), tmp_path / "other")
    zexport.consolidate(other, out, _OVERWRITE)
    changes = [one for one in server.requests if one.method in ("PUT", "POST", "DELETE")]
    noted, removed, *_ = changes
    assert noted.key.endswith(f"{name}/{RECEIPTS}/plan")
    assert (removed.method, removed.query) == ("POST", "delete")
    assert set(server.get(name)) == {"model.safetensors", "README.md", MANIFEST_NAME}
    command = [sys.executable, "-m", "zexport", "consolidate", str(other), out, "--overwrite"]
    env = {**os.environ, **server.environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"What {out} holds is removed before the new folder is written")


def test_what_somebody_edited_in_a_bucket_is_not_replaced(
    run: Path, out: str, name: str, server: Server
) -> None:
    """Versions tell so without a byte of weights; a copy has other ones, and is read."""
    zexport.consolidate(run, out)
    server.requests.clear()
    zexport.consolidate(run, out, ExportOptions(overwrite=True))
    methods = [one.method for one in server.requests]
    before = server.requests[: methods.index("POST")]  # by which the older one goes
    assert not [one for one in before if one.range and one.key.endswith(".safetensors")]
    for key in [one["path"] for page in obstore.list(server.store, name) for one in page]:
        obstore.copy(server.store, key, key.replace(name, f"{name}-copy"))
    zexport.consolidate(run, f"{out}-copy", ExportOptions(overwrite=True))
    weights = f"{name}/model.safetensors"
    content = bytes(obstore.get(server.store, weights).bytes())
    obstore.put(server.store, weights, content[:-4] + b"mine")
    before = server.get(name)
    command = [sys.executable, "-m", "zexport", "consolidate", str(run), out, "--overwrite"]
    env = {**os.environ, **server.environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == OutputError.exit_code
    assert "model.safetensors does not hold" in done.stderr
    assert server.get(name) == before


def test_of_two_exports_the_first_with_a_manifest_stands(
    run: Path, out: str, name: str, server: Server
) -> None:
    def publish_another(one: Request) -> None:
        if one.method == "PUT" and one.key.endswith(MANIFEST_NAME):
            server.fault = lambda _: None
            obstore.put(server.store, f"{name}/{MANIFEST_NAME}", b"another's")

    server.fault = publish_another
    with pytest.raises(OutputError, match="it is there already"):
        zexport.consolidate(run, out, _SHARDS)
    assert server.get(name)[MANIFEST_NAME] == b"another's"


def test_what_is_not_an_exports_own_is_not_removed(run: Path, out: str, server: Server) -> None:
    obstore.put(server.store, f"{out.removeprefix(f's3://{BUCKET}/')}/notes/mine.txt", b"mine")
    with pytest.raises(OutputError, match="exists and is not empty"):
        zexport.consolidate(run, out, _SHARDS)
    with pytest.raises(OutputError, match="neither an export nor a model's folder"):
        zexport.consolidate(run, out, _OVERWRITE)
    server.fault = _of_shard(2, Answer("403 Forbidden", "AccessDenied"))
    with pytest.raises(OutputError):
        zexport.consolidate(run, f"{out}-2", _SHARDS)
    obstore.put(server.store, f"{out.removeprefix(f's3://{BUCKET}/')}-2/mine.txt", b"mine")
    server.fault = lambda _: None
    objects.forget_listings()
    with pytest.raises(OutputError, match="what is not its own, which would be removed"):
        zexport.consolidate(run, f"{out}-2", _SHARDS)


@pytest.mark.parametrize("foreign", ["mine.pt", "global_step2/mine.safetensors"])
def test_files_of_others_among_those_of_a_stopped_resharding_are_not_removed(
    foreign: str, out: str, name: str, server: Server
) -> None:
    """What it left itself goes, though the rerun would not write it."""
    server.fault = lambda one: (
        Answer("403 Forbidden", "AccessDenied")
        if one.method == "PUT" and one.key.endswith(f"{name}/latest")
        else None
    )
    with pytest.raises(OutputError):
        zexport.reshard(_REAL, out, ReshardOptions(world_size=3))
    server.fault = lambda _: None
    obstore.put(server.store, f"{name}/{foreign}", b"mine")
    objects.forget_listings()
    with pytest.raises(OutputError, match="what is not its own, which would be removed"):
        zexport.reshard(_REAL, out, ReshardOptions(world_size=2))
    assert server.get(name)[foreign] == b"mine"
    obstore.delete(server.store, f"{name}/{foreign}")
    objects.forget_listings()
    zexport.reshard(_REAL, out, ReshardOptions(world_size=2))
    assert zexport.verify_export(out, against=_REAL).ok


def _as_given(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files, and of a manifest what does not tell when the sources were put where they are."""
    content = re.sub(rb'"mtime_ns": \d+|  "blake3": "\w+",\n', b"", files[MANIFEST_NAME])
    return files | {MANIFEST_NAME: content}


def test_rank_files_in_a_bucket_are_those_on_a_disk(
    out: str, name: str, server: Server, tmp_path: Path
) -> None:
    options = ReshardOptions(world_size=3)
    zexport.reshard(_REAL, tmp_path / "near", options)
    zexport.reshard(_REAL, out, options)
    near = {p.relative_to(tmp_path / "near").as_posix(): p for p in (tmp_path / "near").rglob("*")}
    content = {name: path.read_bytes() for name, path in near.items() if path.is_file()}
    assert server.get(name) == content
    written = [one.key.removeprefix(f"{BUCKET}/{name}/") for one in server.of("PUT")]
    assert written[-2:] == ["latest", MANIFEST_NAME]
    far = server.put(_REAL, f"{name}-source/{_REAL.parent.name}/{_REAL.name}")
    zexport.reshard(far, f"{out}-far", options)
    assert _as_given(server.get(f"{name}-far")) == _as_given(content)
    assert zexport.verify_export(out, against=_REAL).ok
    with pytest.raises(OutputError, match="holds a checkpoint, which an export never replaces"):
        zexport.consolidate(_REAL, out, ExportOptions(overwrite=True))
    zexport.reshard(_REAL, out, ReshardOptions(world_size=1, overwrite=True))
    assert zexport.open_checkpoint(out).ranks == 1


def test_parts_make_in_a_bucket_what_one_process_makes(
    run: Path, out: str, name: str, server: Server, tmp_path: Path
) -> None:
    zexport.consolidate(run, tmp_path / "near", _SHARDS)
    for one in (3, 1):
        done = zexport.consolidate_part(run, out, Share(one, 3), _SHARDS)
        assert isinstance(done, zexport.PartReport)
        assert MANIFEST_NAME not in server.get(name)
    with pytest.raises(OutputError, match="another number of workers"):
        zexport.consolidate_part(run, out, Share(1, 2), _SHARDS)
    with pytest.raises(OutputError, match="was begun for another plan"):
        zexport.consolidate_part(run, out, Share(2, 3))
    done = zexport.consolidate_part(run, out, Share(2, 3), _SHARDS)
    assert isinstance(done, zexport.ExportReport)
    assert server.get(name) == _files(tmp_path / "near")
    server.requests.clear()
    zexport.consolidate_part(run, out, Share(2, 3), _OVERWRITE)
    assert not server.of("PUT")
    with pytest.raises(OutputError, match="no part of an export may empty it"):
        zexport.consolidate_part(run, out, Share(1, 3))


def test_parts_that_come_to_the_end_together_publish_once(
    run: Path, out: str, name: str, server: Server, tmp_path: Path
) -> None:
    zexport.consolidate(run, tmp_path / "near", _SHARDS)
    for one in (1, 2):
        zexport.consolidate_part(run, out, Share(one, 3), _SHARDS)

    def let_another_be_first(one: Request) -> None:
        if one.method == "PUT" and one.key.endswith(MANIFEST_NAME):
            server.fault = lambda _: None
            zexport.finish_export(out)

    server.fault = let_another_be_first
    zexport.consolidate_part(run, out, Share(3, 3), _SHARDS)
    assert server.get(name) == _files(tmp_path / "near")


@pytest.mark.parametrize("parts", [1, 2])
def test_nothing_fails_once_the_manifest_is_there(
    parts: int, run: Path, out: str, name: str, server: Server
) -> None:
    is_there = False

    def stop_then(one: Request) -> Answer | None:
        nonlocal is_there
        if is_there:
            return Answer("403 Forbidden", "AccessDenied")
        is_there = one.method == "PUT" and one.key.endswith(MANIFEST_NAME)
        return None

    if parts > 1:
        zexport.consolidate_part(run, out, Share(1, 2), _SHARDS)
    server.fault = stop_then
    if parts > 1:
        done = zexport.consolidate_part(run, out, Share(2, 2), _SHARDS)
    else:
        done = zexport.consolidate(run, out, _SHARDS)
    server.fault = lambda _: None
    told = rf"{out}/\{RECEIPTS} is of no use any more, and cannot be removed: the store refuses"
    assert re.match(told, done.warnings[-1])
    assert zexport.verify_export(out, against=run).ok
    with pytest.raises(OutputError, match="exists and is not empty"):
        zexport.consolidate(run, out, _SHARDS)
    assert not any(one.startswith(RECEIPTS) for one in server.get(name))


def test_parts_are_finished_by_hand_unless_a_shard_was_replaced(
    run: Path, out: str, name: str, server: Server
) -> None:
    def refuse(one: Request) -> Answer | None:
        is_last = one.method == "PUT" and one.key.endswith(MANIFEST_NAME)
        return Answer("403 Forbidden", "AccessDenied") if is_last else None

    zexport.consolidate_part(run, out, Share(2, 2), _SHARDS)
    server.fault = refuse
    with pytest.raises(OutputError, match="the store refuses access"):
        zexport.consolidate_part(run, out, Share(1, 2), _SHARDS)
    server.fault = lambda _: None
    shard = f"{name}/model-00002-of-00004.safetensors"
    content = bytes(obstore.get(server.store, shard).bytes())
    obstore.put(server.store, shard, content[:-1] + b"x")
    with pytest.raises(OutputError, match="has no receipt for model-00002-of-00004"):
        zexport.finish_export(out)
    obstore.put(server.store, shard, content)
    zexport.finish_export(out)
    assert zexport.verify_export(out, against=run).ok
    with pytest.raises(OutputError, match="has no parts that are to be"):
        zexport.finish_export(out)


def test_parts_in_a_bucket_do_not_mix_files_beside_the_weights(
    run: Path, out: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "tokenizer.json").write_text('{"model": {}, "added_tokens": []}')
    options = replace(_SHARDS, base=base)
    zexport.consolidate_part(run, out, Share(1, 2), options)
    (base / "tokenizer.json").write_text('{"model": {}, "added_tokens": [] }')
    with pytest.raises(OutputError, match=r"other files beside .*\(found another tokenizer"):
        zexport.consolidate_part(run, out, Share(2, 2), options)


def test_second_copies_are_compared_by_the_first_part_alone(
    out: str, name: str, server: Server, tmp_path: Path
) -> None:
    """As one process does: nothing is published where they differ, unless that is allowed."""
    run = copied("z2_w2_bf16_groups", tmp_path)
    states = file_of(run, "mp_rank_00_model_states.pt")
    saved = torch.load(states, weights_only=False)
    saved["module"]["lm_head.weight"] += 1
    torch.save(saved, states)
    far = server.put(run, f"{name}-run/{run.name}")
    strict = ExportOptions(layout=NameLayout.MEMORY, max_shard_nbytes=10_000)
    zexport.consolidate_part(far, out, Share(2, 2), strict)
    with pytest.raises(DamagedCheckpointError, match="lm_head"):
        zexport.consolidate_part(far, out, Share(1, 2), strict)
    assert MANIFEST_NAME not in server.get(name)
    lax = replace(strict, allow=frozenset({FindingKind.CAST_MISMATCH}))
    for number in (2, 1):
        zexport.consolidate_part(far, f"{out}-lax", Share(number, 2), lax)
    zexport.consolidate(far, f"{out}-whole", lax)
    assert server.get(f"{name}-lax") == server.get(f"{name}-whole")


def test_finishing_goes_on_where_it_was_killed_while_it_cleared_up(
    run: Path, out: str, name: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    zexport.consolidate_part(run, out, Share(1, 2), _SHARDS)
    with monkeypatch.context() as patch:
        patch.setattr(receipts, "remove", interrupt)
        with pytest.raises(KeyboardInterrupt):
            zexport.consolidate_part(run, out, Share(2, 2), _SHARDS)
    assert MANIFEST_NAME in server.get(name)
    report = zexport.finish_export(out)
    assert sorted(server.get(name)) == sorted(report.files)
    assert zexport.verify_export(out, against=run).ok


def test_each_command_of_the_page_on_large_checkpoints_ends_well(
    run: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "large.md").read_text()
    block = re.search(r"## Object storage.*?```sh\n(.*?)```", page, re.DOTALL)
    assert block is not None
    for prefix in ("run", "model"):
        obstore.delete(server.store, [f"{prefix}/{name}" for name in server.get(prefix)])
    server.put(run, "run")
    zexport.consolidate(run, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for line in block[1].splitlines():
        _, *words = line.split()
        cli.main(words, standalone_mode=False)
    assert MANIFEST_NAME in server.get("model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
