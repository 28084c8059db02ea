"""Reaps dead worker processes, and closes their sessions once nothing of them is alive.

The order makes it safe. The process group is killed while its dead leader still holds the group
id. Then the leader is reaped. Only when every other member of the group and the processes of its
jobs are gone, its coordinator sessions are closed (`qdo.worker.supervisor.session_closer`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable

from qdo.brokers.registry import positions_of
from qdo.coordination.interrupted_attempts import InFlight
from qdo.settings.settings import Settings
from qdo.worker.supervisor.child_process import ChildProcess
from qdo.worker.supervisor.session_closer import SessionCloser

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _DyingProcess:
    """A reaped child whose process group may still have living members."""

    child: ChildProcess
    give_up_at: float
    in_flight: list[InFlight]
    reason: str


class Reaper:
    """The dead children of one parent.

    :ivar left: descriptors of the receipt stores of dead children, for the next child to
        release. The parent that takes one closes it.
    :ivar settings: the settings in force.
    :param wakeup: called from another thread when sessions are closed.
    """

    def __init__(self, settings: Settings, wakeup: Callable[[], None]) -> None:
        self.left: list[int] = []
        self.settings = settings
        self._wakeup = wakeup
        self._dying: list[_DyingProcess] = []
        self._closers: list[SessionCloser] = []

    @property
    def busy(self) -> bool:
        """True while a group may have living members or a session is being closed."""
        return bool(self._dying or self._closers)

    @property
    def next_at(self) -> float | None:
        """The time at which `step` has something to do without a signal, None if there is none."""
        return min((dying.give_up_at for dying in self._dying), default=None)

    def reap(self, child: ChildProcess, *, stopping: bool) -> int:
        """Reap a dead child; return its exit code.

        :param stopping: it was asked to exit. Then its death counts as no message's attempt, unless
            a message blocked its loop.
        """
        code = child.reap()
        if child.registered:
            give_up_at = time.monotonic() + self.settings.session_timeout_seconds
            in_flight = [] if stopping and child.blamed is None else child.in_flight
            reason = _exit_reason(child, code)
            self._dying.append(_DyingProcess(child, give_up_at, in_flight, reason))
        else:
            os.close(child.receipts)
        self._reap_dying()
        _log.log(*_exit_message(child, code, stopping=stopping))
        return code

    def step(self) -> None:
        """Close the sessions of children whose groups are gone; forget finished closers."""
        self._reap_dying()
        self._closers = [closer for closer in self._closers if not closer.finished]

    def _reap_dying(self) -> None:
        for dying in list(self._dying):
            if dying.child.group_gone():
                self._dying.remove(dying)
                self.left.append(dying.child.receipts)
                self._close_sessions(dying)
            elif dying.give_up_at <= time.monotonic():
                self._dying.remove(dying)
                os.close(dying.child.receipts)
                _log.warning(
                    "%s (pid %d): cannot kill part of its process group; its queues are free"
                    " when its session times out",
                    dying.child.name,
                    dying.child.pid,
                )

    def _close_sessions(self, dying: _DyingProcess) -> None:
        child = dying.child
        closer = SessionCloser(
            f"{child.name} (pid {child.pid})",
            child.sessions,
            self.settings.session_timeout_seconds,
            self._wakeup,
            dying.in_flight,
            dying.reason,
            positions_of(self.settings.broker),
            after=child.keeper,
        )
        self._closers.append(closer)
        closer.start()


def _exit_message(child: ChildProcess, code: int, *, stopping: bool) -> tuple[int, str]:
    """Return log level and message for the exit of a child."""
    if code == 0:
        return logging.INFO, f"{child.name} (pid {child.pid}) finished"
    level = logging.INFO if stopping and code == -signal.SIGTERM else logging.WARNING
    return level, _exit_reason(child, code)


def _exit_reason(child: ChildProcess, code: int) -> str:
    """Return how an unfinished child exited."""
    if child.blamed is not None:
        limit = child.blamed.limit_seconds
        return f"{child.name} (pid {child.pid}) was killed: a job blocked its loop for {limit:g} s"
    how = f"exited with code {code}" if code >= 0 else f"died of {_signal_name(-code)}"
    return f"{child.name} (pid {child.pid}) {how}"


def _signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
