"""``zexport verify`` reports every change of an export."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

import zexport
from tests.support.checkpoints import edit
from tests.support.published import check
from tests.support.stopping import SHARDS, Job, files, flip, four_shards
from zexport import OutputError, ReshardOptions
from zexport.filenames import MANIFEST_NAME

FIXTURES = Path(__file__).parents[2] / "fixtures"
INDEX = "model.safetensors.index.json"
W = tuple(f"layers.{n}.w" for n in range(4))
OTHER_BYTES = "does not contain the bytes that were written"
OTHER_VALUES = "has other values in the file than when exported"
OTHER_SHAPE = "has another shape or dtype in the file than when exported"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An export of four shards; not to be changed."""
    job = four_shards(tmp_path_factory.mktemp("exported"))
    job.run()
    return job


@pytest.fixture
def out(exported: Job, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(exported.out, tmp_path / "out")


def _problems(out: Path, against: Path | None = None) -> set[tuple[str, str, str]]:
    report = zexport.verify_export(out, against=against)
    assert report.ok == bool(report) == (not report.problems)
    return {(one.file, one.tensor, one.problem) for one in report.problems}


def _edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file; a manifest has the right digest afterwards."""
    table = json.loads(path.read_bytes())
    change(table)
    text = json.dumps({key: value for key, value in table.items() if key != "blake3"})
    rest = f"{{\n{text[1:]}"
    seal = f'  "blake3": "{blake3(rest.encode()).hexdigest()}",\n' if "blake3" in table else ""
    path.write_text(f"{{\n{seal}{text[1:]}")


def _digest(name: str, data: bytes) -> str:
    """Return a file's digest in the manifest; a shard's covers header and tensor digests."""
    if not name.endswith(".safetensors"):
        return blake3(data).hexdigest()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    table.pop("__metadata__", None)
    ranges = sorted(entry["data_offsets"] for entry in table.values())
    digests = [blake3(data[begin + a : begin + b]).digest() for a, b in ranges]
    return blake3(data[:begin] + b"".join(digests)).hexdigest()


def _relist(out: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed."""
    data = (out / name).read_bytes()
    entry = {"nbytes": len(data), "blake3": _digest(name, data)}
    _edit_json(out / MANIFEST_NAME, lambda table: table["files"].update({name: entry}))


def test_sound_export_has_no_problems(exported: Job) -> None:
    steps: list[zexport.Progress] = []
    report = zexport.verify_export(exported.out, against=exported.source, progress=steps.append)
    assert report.ok
    assert (report.files, report.tensors, report.against_checkpoint) == (6, 4, True)
    assert steps[-1].nbytes_done == steps[-1].nbytes_total


def test_manifest_has_the_digests_of_the_bytes_on_the_disk(exported: Job) -> None:
    found = files(exported.out)
    manifest = check("manifest", json.loads(found.pop(MANIFEST_NAME)))
    assert {name: (one["nbytes"], one["blake3"]) for name, one in manifest["files"].items()} == {
        name: (len(data), _digest(name, data)) for name, data in found.items()
    }
    for name, shard in zip(W, SHARDS, strict=True):
        entry, tensor = manifest["tensors"][name], load_file(exported.out / shard)[name]
        assert entry["blake3"] == blake3(tensor.numpy().tobytes()).hexdigest()
        assert (entry["shard"], entry["dtype"], entry["shape"]) == (shard, "F32", [500, 500])
    for one in manifest["sources"]:
        status = next(exported.source.glob(f"*/{Path(one['path']).name}")).stat()
        assert (one["nbytes"], one["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    lines = (exported.out / MANIFEST_NAME).read_bytes().splitlines(keepends=True)
    others = [line for line in lines if not line.startswith(b'  "blake3": ')]
    assert manifest["blake3"] == blake3(b"".join(others)).hexdigest()


def _swap(out: Path) -> None:
    save_file({W[0]: torch.zeros(100, 10), "new": torch.zeros(1)}, out / SHARDS[0])
    _relist(out, SHARDS[0])


_TAMPERED: dict[str, tuple[Callable[[Path], object], tuple[str, str, str]]] = {
    "value": (lambda out: flip(out / SHARDS[1], -1), (SHARDS[1], W[1], OTHER_VALUES)),
    "header": (
        lambda out: flip(out / SHARDS[1], 34),
        (SHARDS[1], "", "header"),
    ),
    "small file": (lambda out: flip(out / "README.md", -1), ("README.md", "", OTHER_BYTES)),
    "missing shard": (
        lambda out: (out / SHARDS[0]).unlink(),
        (SHARDS[0], "", "cannot be read"),
    ),
    "cut shard": (
        lambda out: os.truncate(out / SHARDS[0], 1_000_119),
        (SHARDS[0], "", "1000119 bytes"),
    ),
    "stray shard": (
        lambda out: save_file({"x": torch.ones(1)}, out / "stray.safetensors"),
        ("stray.safetensors", "", "not listed"),
    ),
    "another shape": (_swap, (SHARDS[0], W[0], OTHER_SHAPE)),
    "another tensor": (_swap, (SHARDS[0], "new", "is in the file but was not exported")),
}


@pytest.mark.parametrize("what", _TAMPERED)
def test_tampering_is_reported(out: Path, what: str) -> None:
    act, (name, tensor, words) = _TAMPERED[what]
    act(out)
    found = _problems(out)
    assert any((file, of) == (name, tensor) and words in text for file, of, text in found)
    assert {file for file, *_ in found} <= {name, INDEX}


def test_changed_line_of_a_manifest_is_reported(out: Path) -> None:
    path = out / MANIFEST_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines[::3]):
        digits = (c for c in b"0123456789" if bytes([c]) in line)
        other = line.replace(bytes([next(digits, 0)]), b"z", 1) + b" "
        path.write_bytes(b"".join([*lines[: 3 * number], other, *lines[3 * number + 1 :]]))
        assert _problems(out), line
    path.write_bytes(b"".join(lines))
    assert not _problems(out)


@pytest.mark.parametrize("key", ["schema", "files", "tensors", "sources"])
def test_malformed_manifest_is_refused(out: Path, key: str) -> None:
    for value in (None, 7, "x", ["x"], {"x": "x"}):
        _edit_json(out / MANIFEST_NAME, lambda table, value=value: table.update({key: value}))
        assert MANIFEST_NAME in {file for file, *_ in _problems(out)}
        with pytest.raises(OutputError, match=MANIFEST_NAME):
            zexport.consolidate(FIXTURES / "z3_w2_bf16" / "ckpt", out, overwrite=True)


# --- against a checkpoint ---


def test_other_values_in_the_checkpoint_are_reported(
    exported: Job, out: Path, tmp_path: Path
) -> None:
    other = four_shards(tmp_path, seed=1).source
    report = zexport.verify_export(out, against=other)
    found = {(one.file, one.tensor, one.problem) for one in report.problems}
    assert found == {
        (shard, name, "has other values in the checkpoint than when exported")
        for shard, name in zip(SHARDS, W, strict=True)
    }
    assert "another run or step" in report.conclusion
    (out / SHARDS[0]).write_bytes(b"")
    assert zexport.verify_export(out, against=other).conclusion == ""
    assert not _problems(exported.out)


def test_other_source_files_with_equal_tensors_are_reported(exported: Job, out: Path) -> None:
    path = out / MANIFEST_NAME
    _edit_json(path, lambda table: table["sources"][0].update(mtime_ns=1))
    assert not _problems(out, exported.source)  # it was only copied
    _edit_json(path, lambda table: table["sources"][0].update(blake3="00"))
    report = zexport.verify_export(out, against=exported.source)
    (problem,) = report.problems
    assert problem.problem.endswith("is not what was read for the export")
    assert "equal" in report.conclusion
    _edit_json(path, lambda table: table["sources"][0].update(path="other.pt"))
    assert {one.partition(".pt ")[2] for *_, one in _problems(out, exported.source)} == {
        "was not read for the export",
        "is not read any more",
    }


# --- a resharded checkpoint ---


def test_tampering_with_a_resharded_checkpoint_is_reported(tmp_path: Path) -> None:
    source = FIXTURES / "z2_w2_bf16_tied" / "ckpt"
    job = Job(source, tmp_path / "out", ReshardOptions(world_size=3))
    job.run()
    assert not _problems(job.out)
    assert not _problems(job.out, source)
    path = next(job.out.glob("*/*rank_1_*optim*"))
    name, content = path.relative_to(job.out).as_posix(), path.read_bytes()
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    flat = state["single_partition_of_fp32_groups"][0].numpy().tobytes()
    flip(path, content.rindex(flat) + 4)
    found = _problems(job.out)
    assert (name, "", OTHER_BYTES) in found
    assert [tensor for _, tensor, problem in found if problem == OTHER_VALUES]
    path.write_bytes(content)
    stray = path.with_name("stray_optim_states.pt")
    stray.write_bytes(content)
    name = stray.relative_to(job.out).as_posix()
    assert _problems(job.out) == {(name, "", "is not listed in the manifest")}
    stray.unlink()
    other = shutil.copytree(source, tmp_path / "other")
    edit(next(other.glob("*/*rank_0_*optim*")), _add_to_states)
    assert "has other values in the checkpoint than when exported" in {
        one[2] for one in _problems(job.out, other)
    }


def _add_to_states(state: dict[str, Any]) -> None:
    for one in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        one["exp_avg"] += 1
