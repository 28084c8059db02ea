"""The child's end of the pipe to its parent: reports to it, and notices its death."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
from collections.abc import Callable, Iterable

import gevent

from qdo.settings.settings import Settings
from qdo.worker.imported_files import app_files

FILES_SECONDS = 1.0
"""How often a worker looks for newly imported files; only with the setting `reload`."""

_log = logging.getLogger(__name__)


class ParentLink:
    """The child's end of the pipe to the parent.

    The child sends everything needed to close each of its sessions. So the parent can close
    them the moment this process dies. The parent never sends anything: the child reads the end
    of the stream when the parent dies.

    :param coordinator: address of the sessions' coordinator. An app may set it in code that the
        parent never imports.
    :param root: znode of the app, which the app may set in the same way.
    """

    def __init__(self, pipe: socket.socket, coordinator: str, root: str = "") -> None:
        self._pipe = pipe
        self._coordinator = coordinator
        self._root = root
        self._gone = False

    def on_session(
        self, session: tuple[int, bytes] | None, timeout_seconds: float | None = None
    ) -> None:
        """Report a new session; None means that the worker closed the last one itself.

        :param timeout_seconds: the timeout that the coordinator granted; None if unknown.
        """
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
        """Ask the parent for an action: "drain", "restart" or "reload".

        :raises OSError: the parent has died.
        """
        self._pipe.sendall(json.dumps({"ask": action}).encode() + b"\n")

    def watch(self, on_death: Callable[[], None]) -> None:
        """Wait until the parent has died, then call `on_death` once."""
        try:
            while self._pipe.recv(4096):
                pass
        except OSError as error:
            _log.debug("the pipe to the parent broke: %s", error)
        self._gone = True
        on_death()


def send_settings(pipe: socket.socket, settings: Settings) -> None:
    """Send the parent the settings in force: the app may have some in code."""
    try:
        pipe.sendall(json.dumps({"settings": dataclasses.asdict(settings)}).encode() + b"\n")
    except OSError as error:
        _log.warning(
            "cannot report the settings to the parent, which goes on with its own: %s", error
        )


def send_files(pipe: socket.socket, files: Iterable[str]) -> None:
    """Send the parent the names of the app's source files."""
    try:
        pipe.sendall(json.dumps({"files": sorted(files)}).encode() + b"\n")
    except OSError as error:
        _log.warning(
            "cannot report source files to the parent; it may overlook that they change: %s", error
        )


def send_files_forever(pipe: socket.socket) -> None:
    """Send the parent the names of the app's source files, again whenever there are more."""
    sent: set[str] = set()
    while True:
        files = app_files()
        if not files <= sent:
            sent |= files
            send_files(pipe, sent)
        gevent.sleep(FILES_SECONDS)
