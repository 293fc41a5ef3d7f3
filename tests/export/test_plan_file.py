"""The sealed plan: parts and reruns recognize each other by its digest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import zexport
from tests.support.real_cases import FIXTURES
from zexport import OutputError
from zexport.export.plan_file import Request, SealedPlan, seal, unseal

Plan = zexport.ExportPlan


def plan(folder: Path) -> Plan:
    """The plan for a fixture whose files have a fixed time."""
    memory = zexport.ExportOptions(layout=zexport.NameLayout.MEMORY)
    root = shutil.copytree(FIXTURES / "z3_w2_bf16" / "ckpt", folder / "run", dirs_exist_ok=True)
    for path in root.rglob("*"):
        os.utime(path, ns=(0, 10**18))
    return zexport.plan_export(zexport.open_checkpoint(root), folder / "out", memory)


def sealed(made: Plan) -> SealedPlan:
    request = Request((str(made.out_dir.parent / "run"),), {})
    return unseal(seal(made, request), Path("plan"), made.out_dir)


def test_plan_survives_sealing(tmp_path: Path) -> None:
    made = plan(tmp_path)
    found = sealed(made)
    assert [*found.plan.shards] == [*made.shards]
    assert replace(found.plan, shards=()) == replace(made, shards=(), nbytes_compared=0)
    assert [one.nbytes for one in found.sizes] == [file.nbytes for file in made.shards]


def test_digest_is_the_same_in_every_folder(tmp_path: Path) -> None:
    here, there = (plan(tmp_path / name) for name in ("here", "there"))
    there = replace(there, jobs=7, chunk_nbytes=4096, overwrite=True)
    assert sealed(there).digest == sealed(here).digest


def with_tensors(made: Plan, *tensors: object) -> Plan:
    return replace(made, shards=(replace(made.shards[0], tensors=tensors),))


def with_tensor(made: Plan, **changes: object) -> Plan:
    first, *others = made.shards[0].tensors
    return with_tensors(made, replace(first, **changes), *others)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: with_tensors(made, *made.shards[0].tensors[1:]),
        lambda made: with_tensors(made, *made.shards[0].tensors[::-1]),
        lambda made: with_tensor(made, offset=0),
        lambda made: with_tensor(made, source=made.shards[0].tensors[1].source),
        lambda made: replace(made, sources=made.sources[::-1]),
        lambda made: replace(made, side_files=()),
    ],
)
def test_digest_changes_with_the_plan(change: Callable[[Plan], Plan], tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert sealed(change(made)).digest != sealed(made).digest


def test_damaged_plan_is_refused(tmp_path: Path) -> None:
    content = bytearray(seal(plan(tmp_path), Request((), {})))
    content[len(content) // 2] ^= 1
    with pytest.raises(OutputError, match="not a plan of this zexport"):
        unseal(bytes(content), Path("plan"), tmp_path / "out")
