"""A real Ray cluster of two nodes on this machine: parts as its tasks, and what can befall them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import zexport
from tests.support.stopping import files
from zexport import ExportOptions, Progress, ReshardOptions, consolidate, plan_export, reshard
from zexport.api.parts import Request
from zexport.checkpoint.open import open_checkpoint
from zexport.cli.main import cli
from zexport.cluster import connection, export, node_views
from zexport.cluster.export import gathered
from zexport.errors import CheckpointError, OutputError, UsageError, ZexportError
from zexport.options import Engine, NameLayout
from zexport.run.execute import ExportReport
from zexport.store.publish import locked_part

FIXTURES = Path(__file__).parents[2] / "fixtures"
CKPT = FIXTURES / "z3_w2_bf16_frozen" / "ckpt"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
LIMIT_S = 180
APART = Path("/proc/self/cwd/ckpt")
"""A checkpoint's path of which each node has its own."""

_ONE_THREAD = ExportOptions(jobs=1)
_STAND_INS = {"zexport": f'exec {sys.executable} -m zexport "$@"', "ray": 'shift 3; exec "$@"'}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders that the nodes' processes work in: ``/proc/self/cwd`` is another on each."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    return first, second


@pytest.fixture(scope="module")
def cluster(homes: tuple[Path, Path]) -> Iterator[Cluster]:
    """Two nodes of one core each, to which this process is connected."""
    answer = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.chdir(homes[0])
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        patch.chdir(homes[1])
        made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
    signal.signal(signal.SIGTERM, answer)


def _exported(
    checkpoint: list[Path],
    out: Path,
    told: list[Progress] | None = None,
    options: ExportOptions = _ONE_THREAD,
) -> ExportReport:
    """What a crew makes of a checkpoint, with a thread for each worker."""
    with gathered("auto", checkpoint, out) as crew:
        plan = plan_export(open_checkpoint(crew.checkpoint), out, options)
        request = Request.of(crew.checkpoint, options, None, follow=False)
        return crew.run(plan, request, progress=told.append if told is not None else None)


def _beside(out: Path) -> list[str]:
    return [path.name for path in out.parent.iterdir() if path.name.startswith(f"{out.name}.")]


@pytest.mark.usefixtures("cluster")
def test_the_nodes_make_what_one_process_makes(tmp_path: Path) -> None:
    consolidate(CKPT, tmp_path / "whole")
    out, told = tmp_path / "above" / "model", list[Progress]()
    report = _exported([CKPT], out, told)
    assert files(out) == files(tmp_path / "whole")
    assert report.nbytes_read >= sum(path.stat().st_size for path in out.glob("*.safetensors")) // 2
    assert _beside(out) == []
    assert told[-1].nbytes_done == told[-1].nbytes_total > 0
    with pytest.raises(OutputError, match="exists and is not empty"):
        _exported([CKPT], out)


@pytest.mark.usefixtures("cluster")
def test_the_nodes_reshard_as_one_process_does(tmp_path: Path) -> None:
    options, out = ReshardOptions(world_size=3, jobs=1), tmp_path / "on-3"
    reshard(CKPT, tmp_path / "whole", options)
    with gathered("auto", [CKPT], out) as crew:
        plan = zexport.plan_reshard(open_checkpoint(crew.checkpoint), out, options)
        crew.run(plan, Request.of(crew.checkpoint, options, None, follow=False))
    assert files(out) == files(tmp_path / "whole")


def _spread(name: str, homes: Sequence[Path]) -> None:
    """Give each of two nodes the files of one rank."""
    for rank, home in enumerate(homes):
        other = f"*_rank_{1 - rank}_mp_rank_*"
        root = FIXTURES / name / "ckpt"
        shutil.rmtree(home / "ckpt", ignore_errors=True)
        shutil.copytree(root, home / "ckpt", ignore=shutil.ignore_patterns(other))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", ["z3_w2_bf16_frozen", "z2_w2_bf16_groups"])
