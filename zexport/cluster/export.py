"""A folder made by the nodes of a Ray cluster: begun and published here, written by all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from zexport.api.parts import Request, check_engine
from zexport.cluster.connection import Node, ask, connected
from zexport.cluster.node_views import Places, survey
from zexport.cluster.tasks import Order, Task, perform_all
from zexport.export.plan import ExportPlan
from zexport.printable import some
from zexport.run.execute import ExportReport
from zexport.run.progress import Progress
from zexport.run.readback import VerifyMode
from zexport.run.shares import Share, nodes_of, shares_of
from zexport.run.staging import real_path
from zexport.run.workers import begun_parts, finish_parts
from zexport.store import node_files, objects
from zexport.store.address import local_path, place
from zexport.store.client import options_in_use
from zexport.store.folders import absolute
from zexport.store.json import values_of
from zexport.store.publish import marked, parents

_PARTS_MIN = 2
"""A folder that was begun for one part is one process's own, and not gone on with by others."""


class Crew:
    """The nodes of a cluster that make one folder together.

    Attributes:
        checkpoint: where it lies for all of them: what was given, or an address for each node
            that keeps a part of it on its own disk.
    """

    def __init__(self, places: Places) -> None:
        self.checkpoint = places.checkpoint
        self._places = places

    def run(
        self,
        plan: ExportPlan,
        request: Request,
        *,
        verify: VerifyMode = VerifyMode.READBACK,
        progress: Callable[[Progress], None] | None = None,
    ) -> ExportReport:
        """Have a plan of ``checkpoint`` done: the folder is byte for byte that of one process.

        What is finished when this fails or is interrupted stays, and the same call goes on from
        there. No task is left running.

        Raises:
            OutputError: the folder cannot be made, another process has it written, or nodes were
                lost that no other can take the place of.
            ZexportError: as ``zexport.run_export`` does.
        """
        began = time.monotonic()
        check_engine(plan)
        writing = self._writing_nodes()
        cores = min(plan.jobs, *(node.cores for node in writing)) if writing else plan.jobs
        count = len(nodes_of(plan)) or sum(node.cores // cores for node in writing)
        count = max(count, _PARTS_MIN)
        with begun_parts(plan, count, values_of(request)) as parts:
            order = Order(request, absolute(plan.out_dir), verify, dict(options_in_use()))
            written = perform_all(order, self._tasks(plan, parts, cores), progress)
            done = finish_parts(plan, verify=verify)
        return replace(
            done,
            nbytes_read=done.nbytes_read + sum(one.nbytes_read for one in written),
            seconds=time.monotonic() - began,
            warnings=(*done.warnings, *self._warnings()),
        )

    def _writing_nodes(self) -> list[Node]:
        """Those with a core at least, which a head node often has not."""
        return [node for node in self._places.nodes if node.cores]

    def _tasks(self, plan: ExportPlan, parts: int, cores: int) -> list[Task]:
        """A task for each share; where nodes have files of their own, each gets what it has."""
        nbytes = [sum(one.nbytes for one in share) for share in shares_of(plan, parts)]
        by_id = {node.id: node for node in self._places.nodes}
        own = [by_id[one] for one in nodes_of(plan)]
        return [
            Task(Share(n, parts), size, min(cores, node.cores), node=node)
            if node is not None
            else Task(Share(n, parts), size, cores, avoided=self._places.left_out)
            for n, (size, node) in enumerate(zip_longest(nbytes, own), start=1)
        ]

    def _warnings(self) -> Iterator[str]:
        if left_out := [node.host for node in self._places.left_out]:
            yield (
                f"{len(left_out)} nodes do not see all that is read, and wrote nothing: "
                f"{some(left_out, 8)}"
            )


@contextmanager
def gathered(
    address: str, checkpoint: Sequence[Path], out_dir: Path, also: Sequence[Path] = ()
) -> Iterator[Crew]:
    """A block in which the nodes of a cluster are there to make ``out_dir``.

    Args:
        address: ``local``, ``auto``, or a cluster's address, as ``ray.init`` takes it.
        checkpoint: as for ``zexport.open_checkpoint``, where it lies on the nodes.
        out_dir: a folder that all nodes see.
        also: what else the plan is made of, which all nodes see as this process does.

    Raises:
        UsageError: no cluster is found, Ray is not installed, or a node has another zexport.
        CheckpointError: no node sees the checkpoint, or one that writes does not see the rest.
        OutputError: a node does not see where ``out_dir`` is to lie, or does not answer.
    """
    target = real_path(local_path(out_dir))
    paths = [absolute(place(path)) for path in checkpoint]
    with connected(address), parents(target.parent), node_files.used(ask):
        with marked(target) as mark:
            places = survey(paths, mark, also)
        objects.forget_listings()  # of what lay there when this process asked before
        yield Crew(places)
