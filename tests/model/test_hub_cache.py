"""The hub's cache on this machine, found as huggingface_hub finds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from huggingface_hub.errors import IncompleteSnapshotError

from zexport.model.hub_cache import cached_snapshot

_COMMIT = "0123456789" * 4
_ASK = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], local_files_only=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HF_HOME": "$HOME/b", "HOME": "{}"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{}/c"}, "c/huggingface/hub"),
        ({"HOME": "{}"}, ".cache/huggingface/hub"),
    ],
)
def test_a_snapshot_is_the_one_that_the_hubs_own_library_finds(
    variables: dict[str, str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    model = tmp_path / folder / "models--acme--small"
    (model / "snapshots" / _COMMIT).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(_COMMIT)
    asked = [sys.executable, "-c", _ASK, "acme/small"]
    theirs = subprocess.run(asked, capture_output=True, text=True, check=True, env=os.environ)
    found = cached_snapshot("acme/small")
    assert found is not None
    assert found.samefile(theirs.stdout.strip())


@pytest.mark.parametrize("commit", [None, "", "../../x", "main", _COMMIT, "\xe9"])
def test_what_is_not_whole_is_no_snapshot(
    commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--acme--small" / "refs"
    refs.mkdir(parents=True)
    if commit is not None:
        (refs / "main").write_text(commit)
    assert cached_snapshot("acme/small") is None


@pytest.mark.parametrize("fetched", [("config.json",), ("config.json", "a/model.safetensors")])
def test_a_snapshot_whose_download_was_stopped_is_none(
    fetched: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub's own library sees it, which lists what is to be fetched before it does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--acme--small"
    for name, content in {
        "refs/main": _COMMIT,
        **{f"snapshots/{_COMMIT}/{name}": "" for name in fetched},
    }.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(content)
    names = ("config.json", "a/model.safetensors")
    write_tree_cache(str(model), _COMMIT, {name: TreeCacheEntry(0, "") for name in names})
    assert any((model / "trees").iterdir())
    if fetched == names:
        assert cached_snapshot("acme/small") == Path(
            snapshot_download("acme/small", local_files_only=True)
        )
        return
    with pytest.raises(IncompleteSnapshotError):
        snapshot_download("acme/small", local_files_only=True)
    assert cached_snapshot("acme/small") is None


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert cached_snapshot("acme/small") is None