def test_rank_files_that_each_node_keeps_are_read_where_they_are(
    name: str, homes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is on the first of the nodes."""
    monkeypatch.chdir(homes[0])
    _spread(name, homes)
    consolidate([home / "ckpt" for home in homes], tmp_path / "whole")
    _exported([APART], tmp_path / "model")
    assert files(tmp_path / "model") == files(tmp_path / "whole")


@pytest.mark.usefixtures("cluster")
def test_paths_that_lie_each_on_its_own_node_are_read_there(
    homes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(homes[0])
    _spread("z2_w2_bf16_groups", homes)
    for home, name in zip(homes, ("one", "two"), strict=True):
        (home / "ckpt").rename(home / name)
    consolidate([homes[0] / "one", homes[1] / "two"], tmp_path / "whole")
    _exported([APART.with_name("one"), APART.with_name("two")], tmp_path / "model")
    assert files(tmp_path / "model") == files(tmp_path / "whole")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("only", ["model.layers.0.mlp", "model.layers.1.mlp"])
def test_what_one_node_alone_has_of_a_model_is_exported_alone(
    only: str, homes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ZeRO-2, a weight lies with one rank: the first layer's with the first."""
    monkeypatch.chdir(homes[0])
    _spread("z2_w2_bf16_groups", homes)
    out = tmp_path / "model"
    options = ExportOptions(jobs=1, only=only, layout=NameLayout.MEMORY)
    consolidate([home / "ckpt" for home in homes], tmp_path / "whole", options)
    _exported([APART], out, options=options)
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.usefixtures("cluster")
def test_a_base_that_one_node_alone_sees_is_told_before_anything_is_written(
    homes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(homes[0])
    _spread("z3_w2_bf16_frozen", homes)
    base = homes[0] / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    words = [
        "consolidate",
        APART,
        tmp_path / "model",
        "--ray",
        "auto",
        "--base",
        APART.with_name("base"),
    ]
    with pytest.raises(CheckpointError, match="base: is not the same on the nodes"):
        cli.main([*map(str, words)], standalone_mode=False)
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("cluster")
def test_what_is_another_on_a_node_is_told_before_anything_is_written(
    homes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(homes[0])
    with monkeypatch.context() as patch:
        patch.setattr(export, "real_path", lambda path: path)  # which is the first node's own
        with pytest.raises(OutputError, match="not the same folder on all nodes") as caught:
            _exported([CKPT], APART.with_name("model"))
    assert "Mount its file system there under this path" in str(caught.value)
    for module in (connection, node_views):
        monkeypatch.setattr(module, "__version__", "9.9")
    with pytest.raises(UsageError, match=rf"has {zexport.__version__}.*expected 9\.9"):
        _exported([CKPT], tmp_path / "model")
    assert not [*tmp_path.iterdir(), *homes[0].glob("model*")]


def test_the_lines_of_the_page_are_run(cluster: Cluster, tmp_path: Path) -> None:
    """A job is what is run on a node of the cluster; the command that hands it over is stood in."""
    page = (FIXTURES.parent / "docs" / "large.md").read_text(encoding="utf-8")
    section = page.partition("\n## Ray\n")[2].partition("\n## ")[0]
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    shutil.copytree(CKPT, tmp_path / "run" / "checkpoint-1000")
    shutil.copytree(FIXTURES.parent / "examples", tmp_path / "examples")
    (tmp_path / "bin").mkdir()
    for name, body in _STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    own = {"RAY_ADDRESS": cluster.address, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euxc", lines.replace("ray job submit", "mv model first\nray job submit")],
        cwd=tmp_path,
        env=os.environ | own | {"PYTHONPATH": str(FIXTURES.parent)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    given = tmp_path / "run" / "checkpoint-1000"
    consolidate(given, tmp_path / "whole")
    assert files(tmp_path / "first") == files(tmp_path / "model") == files(tmp_path / "whole")
    reshard(given, tmp_path / "whole-64", ReshardOptions(world_size=64))
    assert files(tmp_path / "on-64") == files(tmp_path / "whole-64")


@pytest.mark.usefixtures("cluster")
def test_deepspeeds_own_converter_has_no_parts(tmp_path: Path) -> None:
    options = ExportOptions(engine=Engine.DEEPSPEED)
    with gathered("auto", [CKPT], tmp_path / "model") as crew:
        plan = plan_export(open_checkpoint(crew.checkpoint), tmp_path / "model", options)
        request = Request.of(crew.checkpoint, options, None, follow=False)
        with pytest.raises(UsageError, match="parts are written by the native engine alone"):
            crew.run(plan, request)
    assert not [*tmp_path.iterdir()]


def _waiting(out: Path, parts: int, driver: subprocess.Popen[str] | None = None) -> None:
    """Return when the folder is begun, and its workers have had time to come to their locks."""
    journal = out.with_name(f"{out.name}.partial") / ".zexport_journal" / "plan"

    def is_begun() -> bool:
        assert driver is None or driver.poll() is None, driver and driver.communicate()
        return journal.exists()

    _until(is_begun, "it was not begun")
    _until(lambda: sum(b"ray::perform" in one for one in _commands()) >= parts, "no worker came")


def _until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def _commands() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


def test_what_a_lost_node_had_begun_is_done_by_another(cluster: Cluster, tmp_path: Path) -> None:
    consolidate(CKPT, tmp_path / "whole")
    lost, out = cluster.add_node(**NODE), tmp_path / "model"
    reports: list[ExportReport] = []
    thread = threading.Thread(target=lambda: reports.append(_exported([CKPT], out)))
    with ExitStack() as held:
        for number in (1, 2, 3):
            held.enter_context(locked_part(out, number))
        thread.start()
        _waiting(out, 3)
        cluster.remove_node(lost, allow_graceful=False)
    thread.join(LIMIT_S)
    assert reports
    assert files(out) == files(tmp_path / "whole")
    assert _beside(out) == []


def test_what_a_lost_node_alone_has_waits_until_it_is_back(
    cluster: Cluster,
    homes: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes back under another name; what was written of its files by others stays."""
    third, out, told = tmp_path_factory.mktemp("third"), tmp_path / "model", list[Progress]()
    shutil.rmtree(homes[1] / "ckpt", ignore_errors=True)
    _spread(CKPT.parent.name, (homes[0], third))
    monkeypatch.chdir(third)
    lost = cluster.add_node(**NODE)
    monkeypatch.chdir(homes[0])
    raised: list[BaseException] = []

    def run() -> None:
        try:
            _exported([APART], out)
        except ZexportError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    with locked_part(out, 2):
        thread.start()
        first = out.with_name("model.partial") / ".zexport_journal" / "part 1.json"
        _until(first.exists, "the first part was not written")
        cluster.remove_node(lost, allow_graceful=False)
        thread.join(LIMIT_S)
    (error,) = raised
    assert "the node that has its rank files is gone" in str(error)
    assert "When it is back, the same command goes on" in str(error)
    monkeypatch.chdir(third)
    back = cluster.add_node(**NODE)
    monkeypatch.chdir(homes[0])
    _exported([APART], out, told)
    cluster.remove_node(back)
    assert told[-1].nbytes_resumed > 0
    consolidate(CKPT, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


def test_an_interrupt_ends_all_tasks_and_a_second_driver_is_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    words = ["consolidate", CKPT, out, "--ray", cluster.address, "--jobs", "1", "--quiet"]
    command = [sys.executable, "-m", "zexport", *map(str, words)]
    with locked_part(out, 1), locked_part(out, 2):
        first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        _waiting(out, 2, first)
        second = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert second.returncode == OutputError.exit_code
        assert "another process has this folder written by a cluster" in second.stderr
        assert first.poll() is None
        first.send_signal(signal.SIGINT)
        said = first.communicate(timeout=LIMIT_S)[1]
        assert first.returncode == 130, said
        assert "the same command goes on" in said
        assert not [one for one in _commands() if b"ray::perform" in one]
    assert not out.exists()
    consolidate(CKPT, tmp_path / "whole")
    _exported([CKPT], out)
    assert files(out) == files(tmp_path / "whole")
    assert _beside(out) == []
