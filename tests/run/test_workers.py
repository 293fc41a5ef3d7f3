"""An export by several workers, each knowing the plan and the unfinished folder alone."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from errno import ENOLCK
from os import utime
from pathlib import Path
from threading import Timer

import pytest
import torch
from msgspec import structs

from tests.support.plans import save
from tests.support.stopping import SHARDS, files, files_of, four_shards, stopped_after
from zexport import consolidate, consolidate_part, finish_export, verify_export
from zexport.errors import (
    DamagedCheckpointError,
    OutputError,
    UnsafeError,
    UsageError,
    VerificationError,
    ZexportError,
)
from zexport.export.plan import ExportPlan, SideFile
from zexport.export.plan_digest import PlanDigest
from zexport.export.proof import WeightReader
from zexport.filenames import RECEIPTS
from zexport.options import Engine, ExportOptions
from zexport.ranges.dtypes import DType
from zexport.run import workers
from zexport.run.begin import Workplace
from zexport.run.execute import ExportReport, PartReport, run_plan
from zexport.run.part import write_part
from zexport.run.pieces import FileReader
from zexport.run.progress import Meter
from zexport.run.readback import VerifyMode
from zexport.run.receipts import _sealed, finished_files
from zexport.run.shares import Share, divide, whole
from zexport.run.workers import finish_parts, run_part, write_share
from zexport.store.publish import locked, locked_part

_NOW = time.time()
FIXTURE = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    """Four files that share their records."""
    return four_shards(tmp_path / "ckpt", tmp_path / "out")


def _again(tmp_path: Path) -> ExportPlan:
    """The same plan, as another machine makes it."""
    return four_shards(tmp_path / "ckpt", tmp_path / "out")


def _parts(tmp_path: Path, count: int, *numbers: int) -> list[ExportReport | PartReport]:
    return [run_part(_again(tmp_path), Share(number, count)) for number in numbers]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 40])
def test_parts_in_any_order_give_the_same_bytes_as_one_process(
    plan: ExportPlan, tmp_path: Path, count: int
) -> None:
    """With 3 and more, shards are cut within tensors; 40 are shorter than a chunk."""
    expected = files_of(plan)
    order = [*range(2, count + 1, 2), *range(1, count + 1, 2)]
    *before, last = _parts(tmp_path, count, *order)
    assert files(plan.out_dir) == expected
    assert isinstance(last, ExportReport)
    assert all(isinstance(report, PartReport) for report in before)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out.")] == []


def test_parts_side_by_side_give_the_same_bytes(plan: ExportPlan, tmp_path: Path) -> None:
    expected = files_of(plan)
    with ThreadPoolExecutor(6) as workers:
        reports = [*workers.map(lambda n: _parts(tmp_path, 6, n)[0], range(1, 7))]
    assert sum(isinstance(report, ExportReport) for report in reports) == 1
    assert files(plan.out_dir) == expected


def test_shares_cut_tensors_where_no_border_is_near(plan: ExportPlan) -> None:
    names = [one.name for share in divide(plan.shards, 7) for one in share]
    assert any("@" in name for name in names)
    assert len(set(names)) == len(names)


def test_a_worker_that_was_stopped_goes_on_from_its_receipts(
    plan: ExportPlan, tmp_path: Path
) -> None:
    expected = files_of(plan)
    with stopped_after(1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        _parts(tmp_path, 2, 1)
    first, last = _parts(tmp_path, 2, 1, 2)
    assert isinstance(first, PartReport)
    assert first.nbytes_written < sum(file.data_nbytes for file in plan.shards[:2])
    assert isinstance(last, ExportReport)
    assert files(plan.out_dir) == expected


def test_the_only_worker_goes_on_from_its_receipts_too(
    plan: ExportPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.utime", lambda *_, **__: None)  # all files get one time in the end
    expected, request = files_of(plan), {"paths": ["ckpt"]}
    with stopped_after(2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run_part(_again(tmp_path), Share(1, 1), request=request)
    partial = tmp_path / "out.partial"
    left = {name: (partial / name).stat().st_mtime_ns for name in finished_files(partial)}
    assert left
    assert isinstance(run_part(_again(tmp_path), Share(1, 1), request=request), ExportReport)
    assert {name: (plan.out_dir / name).stat().st_mtime_ns for name in left} == left
    assert files(plan.out_dir) == expected


def test_a_part_tells_which_are_still_to_come(tmp_path: Path, plan: ExportPlan) -> None:
    (report,) = _parts(tmp_path, 4, 2)
    assert isinstance(report, PartReport)
    assert report.missing == (1, 3, 4)
    assert not plan.out_dir.exists()


def test_a_part_that_is_run_again_after_all_finds_its_work_done(
    plan: ExportPlan, tmp_path: Path
) -> None:
    """As a scheduler does with a task that it had stopped; nothing is left beside the folder."""
    _parts(tmp_path, 3, 1, 2, 3)
    before = files(plan.out_dir)
    for report in _parts(tmp_path, 3, 3, 2):
        assert isinstance(report, PartReport)
        assert report.missing == ()
        assert report.nbytes_written == 0
        assert report.nbytes_read > 0
    assert files(plan.out_dir) == before
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt", "out"}


def test_a_folder_of_other_weights_is_not_taken_for_the_parts_own(
    plan: ExportPlan, tmp_path: Path
) -> None:
    """Also where the checkpoint has the names, sizes and times of the one that it was made of."""
    _parts(tmp_path, 2, 1, 2)
    before = files(plan.out_dir)
    with pytest.raises(OutputError, match="exists and is not empty"):
        run_part(four_shards(tmp_path / "ckpt", tmp_path / "out", DType.BF16), Share(1, 2))
    source = tmp_path / "ckpt" / "rank_0.pt"
    status = source.stat()
    save(source, [tensor + 1 for tensor in torch.load(source).values()])
    utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source.stat().st_size == status.st_size
    with pytest.raises(OutputError, match="holds other weights than this part would write"):
        _parts(tmp_path, 2, 1)
    assert files(plan.out_dir) == before


def test_a_folder_that_lost_a_file_is_not_complete(plan: ExportPlan, tmp_path: Path) -> None:
    _parts(tmp_path, 2, 1, 2)
    (plan.out_dir / SHARDS[3]).unlink()
    with pytest.raises(OutputError, match="exists and is not empty"):
        _parts(tmp_path, 2, 1)


def test_verifying_what_is_not_finished_says_so(plan: ExportPlan, tmp_path: Path) -> None:
    _parts(tmp_path, 3, 1)
    told = r": is not finished \(found .*out\.partial\)\. Run .* type zexport finish /.*/out\."
    for path in (plan.out_dir, plan.out_dir.with_name("out.partial")):
        with pytest.raises(VerificationError, match=re.escape(path.name) + told):
            verify_export(path)


def test_nothing_is_published_while_a_part_is_missing(plan: ExportPlan, tmp_path: Path) -> None:
    _parts(tmp_path, 3, 1, 3)
    with pytest.raises(OutputError, match=r"lacks parts \(found 2 of 3, expected also 2/3\)"):
        finish_parts(plan)
    assert not plan.out_dir.exists()


def test_a_set_whose_last_worker_died_before_publishing_is_finished_by_hand(
    plan: ExportPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    with monkeypatch.context() as patch:
        patch.setattr("zexport.run.workers._published", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            _parts(tmp_path, 2, 2)
    finish_parts(_again(tmp_path))
    assert files(plan.out_dir) == expected


def _interrupted(*_: object, **__: object) -> ExportReport:
    raise KeyboardInterrupt


def test_finishing_where_no_part_was_is_refused(plan: ExportPlan) -> None:
    with pytest.raises(OutputError, match="has no parts that are to be finished"):
        finish_parts(plan)


def test_nothing_is_written_where_the_folder_was_not_begun(
    plan: ExportPlan, tmp_path: Path
) -> None:
    work = Workplace.of(plan, tmp_path, VerifyMode.NONE, Meter(None, reads_again=False))
    with (
        WeightReader.of_plan(plan) as sources,
        pytest.raises(OutputError, match="was not begun for this plan"),
    ):
        write_part(work, [*map(whole, plan.shards)], FileReader(sources))


def test_the_reference_engine_has_no_parts(tmp_path: Path) -> None:
    options = ExportOptions(engine=Engine.DEEPSPEED)
    with pytest.raises(UsageError, match="parts are written by the native engine alone"):
        consolidate_part(FIXTURE, tmp_path / "model", Share(1, 2), options)


def test_parts_of_two_plans_do_not_meet(tmp_path: Path) -> None:
    _parts(tmp_path, 2, 1)
    other = four_shards(tmp_path / "ckpt", tmp_path / "out", DType.BF16)
    with pytest.raises(OutputError, match="was begun for another plan"):
        run_part(other, Share(2, 2))


def test_files_beside_the_weights_do_not_change_between_parts(tmp_path: Path) -> None:
    root, out = tmp_path / "ckpt", tmp_path / "out"
    shutil.copytree(FIXTURE, root)
    consolidate_part(root, out, Share(1, 2))
    (root / "tokenizer_config.json").write_text("{}")
    for again in (lambda: consolidate_part(root, out, Share(2, 2)), lambda: finish_export(out)):
        with pytest.raises(OutputError, match="other files beside the weights"):
            again()
    shutil.copy(FIXTURE / "tokenizer_config.json", root)
    assert isinstance(consolidate_part(root, out, Share(2, 2)), ExportReport)


@pytest.mark.parametrize("damage", [b"", b"{}"], ids=["emptied", "changed"])
def test_a_small_file_that_a_power_cut_has_emptied_is_written_again(
    damage: bytes, tmp_path: Path
) -> None:
    one, out = tmp_path / "one", tmp_path / "out"
    consolidate(FIXTURE, one)
    consolidate_part(FIXTURE, out, Share(1, 2))
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / "out.partial" / name).write_bytes(damage)
    assert isinstance(consolidate_part(FIXTURE, out, Share(2, 2)), ExportReport)
    assert files(out) == files(one)


def test_workers_that_count_differently_do_not_meet(tmp_path: Path) -> None:
    _parts(tmp_path, 2, 1)
    with pytest.raises(OutputError, match=r"another number of workers \(found 2, expected 3\)"):
        _parts(tmp_path, 3, 2)


def test_a_share_of_a_folder_that_is_not_there_is_not_begun_here(
    plan: ExportPlan, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="was begun on another machine, and is not there"):
        write_share(plan, Share(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_none_waits_while_another_works_out_what_the_plan_is(
    plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes seconds for a large model, and as many workers may begin at the same time."""

    def digest(of: ExportPlan) -> PlanDigest:
        with locked(plan.out_dir):  # which is refused where another holds it
            return PlanDigest(of)

    monkeypatch.setattr(workers, "PlanDigest", digest)
    assert isinstance(run_part(plan, Share(1, 2)), PartReport)
    assert isinstance(run_part(plan, Share(2, 2)), ExportReport)


