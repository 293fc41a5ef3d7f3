"""Kills, refusals and full disks, at a few points each; ``make torture`` tries all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.plans import Wanted, export_plan, save
from tests.support.stopping import SHARDS, files, files_of, four_shards
from tests.torture.commands import Export, killed_at_random, make_checkpoint
from tests.torture.faults import Calls, watched
from tests.torture.kills import count_calls, killed_at
from tests.torture.parts import killed_workers
from tests.torture.refusals import ALWAYS, FAULTS, Fault, every_fault
from tests.torture.small_disk import every_size
from zexport.errors import DamagedCheckpointError, OutputError
from zexport.export.plan import ExportPlan
from zexport.ranges.dtypes import DType
from zexport.run import part
from zexport.run.execute import run_plan
from zexport.run.receipts import finished_files
from zexport.store.contents import write_durably

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    """Four shards that share their records."""
    return four_shards(tmp_path / "ckpt", tmp_path / "out")


def test_a_process_killed_between_any_two_calls_leaves_all_or_nothing(plan: ExportPlan) -> None:
    whole = files_of(plan)
    count = count_calls(plan)
    taken_over = [killed_at(plan, at, whole) for at in range(1, count + 1, count // 7)]
    assert max(taken_over) > 0


def test_workers_killed_anywhere_leave_all_or_nothing(plan: ExportPlan) -> None:
    assert killed_workers(plan, 3, 4, seed=1, whole=files_of(plan))["kills"] >= 4


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_refusal_of_any_call_leaves_nothing_half_made(plan: ExportPlan, fault: Fault) -> None:
    whole = files_of(plan)
    with watched(Calls()) as calls:
        files_of(plan)
    step = max(1, sum(calls.counts[name] for name in fault.names) // 2)
    stopped = list(every_fault(plan, fault, whole, step))
    assert stopped[0] or fault.times < ALWAYS


def test_bytes_that_a_disk_once_did_not_take_end_the_export(
    plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk says so once, here while the shard is being written; the next sync succeeds."""
    whole = part._StretchWriter.flush
    calls: list[str] = []

    def flush(self: part._StretchWriter) -> None:
        calls.append(self.stretch.file.filename)
        if len(calls) == 1:
            time.sleep(0.3)  # until the shard's last flush is asked for
            raise OutputError("cannot be written: Input/output error") from OSError(5, "lost")
        whole(self)

    monkeypatch.setattr(part, "_FLUSH_NBYTES", 1)
    monkeypatch.setattr(part._StretchWriter, "flush", flush)
    with pytest.raises(OutputError, match="Input/output error"):
        run_plan(plan)
    assert calls[0] == SHARDS[0]
    partial = plan.out_dir.with_name("out.partial")
    assert SHARDS[0] not in (finished_files(partial) if partial.exists() else ())


def test_a_disk_too_small_is_known_before_a_byte_is_read(tmp_path: Path) -> None:
    assert every_size(tmp_path, step=40)


def test_a_disk_without_room_for_a_shard_ends_the_export_before_it_reads(
    plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may promise room that it then does not give, as under a quota."""

    def refuse(*_: int) -> None:
        raise OSError(122, os.strerror(122))

    def read(*_: object) -> int:
        raise AssertionError("a byte was read")

    monkeypatch.setattr("zexport.store.files._take_room", refuse)
    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(OutputError, match="quota"):
        run_plan(plan)
    assert not list(plan.out_dir.parent.glob("out*"))


@pytest.mark.parametrize("change", ["cut", "touched", "replaced"])
def test_a_source_that_changes_while_it_is_read_is_found_out(plan: ExportPlan, change: str) -> None:
    source = plan.sources[0]

    def act(name: str, _number: int) -> None:
        if name != "preadv" or calls.counts[name] != 9:
            return
        if change == "cut":
            os.truncate(source.path, source.version.nbytes // 3)
        elif change == "touched":
            os.utime(source.path)
        else:
            source.path.with_name("new").write_bytes(bytes(source.version.nbytes))
            source.path.with_name("new").rename(source.path)

    calls = Calls(act)
    with watched(calls), pytest.raises(DamagedCheckpointError, match=r"changed|too early|bytes"):
        run_plan(plan)
    assert not list(plan.out_dir.parent.glob("out*"))


def test_of_two_exports_into_one_folder_one_wins_and_the_other_says_so(tmp_path: Path) -> None:
    root = FIXTURES / "z3_w2_bf16" / "ckpt"
    words = (sys.executable, "-m", "zexport", "consolidate", root, tmp_path / "out", "--quiet")
    both = [
        subprocess.Popen([*map(str, words)], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    codes = Counter(process.returncode for process in both)
    assert codes == {0: 1, 6: 1}, said
    assert "another export is writing this folder" in "".join(said) or "exists" in "".join(said)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_commands_ended_at_random_moments_leave_all_or_nothing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "ckpt", 1e6)
    export = Export(checkpoint, tmp_path / "out", shard_size="1MB")
    found = killed_at_random(export, 3, seed=1)
    assert sum(found[name] for name in ("whole", "resumed", "begun anew")) == 3


def test_a_process_without_a_terminal_goes_on_when_hangups_are_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from zexport.cli import main\n"
        "main._answer_signals()\n"
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN\n"
        "assert signal.getsignal(signal.SIGTERM) is main._interrupt\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=tmp_path)


def test_an_interrupt_during_an_import_is_an_interrupt(tmp_path: Path) -> None:
    """numpy's extension makes an ImportError of it."""
    script = (
        "import os, signal, sys\n"
        "from zexport.cli import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "            except KeyboardInterrupt: raise ImportError('umath failed to import')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv[1:] = ['consolidate', *sys.argv[1:]]\n"
        "main.main()\n"
    )
    words = (FIXTURES / "z3_w2_bf16" / "ckpt", tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_a_training_run_killed_while_it_moves_latest_keeps_the_old_one(tmp_path: Path) -> None:
    """Between any two calls, ``latest`` is the old one or the new one."""
    latest = tmp_path / "latest"
    seen = set()
    for at in range(1, 9):
        write_durably(latest, b"old")
        child = os.fork()
        if child == 0:
            with watched(Calls(lambda _, number, at=at: _kill(number == at))):  # type: ignore[misc]
                write_durably(latest, b"new")
            os._exit(0)
        os.waitpid(child, 0)
        seen.add(latest.read_text())
    assert seen == {"old", "new"}


def _kill(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_read_only_folder_is_found_out_before_the_work(
    plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(OutputError, match="Permission denied"):
        run_plan(plan)


def test_a_name_too_long_for_the_file_system_is_found_out_before_the_work(tmp_path: Path) -> None:
    file, (extent,) = save(tmp_path / "c" / "rank.pt", [torch.zeros(3)])
    wanted = [Wanted("x", (3,), DType.F32, DType.F32, extent)]
    plan = export_plan(tmp_path / ("n" * 250), {SHARDS[0]: wanted}, [file])
    with pytest.raises(OutputError, match="File name too long"):
        run_plan(plan)
    assert files(tmp_path) == {"c/rank.pt": file.path.read_bytes()}
