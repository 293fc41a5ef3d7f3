"""Start names processes as forks of a process that has imported transformers.

The import takes seconds, and many tests ask. A fork has its own limits, output and end. Nothing
here depends on what the process is asked or how it answers: any ``python -m zexport....`` whose
module is called ``names_process`` is started so.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_POPEN = subprocess.Popen
_DECIDING = ("HF_", "HOME", "LD_", "PATH", "PYTHON", "TORCH_", "TRANSFORMERS_", "USE_")
"""Prefixes of variables by which Python, torch and transformers find or choose code."""

_SET_BY_CLIENT = ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY")
_DESCRIPTORS_MAX, _REQUEST_NBYTES_MAX, _FREE_DESCRIPTOR = 16, 1 << 16, 200


class WarmNames:
    """The ``Popen`` to use for ``subprocess.Popen``, and the process that it forks.

    What a test gives another environment or folder is started as usual.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="names")
        self._socket = str(Path(self._folder) / "socket")
        self._owner = os.getpid()
        self._begun_in = _surroundings(os.environ)
        warm = self

        class Popen(_POPEN):  # type: ignore[type-arg]
            def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
                super().__init__(warm.command(args, options), *rest, **options)

        self.Popen = Popen

    def command(self, args: Any, options: Mapping[str, Any]) -> Any:
        """The command to start, given the one that was asked for."""
        is_names = isinstance(args, list | tuple) and any(
            str(word).startswith("zexport.") and str(word).endswith("names_process")
            for word in args
        )
        environment = options.get("env") or os.environ
        if not is_names or "preexec_fn" in options or _surroundings(environment) != self._begun_in:
            return args
        self._start()
        words = [*map(str, args[args.index("-m") + 1 :])]
        passed = [0, 1, 2, *options.get("pass_fds", ())]
        return [sys.executable, "-SE", __file__, self._socket, json.dumps(passed), *words]

    def _start(self) -> None:
        if Path(self._socket).exists():
            return
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(self._socket)
            except OSError:  # a fork of ours was first
                return
            listening.listen(8)
            _POPEN(
                [sys.executable, "-P", __file__, str(listening.fileno()), str(self._owner)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(listening.fileno(),),
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            )

    def end(self) -> None:
        """Take the socket away; the process ends when it finds that."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _surroundings(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    found = {n: v for n, v in environment.items() if n.startswith(_DECIDING)}
    return str(Path.cwd()), {n: v for n, v in found.items() if n not in _SET_BY_CLIENT}


def _ask(path: str, passed: str, words: list[str]) -> int:
    """Have the waiting process fork with our descriptors; its exit status."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        request = json.dumps({"passed": json.loads(passed), "words": words}).encode()
        socket.send_fds(asked, [request], json.loads(passed))
        for descriptor in json.loads(passed):
            os.close(descriptor)  # as a pipe ends when all who have it have closed it
        return int(asked.recv(64) or b"1")


def _serve(listening: socket.socket, owner: int) -> None:
    """Fork for every request, until the owner or the socket's folder is gone."""
    import torch
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)
    with torch.device("meta"):  # imports what building a model imports
        transformers.LlamaForCausalLM(config)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    folder = Path(listening.getsockname()).parent
    while folder.exists() and _is_running(owner):
        if not select.select([listening], [], [], 1)[0]:
            continue
        asked, _ = listening.accept()
        if not os.fork():
            listening.close()
            _attend(asked)
        asked.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _attend(asked: socket.socket) -> None:
    """Run one request in a fork of our own, and kill it if the asker goes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, *_ = socket.recv_fds(asked, _REQUEST_NBYTES_MAX, _DESCRIPTORS_MAX)
    received = json.loads(request)
    if not (pid := os.fork()):
        asked.close()
        _become(received["words"], dict(zip(received["passed"], descriptors, strict=True)))
    for descriptor in descriptors:
        os.close(descriptor)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if select.select([asked], [], [], 0.003)[0]:  # closed: nothing more is ever sent
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os._exit(0)
    asked.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
    os._exit(0)


def _become(words: list[str], descriptors: Mapping[int, int]) -> None:
    """``python -m`` with these words and descriptors."""
    above = {
        n: fcntl.fcntl(d, fcntl.F_DUPFD_CLOEXEC, _FREE_DESCRIPTOR) for n, d in descriptors.items()
    }
    for descriptor in descriptors.values():
        os.close(descriptor)
    for number, descriptor in above.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    code: object = 1
    try:
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        with socket.socket(fileno=int(sys.argv[1])) as waiting:
            _serve(waiting, int(sys.argv[2]))
    else:
        status = _ask(sys.argv[1], sys.argv[2], sys.argv[3:])
        if status < 0:
            os.kill(os.getpid(), -status)
        sys.exit(status)