def test_a_folder_is_not_begun_anew_under_those_that_write_to_it(
    plan: ExportPlan, tmp_path: Path
) -> None:
    """A note that is damaged, or of another version's form, says of nothing that it was begun."""
    expected = files_of(plan)
    run_part(plan, Share(1, 3))
    partial = tmp_path / "out.partial"
    (partial / RECEIPTS / "plan").write_bytes(b"of another form\n{}")
    before = files(partial)
    with locked_part(plan.out_dir, 2), pytest.raises(OutputError, match="written to by other"):
        run_part(_again(tmp_path), Share(3, 3), verify=VerifyMode.NONE)
    assert files(partial) == before
    _parts(tmp_path, 3, 3, 1, 2)
    assert files(plan.out_dir) == expected


def test_two_workers_of_one_number_do_not_meet(plan: ExportPlan, tmp_path: Path) -> None:
    with (
        locked_part(plan.out_dir, 1),
        pytest.raises(OutputError, match="another process writes part 1 of this folder"),
    ):
        _parts(tmp_path, 2, 1)


def test_a_worker_that_was_started_again_publishes_in_the_place_of_the_one_before_it(
    plan: ExportPlan, tmp_path: Path
) -> None:
    """While it is at work, nobody takes the folder away from under it."""
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    with locked_part(plan.out_dir, 1):
        (report,) = _parts(tmp_path, 2, 2)
        assert isinstance(report, PartReport)
        assert report.missing == (1,)
        with pytest.raises(OutputError, match=r"still written to .*\(found parts 1\)\. Wait"):
            finish_parts(plan)
    assert isinstance(_parts(tmp_path, 2, 1)[0], ExportReport)
    assert files(plan.out_dir) == expected


