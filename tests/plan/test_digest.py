"""A plan's digest: of what it says, however it was put together and wherever it was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.plans import Wanted, export_plan
from zexport.formats.safetensors_file import SafetensorsFrame
from zexport.plan.digest import PlanDigest
from zexport.plan.plan import ExportPlan, Reference, SideFile, SourceFile
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Chain, Extent, Member, Striped, Window
from zexport.store.versions import Version


def _ranks(folder: str) -> tuple[ByteSource, ...]:
    return tuple(Chain((Extent(Path(folder, f"{name}.pt"), 0, 40),)) for name in "ab")


def _plan(folder: str = "here", tensors: int = 2) -> ExportPlan:
    """A plan over two files that need not be there."""
    source = Striped(_ranks(folder), 8, 8, 16)
    wanted = [Wanted(f"x{n}", (4,), DType.F32, DType.F32, source) for n in range(tensors)]
    members = (Member("data/0", 0, 40, 7),)
    return export_plan(
        Path(folder, "out"),
        {"model.safetensors": wanted},
        [SourceFile(Path(folder, f"{name}.pt"), Version(40, 1), members) for name in "ab"],
        side_files=(SideFile("config.json", b"{}"),),
    )


def _digests(plan: ExportPlan) -> tuple[str, str]:
    digest = PlanDigest(plan)
    return digest.whole, digest.of_file(plan.shards[0])


def test_the_same_plan_made_elsewhere_and_in_other_memory_has_the_same_digest() -> None:
    plan = replace(_plan("there"), jobs=4, chunk_nbytes=4096, overwrite=True)
    assert _digests(plan) == _digests(_plan("here"))


def test_it_does_not_depend_on_what_is_shared() -> None:
    plan = _plan()
    apart = [
        structs.replace(t, source=Striped(_ranks("here"), 8, 8, 16)) for t in plan.shards[0].tensors
    ]
    assert _digests(_with(plan, tensors=tuple(apart))) == _digests(plan)


def _with(plan: ExportPlan, **changes: object) -> ExportPlan:
    return replace(plan, shards=(structs.replace(plan.shards[0], **changes),))  # type: ignore[arg-type]


def _with_tensor(plan: ExportPlan, **changes: object) -> ExportPlan:
    first, *others = plan.shards[0].tensors
    return _with(plan, tensors=(structs.replace(first, **changes), *others))  # type: ignore[arg-type]


def _with_source(plan: ExportPlan, **changes: object) -> ExportPlan:
    first, *others = plan.sources
    return replace(plan, sources=(structs.replace(first, **changes), *others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: _with(plan, frame=SafetensorsFrame(b"Header")),
        lambda plan: _with(plan, filename="other.safetensors"),
        lambda plan: _with(plan, tensors=plan.shards[0].tensors[:1]),
        lambda plan: _with(plan, tensors=plan.shards[0].tensors[::-1]),
        lambda plan: _with_tensor(plan, name="z"),
        lambda plan: _with_tensor(plan, dtype=DType.BF16),
        lambda plan: _with_tensor(plan, shape=(2, 2)),
        lambda plan: _with_tensor(plan, offset=0),
        lambda plan: _with_tensor(plan, stored_name="z"),
        lambda plan: _with_tensor(plan, stored_dtype=DType.BF16),
        lambda plan: _with_tensor(plan, source=Striped(_ranks("here"), 12, 8, 16)),
        lambda plan: _with_tensor(plan, source=Striped(_ranks("here")[::-1], 8, 8, 16)),
        lambda plan: _with_tensor(plan, source=Window(_ranks("here")[0], 8, 16)),
        lambda plan: _with_source(plan, version=Version(40, 2)),
        lambda plan: _with_source(plan, members=(Member("data/0", 0, 40, 8),)),
        lambda plan: replace(plan, sources=plan.sources[::-1]),
        lambda plan: replace(plan, reference=Reference(Path("here"), "global_step3", ())),
    ],
)
def test_any_difference_shows(change: Callable[[ExportPlan], ExportPlan]) -> None:
    whole, of_file = _digests(change(_plan()))
    assert whole != _digests(_plan())[0]
    assert of_file != _digests(_plan())[1]


def test_what_is_beside_the_weights_is_the_plans_and_not_the_files() -> None:
    plan = _plan()
    other = replace(plan, side_files=(SideFile("config.json", b"[]"),))
    assert _digests(other)[0] != _digests(plan)[0]
    assert _digests(other)[1] == _digests(plan)[1]
    assert _digests(replace(plan, provenance={}))[0] != _digests(plan)[0]


def test_another_version_of_zexport_has_other_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _digests(_plan())
    monkeypatch.setattr("zexport.plan.digest.__version__", "9.9")
    assert not {*before} & {*_digests(_plan())}


def test_what_many_share_is_looked_into_once() -> None:
    reads: list[str] = []

    class Counted(Extent):
        def __getattribute__(self, name: str) -> object:
            reads.append(name)
            return super().__getattribute__(name)

    shared = (Counted(Path("here/a.pt"), 0, 40),)
    plan = _plan(tensors=100)
    tensors = [
        structs.replace(t, source=Striped(shared, 0, 40, 16)) for t in plan.shards[0].tensors
    ]
    PlanDigest(_with(plan, tensors=tuple(tensors)))
    assert reads.count("offset") == 1
