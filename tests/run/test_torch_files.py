"""An output of ``.pt`` files, with every promise that one of safetensors has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from tests.support.plans import export_plan, save, saved
from tests.support.stopping import files, files_of, stopped_after
from zexport.errors import VerificationError
from zexport.export.plan import ExportPlan, plan_torch_file
from zexport.formats.inert import Ordered, TensorLeaf
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Chain
from zexport.run.execute import run_plan
from zexport.run.verify import verify_export


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    """Two files in a folder: tied, cast, padded and empty tensors in one, none in the other."""
    masters, moments = torch.arange(1000.0), torch.arange(333.0)
    source, (first, second) = save(tmp_path / "ckpt" / "a.pt", [masters, moments])
    tied = TensorLeaf((10, 100), DType.BF16, first, DType.F32)
    value = {
        "module": Ordered({"a.w": tied, "b.w": tied, "e": _zeros(0)}),
        "flat": [
            TensorLeaf((1000,), DType.F32, first, DType.F32),
            TensorLeaf((340,), DType.F32, Chain((second, Zeros(28))), DType.F32),
        ],
        "step": 3,
    }
    empty = export_plan(tmp_path / "out", {}, [source], chunk_nbytes=512)
    files = plan_torch_file("step3/a.pt", value), plan_torch_file("step3/b.pt", {"e": _zeros(0, 2)})
    return replace(empty, shards=files)


def _zeros(*shape: int) -> TensorLeaf:
    nbytes = TensorLeaf(shape, DType.F32, Zeros(0), DType.F32).nbytes
    return TensorLeaf(shape, DType.F32, Zeros(nbytes), DType.F32)


def test_torch_loads_what_was_planned(plan: ExportPlan) -> None:
    report = run_plan(plan)
    assert report.files == ("step3/a.pt", "step3/b.pt", "zexport_manifest.json")
    loaded = torch.load(plan.out_dir / "step3/a.pt", weights_only=True, mmap=True)
    assert torch.equal(loaded["module"]["a.w"], torch.arange(1000.0).view(10, 100).bfloat16())
    assert loaded["module"]["b.w"] is loaded["module"]["a.w"]
    assert torch.equal(loaded["flat"][0], torch.arange(1000.0))
    padded = torch.cat([torch.arange(333.0), torch.zeros(7)])
    assert torch.equal(loaded["flat"][1], padded)
    assert torch.load(plan.out_dir / "step3/b.pt")["e"].shape == (0, 2)


def test_a_file_that_holds_other_tensors_is_never_committed(plan: ExportPlan) -> None:
    other = plan_torch_file("step3/a.pt", {"x": _zeros(2)})
    first = structs.replace(plan.shards[0], frame=other.frame, tensors=plan.shards[0].tensors[:1])
    with pytest.raises(VerificationError, match="not a whole zip archive"):
        run_plan(replace(plan, shards=(first,)))
    assert not plan.out_dir.exists()


def test_a_rerun_takes_files_in_folders_over_and_gives_the_same_bytes(plan: ExportPlan) -> None:
    whole = files_of(plan)
    with stopped_after(1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run_plan(plan)
    stale = plan.out_dir.with_name("out.partial") / "old" / "deep" / "c.pt"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of another plan")
    report = run_plan(plan)
    assert report.resumed == ("step3/a.pt",)
    assert files(plan.out_dir) == whole
    assert not (plan.out_dir / "old").exists()


def _problems(plan: ExportPlan, *, against: bool = False) -> set[tuple[str, str, str]]:
    report = verify_export(plan.out_dir, plan=plan if against else None)
    assert report.ok == (not report.problems)
    return {(one.file, one.tensor, one.problem) for one in report.problems}


def test_verify_holds_every_byte_against_manifest_and_sources(plan: ExportPlan) -> None:
    run_plan(plan)
    assert _problems(plan) == _problems(plan, against=True) == set()
    path = plan.out_dir / "step3/a.pt"
    content, tensor = path.read_bytes(), plan.shards[0].tensors[1]
    values = ("step3/a.pt", "step3/a.pt/flat/0", "does not hold the values that were written")
    other = ("step3/a.pt", "", "does not hold the bytes that were written")
    for at, told in (
        (tensor.offset + 5, {values, other}),
        (tensor.offset - 1, {other}),  # what pads a record's own header
    ):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert _problems(plan) == told
    path.write_bytes(content.replace(b"PK\x05\x06", b"PK\x05\x07"))
    told = _problems(plan)
    assert other in told
    ((file, _, problem),) = told - {other}
    assert (file, "not a whole zip archive" in problem) == ("step3/a.pt", True)
    path.write_bytes(content)
    (plan.out_dir / "step3/c.pt").write_bytes(content)
    assert _problems(plan) == {("step3/c.pt", "", "is not listed in the manifest")}


def test_verify_against_another_state_names_the_tensors(plan: ExportPlan, tmp_path: Path) -> None:
    run_plan(plan)
    save(tmp_path / "ckpt" / "a.pt", [torch.arange(1000.0) + 1, torch.arange(333.0)])
    source, _ = saved(tmp_path / "ckpt" / "a.pt")
    found = _problems(replace(plan, sources=(source,)), against=True)
    told = "has other values in the checkpoint"
    names = "step3/a.pt/module/a.w", "step3/a.pt/flat/0"
    assert found == {("step3/a.pt", name, told) for name in names}