def test_a_worker_that_died_before_the_last_step_leaves_it_to_the_next(
    plan: ExportPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receipts are gone, and the folder has all but its name; the manifest vouches for it."""
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    with monkeypatch.context() as patch:
        patch.setattr("zexport.run.workers.publish", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            _parts(tmp_path, 2, 2)
    (report,) = _parts(tmp_path, 2, 2)
    assert report.nbytes_read
    assert files(plan.out_dir) == expected


@pytest.mark.parametrize("at", ["receipts.remove_all", "receipts.remove", "workers.publish"])
@pytest.mark.parametrize("is_finished_by_hand", [False, True])
def test_a_worker_that_died_while_it_cleared_up_leaves_a_folder_that_lacks_its_name_alone(
    at: str, is_finished_by_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was made of may be gone by then: the manifest says what it is."""
    run = FIXTURE
    whole = consolidate(run, tmp_path / "whole")
    expected, out = files(tmp_path / "whole"), tmp_path / "out"
    consolidate_part(run, out, Share(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(f"zexport.run.{at}", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            consolidate_part(run, out, Share(2, 2))
    assert not out.exists()
    if is_finished_by_hand:
        done = finish_export(out)
        assert (done.form, done.files, done.tensors) == (whole.form, whole.files, whole.tensors)
    else:
        consolidate_part(run, out, Share(1, 2))
    assert files(out) == expected
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.")]


@pytest.mark.parametrize("at", ["receipts.remove_all", "receipts.remove", "workers.publish"])
def test_workers_that_are_started_again_together_need_none_whose_part_was_done(
    at: str, plan: ExportPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third part's note was removed already; its worker has ended well, and comes no more."""
    expected = files_of(plan)
    _parts(tmp_path, 3, 1, 3)
    with monkeypatch.context() as patch:
        patch.setattr(f"zexport.run.{at}", _stopped_at_the_last)
        with pytest.raises(KeyboardInterrupt):
            _parts(tmp_path, 3, 2)
    with locked_part(plan.out_dir, 2):  # started again, too, and in wait for its turn
        _parts(tmp_path, 3, 1)
    _parts(tmp_path, 3, 2)
    assert files(plan.out_dir) == expected
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.")]


def _stopped_at_the_last(places: Iterable[Path] | Path = (), *_: object, **__: object) -> None:
    """The work of ``remove_all`` but for the file that it would remove last, where it is that."""
    if not isinstance(places, Path):
        for place in [*places][:-1]:
            place.unlink()
    raise KeyboardInterrupt


@pytest.mark.parametrize("keeps_receipts", [True, False])
def test_a_folder_with_receipts_is_an_exports_own_though_its_lock_is_gone(
    keeps_receipts: bool, plan: ExportPlan, tmp_path: Path
) -> None:
    """Where locks do nothing, the one that ends first may remove the file of another's."""
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    for lock in tmp_path.glob("out.partial*.lock"):
        lock.unlink()
    if keeps_receipts:
        _parts(tmp_path, 2, 2)
        assert files(plan.out_dir) == expected
        return
    shutil.rmtree(tmp_path / "out.partial" / RECEIPTS)
    with pytest.raises(OutputError, match="is in the way"):
        _parts(tmp_path, 2, 2)


@pytest.mark.usefixtures("plan")
def test_a_folder_of_the_users_stays_whoever_came_to_it_first(tmp_path: Path) -> None:
    """A worker that was killed before it could refuse the folder has left the lock's file."""
    mine = tmp_path / "out.partial" / "mine.txt"
    mine.parent.mkdir()
    mine.touch()
    (tmp_path / "out.partial.lock").touch()
    for number in (1, 2):
        with pytest.raises(OutputError, match="is in the way"):
            _parts(tmp_path, 2, number)
    assert mine.exists()


def test_who_looks_whether_a_part_is_at_work_keeps_its_worker_from_nothing(
    plan: ExportPlan, tmp_path: Path
) -> None:
    with ExitStack() as look:
        look.enter_context(locked_part(plan.out_dir, 1))
        end = Timer(0.4, look.close)
        end.start()
        (report,) = _parts(tmp_path, 2, 1)
        end.join()
    assert report.missing == (2,)


def test_a_finished_folder_takes_no_others_place_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = FIXTURE, tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("zexport.run.workers.publish", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            consolidate_part(run, out, Share(1, 1))
    out.mkdir()
    (out / "mine.txt").touch()
    with pytest.raises(OutputError, match="is there, and the folder that is finished beside it"):
        finish_export(out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["../evil.safetensors", "/evil.safetensors", "a/../../evil.json"])
def test_no_plan_names_a_file_outside_its_folder(
    name: str, plan: ExportPlan, tmp_path: Path
) -> None:
    """Whatever it was read from: names in a checkpoint, or what another worker has noted."""
    before = {path.name for path in tmp_path.iterdir()}
    evil = replace(plan, side_files=(SideFile(name, content=b"x"),))
    with pytest.raises(UnsafeError, match="would be left by a file that the plan names"):
        run_plan(evil)
    assert {path.name for path in tmp_path.iterdir()} == before
    _parts(tmp_path, 2, 1)
    noted = tmp_path / "out.partial" / RECEIPTS / "plan"
    table = json.loads(noted.read_bytes().partition(b"\n")[2])
    table["side_files"][name] = {"nbytes": 1, "blake3": "0" * 64}
    noted.write_bytes(_sealed(table))
    with pytest.raises(OutputError, match="was begun for another plan"):
        _parts(tmp_path, 2, 2)


def test_one_process_alone_does_not_disturb_parts_at_work(plan: ExportPlan, tmp_path: Path) -> None:
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    with (
        locked_part(plan.out_dir, 2),
        pytest.raises(OutputError, match="parts of an export are being written to this folder"),
    ):
        run_plan(plan)
    report = run_plan(plan)
    assert report.resumed == SHARDS[:2]
    assert files(plan.out_dir) == expected


def test_parts_begin_anew_where_one_process_alone_has_stopped(
    plan: ExportPlan, tmp_path: Path
) -> None:
    expected = files_of(plan)
    with stopped_after(2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run_plan(plan)
    _parts(tmp_path, 3, 1, 2, 3)
    assert files(plan.out_dir) == expected


def test_a_part_that_was_changed_since_is_written_again(plan: ExportPlan, tmp_path: Path) -> None:
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    shard = tmp_path / "out.partial" / SHARDS[0]
    _flip(shard, 900)
    (tmp_path / "out.partial" / "config.json").unlink()
    _parts(tmp_path, 2, 1, 2)
    assert files(plan.out_dir) == expected


def test_a_receipt_that_was_cut_short_counts_for_nothing(plan: ExportPlan, tmp_path: Path) -> None:
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    receipt = tmp_path / "out.partial" / RECEIPTS / f"{SHARDS[0]}.json"
    receipt.write_bytes(receipt.read_bytes()[:-1])
    with pytest.raises(OutputError, match=f"has no receipt for {SHARDS[0]}"):
        _parts(tmp_path, 2, 2)
    _parts(tmp_path, 2, 1)
    assert files(plan.out_dir) == expected


def test_a_shard_that_was_changed_after_its_part_ended_is_found_before_it_is_published(
    plan: ExportPlan, tmp_path: Path
) -> None:
    """One whose times changed alone is read again, and is as good as before."""
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    shard = tmp_path / "out.partial" / SHARDS[0]
    utime(shard, ns=(1, 1))
    before = shard.read_bytes()
    _flip(shard, 900)
    with pytest.raises(OutputError, match="was changed since it was written"):
        _parts(tmp_path, 2, 2)
    assert not plan.out_dir.exists()
    shard.write_bytes(before)
    _parts(tmp_path, 2, 2)
    assert files(plan.out_dir) == expected


@pytest.mark.parametrize("which", [0, -1], ids=["whole", "cut"])
def test_a_file_of_two_parts_that_was_changed_between_them_is_not_published(
    which: int, plan: ExportPlan, tmp_path: Path
) -> None:
    """The second part changes the file, too, so that its times tell nothing of the first."""
    expected = files_of(plan)
    _parts(tmp_path, 3, 1)
    cut = divide(plan.shards, 3)[0][-1]
    shard = tmp_path / "out.partial" / cut.file.filename
    content, at = bytearray(shard.read_bytes()), cut.tensors[which].offset
    content[at] ^= 1
    shard.write_bytes(content)
    _parts(tmp_path, 3, 2, 3)
    assert not plan.out_dir.exists()
    _parts(tmp_path, 3, 1)
    assert files(plan.out_dir) == expected


def test_a_receipt_of_another_plan_counts_for_nothing(plan: ExportPlan, tmp_path: Path) -> None:
    expected = files_of(plan)
    _parts(tmp_path, 2, 1)
    other = four_shards(tmp_path / "ckpt", tmp_path / "other", DType.BF16)
    run_part(other, Share(1, 2))
    for name in (f"{SHARDS[0]}.json", "part 1.json"):
        receipt = Path(RECEIPTS) / name
        shutil.copy(tmp_path / "other.partial" / receipt, tmp_path / "out.partial" / receipt)
    with pytest.raises(OutputError, match="lacks parts"):
        finish_parts(plan)
    _parts(tmp_path, 2, 2, 1)
    assert files(plan.out_dir) == expected


def test_where_locks_do_nothing_workers_end_right_or_with_a_sentence(
    plan: ExportPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS without a lock server: all begin the folder, and all come to its end, at once."""

    def refuse(*_: object) -> None:
        raise OSError(ENOLCK, "No locks available")

    expected = files_of(plan)
    monkeypatch.setattr("fcntl.flock", refuse)

    def run(number: int) -> str:
        try:
            _parts(tmp_path, 4, number)
        except ZexportError as error:
            return error.sentence()
        return ""

    for _ in range(5):
        with ThreadPoolExecutor(4) as workers:
            told = [*workers.map(run, range(1, 5))]
        if not plan.out_dir.exists():  # one was in the way of another: it is said, and tried again
            assert any(told)
            for number in range(1, 5):
                run(number)
        assert files(plan.out_dir) == expected
        shutil.rmtree(plan.out_dir)


def test_clocks_that_are_apart_do_not_matter(
    plan: ExportPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = files_of(plan)
    for number, off in ((2, -86_400.0), (3, 86_400.0), (1, 0.0)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda off=off: _NOW + off)
            _parts(tmp_path, 3, number)
    assert files(plan.out_dir) == expected


def test_what_two_parts_read_is_proved_as_a_whole(plan: ExportPlan, tmp_path: Path) -> None:
    """One of them read a byte that is no more what was saved; the other did not."""
    _parts(tmp_path, 2, 1)
    source = plan.sources[0]
    wrong = structs.replace(source.members[0], crc32=1)
    others = (structs.replace(source, members=(wrong, *source.members[1:])), *plan.sources[1:])
    with pytest.raises(OutputError, match="was begun for another plan"):
        run_part(replace(plan, sources=others), Share(2, 2))
    _flip(source.path, source.members[0].offset + source.members[0].nbytes - 40)
    with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
        _parts(tmp_path, 2, 2)
    assert not plan.out_dir.exists()


def _flip(path: Path, at: int) -> None:
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
