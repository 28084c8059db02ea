"""A warm interpreter that forks the processes of tests.

Importing qdo takes 0.15 s of processor time for a command, 0.35 s for a worker; a fork takes 0.015.
It has one thread, and ends when no process of pytest has the other end of its standard input, a
socket, any more.

A request is one message on that socket, with five descriptors:

1. a socket for the answers: ``{"pid": N}`` at once; at the end ``{"status": N, "seconds": S}``,
   see `os.wait`, with the processor time of the process and of its children;
2. a memory file with the request as JSON: ``argv`` after the name of the interpreter, ``env``,
   ``cwd``, ``umask``, ``session``;
3. standard input, output and error of the new process.

A forked process differs from an executed one in its ``/proc/PID/cmdline``, in the seed of its
hashes, in the order in which modules were imported, and in the end of the interpreter, which it
leaves out. Tests of such things have the mark `exec`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, NoReturn

REQUESTS = 0
"""The descriptor of the socket for requests."""
OPTIONAL = (
    *("boto3", "botocore", "cryptography", "flask", "google.protobuf", "opentelemetry"),
    *("prometheus_client", "psycopg", "sqlalchemy", "urllib3"),
)
"""Libraries that look whether gevent has patched the interpreter, or that few processes import.
Only the server of commands has them."""
ROOT = str(Path(__file__).parents[3])
INSTALLED = sys.path[1:]
"""What the interpreter has on its path by itself; this program is started without PYTHONPATH."""
HANDLED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
ENCODING = sys.stdout.encoding
ERRORS = {name: getattr(sys, name).errors for name in ("stdin", "stdout", "stderr")}


def preload(*, optional: bool) -> None:
    """Import the parts of qdo that commands, parents and worker processes use.

    :param optional: import the libraries of `OPTIONAL`, too.
    """

    import qdo
    from qdo.errors import SettingsError

    if not optional:
        sys.modules.update(dict.fromkeys(OPTIONAL))  # an import of None fails
    for found in pkgutil.walk_packages(qdo.__path__, "qdo.", onerror=lambda _: None):
        if not found.name.endswith("__main__") and not {"programs", "contrib"} & {
            *found.name.split(".")
        }:
            with contextlib.suppress(ImportError, SettingsError):
                importlib.import_module(found.name)
    for name in ("rich.console", "rich.table"):  # those that print a table import them
        importlib.import_module(name)
    for name in OPTIONAL:
        if optional:
            importlib.import_module(name)
        else:
            del sys.modules[name]
    if threading.active_count() > 1:
        raise RuntimeError(f"an import started threads: {threading.enumerate()}")
    from gevent._hub_local import get_hub_if_exists
    from gevent.monkey import is_anything_patched

    if get_hub_if_exists() is not None or is_anything_patched():
        raise RuntimeError("an import started gevent's loop or patched modules")


def serve() -> None:
    """Fork processes until the socket for requests is closed."""
    requests = socket.socket(fileno=os.dup(REQUESTS))
    os.set_inheritable(requests.fileno(), False)
    wakeups, wakeup = os.pipe()
    for end in (wakeups, wakeup):
        os.set_blocking(end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends this
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests, wakeups], [], [])
        if wakeups in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeups, 4096)
            _reap(running)
        if requests in ready and not _accept(requests, running):
            return


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        answer = {"status": status, "seconds": usage.ru_utime + usage.ru_stime}
        with running.pop(pid) as answers, contextlib.suppress(OSError):  # the test may have ended
            answers.send(json.dumps(answer).encode())


def _accept(requests: socket.socket, running: dict[int, socket.socket]) -> bool:
    data, ancillary, _, _ = requests.recvmsg(16, socket.CMSG_SPACE(5 * 4))
    if not data:
        return False
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    answers, text, *streams = fds
    with open(text, "rb") as file:
        request = json.load(file)
    pid = fork()
    if pid == 0:
        _become(request, streams)
    for fd in streams:
        os.close(fd)
    running[pid] = socket.socket(fileno=answers)
    running[pid].send(json.dumps({"pid": pid}).encode())
    return True


def fork() -> int:
    """Fork; signals for the new process wait until it calls `reset`.

    The handlers of this process, which it has before, would lose them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED | {signal.SIGINT})
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _become(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Become the process that was requested."""
    with leaving():
        if request["session"]:
            os.setsid()
        os.umask(request["umask"])
        os.chdir(request["cwd"])
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        os.closerange(3, 1024)
        reset(request["env"])
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        kind, what, *arguments = request["argv"]
        sys.orig_argv = [sys.executable, *request["argv"]]
        sys.path.insert(0, request["cwd"] if kind == "-m" else "")
        run(kind, what, arguments)


def reset(env: dict[str, str]) -> None:
    """Undo what this process has set up or inherited, as exec would."""
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    random.seed()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    sys.excepthook = sys.__excepthook__
    _open_streams()
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*filter(None, added), *INSTALLED])
    importlib.invalidate_caches()


def _open_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            stream = None
        else:
            stream = _stream(number, name)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, name: str) -> io.TextIOWrapper:
    mode = "r" if name == "stdin" else "w"
    unbuffered = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    file: Any = open(number, f"{mode}b", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    getattr(file, "raw", file).name = f"<{name}>"
    stream = io.TextIOWrapper(
        file,
        encoding=ENCODING,
        errors=ERRORS[name],
        line_buffering=name == "stderr" or os.isatty(number),
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def run(kind: str, what: str, arguments: Sequence[str]) -> None:
    """Run ``python -m MODULE`` or ``python -c SOURCE`` in this process."""
    program = ModuleType("__main__")
    sys.modules["__main__"] = program
    program.__dict__["__builtins__"] = __builtins__
    sys.argv = [kind, *arguments]
    _fork_workers()
    if kind == "-m":
        sys.modules.pop(what, None)
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    else:
        exec(compile(what, "<string>", "exec"), program.__dict__)


class ForkedWorker:
    """The worker process of a forked parent, in place of the `subprocess.Popen` that starts it.

    gevent patches it before `qdo.worker.main` runs, but after qdo's imports.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: int,
        env: dict[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._returncode: int | None = None
        self.pid = fork()
        if self.pid == 0:
            with leaving():
                self._become(argv, env, pass_fds)

    def _become(self, argv: Sequence[str], env: dict[str, str], pass_fds: Sequence[int]) -> None:
        os.setsid()
        # Objects of the parent own the other descriptors, and may close them at any time. Closed
        # here, their numbers would soon be those of the worker's own files.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in {0, *map(int, os.listdir("/proc/self/fd"))} - {1, 2, null, *pass_fds}:
            with contextlib.suppress(OSError):  # the list had a descriptor of its own
                os.fstat(fd)
                os.dup2(null, fd, inheritable=False)
        for fd in pass_fds:
            os.set_inheritable(fd, True)
        reset(env)
        sys.orig_argv = [sys.executable, *argv[1:]]
        run("-m", argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :])

    def wait(self) -> int:
        """Reap it; return its exit code."""
        if self._returncode is None:
            self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._returncode


def _start_worker(argv: Sequence[str], **options: Any) -> ForkedWorker | subprocess.Popen[bytes]:
    if threading.active_count() > 1:  # a fork would copy the locks that other threads hold
        return subprocess.Popen(argv, **options)
    return ForkedWorker(argv, **options)


def _fork_workers() -> None:
    from qdo.worker.supervisor import child

    stand_in: Any = SimpleNamespace(Popen=_start_worker, DEVNULL=subprocess.DEVNULL)
    child.subprocess = stand_in


class leaving(contextlib.AbstractContextManager[None]):
    """End this process after the block, as the interpreter ends a program."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> NoReturn:
        code = 1
        try:
            code = _code(error)
        finally:
            for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
                _try(step)
            if not all(map(_flushed, (sys.stdout, sys.stderr))):
                code = 120
            os._exit(code & 0xFF)


def _code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def _try(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException:  # noqa: BLE001 - the process ends, whatever a library left behind
        traceback.print_exc()


def _flushed(stream: Any) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except (OSError, ValueError) as error:
        if stream is sys.stderr:
            return True
        print(f"Exception ignored in: {stream!r}", file=sys.stderr)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.path[0] = ROOT
    preload(optional="optional" in sys.argv)
    gc.collect()
    gc.freeze()
    serve()
