"""Who does what of an export by a cluster, decided from what its nodes say; without Ray."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from zexport import Progress, Share, VerifyMode
from zexport.api.parts import Request
from zexport.cluster import connection, node_views, tasks
from zexport.cluster.connection import Node, connected
from zexport.cluster.node_views import Places, Sight, survey
from zexport.cluster.progress import together
from zexport.cluster.tasks import FalteredError, Order, Task, perform
from zexport.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingExtraError,
    OutputError,
    UsageError,
)
from zexport.run.progress import Phase
from zexport.store.address import Address
from zexport.store.folders import is_folder
from zexport.store.versions import Version

CKPT = Path("/data/run")
ONE, TWO, THREE = (Node(f"{n}f00", f"host{n}", 8) for n in (1, 2, 3))
_SOME = Version(10, 1)
RANK_0 = {"global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt": _SOME, "latest": _SOME}
RANK_1 = {"global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt": _SOME, "latest": _SOME}


def _surveyed(
    monkeypatch: pytest.MonkeyPatch,
    told: dict[Node, object],
    here: dict[str, Version] | None = None,
) -> Places:
    """What comes of the nodes' answers, where the driver sees ``here``."""
    return _surveyed_all(monkeypatch, told, Sight(True, (here or {},)), [CKPT])


def _surveyed_all(
    monkeypatch: pytest.MonkeyPatch,
    told: Mapping[Node, object],
    here: Sight,
    paths: Sequence[Path],
    also: Sequence[Path] = (),
) -> Places:
    """The same of several paths, and of what else is read."""
    monkeypatch.setattr(node_views, "ask_all", lambda *_: told)
    monkeypatch.setattr(node_views, "look", lambda *_: here)
    return survey(paths, Path("/out/model.mark"), also)


def test_nodes_that_see_all_of_it_take_part_and_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_of = Sight(True, (RANK_0 | RANK_1,))
    told: dict[Node, object] = {ONE: all_of, TWO: Sight(True, ({},)), THREE: all_of}
    found = _surveyed(monkeypatch, told, RANK_0 | RANK_1)
    assert (found.checkpoint, found.nodes, found.left_out) == ((CKPT,), (ONE, THREE), (TWO,))


def test_of_nodes_with_files_of_their_own_that_of_rank_0_is_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has nothing of its own is not asked for anything."""
    same = Sight(True, (RANK_1,))
    told: dict[Node, object] = {ONE: same, TWO: Sight(True, (RANK_0,)), THREE: same}
    found = _surveyed(monkeypatch, told)
    assert found.nodes == (TWO, ONE)
    assert [*map(str, found.checkpoint)] == ["node://2f00/data/run", "node://1f00/data/run"]


def test_each_path_is_read_on_the_nodes_that_it_lies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or where it was named, if all that take part see it there, which a head node does not."""
    first, second, shared = Path("/data/one"), Path("/data/two"), Path("/net/three")
    told = {
        ONE: Sight(True, (RANK_0, {}, RANK_1)),
        TWO: Sight(True, ({}, RANK_1, RANK_1)),
        THREE: Sight(True, ({}, {}, {})),
    }
    here = Sight(True, (RANK_0, {}, RANK_1))
    found = _surveyed_all(monkeypatch, told, here, [first, second, shared])
    assert found.nodes == (ONE, TWO)
    assert [*map(str, found.checkpoint)] == [
        "node://1f00/data/one",
        "node://2f00/data/two",
        "/net/three",
    ]


_BASE = Path("/models/base")
_STAMP = {"model.safetensors": (_SOME, 7)}


def test_nodes_that_do_not_see_the_base_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Sight(True, (RANK_0,), (_STAMP,))
    told = {ONE: here, TWO: Sight(True, (RANK_0,), ({},))}
    found = _surveyed_all(monkeypatch, told, here, [CKPT], [_BASE])
    assert (found.nodes, found.left_out) == ((ONE,), (TWO,))


