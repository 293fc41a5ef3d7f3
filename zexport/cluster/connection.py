"""The connection to a Ray cluster: its nodes, and what one of them or all of them say."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from zexport import __version__
from zexport.errors import MissingExtraError, OutputError, UsageError
from zexport.extras import to_install
from zexport.printable import some
from zexport.store.client import first_line

RETRIES = 3
"""How often Ray runs a task again whose process or node was lost."""

_LOCAL = "local"
"""In the place of an address: a cluster of this machine alone, for as long as it is used."""

_NODE = "ray.io/node-id"
"""The label that every node has (docs.ray.io, "Use labels to control scheduling")."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ANSWER_SECONDS, _LOOK_SECONDS = 120.0, 2.0


class Node(Struct, frozen=True):
    """A machine of the cluster that is alive: its id, its name for people, and its cores."""

    id: str
    host: str
    cores: int


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A block in which there is a cluster; one that the caller has connected to is taken.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: no cluster is found at ``address``.
    """
    if find_spec("ray") is None:
        raise MissingExtraError("--ray needs Ray, which is not installed", hint=to_install("ray"))
    import ray

    if ray.is_initialized():
        yield
        return
    answers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        _connect(address)
        for number, answer in answers.items():  # Ray takes SIGTERM for itself
            signal.signal(number, answer)
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    import ray

    own: dict[str, Any] = {}
    if address == _LOCAL:
        own["include_dashboard"] = False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it tells nobody of itself
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, ValueError) as cause:
        raise UsageError(
            "no Ray cluster is found",
            found=f"--ray {address}",
            hint="Start one with ray start --head, or give --ray local or HOST:6379",
        ) from cause
    except RuntimeError as cause:  # Ray's own check of versions
        raise UsageError(
            "the Ray cluster cannot be joined",
            found=first_line(cause),
            hint="Use the versions of Ray and Python that its nodes have",
        ) from cause


def nodes() -> list[Node]:
    """The nodes that are alive, always in the same order."""
    import ray

    found = [
        Node(one["NodeID"], one["NodeManagerHostname"], int(one["Resources"].get("CPU", 0)))
        for one in ray.nodes()
        if one["Alive"]
    ]
    return sorted(found, key=lambda node: node.id)


def on(node_id: str) -> dict[str, Any]:
    """The option by which Ray runs a task on this node alone."""
    return {"label_selector": {_NODE: node_id}}


def not_on(avoided: Sequence[Node]) -> dict[str, Any]:
    """The option by which Ray runs tasks on all nodes but these, evenly."""
    if not avoided:
        return {"scheduling_strategy": "SPREAD"}
    return {"label_selector": {_NODE: f"!in({', '.join(node.id for node in avoided)})"}}


def own_node() -> str:
    """The id of the node that this process runs on."""
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found


def ask_all(function: Callable[..., object], *args: object) -> dict[Node, object]:
    """What ``function`` says on each node; of a node with another zexport its version, as text.

    Nodes that are lost meanwhile are left out.

    Raises:
        OutputError: a node does not answer.
    """
    import ray

    mine, module, name = __version__, function.__module__, function.__name__

    def answer(*args: object) -> object:  # it goes there by value: a node may have no zexport
        try:
            from zexport import __version__ as own
        except ImportError:
            return "none"
        return own if own != mine else getattr(import_module(module), name)(*args)

    task = ray.remote(num_cpus=0, max_retries=RETRIES)(answer)
    told: dict[Node, object] = {}
    asked = {task.options(**on(node.id)).remote(*args): node for node in nodes()}
    silent = [*asked]
    deadline = time.monotonic() + _ANSWER_SECONDS
    while silent and time.monotonic() < deadline:
        ended, silent = ray.wait(silent, num_returns=len(silent), timeout=_LOOK_SECONDS)
        for one in ended:
            try:
                told[asked[one]] = ray.get(one)
            except ray.exceptions.RayTaskError as failed:
                raise failed.cause from None
            except ray.exceptions.RayError:  # the node is lost
                continue
        alive = nodes()
        silent = [one for one in silent if asked[one] in alive]
    if silent:
        raise OutputError(
            "nodes of the cluster do not answer",
            found=some([asked[one].host for one in silent], 8),
            hint="Look at them with ray status, and run again without them",
        )
    return told


def ask(node_id: str, function: Callable[..., Any], *args: object) -> Any:
    """What ``function`` says on a node; what the system refuses there is refused here."""
    import ray

    if node_id == _own_node_once():
        return function(*args)
    task = ray.remote(num_cpus=0, max_retries=RETRIES)(_answer).options(**on(node_id))
    try:
        found = ray.get(task.remote(function, args), timeout=_ANSWER_SECONDS)
    except ray.exceptions.RayError as cause:
        raise OSError(errno.EHOSTDOWN, "the node that has it does not answer") from cause
    if isinstance(found, OSError):
        raise found
    return found


_own_node_once = cache(own_node)


def _answer(function: Callable[..., object], args: tuple[object, ...]) -> object:
    """What a function says, or what the system refuses it."""
    try:
        return function(*args)
    except OSError as error:
        return error
