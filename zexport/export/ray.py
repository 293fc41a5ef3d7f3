"""Run a job on a Ray cluster: this process begins and finishes it, tasks write its parts.

All nodes see the checkpoint and the output under the same path, or both are in a bucket. A task
loads the sealed plan; nothing else passes between the processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zexport.errors import MissingExtraError, OutputError, UsageError, ZexportError
from zexport.export.job import TURN_SECONDS, Job, Written, begin, finish, load, write
from zexport.export.report import (
    ExportReport,
    OnProgress,
    Phase,
    Progress,
    VerifyMode,
)
from zexport.optional_deps import to_install
from zexport.options import Share
from zexport.storage.client import options_in_use, use_storage_options
from zexport.storage.files import refresh
from zexport.storage.os_errors import first_line, may_pass

_RETRIES = 3
"""How often Ray restarts a task that lost its process, its node, or its storage."""

_WAIT_SECONDS, _END_SECONDS = 0.5, 20.0


class StorageFailedError(Exception):
    """The storage failed in a way that may pass; the error is the argument."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster (``local``, ``auto`` or an address) for the block.

    A connection of the caller is used. ``local`` starts a cluster on this machine.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: there is no such cluster.
    """
    if find_spec("ray") is None:
        raise MissingExtraError("--ray needs Ray, which is not installed", hint=to_install("ray"))
    import ray

    if ray.is_initialized():
        yield
        return
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    own: dict[str, Any] = {}
    if address == "local":
        own["include_dashboard"] = False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, ValueError, RuntimeError) as cause:
        raise UsageError(
            "no Ray cluster, or this process cannot join it",
            found=f"--ray {address}: {first_line(cause)}",
            hint="Start one with ray start --head, with the same versions of Ray and Python; or "
            "pass --ray local",
        ) from cause
    try:
        for number, handler in handlers.items():  # Ray replaces that of SIGTERM
            signal.signal(number, handler)
        yield
    finally:
        ray.shutdown()


def export_on_cluster(job: Job, max_cores: int, progress: OnProgress | None) -> ExportReport:
    """Write a job on the cluster this process is ``connected`` to.

    The output is byte for byte that of one process. On failure, finished files stay, no task is
    left running, and the same command continues.

    Args:
        job: the job.
        max_cores: cores that one task uses at most.
        progress: called as files are finished.

    Raises:
        OutputError: the folder cannot be written, or a task was lost again and again.
    """
    cores = [one for one in _cores() if one]
    each = min(max_cores, *cores)
    count = max(2, sum(one // each for one in cores))
    with job.place.lock(TURN_SECONDS):
        if not begin(job, Share(1, count)):
            raise OutputError("is complete already", path=job.plan.out_dir)
    try:
        written = _write_all(job, count, each, progress)
    except BaseException as error:  # Ctrl-C too
        error.add_note(f"Finished files stay in {job.place.folder}. Run it again to continue.")
        raise
    with job.place.lock(TURN_SECONDS):
        return finish(job, sum(one.nbytes_read for one in written))


def _cores() -> list[int]:
    """Return the cores of each live node; a head node often offers none."""
    import ray

    return [int(one["Resources"].get("CPU", 0)) for one in ray.nodes() if one["Alive"]]


def _write_part(
    out_dir: Path, share: Share, verify: VerifyMode, storage: Mapping[str, str]
) -> Written | ZexportError:
    """Write a part on a node; return an error that retrying would not change.

    Raises:
        StorageFailedError: retry.
    """
    use_storage_options(storage)
    refresh(out_dir)
    try:
        if (sealed := load(out_dir)) is None:
            raise OutputError(
                "was begun on another machine and is missing on this one",
                path=out_dir,
                hint="Choose a folder that all machines see under the same path",
            )
        return write(Job.of(sealed, verify, None), share)
    except ZexportError as error:
        if may_pass(error.__cause__):
            raise StorageFailedError(error) from error
        return error


def _write_all(job: Job, count: int, cores: int, on_progress: OnProgress | None) -> list[Written]:
    """Write all parts; no task is left when this returns or raises."""
    import ray

    retries = {"max_retries": _RETRIES, "retry_exceptions": [StorageFailedError]}
    task = ray.remote(num_cpus=cores, scheduling_strategy="SPREAD", **retries)(_write_part)
    out_dir, storage = job.plan.out_dir, dict(options_in_use())
    shares = [Share(number, count) for number in range(1, count + 1)]
    started = {task.remote(out_dir, share, job.verify, storage): share for share in shares}
    pending, reports = [*started], []
    total = sum(one.data_nbytes for one in job.sealed.sizes)
    try:
        while pending:
            ended, pending = ray.wait(pending, timeout=_WAIT_SECONDS)
            reports += [_result(one, started[one], out_dir) for one in ended]
            if max(_cores(), default=0) < cores:
                raise OutputError("no node is left that could write", path=out_dir)
            if on_progress is not None:
                left = sum(one.data_nbytes for one in job.missing())
                on_progress(Progress(total - left, total, Phase.WRITE))
    finally:
        for one in pending:
            ray.cancel(one, force=True)
        if pending:
            ray.wait([*pending], num_returns=len(pending), timeout=_END_SECONDS)
    return reports


def _result(task: Any, share: Share, out_dir: Path) -> Written:
    import ray

    try:
        found: Written | ZexportError = ray.get(task)
    except StorageFailedError as failed:
        raise failed.cause.args[0] from None  # type: ignore[attr-defined] # added by Ray
    except ray.exceptions.RayError as cause:
        raise OutputError(
            f"part {share} was lost {_RETRIES + 1} times",
            path=out_dir,
            found=first_line(cause),
            hint="Check that all nodes have zexport, and ray status; the same command continues",
        ) from cause
    if isinstance(found, ZexportError):
        raise found
    return found
