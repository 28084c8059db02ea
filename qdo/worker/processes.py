"""One worker process as its parent sees it: start, what it says of its sessions, end, group."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from qdo.coordination.crashes import InHand
from qdo.settings import Settings
from qdo.worker import hands
from qdo.worker.sessions import Session

CHILD_ARGV = (sys.executable, "-m", "qdo.worker.child")
CHILD_VARIABLE = "QDO_CHILD"
"""Environment variable with what the child must know, as JSON: settings may hold secrets, and
a command line is readable by every user of the machine."""

_log = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER = 36


class Child:
    """A running worker process, leader of a process group and session of its own.

    :ivar files: what it imported, as far as it said; only with the setting `reload`.
    :ivar in_hand: after `reap`, the messages that it had in hand when it died.
    :ivar receipts: after `reap`, the descriptor of what it held at the broker; whoever takes
        it closes it.
    :param left: such descriptors of dead processes, for this one to give back.
    :param again: one of this place has run before.

    Only the parent's main loop may reap it: until then its pid and group cannot be given
    to anybody else, so that a signal never meets a stranger.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        settings: Settings,
        target: str | None,
        left: Sequence[int] = (),
        again: bool = False,
    ) -> None:
        self.name = name
        self.sessions: list[Session] = []
        self.files: list[str] = []
        self._coordinator = settings.coordinator
        self._said = b""
        # A socket pair, not a pipe: the child writes its lines into it, and reads its end from
        # it when the parent has died.
        self.pipe, far_end = socket.socketpair()
        self.pipe.setblocking(False)
        self._hands = hands.make_memory()
        self.receipts = hands.make_memory("qdo-receipts")
        self.in_hand: list[InHand] = []
        told = {
            "settings": dataclasses.asdict(settings),
            "target": target,
            "pipe": far_end.fileno(),
            "hands": self._hands,
            "receipts": self.receipts,
            "left": list(left),
            "again": again,
        }
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                env={**os.environ, CHILD_VARIABLE: json.dumps(told)},
                pass_fds=(far_end.fileno(), self._hands, self.receipts, *left),
                start_new_session=True,
            )
        except BaseException:
            self.pipe.close()
            os.close(self._hands)
            os.close(self.receipts)
            raise
        finally:
            far_end.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def registered(self) -> bool:
        """Whether it has a session open, as far as it said."""
        return bool(self.sessions)

    def ask(self) -> None:
        """Send SIGTERM to the process itself; its executor processes are its own business."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole process group; only before `reap`."""
        os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Take the exit code of the dead process (negative: signal) and what it left: what it
        said last, and the messages it had in hand.

        The group is killed first, while the dead leader still keeps its number from being
        used again.
        """
        self.kill()
        code = self._process.wait()
        self.hear()
        self.pipe.close()
        self.in_hand = hands.read(self._hands)
        os.close(self._hands)
        return code

    def group_gone(self) -> bool:
        """Return whether nothing of its group lives; call it after `reap`.

        As the parent adopts orphans (`adopt_orphans`), every former member is its child, and
        counts as gone once it is reaped.
        """
        try:
            os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def hear(self) -> bool:
        """Read what the child said; return False when it closed its end."""
        while True:
            try:
                data = self.pipe.recv(65536)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            *lines, self._said = (self._said + data).split(b"\n")
            for line in lines:
                self._understand(line)

    def _understand(self, line: bytes) -> None:
        try:
            value = json.loads(line)
            if "files" in value:
                self.files = list(map(str, value["files"]))
                return
            session = self._session_of(value)
        except (ValueError, KeyError, TypeError):
            _log.warning("%s (pid %d) said %r, which is ignored", self.name, self.pid, line[:100])
            return
        if session is None:
            del self.sessions[-1:]
        elif session not in self.sessions:
            self.sessions.append(session)

    def _session_of(self, value: dict[str, Any]) -> Session | None:
        if value["session"] is None:
            return None
        # An app may name its coordinator in code, which only the child imports.
        url = value.get("coordinator") or self._coordinator
        root = str(value.get("root", ""))
        return Session(url, int(value["session"], 16), bytes.fromhex(value["password"]), root)


def next_ended() -> int | None:
    """Return the pid of an ended child of this process, which stays unreaped; None: no such."""
    try:
        state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if state is None else state.si_pid


def adopt_orphans() -> bool:
    """Make this process the new parent of its descendants' orphans (Linux); say if it worked.

    Without it a dead child's executor processes would be handed to init, and nobody here
    could tell when they are gone.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
