"""The folder that appears complete or not at all, on a real file system."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zexport.errors import OutputError
from zexport.run.staging import staged_folder
from zexport.store.files import check_space, writing


def _make(out_dir: Path, content: str = "new", **options: object) -> None:
    settings = {"overwrite": False, **options}
    with staged_folder(out_dir, **settings) as folder:  # type: ignore[arg-type]
        (folder / "file").write_text(content)
        (folder / "model.safetensors").touch()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_seen_until_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged_folder(out, overwrite=False) as folder:
        (folder / "file").write_text("new")
        assert not out.exists()
        assert folder == tmp_path / "out.partial"
    assert (out / "file").read_text() == "new"
    assert _names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failing_block_leaves_everything_as_it_was(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), staged_folder(tmp_path / "a" / "b", overwrite=False):
        raise error
    assert _names(tmp_path) == []


def test_parents_that_were_there_stay_when_the_block_fails(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(KeyError), staged_folder(tmp_path / "a/b/c", overwrite=False):
        raise KeyError
    assert _names(tmp_path) == ["a"]
    assert _names(tmp_path / "a") == []


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    _make(tmp_path / "out")
    assert _names(tmp_path / "out") == ["file", "model.safetensors"]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(
        OutputError, match=r"exists and is not empty\. Choose another name, or pass"
    ):
        _make(tmp_path / "out")
    assert _names(tmp_path / "out") == ["mine"]
    assert _names(tmp_path) == ["out"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("keep")
    with pytest.raises(OutputError, match="is not a folder"):
        _make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_text() == "keep"


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("keep")
    with pytest.raises(OutputError, match="cannot be written"):
        _make(tmp_path / "a" / "out")


def test_an_old_folder_is_replaced_whole_and_only_at_the_end(tmp_path: Path) -> None:
    _make(tmp_path / "out", "old")
    (tmp_path / "out" / "extra").write_text("old")
    with staged_folder(tmp_path / "out", overwrite=True) as folder:
        (folder / "file").write_text("new")
        assert (tmp_path / "out" / "file").read_text() == "old"
    assert _names(tmp_path / "out") == ["file"]
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert _names(tmp_path) == ["out"]


def test_a_failing_replacement_keeps_the_old_folder(tmp_path: Path) -> None:
    _make(tmp_path / "out", "old")
    with pytest.raises(KeyError), staged_folder(tmp_path / "out", overwrite=True):
        raise KeyError
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert _names(tmp_path) == ["out"]


_STOPPED = pytest.mark.parametrize(
    "stop", [lambda: OSError(5, "Input/output error"), KeyboardInterrupt], ids=["refused", "Ctrl-C"]
)
_TOLD = (OutputError, KeyboardInterrupt)


@_STOPPED
@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_keeps_the_old_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    stop: Callable[[], BaseException],
) -> None:
    _make(tmp_path / "out", "old")
    renames = iter(range(1, 10))
    whole = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if next(renames) == failing:
            raise stop()
        return whole(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(_TOLD, match=r"^$|cannot be written: Input/output error"):
            _make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert _names(tmp_path) == ["out"]


@_STOPPED
@pytest.mark.parametrize("old", [True, False])
def test_a_name_that_the_disk_does_not_take_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool, stop: Callable[[], BaseException]
) -> None:
    if old:
        _make(tmp_path / "out", "old")
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise stop()
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(_TOLD, match=r"^$|cannot be written: Input/output error"):
        _make(tmp_path / "out", overwrite=True)
    assert _names(tmp_path) == (["out"] if old else [])
    if old:
        assert (tmp_path / "out" / "file").read_text() == "old"


def test_a_replacement_that_was_killed_between_two_renames_is_undone(tmp_path: Path) -> None:
    _make(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / "out.replaced")
    (tmp_path / "out.partial.lock").write_text("a zexport export\n")
    with pytest.raises(OutputError, match="exists and is not empty"):
        _make(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"


def test_a_folder_that_was_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    staged = staged_folder(tmp_path / "out", overwrite=False)
    staged.__enter__()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(OutputError, match="Directory not empty"):
        staged.__exit__(None, None, None)
    assert _names(tmp_path / "out") == ["mine"]
    assert _names(tmp_path) == ["out"]


def test_a_second_export_into_the_same_folder_is_told_so(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out", overwrite=False) as folder:
        (folder / "file").write_text("first")
        with pytest.raises(OutputError, match="another export is writing this folder"):
            _make(tmp_path / "out")
        assert _names(folder) == ["file"]
    assert _names(tmp_path) == ["out"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    script = (
        "import os, sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from zexport.run.staging import staged_folder\n"
        "with staged_folder(Path(sys.argv[1]), overwrite=False) as folder:\n"
        "    (folder / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], check=False, timeout=60
    )
    assert done.returncode == -9
    assert _names(tmp_path) == ["out.partial", "out.partial.lock"]
    _make(tmp_path / "out")
    assert _names(tmp_path) == ["out"]
    assert _names(tmp_path / "out") == ["file", "model.safetensors"]


def test_a_lock_removed_by_its_owner_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fcntl.flock
    rounds: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        rounds.append(operation)
        if len(rounds) == 1:
            (tmp_path / "out.partial.lock").unlink()
        whole(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    _make(tmp_path / "out")
    assert rounds == [*[fcntl.LOCK_EX | fcntl.LOCK_NB] * 2, fcntl.LOCK_UN]


def test_a_lack_of_space_is_told_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="has no room for the output") as caught:
        check_space(tmp_path, 1 << 60)
    assert caught.value.expected == f"at least {1 << 60}"
    assert caught.value.found is not None
    assert caught.value.found.endswith("bytes free")


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(OutputError, match=r"Permission denied\. Choose a folder you may write to"):
        _make(tmp_path / "out")
    assert _names(tmp_path) == []


@pytest.mark.parametrize("out", ["run/global_step3", "run/global_step3/out", "run", "."])
def test_the_checkpoint_is_never_written_over(tmp_path: Path, out: str) -> None:
    source = tmp_path / "run" / "global_step3" / "rank.pt"
    source.parent.mkdir(parents=True)
    source.write_text("weights")
    with pytest.raises(OutputError, match="would be mixed with the files that are read"):
        _make(tmp_path / out, overwrite=True, sources=[source])
    assert source.read_text() == "weights"


def test_a_base_model_may_have_an_export_below_it_but_not_in_its_place(tmp_path: Path) -> None:
    source = tmp_path / "base" / "model.safetensors"
    source.parent.mkdir()
    source.write_text("weights")
    _make(tmp_path / "base" / "export", sources=[source])
    with pytest.raises(OutputError, match="would be mixed"):
        _make(tmp_path / "base", overwrite=True, sources=[source])


@pytest.mark.parametrize("ending", [".partial", ".replaced"])
def test_what_is_read_lies_in_no_folder_that_the_work_makes(tmp_path: Path, ending: str) -> None:
    source = tmp_path / f"out{ending}" / "model.safetensors"
    source.parent.mkdir()
    source.write_text("weights")
    with pytest.raises(OutputError, match="would be mixed"):
        _make(tmp_path / "out", sources=[source])


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _make(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert _names(tmp_path / "real") == ["file", "model.safetensors"]


@pytest.mark.parametrize(
    ("number", "hint"),
    [(28, "Free some space"), (122, "quota"), (13, "may write to"), (30, "read-only")],
)
def test_each_refusal_of_the_system_has_its_hint(number: int, hint: str) -> None:
    with pytest.raises(OutputError, match=hint) as caught, writing(Path("file")):
        raise OSError(number, os.strerror(number))
    assert isinstance(caught.value.__cause__, OSError)
    assert os.strerror(number) in caught.value.problem


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were put on the disk, in order."""
    paths: list[str] = []
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_whose_work_it_is_then_files_their_folder_and_its_parent_are_put_on_the_disk(
    tmp_path: Path, synced: list[str]
) -> None:
    _make(tmp_path / "out")
    partial = tmp_path / "out.partial"
    files = [str(partial / "model.safetensors"), str(partial / "file")]
    assert synced == [f"{partial}.lock", *files, str(partial), str(tmp_path)]
