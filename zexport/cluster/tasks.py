"""The parts of an export as tasks of a cluster: started, waited for, and ended together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from zexport.api.parts import Request
from zexport.cluster.connection import RETRIES, Node, ask, nodes, not_on, on, own_node
from zexport.cluster.progress import Board, Teller, together
from zexport.errors import OutputError, ZexportError
from zexport.run.execute import PartReport
from zexport.run.progress import Phase, Progress
from zexport.run.readback import VerifyMode
from zexport.run.shares import Share
from zexport.run.workers import write_share
from zexport.store import node_files, objects
from zexport.store.client import first_line, use_storage_options
from zexport.store.retries import may_pass

_WAIT_SECONDS = 0.5
_END_SECONDS = 20.0
"""How long tasks are waited for that were told to end."""


class Order(Struct, frozen=True):
    """What all workers are told: what the plan is made of, where it goes, how it is checked."""

    request: Request
    out_dir: Path
    verify: VerifyMode
    storage: Mapping[str, str]


class Task(Struct, frozen=True):
    """One worker's share, how many bytes it is and cores it takes; the node, where one must do it.

    Where none must, all may but those that are ``avoided``.
    """

    share: Share
    nbytes: int
    cores: int
    node: Node | None = None
    avoided: tuple[Node, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """How Ray is to run it."""
        place = not_on(self.avoided) if self.node is None else on(self.node.id)
        retries = {"max_retries": RETRIES, "retry_exceptions": [FalteredError]}
        return {"num_cpus": self.cores, **retries, **place}

    def may_run(self, alive: Sequence[Node]) -> bool:
        """Whether a node is there that can run it."""
        able = (node for node in alive if node.cores >= self.cores and node not in self.avoided)
        return any(self.node in (None, node) for node in able)


class FalteredError(Exception):
    """The storage failed for a moment, with the error that is its argument: try again."""


def perform(order: Order, share: Share, board: Any) -> PartReport | ZexportError:
    """Write a share on a node of the cluster; an error that stays is returned.

    Raises:
        FalteredError: another try may succeed.
    """
    node_files.use(ask)
    objects.forget_listings()  # of another export that this process wrote a part of
    use_storage_options(order.storage)
    tell = Teller(board, share.number)
    try:
        plan = order.request.plan(order.out_dir)
        return write_share(plan, share, verify=order.verify, progress=tell)
    except ZexportError as error:
        if may_pass(error.__cause__):
            raise FalteredError(error) from error
        return error


def perform_all(
    order: Order, tasks: Sequence[Task], tell: Callable[[Progress], None] | None
) -> list[PartReport]:
    """Have all shares written; when this ends, in whatever way, no task is left.

    Raises:
        OutputError: a worker died again and again, or no node is left that could do its share.
        ZexportError: what the first worker said that failed.
    """
    import ray

    board = ray.remote(num_cpus=0)(Board).options(**on(own_node())).remote()
    task_of = ray.remote(perform)
    started = {
        task_of.options(**task.options).remote(order, task.share, board): task for task in tasks
    }
    nbytes = [task.nbytes for task in tasks]
    reports: dict[int, PartReport] = {}
    pending = [*started]
    try:
        while pending:
            ended, pending = ray.wait(pending, timeout=_WAIT_SECONDS)
            for one in ended:
                number = started[one].share.number
                reports[number] = _report(one, started[one], order.out_dir)
            _check_able([started[one] for one in pending], order.out_dir)
            if tell is not None:
                told = ray.get(board.told.remote())
                told |= {n: _ended(nbytes[n - 1], report) for n, report in reports.items()}
                tell(together(nbytes, told))
    finally:
        _end(pending)
        ray.kill(board)
    return [*reports.values()]


def _ended(nbytes: int, report: PartReport) -> Progress:
    """How far a worker has come whose share is done: what it did not write was there."""
    return Progress(nbytes, nbytes, Phase.VERIFY, nbytes - report.nbytes_written)


def _report(task: Any, meant: Task, out_dir: Path) -> PartReport:
    """What a worker did that has ended; its failure is raised here."""
    import ray

    try:
        found: PartReport | ZexportError = ray.get(task)
    except FalteredError as fault:
        raise fault.cause.args[0] from None  # type: ignore[attr-defined] # Ray's own mixture
    except ray.exceptions.RayError as cause:
        _check_able([meant], out_dir)  # Ray itself gives up what no node can do
        raise OutputError(
            f"part {meant.share} was lost {RETRIES + 1} times",
            path=out_dir,
            found=first_line(cause),
            hint="Look at the nodes with ray status; the same command goes on from what is there",
        ) from cause
    if isinstance(found, ZexportError):
        raise found
    return found


def _check_able(pending: Sequence[Task], out_dir: Path) -> None:
    """Refuse to wait for what no node can do any more."""
    alive = nodes() if pending else []
    for task in pending:
        if not task.may_run(alive):
            lost = "the node that has its rank files" if task.node else "every node that could"
            raise OutputError(
                f"part {task.share} cannot be written: {lost} is gone from the cluster",
                path=out_dir,
                hint="When it is back, the same command goes on from what is there",
            )


def _end(pending: Sequence[Any]) -> None:
    """End tasks, and return when they have ended."""
    import ray

    for task in pending:
        ray.cancel(task, force=True)
    if pending:
        ray.wait([*pending], num_returns=len(pending), timeout=_END_SECONDS)
