"""The worker process itself: ``python -m qdo.worker.child``, started by `qdo-worker`.

What it needs stands as JSON in the environment variable QDO_CHILD: ``settings``, ``target``
(MODULE:APP or null), ``pipe``, the descriptor of a socket to the parent, ``hands`` and
``receipts``, those of memory shared with it (`qdo.worker.hands`, `qdo.worker.receipts`), and
``left``, those of receipts that dead processes left. gevent patches the process before anything
else is imported, above all the app.

SIGTERM or SIGINT drains; the second one aborts running jobs and releases; the third exits.

When the parent dies the worker drains and exits. It could go on, but nobody would restart it
any more or close its session after a kill -9, and the init system, which watches the parent,
believes the service to be down and starts another one beside it. Its queues go to other workers,
nothing is repeated.

Exit codes: 0 stopped in good order, 1 a job could not be finished or a part died, 2 usage or
settings, 3 coordinator or broker out of reach at the start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdo.settings import Settings
    from qdo.worker.worker import Worker


def main() -> int:
    """Run a worker process as its environment says; return the exit code."""
    from gevent import monkey

    monkey.patch_all()
    told = json.loads(os.environ["QDO_CHILD"])
    # The app must not pass it on to processes that it starts: settings may hold secrets.
    del os.environ["QDO_CHILD"]
    pipe = socket.socket(fileno=told["pipe"])
    os.set_inheritable(pipe.fileno(), False)
    for fd in (told.get("hands"), told.get("receipts"), *told.get("left", ())):
        if fd is not None:
            os.set_inheritable(fd, False)
    return _run(told, pipe)


def _run(told: dict[str, Any], pipe: socket.socket) -> int:
    # Imported only now: gevent has to patch first.
    import logging

    from qdo import log
    from qdo.errors import QdoError
    from qdo.settings import Settings

    settings = Settings(**told["settings"])
    log.configure(settings.log_level)
    if settings.reload:
        # A file that is written twice in one second may have the byte code of the first.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        return _work(settings, told, pipe)
    except QdoError as error:
        print(f"qdo-worker: {error}", file=sys.stderr, flush=True)
        _tell_failure(settings, told, pipe, error)
        return error.exit_code
    except Exception as error:
        logging.getLogger(__name__).critical("the worker failed", exc_info=True)
        _tell_failure(settings, told, pipe, error)
        return 1


def _tell_failure(settings: Settings, told: dict[str, Any], pipe: Any, error: Exception) -> None:
    """Say which files to mend, so that the parent notices when they are."""
    if settings.reload:
        from qdo.worker import parent, reloading

        named = reloading.failure_files(error, told["target"] or settings.job)
        parent.tell_files(pipe, reloading.app_files() | named)


def _work(settings: Settings, told: dict[str, Any], pipe: socket.socket) -> int:
    import gevent

    from qdo.coordination.layout import Layout
    from qdo.loading import prepare
    from qdo.worker.hands import Hands
    from qdo.worker.parent import Parent, tell_files_for_ever
    from qdo.worker.receipts import Receipts
    from qdo.worker.receipts import read as read_receipts
    from qdo.worker.registrar import Registrar
    from qdo.worker.worker import Worker

    target: str | None = told["target"]
    app, settings = prepare(settings, target)
    root = Layout.of(settings.app, settings.namespace).root
    parent = Parent(pipe, settings.coordinator, root)
    worker = Worker(
        app,
        settings,
        registrar=Registrar(settings, parent.on_session),
        exit_process=os._exit,
        target=target or "",
        # As many turns as lanes may be under way.
        hands=Hands(2 * settings.concurrency, told.get("hands")),
        receipts=Receipts(told.get("receipts")),
        left=[each for fd in told.get("left", ()) for each in read_receipts(fd)],
        again=told.get("again", False),
    )
    for fd in told.get("left", ()):
        os.close(fd)
    _obey_signals(worker)
    gevent.spawn(parent.watch, lambda: _parent_died(worker))
    if settings.reload:
        gevent.spawn(tell_files_for_ever, pipe)
    return worker.run()


def _obey_signals(worker: Worker) -> None:
    def asked(number: int, frame: Any) -> None:
        worker.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)


def _parent_died(worker: Worker) -> None:
    import logging

    logging.getLogger(__name__).error(
        "the parent process died: nobody would restart this worker or close its session; draining"
    )
    worker.request_stop()


if __name__ == "__main__":
    sys.exit(main())
