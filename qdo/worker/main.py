"""The entry point of a worker process, ``python -m qdo.worker.main``; `qdo-worker` starts it.

The parent's `ChildProcess` passes the input as JSON in the environment variable QDO_CHILD. The
process inherits the descriptors of the pipe and the shared memories. The target is MODULE:APP or
null.

gevent patches the process before any other import, especially the import of the app.

At the first SIGTERM or SIGINT, the worker drains. At the second, the worker aborts running jobs and
releases its queues. At the third, the worker exits.

When the parent dies, the worker drains and exits. Without a parent, no process would restart the
worker or close its session after a SIGKILL. The init system, which watches the parent, starts
another instance of the service. The queues of this worker go to other workers, which do not repeat
any message.

Exit codes: 0 stopped cleanly, 1 a job did not finish or a part died, 2 usage or settings, 3
coordinator or broker unreachable at the start, 5 a right is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from qdo.settings.settings import Settings
    from qdo.worker.worker import ProcessContext, Worker

# Python runs this module as a program, so `__name__` is not the module's name.
LOG_NAME = "qdo.worker.main"


def main() -> int:
    """Run a worker process with the input in its environment; return the exit code."""
    _patch()
    del sys.argv[1:]  # the process title is for `ps`, not for the app
    # Remove the variable from the environment, because processes that the app starts must not
    # inherit secrets in the settings.
    child = json.loads(os.environ.pop("QDO_CHILD"))
    pipe = socket.socket(fileno=child["pipe"])
    os.set_inheritable(pipe.fileno(), False)
    shared = [child.get(name) for name in ("in_flight", "receipts", "stacks", "metrics")]
    for fd in (*shared, *child.get("left", ())):
        if fd is not None:
            os.set_inheritable(fd, False)
    return _run(child, pipe)


def _patch() -> None:
    import queue
    import threading
    from importlib import metadata

    from gevent import monkey

    # gevent looks for plugins at each of 20 events, and Python then reads the metadata of all
    # packages. With 133 packages, the reads take 240 ms; a single read takes 40 ms.
    look = metadata.entry_points
    metadata.entry_points = look().select
    try:
        # gevent's queues and events fail when threads share them. Python's queues and events use
        # locks, and gevent's locks work between threads with running event loops.
        monkey.patch_all(queue=False)
    finally:
        metadata.entry_points = look
    python_event: Any = monkey.get_original("threading", "Event")

    class ThreadsEvent(python_event):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            # Use an RLock, because with a Lock, `set` would let other greenlets run, even in a new
            # fork.
            self._cond = threading.Condition(threading.RLock())

    patched: Any = queue
    patched.SimpleQueue = patched._PySimpleQueue
    patched = threading
    patched.Event = ThreadsEvent


def _run(child: dict[str, Any], pipe: socket.socket) -> int:
    # Import late, because gevent must patch first.
    import logging

    from qdo.errors import QdoError
    from qdo.settings.settings import Settings
    from qdo.system import logs
    from qdo.text import printable_lines
    from qdo.worker import parent_link
    from qdo.worker.line_limit import limit_lines
    from qdo.worker.stacks import write_at_signal

    parent_link.isolate()
    settings = Settings(**child["settings"])
    logs.set_up(settings.logging)
    limit_lines()
    if child.get("stacks") is not None:
        write_at_signal(child["stacks"])
    if settings.reload:
        # Byte code may be outdated if a developer writes a file twice within one second.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        return _work(settings, child, pipe)
    except QdoError as error:
        # The init system may not read stderr. The exit code shows that a restart cannot help.
        with contextlib.suppress(OSError):
            print(printable_lines(f"qdo-worker: {error}", "  "), file=sys.stderr, flush=True)
        _report_failure(settings, child, pipe, error)
        return error.exit_code
    except Exception as error:
        logging.getLogger(LOG_NAME).critical("the worker failed; this process ends", exc_info=True)
        _report_failure(settings, child, pipe, error)
        return 1


def _report_failure(
    settings: Settings, child: dict[str, Any], pipe: socket.socket, error: Exception
) -> None:
    """Send the parent the files in which a developer may fix the error; the parent watches them."""
    if settings.reload:
        from qdo.worker.parent_link import app_files, failure_files, send_files

        involved = failure_files(error, child["target"] or settings.job)
        send_files(pipe, app_files() | involved)


def _work(settings: Settings, child: dict[str, Any], pipe: socket.socket) -> int:
    import logging

    import gevent

    from qdo.coordination.znodes.layout import Layout
    from qdo.loading import prepare
    from qdo.settings.hosts import file_warnings, share_files
    from qdo.system import logs
    from qdo.worker.duties.member_factory import MemberFactory
    from qdo.worker.parent_link import ParentLink, send_files_forever, send_settings
    from qdo.worker.worker import Worker

    before = settings
    app, settings = prepare(before, child["target"])
    if settings.logging != before.logging:
        logs.set_up(settings.logging)
    send_settings(pipe, settings)
    share_files(settings)
    if not child.get("restarted", False):
        for sentence in file_warnings(settings):
            logging.getLogger(LOG_NAME).warning(sentence)
    root = Layout.of(settings.app, settings.namespace).root
    parent = ParentLink(pipe, settings.coordinator, root)
    members = MemberFactory(settings, parent.on_session, child.get("name", ""))
    worker = Worker(app, settings, _context(settings, child, parent.ask), members)
    stops = _StopCount(worker)
    _handle_signals(stops.by_signal)
    gevent.spawn(parent.watch, stops.by_parent, lambda: _parent_died(worker))
    if settings.reload:
        gevent.spawn(send_files_forever, pipe)
    return worker.run()


def _context(
    settings: Settings, child: dict[str, Any], ask_parent: Callable[[str], None]
) -> ProcessContext:
    from qdo.worker.metrics.monitor import MetricsPage
    from qdo.worker.shared_memory import InFlightTable, SharedReceiptStore, read_receipts
    from qdo.worker.worker import ProcessContext

    receipts = []
    for fd in child.get("left", ()):
        receipts += read_receipts(fd)
        os.close(fd)
    return ProcessContext(
        target=child["target"] or "",
        # `concurrency` turns and as many lanes may run at once.
        in_flight=InFlightTable(2 * settings.concurrency, child.get("in_flight")),
        receipts=SharedReceiptStore(child.get("receipts")),
        metrics=MetricsPage(child.get("metrics")),
        left=receipts,
        restarted=child.get("restarted", False),
        deaths=tuple((pid, at, how) for pid, at, how in child.get("deaths", ())),
        ask_parent=ask_parent,
        exit=os._exit,
    )


class _StopCount:
    """Counts stop requests. Each request comes twice: as a signal and over the parent's socket."""

    # The signal reaches a process with a blocked event loop. The socket reaches a process with a
    # replaced signal handler. This class counts both separately, and the larger count applies.
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._signals = self._asked = self._done = 0

    def by_signal(self) -> None:
        self._signals += 1
        self._pass_on()

    def by_parent(self) -> None:
        self._asked += 1
        self._pass_on()

    def _pass_on(self) -> None:
        while self._done < max(self._signals, self._asked):
            self._done += 1
            self._worker.request_stop()


def _handle_signals(on_stop: Callable[[], None]) -> None:
    from qdo.system.processes import reset_signals_in_forks

    reset_signals_in_forks()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: on_stop())


def _parent_died(worker: Worker) -> None:
    import logging

    logging.getLogger(LOG_NAME).error(
        "the parent process died; draining, because nothing would restart this worker or close"
        " its session"
    )
    worker.request_stop()


if __name__ == "__main__":
    sys.exit(main())
