"""Names processes that have transformers when they begin: forks of one that imported it and waits.

The import takes seconds, and many tests ask. A fork is a process of its own as ever, with its own
limits, output and end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from signal import SIGKILL
from threading import Lock
from typing import IO, Any, Self

_POPEN = subprocess.Popen
_MODULE = "zexport.model.names_process"
_DECIDING = ("HF_", "HOME", "LD_", "PATH", "PYTHON", "TORCH_", "TRANSFORMERS_", "USE_")
"""How variables begin by which Python, torch and transformers find code, or choose it."""

_ANY_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 8,
}


class WarmSubprocess:
    """Stands for ``subprocess`` where names processes are started.

    What a test gives another environment or folder, or another ``subprocess.Popen``, is started as
    ever.
    """

    PIPE = subprocess.PIPE

    def __init__(self) -> None:
        self._begun_in = _surroundings(os.environ)
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def Popen(self, command: Sequence[str], *, env: Mapping[str, str], **more: Any) -> Any:  # noqa: N802
        is_usual = _surroundings(os.environ) == self._begun_in
        if subprocess.Popen is not _POPEN or _MODULE not in command or not is_usual:
            return subprocess.Popen(command, env=env, **more)
        return _Fork(self, more["stdout"], int(command[-1]))

    def ask(self, word: str, descriptors: Sequence[int] = ()) -> int:
        """The number that the waiting process answers."""
        with self._lock:
            if self._socket is None:
                self._socket = self._start()
            socket.send_fds(self._socket, [word.encode()], descriptors)
            return int(self._socket.recv(64))

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = _POPEN(  # it ends with us, when our end of the socket is closed
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
            )
        return ours


class _Fork:
    """What ``names`` uses of a ``Popen``."""

    def __init__(self, home: WarmSubprocess, output: IO[bytes], answers: int) -> None:
        stdin, to_ask = os.pipe()
        self.stdin = os.fdopen(to_ask, "wb")
        self.returncode: int | None = None
        self._home = home
        self._pid = home.ask("fork", (stdin, output.fileno(), answers))
        os.close(stdin)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self._pid, SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._home.ask(str(self._pid))
        return self.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stdin.close()
        finally:
            self.wait()


def _surroundings(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    return os.getcwd(), {  # noqa: PTH109
        name: value for name, value in environment.items() if name.startswith(_DECIDING)
    }


def _next_fork(asked: socket.socket) -> IO[str]:
    """Returns in every fork, with the file that answers go to; ends with the process that asks."""
    while True:
        word, descriptors, *_ = socket.recv_fds(asked, 64, 3)
        if not word:
            sys.exit()
        if not descriptors:
            _, status = os.waitpid(int(word), 0)
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        stdin, output, answers = descriptors
        if not (pid := os.fork()):
            asked.close()
            for number, descriptor in enumerate((stdin, output, output)):
                os.dup2(descriptor, number)
            return os.fdopen(answers, "w")
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(pid).encode())


if __name__ == "__main__":
    from zexport.model.names_process import answer_all, describe

    describe(_ANY_MODEL)  # so that what building a model imports is there, too
    with socket.socket(fileno=int(sys.argv[1])) as waiting:
        to_answer = _next_fork(waiting)
    with to_answer:
        answer_all(to_answer)