@pytest.mark.parametrize("listings", [[RANK_0, RANK_0], [RANK_0, RANK_1], [{}, {}]])
def test_a_base_that_no_node_or_not_every_holder_of_rank_files_sees_is_told(
    listings: list[dict[str, Version]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of it is another: nothing proves what it holds."""
    copied = {"model.safetensors": (_SOME, 8)}
    told = {
        node: Sight(True, (one,), (stamps,))
        for node, one, stamps in zip((ONE, TWO), listings, (copied, {}), strict=True)
    }
    here = Sight(True, (listings[0],), (_STAMP,))
    with pytest.raises(CheckpointError, match=r"^/models/base: is not the same on .*host1, host2"):
        _surveyed_all(monkeypatch, told, here, [CKPT], [_BASE])


def test_a_checkpoint_that_this_machine_alone_sees_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[Node, object] = {ONE: Sight(True, ({},)), TWO: Sight(True, ({},))}
    with pytest.raises(CheckpointError, match=r"^/data/run: is not the same on the nodes"):
        _surveyed(monkeypatch, told, RANK_0)


def test_another_version_on_a_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[Node, object] = {ONE: Sight(True, ({},)), TWO: "0.0.9", THREE: "none"}
    with pytest.raises(UsageError, match=r"another zexport \(found host2 has 0\.0\.9, host3 has"):
        _surveyed(monkeypatch, told)


def test_a_node_that_does_not_see_the_output_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[Node, object] = {ONE: Sight(True, ({},)), TWO: Sight(False, ({},))}
    with pytest.raises(OutputError, match=r"not the same folder on all nodes .*on host2\)\. Mount"):
        _surveyed(monkeypatch, told)


def test_a_file_on_a_node_is_read_where_a_cluster_reaches_it_alone() -> None:
    with pytest.raises(OSError, match="which --ray alone reaches"):
        is_folder(Address("node://1f00/data/run"))


def test_all_workers_make_one_figure() -> None:
    told = {
        1: Progress(30, 100, Phase.WRITE),
        2: Progress(10, 60, Phase.WRITE, nbytes_resumed=40),
        3: Progress(50, 100, Phase.RESUME),
    }
    assert together([100, 100, 100], told) == Progress(80, 300, Phase.WRITE, 40)
    ended = {n: Progress(90, 100, Phase.VERIFY) for n in (1, 2, 3)}
    assert together([100, 100, 100], ended) == Progress(270, 300, Phase.VERIFY)


def test_a_task_waits_for_no_node_that_cannot_do_it() -> None:
    anywhere = Task(Share(1, 2), 10, cores=4, avoided=(TWO,))
    assert anywhere.may_run([ONE, TWO])
    assert not anywhere.may_run([TWO, Node("4", "host4", 2)])
    assert not Task(Share(1, 2), 10, cores=4, node=THREE).may_run([ONE, TWO])


def test_what_may_pass_is_tried_again_and_all_else_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = Order(Request(("c",), None, False), tmp_path, VerifyMode.NONE, {})

    def raising(error: Exception, cause: Exception | None) -> Callable[..., None]:
        def act(*_: object, **__: object) -> None:
            raise error from cause

        return act

    monkeypatch.setattr(Request, "plan", lambda *_: None)
    stale = OutputError("cannot be written: stale", path=tmp_path)
    monkeypatch.setattr(tasks, "write_share", raising(stale, OSError(errno.ESTALE, "stale")))
    with pytest.raises(FalteredError) as caught:
        perform(order, Share(), None)
    assert caught.value.args == (stale,)
    for error in (DamagedCheckpointError("is damaged"), OutputError("is full")):
        monkeypatch.setattr(tasks, "write_share", raising(error, OSError(errno.ENOSPC, "full")))
        assert perform(order, Share(), None) is error


def test_a_worker_that_dies_every_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def crash(*_: object) -> None:
        raise ray.exceptions.WorkerCrashedError

    monkeypatch.setattr(ray, "get", crash)
    monkeypatch.setattr(tasks, "nodes", lambda: [ONE])
    task = Task(Share(2, 3), 10, cores=1)
    with pytest.raises(OutputError, match=r"/out/model: part 2/3 was lost 4 times"):
        tasks._report(None, task, Path("/out/model"))
    gone = replace(task, node=TWO)
    with pytest.raises(OutputError, match=r"part 2/3 cannot be written: the node that has its"):
        tasks._report(None, gone, Path("/out/model"))


def test_nobody_waits_for_a_node_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "nodes", lambda: [ONE])
    task = Task(Share(2, 3), 10, cores=1, node=TWO)
    with pytest.raises(OutputError, match="the node that has its rank files is gone"):
        tasks._check_able([task], Path("/out/model"))


def test_nodes_that_do_not_answer_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Silent:
        def options(self, **_: object) -> Silent:
            return self

        def remote(self, *_: object) -> str:
            return "task"

    monkeypatch.setattr(ray, "remote", lambda **_: lambda _function: Silent())
    monkeypatch.setattr(connection, "nodes", lambda: [ONE])
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.0)
    with pytest.raises(OutputError, match=r"do not answer \(found host1\)\. Look at them"):
        connection.ask_all(node_views.look)


def test_where_ray_is_missing_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[ray\]'"), connected("auto"):
        pass


def test_where_no_cluster_is_found_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def fail(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(UsageError, match="no Ray cluster is found"), connected("auto"):
        pass


def test_a_cluster_of_another_version_of_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def fail(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1\n")

    monkeypatch.setattr(ray, "init", fail)
    with (
        pytest.raises(UsageError, match=r"cannot be joined \(found Version mismatch: [^\n]*\)"),
        connected("auto"),
    ):
        pass
