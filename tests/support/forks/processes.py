"""`Popen` and `run` of the standard library, whose Python processes a warm interpreter forks."""

from __future__ import annotations

import array
import contextlib
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("PYTHON", "LC_", "LANG", "MALLOC", "LD_", "GEVENT")
"""Beginnings of environment variables that an interpreter or a library reads at its start."""
HANDLED = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Those that the server reads for each process."""


class Choice:
    """Whether processes are forked, or started by exec: the one place where tests decide it.

    :ivar exec_now: the current test has the mark `exec`.
    :ivar forked_seconds: processor time of the forked processes that have ended.
    """

    def __init__(self) -> None:
        self.exec_now = False
        self.forked_seconds = 0.0
        self._lock = threading.Lock()
        self._servers: dict[bool, ForkServer] = {}

    def start(self) -> None:
        """Start the servers now; processes that this one forks then use them, too."""
        for is_command in (True, False):
            self._server(is_command)

    def server(self, argv: Sequence[str]) -> ForkServer | None:
        """Return the server that forks a process for the current test; None for exec."""
        if self.exec_now:
            return None
        return self._server(argv[1:3] == ["-m", "qdo"])

    def _server(self, is_command: bool) -> ForkServer:
        with self._lock:
            if is_command not in self._servers:
                self._servers[is_command] = ForkServer(*["optional"] * is_command)
            return self._servers[is_command]

    def close(self) -> None:
        """End the servers."""
        while self._servers:
            self._servers.popitem()[1].close()


choice = Choice()


class ForkServer:
    """The client's end of `tests.support.forks.server`."""

    def __init__(self, *options: str) -> None:
        self._requests, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py")), *options],
                stdin=far_end.fileno(),
                env={
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("QDO_") and name not in HANDLED
                },
            )
        self._special = _special(os.environ)

    def can_fork(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a fork of the server is like a new process with this input."""
        is_python = argv[0] == sys.executable and argv[1:2] in (["-m"], ["-c"])
        return is_python and _special(env) == self._special

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> tuple[int, socket.socket]:
        """Fork a process; return its pid, and the socket that gets its status at its end."""
        answers, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = os.memfd_create("request")
        with far_end, open(text, "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            os.lseek(text, 0, os.SEEK_SET)
            fds = array.array("i", [far_end.fileno(), text, *streams])
            self._requests.sendmsg([b"fork"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        answer = answers.recv(4096)
        if not answer:
            raise RuntimeError("the fork server died; see its error on stderr")
        return json.loads(answer)["pid"], answers

    def close(self) -> None:
        """End the server, not the processes that it has forked."""
        self._requests.close()
        self._process.wait()


def _special(env: Mapping[str, str]) -> dict[str, str]:
    names = (each for each in env if each.startswith(SPECIAL) and each not in HANDLED)
    return {name: env[name] for name in names}


_INPUT = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
USUAL = {
    **dict.fromkeys(("executable", "preexec_fn", "gid", "gids", "uid")),
    "close_fds": True,
    "pass_fds": (),
    "shell": False,
    "umask": -1,
}
"""Options of a process that can be forked."""


class Popen(subprocess.Popen[Any]):
    """A process as `subprocess.Popen` starts it, though perhaps by a fork; see `Choice`."""

    _answers: socket.socket | None = None

    def _execute_child(self, *values: Any) -> None:  # type: ignore[override]
        given = _INPUT.bind(self, *values).arguments
        env = dict(os.environ if given["env"] is None else given["env"])
        argv = [*map(os.fsdecode, given["args"])]
        usual = all(given.get(name) == value for name, value in USUAL.items())
        server = choice.server(argv) if usual else None
        if server is None or not server.can_fork(argv, env):
            super()._execute_child(*values)  # type: ignore[misc]
            return
        request = {
            "argv": argv[1:],
            "env": env,
            "cwd": os.path.abspath(given["cwd"] or "."),
            "umask": int(_own_status("Umask"), 8),
            "session": given["start_new_session"],
        }
        theirs = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if fd == -1 else fd for number, fd in enumerate(theirs)]
        self.pid, self._answers = server.fork(request, streams)
        self._child_created = True
        ours = [given[name] for name in ("p2cwrite", "c2pread", "errread")]
        pipes = {fd for fd, end in zip(theirs, ours, strict=True) if fd != -1 and end != -1}
        devnull = getattr(self, "_devnull", None)
        for fd in pipes if devnull is None else pipes | {devnull}:
            os.close(fd)
        self._closed_child_pipe_fds = True

    def _internal_poll(self, _deadstate: Any = None, **more: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(_deadstate, **more)  # type: ignore[misc,no-any-return]
        self._receive(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._answers is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if not self._receive(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _receive(self, timeout: float | None) -> bool:
        """Wait for the status of the forked process; return whether it has ended."""
        if self.returncode is None and self._answers is not None:
            ready, _, _ = select.select([self._answers], [], [], timeout)
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if ready and self.returncode is None:
                    answer = json.loads(self._answers.recv(4096))
                    self.returncode = os.waitstatus_to_exitcode(answer["status"])
                    self._answers.close()
                    choice.forked_seconds += answer["seconds"]
        return self.returncode is not None


def _own_status(name: str) -> str:
    text = Path("/proc/self/status").read_text()
    return text.partition(f"\n{name}:")[2].split()[0]


def run(
    argv: Sequence[str],
    *,
    input: bytes | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a process to its end, as `subprocess.run` does with ``check=False``."""
    if options.pop("capture_output", False):
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(argv, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)
