"""The parent process as its child sees it: told of every session, watched for its end."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterable

import gevent

from qdo.worker.reloading import app_files

FILES_SECONDS = 1.0
"""How often a worker looks for files it has imported since; only with the setting `reload`."""

_log = logging.getLogger(__name__)


class Parent:
    """The far end of the pipe to the parent.

    What a session takes to be closed goes there, so that the parent can close it the moment
    this process dies. Nothing comes back but the end of the pipe: the parent died.

    :param coordinator: address of the sessions' coordinator, which an app may name in code
        that the parent never imports.
    :param root: znode of the app, which the app may name in code just so.
    """

    def __init__(self, pipe: socket.socket, coordinator: str, root: str = "") -> None:
        self._pipe = pipe
        self._coordinator = coordinator
        self._root = root
        self._gone = False

    def on_session(self, session: tuple[int, bytes] | None) -> None:
        """Tell of a new session, or with None that the last one was closed in good order."""
        told: dict[str, str | None] = {"session": None}
        if session is not None:
            told = {
                "session": f"{session[0]:x}",
                "password": session[1].hex(),
                "coordinator": self._coordinator,
                "root": self._root,
            }
        try:
            self._pipe.sendall(json.dumps(told).encode() + b"\n")
        except OSError as error:
            if not self._gone:
                _log.warning("the parent cannot be told of a session: %s", error)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Wait until the parent has died, then call `on_death` once."""
        try:
            while self._pipe.recv(4096):
                pass
        except OSError as error:
            _log.debug("the pipe to the parent broke: %s", error)
        self._gone = True
        on_death()


def tell_files(pipe: socket.socket, files: Iterable[str]) -> None:
    """Tell the parent which files this process is made of."""
    try:
        pipe.sendall(json.dumps({"files": sorted(files)}).encode() + b"\n")
    except OSError as error:
        _log.warning("the parent cannot be told of files: %s", error)


def tell_files_for_ever(pipe: socket.socket) -> None:
    """Tell the parent of files, again whenever there are more."""
    told: set[str] = set()
    while True:
        files = app_files()
        if not files <= told:
            told |= files
            tell_files(pipe, told)
        gevent.sleep(FILES_SECONDS)
