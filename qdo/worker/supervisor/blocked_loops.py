"""Processes whose event loop is blocked by a job: their sessions are kept, for a while.

A blocked loop sends no heartbeats, so its session would end after the session timeout. All queues
of the process would move to other workers, and the job would block the next one. So the parent
keeps the session alive, from outside (`session_keeper`). Until the job returns, its process starts
no message, and no other process takes its queues. When the job has blocked the loop for longer than
its limit, the process is killed. An attempt is counted for its message only, and all other queues
continue in other processes.

A loop that runs only for moments between such jobs may not send anything either. So the parent
keeps the session of a loop that is blocked once the last contact with the coordinator was half a
session timeout ago, however long the present job has blocked.

Operators are answered from outside, too (`blocked_actions`).

A process that is stopped (SIGSTOP) is not blocked: its session ends, and its queues move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from qdo.system.clock import clock
from qdo.worker.shared_memory.loop_state import LoopReport
from qdo.worker.supervisor.blocked_actions import BlockedActions
from qdo.worker.supervisor.child_process import ChildProcess
from qdo.worker.supervisor.session_keeper import SessionKeeper

KEEP_AFTER = 0.5
"""Share of the session timeout, since the last contact with the coordinator, after which the
session of a blocked process is kept alive."""
BLOCKED_AFTER = 0.1
"""Share of the session timeout after which a loop that has not run counts as blocked."""
LOOKS = 8
"""Number of looks within a session timeout."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A child as seen at the last look.

    :ivar running_since: clock time before which the loop could not run: the child or this process
        was stopped.
    :ivar kept_since: the beat since which its session is kept.
    :ivar served_since: the beat since which operators are answered for it.
    """

    running_since: float = 0.0
    kept_since: float = 0.0
    served_since: float = 0.0


class BlockedLoops:
    """Watches the event loops of the children of one parent.

    :ivar next_at: time of the next look, on `time.monotonic`.
    :param wake_up: wakes the loop of the parent, from any thread.
    """

    def __init__(self, session_timeout_seconds: float, wake_up: Callable[[], None]) -> None:
        self._wake_up = wake_up
        self.next_at = 0.0
        self._timeout = session_timeout_seconds
        self._looked_at = clock()
        self._awake_since = 0.0
        self._watched: dict[ChildProcess, _Watched] = {}

    def look(self, children: Collection[ChildProcess]) -> Iterator[tuple[ChildProcess, str]]:
        """Keep the sessions of blocked children; yield each child to kill, and the reason."""
        if time.monotonic() < self.next_at:
            return
        now = clock()
        # An app may set a shorter timeout in code, and the coordinator may grant a shorter one.
        granted = [child.sessions[-1].timeout_seconds for child in children if child.registered]
        pause = min(granted, default=self._timeout) / LOOKS
        self.next_at = time.monotonic() + pause
        if now - self._looked_at > 3 * pause:
            self._awake_since = now
        self._looked_at = now
        for child in set(self._watched).difference(children):
            self._release(child)
        for child in children:
            reason = self._look_at(child, now)
            if reason:
                yield child, reason

    def _look_at(self, child: ChildProcess, now: float) -> str:
        """Keep the session of a child if its loop is blocked; return why it must be killed."""
        report = child.loop() if child.registered else None
        if report is None or child.blamed is not None:
            self._release(child)
            return ""
        watched = self._watched.setdefault(child, _Watched())
        if child.is_stopped():
            watched.running_since = now
        blocked = now - max(report.beat, self._awake_since, watched.running_since)
        timeout = child.sessions[-1].timeout_seconds
        if blocked < BLOCKED_AFTER * timeout:
            self._release(child, watched.running_since)
            return ""
        if blocked >= report.limit_seconds:
            child.blamed = report
            return f"{_cause(report)} for {blocked:.1f} s"
        if watched.served_since != report.beat and child.sessions[-1].root:
            watched.served_since = report.beat
            BlockedActions(child, report, self._wake_up).start()
        kept_at = 0.0 if child.keeper is None else child.keeper.kept_at
        quiet = now - max(report.contact, kept_at) >= KEEP_AFTER * timeout
        if quiet and watched.kept_since != report.beat:  # else a keeper is at work
            watched.kept_since = report.beat
            self._keep(child, report, blocked)
        return ""

    def _keep(self, child: ChildProcess, report: LoopReport, blocked: float) -> None:
        name = f"{child.name} (pid {child.pid})"
        _log.warning(
            "%s: %s for %.1f s; keeping its session, and killing it after %g s",
            name,
            _cause(report),
            blocked,
            report.limit_seconds,
        )
        note = {
            "state": "blocked",
            "blocked_by": report.blocked_by or "an unknown job",
            "blocked_since": time.time() - blocked,
        }

        def is_blocked() -> bool:
            seen = child.loop()
            return seen is not None and seen.beat == report.beat

        child.keeper = SessionKeeper(name, child.sessions[-1], note, is_blocked)
        child.keeper.start()

    def _release(self, child: ChildProcess, running_since: float = 0.0) -> None:
        """Stop keeping the session of a child."""
        self._watched.pop(child, None)
        if child.keeper is not None:
            child.keeper.stop()
        if running_since:
            self._watched[child] = _Watched(running_since)


def _cause(report: LoopReport) -> str:
    what = report.blocked_by or "an unknown job that lets no other thread run"
    return f"its event loop has been blocked by {what}"
