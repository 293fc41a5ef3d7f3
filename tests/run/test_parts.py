"""An export in parts, each knowing the plan and the begun folder alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.stopping import SHARDS, files, files_of, four_shards
from zexport.errors import DamagedCheckpointError, OutputError
from zexport.plan.plan import ExportPlan
from zexport.ranges.dtypes import DType
from zexport.run.begin import Begun, Workplace, begin
from zexport.run.finish import Finished, finish
from zexport.run.part import write_part
from zexport.run.pieces import FileReader
from zexport.run.progress import Meter
from zexport.run.readback import VerifyMode
from zexport.run.receipts import RECEIPTS_NAME
from zexport.weights.proof import WeightReader


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    """Four files that share their records."""
    return four_shards(tmp_path / "ckpt", tmp_path / "out")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the parts meet."""
    (tmp_path / "parts").mkdir()
    return tmp_path / "parts"


def _work(plan: ExportPlan, folder: Path) -> Workplace:
    return Workplace.of(plan, folder, VerifyMode.READBACK, Meter(None, reads_again=True))


def _part(plan: ExportPlan, folder: Path, *numbers: int) -> None:
    with WeightReader.of_plan(plan) as sources:
        chosen = [plan.shards[number] for number in numbers]
        write_part(_work(plan, folder), chosen, FileReader(sources))


def _finish(plan: ExportPlan, folder: Path, begun: Begun) -> Finished:
    with WeightReader.of_plan(plan) as sources:
        return finish(_work(plan, folder), begun, FileReader(sources), sources.compare())


def test_parts_give_the_same_bytes_as_the_whole(
    plan: ExportPlan, folder: Path, tmp_path: Path
) -> None:
    """Each makes the plan anew, as another machine would."""
    whole = files_of(plan)
    begun = begin(_work(plan, folder))
    again = four_shards(tmp_path / "ckpt", tmp_path / "elsewhere")
    _part(again, folder, 2, 0)
    _part(four_shards(tmp_path / "ckpt", tmp_path / "out"), folder, 3, 1)
    finished = _finish(plan, folder, begun)
    found = {name: data for name, data in files(folder).items() if RECEIPTS_NAME not in name}
    assert found == whole
    assert finished.files.keys() == whole.keys()


def test_a_folder_lacks_what_no_part_has_written(plan: ExportPlan, folder: Path) -> None:
    begun = begin(_work(plan, folder))
    _part(plan, folder, 0, 1, 3)
    with pytest.raises(OutputError, match=f"has no receipt for {SHARDS[2]}"):
        _finish(plan, folder, begun)


def test_parts_of_two_plans_do_not_meet(plan: ExportPlan, folder: Path, tmp_path: Path) -> None:
    begin(_work(plan, folder))
    other = four_shards(tmp_path / "ckpt", tmp_path / "out", DType.BF16)
    with pytest.raises(OutputError, match="was begun for another plan"):
        _part(other, folder, 0)


def test_what_two_parts_read_is_proved_as_a_whole(
    plan: ExportPlan, folder: Path, tmp_path: Path
) -> None:
    """One of them read a byte that is no more what was saved; the other did not."""
    begun = begin(_work(plan, folder))
    _part(plan, folder, 0, 1)
    source = plan.sources[0]
    wrong = structs.replace(source.members[0], crc32=1)
    others = (structs.replace(source, members=(wrong, *source.members[1:])), *plan.sources[1:])
    spoilt = replace(plan, sources=others)
    with pytest.raises(OutputError, match="was begun for another plan"):
        _part(spoilt, folder, 2, 3)
    _flip(source.path, source.members[0].offset + source.members[0].nbytes - 40)
    _part(replaced := four_shards(tmp_path / "ckpt", tmp_path / "out"), folder, 2, 3)
    with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
        _finish(replaced, folder, begun)


def _flip(path: Path, at: int) -> None:
    from os import utime

    status = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
