"""Addresses in the place of paths, and models by the hub's name for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

import zexport
from tests.support.checkpoints import Model, Run, save, values
from tests.support.forked import typed
from zexport.compat import convert_zero_checkpoint_to_fp32_state_dict
from zexport.errors import NotACheckpointError, UsageError
from zexport.options import ExportOptions
from zexport.store.address import local_path

_W = {"w": values((5, 7), 1)}
_FROZEN = {"frozen": values((3,), 2)}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose frozen weights were left out, and an empty cache of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return save(Model([_W], _FROZEN), Run(stage=2, exclude_frozen=True), tmp_path / "ckpt")


@pytest.mark.parametrize("given", ["hf://me/model", Path("hf://me/model")])
@pytest.mark.parametrize(
    "use",
    [
        zexport.open_checkpoint,
        zexport.verify_export,
        lambda given: zexport.open_checkpoint([".", given]),
        lambda given: zexport.consolidate("ckpt", given, ExportOptions(exclude_frozen=True)),
        lambda given: zexport.diff_models(given, "."),
        lambda given: zexport.diff_models(".", given),
        lambda given: zexport.verify_export(".", base=given),
        lambda given: ExportOptions(base=given),
        lambda given: ExportOptions(adapter_config=given),
    ],
)
@pytest.mark.usefixtures("checkpoint")
def test_an_address_is_no_path(
    use: Callable[[object], object], given: str | Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="hf: is no place that zexport knows") as caught:
        use(given)
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_nor_is_it_one_in_the_functions_of_deepspeed(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has to be a path on this machine"):
        convert_zero_checkpoint_to_fp32_state_dict(
            checkpoint, "s3://bucket/model", exclude_frozen_parameters=True
        )
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("given", ["hf://org/model", "HTTPS://b/m", "abfs+x://a", "file:///x"])
def test_whatever_its_scheme_it_is_refused_by_name(given: str) -> None:
    with pytest.raises(UsageError, match=f"^'{re.escape(given)}' is an address"):
        local_path(given)


@pytest.mark.parametrize("given", ["a:b/c", "run/12:30/ckpt", "1:/x", "./a", "/a:/b", "C:/x"])
def test_a_path_with_a_colon_is_a_path(given: str) -> None:
    assert local_path(given) == Path(given)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(UsageError, match="a path may not be empty"):
        zexport.open_checkpoint("")


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(_FROZEN | _W, folder / "model.safetensors")
    return folder


def _cached(cache: Path, name: str) -> Path:
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    return _model(home / "snapshots" / ("0" * 40))


def test_a_base_by_name_is_taken_from_the_cache_of_the_hub(
    checkpoint: Path, tmp_path: Path
) -> None:
    cached = _cached(tmp_path / "hub", "acme/small")
    options = ExportOptions(base="acme/small")  # type: ignore[arg-type]
    zexport.consolidate(checkpoint, "out", options)
    assert zexport.verify_export("out", against=checkpoint, base="acme/small").ok
    report = zexport.diff_models("acme/small", "out")
    assert (report.a, len(report.tensors)) == (cached, 2)


def test_a_folder_of_that_name_goes_first(checkpoint: Path, tmp_path: Path) -> None:
    (_cached(tmp_path / "hub", "acme/small") / "model.safetensors").write_text("broken")
    _model(tmp_path / "acme" / "small")
    zexport.consolidate(checkpoint, "out", ExportOptions(base=Path("acme/small")))
    assert zexport.diff_models("out", "acme/small").b == Path("acme/small")


def test_a_base_that_is_not_in_the_cache_is_refused_with_how_to_download_it(
    checkpoint: Path,
) -> None:
    for use in (
        lambda: zexport.consolidate(checkpoint, "out", ExportOptions(base=Path("acme/small"))),
        lambda: zexport.diff_models(".", "acme/small"),
    ):
        with pytest.raises(NotACheckpointError, match="nor a model in the Hub cache") as caught:
            use()
        assert caught.value.hint.endswith("hf download acme/small")
    assert not Path("out").exists()


@pytest.mark.parametrize("given", ["~", "~/model", "~root/model"])
@pytest.mark.usefixtures("checkpoint")
def test_the_home_of_a_shell_is_no_folder_to_make(given: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which only a shell takes for a home folder"):
        zexport.consolidate("ckpt", given, exclude_frozen=True)
    assert "write the path in full" in typed("consolidate", "ckpt", f"--output={given}").stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("given", ["~nobody-is-called-so", "model~", "a/~", "/a/~/b"])
def test_a_path_with_a_tilde_elsewhere_is_a_path(given: str) -> None:
    assert local_path(given) == Path(given)
