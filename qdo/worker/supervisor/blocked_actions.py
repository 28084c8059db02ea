"""Does what operators ask of a worker while a job blocks its event loop, over its own connection.

The worker itself cannot read what it is asked for. So its parent runs the machine of actions for as
long as the loop is blocked, as a second actor: see `qdo.fleet.protocol.actions`. A parent whose
workers are not blocked has no connection.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client, connect
from qdo.coordination.side.connection import SideConnection
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.fleet import action_arguments as names
from qdo.fleet.action_node import PARENT
from qdo.fleet.protocol.action_results import FAILED, Finish, Perform, Result
from qdo.fleet.protocol.actions import ActionsWatch
from qdo.fleet.protocol.audit_entries import Values
from qdo.system.clock import clock
from qdo.worker.actions.sampling import Samples, frame_label, profile_result
from qdo.worker.shared_memory.loop_state import LoopReport
from qdo.worker.shared_memory.stack_dumps import functions
from qdo.worker.supervisor.child_process import ChildProcess

LOOK_SECONDS = 0.05
"""How often it looks whether the loop is still blocked."""
RETRY_SECONDS = 0.5
"""Until it connects again, after the coordinator did not answer."""
LONGEST_SECONDS = names.MAX_PROFILE_SECONDS + 10.0
"""How long actions that were begun may take after that."""

_log = logging.getLogger(__name__)


class BlockedActions(threading.Thread):
    """Acts for one worker, in parallel to the parent's other work, until its loop runs again.

    :param report: the state of the loop when it was found to be blocked.
    :param wake_up: wakes the loop of the parent, which looks at `ChildProcess.asked`.
    """

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
        while self._is_blocked():
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
        while self._is_blocked():
            time.sleep(LOOK_SECONDS)
        side.call(watch.close)
        deadline = clock() + LONGEST_SECONDS
        while not watch.ended and clock() < deadline:
            time.sleep(LOOK_SECONDS)

    def _is_blocked(self) -> bool:
        seen = self._child.loop()
        return seen is not None and seen.beat == self._report.beat

    # --- what it does ---------------------------------------------------------------------

    def _table(self) -> Mapping[str, Perform]:
        return {
            names.PING: self._ping,
            names.STACKS: self._stacks,
            names.RUNS: self._runs,
            names.PROFILE: self._profile,
            names.DRAIN: partial(self._pass_on, names.DRAIN, "draining"),
            names.RESTART: partial(self._pass_on, names.RESTART, "restarting"),
            names.RELOAD: partial(
                self._pass_on, names.RELOAD, "restarting all workers of the parent process"
            ),
        }

    def _state(self) -> str:
        report = self._child.loop() or self._report
        what = report.blocked_by or "an unknown job that lets no other thread run"
        seconds = clock() - report.beat
        return f"pid {self._child.pid}, event loop blocked for {seconds:.1f} s by {what}"

    def _ping(self, args: Values, finish: Finish) -> Result:
        return Result(self._state())

    def _stacks(self, args: Values, finish: Finish) -> Result:
        state, dump = self._state(), self._child.dumps.take(self._child.pid)
        if not dump:
            return Result(f"{state}; the process did not write its stacks", outcome=FAILED)
        return Result(state, dump)

    def _runs(self, args: Values, finish: Finish) -> Result:
        state = self._state()
        return Result(state, json.dumps({"total": None, "runs": [], "blocked": state}))

    def _pass_on(self, action: str, text: str, args: Values, finish: Finish) -> Result:
        state = self._state()
        self._child.asked.append(action)
        self._wake_up()
        return Result(f"{text} once the job returns: {state}")

    def _profile(self, args: Values, finish: Finish) -> None:
        seconds = names.seconds_of(names.PROFILE, args)
        thread = threading.Thread(target=self._sample, args=(seconds, finish), daemon=True)
        thread.start()

    def _sample(self, seconds: float, finish: Finish) -> None:
        child, samples, until = self._child, Samples(), clock() + seconds
        while clock() < until:
            dump = child.dumps.take(child.pid)
            if not dump:
                finish(Result("the process did not write its stacks", outcome=FAILED))
                return
            samples.add([frame_label(*each) for each in stack] for stack in functions(dump))
        finish(profile_result(samples, seconds))


def registered_name(client: Client, layout: Layout, session: int) -> str | None:
    """Return the name of the worker that is registered in a session, None if there is none.

    :raises NodeRefusedError: this account may not list the workers.
    :raises CoordinatorUnreachableError: the connection is lost.
    """
    found = read_children(client, [layout.workers]).get(layout.workers, [])
    for node in read_nodes(client, [layout.worker(name) for name in found]):
        if node.session == session:
            return node.path.rpartition("/")[2]
    return None
