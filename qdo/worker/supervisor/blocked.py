"""Keep the sessions of processes with a blocked event loop, and act in their place.

A blocked loop sends no heartbeats, so its session would end after the session timeout. All queues
of the process would move to other workers, and the job would block the next worker. So the parent
keeps the session alive (`SessionKeeper`). Until the job returns, its process starts no message, and
no other process takes its queues. When the job has blocked the loop for longer than its limit, the
parent kills the process. The parent counts an attempt only for the message of this job, and all
other queues continue in other processes.

A loop that runs only briefly between blocking jobs may not send heartbeats, either. So the parent
keeps the session of a blocked loop if the last contact with the coordinator is half a session
timeout old. The job may have just begun to block.

A stopped process (SIGSTOP) does not count as blocked. Its session ends, and its queues move.

The parent also performs the actions that operators request from a blocked worker, because the
worker cannot read the requests.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client, connect
from qdo.coordination.side import SideConnection
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.fleet import actions as names
from qdo.fleet.action_machine import FAILED, PARENT, ActionsWatch, Finish, Perform, Result
from qdo.fleet.audit_entries import Values
from qdo.system.clock import clock
from qdo.worker.shared_memory import LoopReport
from qdo.worker.supervisor.child import ChildProcess, begun
from qdo.worker.supervisor.sessions import SessionKeeper

# Seconds between a thread's checks whether the loop is still blocked.
LOOK_SECONDS = 0.05
# Pause before another connection attempt if the coordinator did not respond, in seconds.
RETRY_SECONDS = 0.5
# Maximum seconds that begun actions may take after the loop runs again.
LONGEST_SECONDS = 10.0
# Share of the session timeout, since the last contact with the coordinator, after which the parent
# keeps the session of a blocked process alive.
KEEP_AFTER = 0.5
# Share of the session timeout after which a loop that has not run counts as blocked.
BLOCKED_AFTER = 0.1
# Number of looks within a session timeout.
LOOKS = 8

_log = logging.getLogger(__name__)


class BlockedActions(threading.Thread):
    """Performs the actions of one blocked worker on a separate thread until its loop runs again."""

    # This thread runs the action machine as a second actor, over its own connection; see
    # `qdo.fleet.action_machine`. A parent without a blocked worker has no connection.

    def __init__(
        self, child: ChildProcess, report: LoopReport, wake_up: Callable[[], None]
    ) -> None:
        super().__init__(name=f"actions-{child.name}", daemon=True)
        self._child = child
        self._session = child.sessions[-1]
        self._report = report
        self._wake_up = wake_up

    def run(self) -> None:
        logged = ""
        while _is_blocked(self._child, self._report):
            try:
                self._act()
                return
            except QdoError as error:
                if str(error) != logged:
                    logged = str(error)
                    _log.warning(
                        "%s: cannot answer operators while it is blocked: %s", self.name, error
                    )
            time.sleep(RETRY_SECONDS)

    def _act(self) -> None:
        session = self._session
        timeout = session.timeout_seconds
        client = connect(session.url, access=session.access, session_timeout_seconds=timeout)
        client.open(timeout / 3)
        side = SideConnection(client)
        try:
            worker = registered_name(client, Layout(session.root), session.id)
            if worker is not None:
                self._serve(side, worker)
        finally:
            side.close()

    def _serve(self, side: SideConnection, worker: str) -> None:
        watch = ActionsWatch(
            Layout(self._session.root).fleet,
            worker,
            self._table(),
            wall=time.time,
            call=side.call,
            actor=PARENT,
        )
        side.add(watch)
        while _is_blocked(self._child, self._report):
            time.sleep(LOOK_SECONDS)
        side.call(watch.close)
        deadline = clock() + LONGEST_SECONDS
        while not watch.ended and clock() < deadline:
            time.sleep(LOOK_SECONDS)

    def _table(self) -> Mapping[str, Perform]:
        return {
            names.PING: self._ping,
            names.STACKS: self._stacks,
            names.RUNS: self._runs,
            names.DRAIN: partial(self._pass_on, names.DRAIN, "draining"),
            names.RESTART: partial(self._pass_on, names.RESTART, "restarting"),
            names.RELOAD: partial(
                self._pass_on, names.RELOAD, "restarting all workers of the parent process"
            ),
        }

    def _state(self) -> str:
        report = self._child.loop() or self._report
        seconds = clock() - report.beat
        return f"pid {self._child.pid}, event loop blocked for {seconds:.1f} s by {_job(report)}"

    def _ping(self, args: Values, finish: Finish) -> Result:
        return Result(self._state())

    def _stacks(self, args: Values, finish: Finish) -> Result:
        state = self._state()
        dump = self._child.dumps.take(self._child.pid)
        if not dump:
            return Result(f"{state}; the process did not write its stacks", outcome=FAILED)
        return Result(state, dump)

    def _runs(self, args: Values, finish: Finish) -> Result:
        state = self._state()
        return Result(state, json.dumps({"total": None, "runs": [], "blocked": state}))

    def _pass_on(self, action: str, text: str, args: Values, finish: Finish) -> Result:
        state = self._state()
        self._child.asked.append(action)
        self._wake_up()  # the loop of the parent then reads `asked`
        return Result(f"{text} once the job returns: {state}")


def registered_name(client: Client, layout: Layout, session: int) -> str | None:
    """Return the name of the worker that a session has registered; None without a worker."""
    workers = read_children(client, [layout.workers]).get(layout.workers, [])
    for node in read_nodes(client, [layout.worker(name) for name in workers]):
        if node.session == session:
            return node.path.rpartition("/")[2]
    return None


@dataclass(slots=True)
class _Watched:
    """The state of a child at the last look."""

    # Clock time until which the process was stopped, so that its loop could not run.
    running_since: float = 0.0
    # The beats for which the parent has begun to keep the child's session, and to answer operators.
    kept_since: float = 0.0
    served_since: float = 0.0


class BlockedLoops:
    """Watches the event loops of the children of one parent.

    :ivar next_at: time of the next look by `time.monotonic`.
    :param wake_up: wakes the loop of the parent, on any thread.
    """

    def __init__(self, session_timeout_seconds: float, wake_up: Callable[[], None]) -> None:
        self._wake_up = wake_up
        self.next_at = 0.0
        self._timeout = session_timeout_seconds
        self._looked_at = clock()
        self._awake_since = 0.0
        self._watched: dict[ChildProcess, _Watched] = {}

    def look(self, children: Collection[ChildProcess]) -> Iterator[tuple[ChildProcess, str]]:
        """Keep the sessions of blocked children alive; yield each child to kill and the reason."""
        if time.monotonic() < self.next_at:
            return
        now = clock()
        # The app in its code, or the coordinator, may set a shorter timeout than the settings.
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
        """Keep the session of a child if its loop is blocked; return a reason to kill, or ""."""
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
        served = watched.served_since == report.beat or not child.sessions[-1].root
        if not served and begun(BlockedActions(child, report, self._wake_up)):
            watched.served_since = report.beat
        kept_at = 0.0 if child.keeper is None else child.keeper.kept_at
        quiet = now - max(report.contact, kept_at) >= KEEP_AFTER * timeout
        at_work = watched.kept_since == report.beat
        if quiet and not at_work and self._keep(child, report, blocked):
            watched.kept_since = report.beat
        return ""

    def _keep(self, child: ChildProcess, report: LoopReport, blocked: float) -> bool:
        """Start a keeper of the child's session; return False if no thread can start."""
        name = f"{child.name} (pid {child.pid})"
        note = {
            "state": "blocked",
            "blocked_by": report.blocked_by or "an unknown job",
            "blocked_since": time.time() - blocked,
        }
        is_blocked = partial(_is_blocked, child, report)
        keeper = SessionKeeper(name, child.sessions[-1], note, is_blocked)
        if not begun(keeper):
            return False
        child.keeper = keeper
        _log.warning(
            "%s: %s for %.1f s; keeping its session, and killing it after %g s",
            name,
            _cause(report),
            blocked,
            report.limit_seconds,
        )
        return True

    def _release(self, child: ChildProcess, running_since: float = 0.0) -> None:
        self._watched.pop(child, None)
        if child.keeper is not None:
            child.keeper.stop()
        if running_since:
            self._watched[child] = _Watched(running_since)


def _cause(report: LoopReport) -> str:
    return f"its event loop has been blocked by {_job(report)}"


def _job(report: LoopReport) -> str:
    return report.blocked_by or "a job that lets no other thread run, or by a busy machine"


def _is_blocked(child: ChildProcess, report: LoopReport) -> bool:
    """Return whether the child's loop has not run after a report."""
    seen = child.loop()
    return seen is not None and seen.beat == report.beat
