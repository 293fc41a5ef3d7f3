"""Checkpoints and models in Google's storage: its protocol, answered by what stands in for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import zexport
from tests.support.buckets import BUCKET, Server
from zexport.errors import CheckpointError, OutputError
from zexport.filenames import MANIFEST_NAME
from zexport.options import ExportOptions, ReshardOptions
from zexport.store.address import Address
from zexport.store.contents import read_edition, rewrite

_CKPT = Path(__file__).parents[2] / "fixtures" / "z2_w2_bf16_groups" / "ckpt"
_SHARDS = ExportOptions(max_shard_nbytes=30_000)


@pytest.fixture
def google(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, named as Google's users name theirs, with a checkpoint in it."""
    for name in server.environment:
        monkeypatch.delenv(name)
    for name, value in server.as_google(tmp_path).items():
        monkeypatch.setenv(name, value)
    server.put(_CKPT, f"google/{_CKPT.parent.name}/ckpt")
    return server


def test_every_command_reads_and_writes_there(google: Server, tmp_path: Path) -> None:
    far = f"gs://{BUCKET}/google/{_CKPT.parent.name}/ckpt"
    one, many = f"gs://{BUCKET}/google/one", f"gs://{BUCKET}/google/many"
    zexport.consolidate(_CKPT, tmp_path / "near", _SHARDS)
    zexport.consolidate(far, one, _SHARDS)
    for number in (2, 1):
        zexport.consolidate_part(far, many, zexport.Share(number, 2), _SHARDS)
    assert google.get("google/one") == google.get("google/many")
    assert zexport.verify_export(one, against=_CKPT).ok
    assert zexport.diff_models(one, tmp_path / "near").verdict.cause is zexport.Cause.NONE
    with pytest.raises(OutputError, match="exists and is not empty"):
        zexport.consolidate(far, one)
    zexport.consolidate(far, one, ExportOptions(overwrite=True))
    assert len([name for name in google.get("google/one") if name.endswith("safetensors")]) == 1
    zexport.reshard(far, f"{many}-ranks", ReshardOptions(world_size=3))
    assert zexport.open_checkpoint(f"{many}-ranks").ranks == 3
    with pytest.raises(CheckpointError, match="does not exist"):
        zexport.open_checkpoint(f"{far}/nothing")


def test_what_was_replaced_meanwhile_is_not_written_over(google: Server) -> None:
    """There each content has a number, and conditions are about that."""
    path = Address(f"gs:/{BUCKET}/google/ledger.json")
    first = rewrite(path, b"one", None)
    second = rewrite(path, b"two", first)
    with pytest.raises(FileExistsError):
        rewrite(path, b"three", first)
    assert read_edition(path) == (b"two", second)
    assert google.get("google")[path.name] == b"two"
    assert MANIFEST_NAME not in google.get("google")
