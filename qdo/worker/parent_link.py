"""Connect a worker process with its parent, and isolate forked copies of the process.

Through the pipe, the child sends reports to its parent, such as the app's imported source files,
and notices the parent's death. A forked copy of a worker process does not run any code of the
worker.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gevent
import gevent.hub

from qdo.settings.settings import Settings
from qdo.system.processes import STOP_REQUEST

_log = logging.getLogger(__name__)

# Seconds between two looks for newly imported files, with the setting `reload`.
FILES_SECONDS = 1.0


def app_files() -> set[str]:
    """Return the imported Python files, except those of installed packages and of qdo."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names}
    installed.add(os.path.realpath(__file__).rpartition("/worker/")[0] + os.sep)
    files = (getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()])
    paths = {os.path.realpath(file) for file in files if isinstance(file, str)}
    return {path for path in paths if not path.startswith(tuple(installed))}


def failure_files(error: BaseException, target: str) -> set[str]:
    """Return the files in the traceback of a failed import, and possible files of the target.

    :param target: MODULE:NAME, or "".
    """
    files = {os.path.abspath(name) for name in _names(error) if os.path.exists(name)}
    module = target.partition(":")[0]
    if module:
        path = os.path.abspath(os.path.join(*module.split(".")))
        files |= {f"{path}.py", os.path.join(path, "__init__.py")}
    return files


def _names(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            yield frame.filename
        if isinstance(error, SyntaxError) and error.filename:
            yield error.filename
        error = error.__cause__ or error.__context__


class ParentLink:
    """The child's end of the pipe to the parent; `root` is the znode of the app."""

    # The child sends all data for closing its sessions, so that the parent can close them when the
    # child dies. The data include address and root, because an app may set these in code. The
    # parent sends `STOP_REQUEST` with each SIGTERM, because a library of the app may have replaced
    # the signal handler.
    def __init__(self, pipe: socket.socket, coordinator: str, root: str = "") -> None:
        self._pipe = pipe
        self._coordinator = coordinator
        self._root = root
        self._gone = False

    def on_session(
        self, session: tuple[int, bytes] | None, timeout_seconds: float | None = None
    ) -> None:
        """Report a new session, or None after the worker has closed its last session."""
        report: dict[str, str | float | None] = {"session": None}
        if session is not None:
            report = {
                "session": f"{session[0]:x}",
                "password": session[1].hex(),
                "coordinator": self._coordinator,
                "root": self._root,
                "timeout": timeout_seconds,
            }
        try:
            self._pipe.sendall(json.dumps(report).encode() + b"\n")
        except OSError as error:
            if not self._gone:
                _log.warning(
                    "cannot report a session to the parent; if this process dies, its queues"
                    " are free when the session times out: %s",
                    error,
                )

    def ask(self, action: str) -> None:
        """Ask the parent to "drain", "restart" or "reload"; raise OSError if the parent is dead."""
        self._pipe.sendall(json.dumps({"ask": action}).encode() + b"\n")

    def watch(self, on_stop: Callable[[], None], on_death: Callable[[], None]) -> None:
        """Call `on_stop` for each request of the parent, and `on_death` when the parent dies."""
        try:
            while data := self._pipe.recv(4096):
                for _ in range(data.count(STOP_REQUEST)):
                    on_stop()
        except OSError as error:
            _log.debug("the pipe to the parent broke: %s", error)
        self._gone = True
        on_death()


def send_settings(pipe: socket.socket, settings: Settings) -> None:
    """Send the parent the settings in force, because the app may set some in code."""
    try:
        pipe.sendall(json.dumps({"settings": dataclasses.asdict(settings)}).encode() + b"\n")
    except OSError as error:
        _log.warning("cannot report the settings to the parent, which keeps its own: %s", error)


def send_files(pipe: socket.socket, files: Iterable[str]) -> None:
    try:
        pipe.sendall(json.dumps({"files": sorted(files)}).encode() + b"\n")
    except OSError as error:
        _log.warning(
            "cannot report source files to the parent; restart it if it overlooks a change: %s",
            error,
        )


def send_files_forever(pipe: socket.socket) -> None:
    """Send the parent the names of the app's source files at the start and after each change."""
    sent: set[str] = set()
    while True:
        files = app_files()
        if not files <= sent:
            sent |= files
            send_files(pipe, sent)
        gevent.sleep(FILES_SECONDS)


def isolate() -> None:
    """Isolate each forked copy of this process. Call this function before importing the app."""
    # Handlers run in the order of their registration, so handlers of the app and of libraries run
    # later.
    os.register_at_fork(after_in_child=_begin_anew)


# A fork copies all greenlets and their event loop. If code in the copy waited through gevent, for
# example in a library's fork handler, these greenlets would resume. The resumed greenlets would run
# messages a second time, and take events of the shared epoll descriptor from the worker. So the
# copy begins with a new event loop, which knows only the greenlet that forked.
def _begin_anew() -> None:
    current: Any = gevent.getcurrent()
    hubs: Any = gevent.hub
    hub = hubs.Hub(default=False)
    hubs.set_hub(hub)
    if current.parent is not None:  # a greenlet switches to its parent when it ends
        hub.parent = _outermost(current)
        current.parent = hub


def _outermost(greenlet: Any) -> Any:
    while greenlet.parent is not None:
        greenlet = greenlet.parent
    return greenlet
