"""The testing kit: an app run in memory, by the engine of a worker, on a clock that stands still.

One worker at a time, in the thread of the test. When it crashes, loses its lease, hands over
or stops, a new one goes on from what was recorded, as in a fleet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from qdo.app import App
from qdo.coordination.layout import QueueNode
from qdo.coordination.operator import Which, sought, unblocked
from qdo.errors import UsageError
from qdo.ops.unblock import Verdict
from qdo.placement import is_async
from qdo.sending import Moment
from qdo.settings import Settings
from qdo.testing.broker import MemoryStore
from qdo.testing.clock import TOLERANCE_SECONDS, Clock
from qdo.testing.faults import Crashed, Point
from qdo.testing.pointed import SendingBroker
from qdo.testing.process import Process
from qdo.testing.results import Results
from qdo.testing.running import check_no_loop
from qdo.testing.world import World

MOST_ATTEMPTS = 100_000
LONGEST_SECONDS = 366 * 86_400.0
KILLED = "the worker process died of SIGKILL"


class TestKit(Results):
    """An app under test; a context manager.

    Until it is closed `app.send` sends to the kit, from anywhere. Settings are those given in
    code and here; neither the settings file nor the environment is read.

    :param app: what is tested, with its jobs and hooks.
    :param clock: a clock to share with another kit.
    :param chance: gives the random number of each back-off; 1 by default, so that each takes
        its full time, and the same in every run.
    :param most_attempts: a run that starts more jobs than this is ended with a UsageError.
    :param settings: settings by name, over those given in code.
    :raises UsageError: the app is being tested already, or by a kit with another clock.
    :raises SettingsError: a name or value will not do.
    """

    __test__ = False  # pytest takes classes that begin with Test for tests

    def __init__(
        self,
        app: App,
        *,
        clock: Clock | None = None,
        chance: Callable[[], float] = lambda: 1.0,
        most_attempts: int = MOST_ATTEMPTS,
        **settings: Any,
    ) -> None:
        self.app = app
        self.clock = Clock() if clock is None else clock
        chosen = Settings().underlaid(app.given, app.origin).merged(settings, "TestKit")
        store = MemoryStore(self.clock.position)
        world = World(app, chosen, self.clock, store, chance, most=most_attempts)
        super().__init__(world, SendingBroker(store, app.name, self._reach))
        self._process: Process | None = None
        self._stack: list[Process] = []
        self._wrecks: list[Process] = []
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.clock.installed())
            undo.enter_context(app.standing_in(self.broker, chosen))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Tear down every job context that is left, and give the app its own broker back."""
        with self._undo:
            processes = [*self._wrecks, *([self._process] if self._process is not None else [])]
            self._wrecks, self._process = [], None
            with contextlib.ExitStack() as closing:
                for process in processes:
                    closing.callback(process.close)

    def __enter__(self) -> TestKit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- sending and running ------------------------------------------------------------

    def send(
        self,
        queue: str,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        delay_seconds: float | None = None,
        at: Moment | None = None,
        dedup_key: str | None = None,
        dedup_seconds: float | None = None,
    ) -> str:
        """Send a message as `App.send` does; nothing is run yet."""
        return self.app.send(
            queue,
            body,
            key,
            headers,
            delay_seconds=delay_seconds,
            at=at,
            dedup_key=dedup_key,
            dedup_seconds=dedup_seconds,
        )

    def run_until_idle(self) -> None:
        """Run everything that can run without time passing.

        What waits for a back-off, for its due time or for an operator goes on waiting. After a
        crash or a lost lease the next worker goes on at once; after `qdo.Stop` the run is over,
        and the next one begins with a new worker.

        :raises UsageError: it does not end, or a job used the kit in a wrong way.
        """
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Let time pass, and run everything that becomes due, each at its time."""
        self._refuse_in_job("run others: use kit.spend(seconds) in it for the time that it takes")
        check_no_loop(any(is_async(job.function) for job in self.app.jobs))
        target = self.clock.passed() + seconds
        if not target >= self.clock.passed():
            self.clock.move(seconds)  # which says what is wrong with it
        self._world.left = self._world.most
        self._run()
        while (due := self._due()) is not None and due <= target + TOLERANCE_SECONDS:
            self._go_to(due)
        self.clock.move_to(target)

    def run_until_settled(self, most_seconds: float = LONGEST_SECONDS) -> float:
        """Let as much time pass as it takes until nothing waits but for an operator.

        :return: the seconds that passed.
        :raises UsageError: it would take longer than `most_seconds`.
        """
        began = self.clock.passed()
        self.run_until_idle()
        while (due := self._due()) is not None:
            if due - began > most_seconds:
                raise UsageError(
                    reason=f"after {most_seconds:g} s something still waits for {due - began:g} s:"
                    " allow more with most_seconds="
                )
            self._go_to(due)
        return self.clock.passed() - began

    def spend(self, seconds: float) -> None:
        """Let time pass within a job, for instance in the stand-in of a slow service.

        A job that has `timeout_seconds` is interrupted when they are over, as while it waits
        in a worker.

        :raises UsageError: no job runs.
        """
        if not self._stack:
            raise UsageError(reason="spend() is for jobs that run: use advance() between runs")
        self._stack[-1].spend(seconds)

    def _refuse_in_job(self, what: str) -> None:
        """End a run whose job does what only tests may do."""
        if self._stack:
            self._stack[-1].fail(UsageError(reason=f"a job under test cannot {what}"))

    def _go_to(self, due: float) -> None:
        self.clock.move_to(due)
        self._world.store.tick()
        self._run()

    def _due(self) -> float | None:
        """Return when something is due next, by the clock; None: nothing waits for its time."""
        if self._process is None:
            return None  # it stopped: without a worker nothing becomes due
        delayed = self._world.store.next_due()
        at = float("inf") if delayed is None else self.clock.passed_at(delayed)
        due = min(at, self._process.due())
        return None if due == float("inf") else due

    def _run(self) -> None:
        """Run the worker, and those that come after it, until one is idle or stops."""
        while True:
            process = self._process
            if process is None:
                process = self._process = Process(self._world)
            self._stack.append(process)
            try:
                process.run()
            except BaseException:
                process.die("")
                raise
            finally:
                self._stack.pop()
                if not process.alive:
                    self._bury(process)
            if process is not self._process:
                if process.alive:
                    process.close()  # it has lost its lease, and its last message has ended
            elif process.stopping is not None:
                self._process = None
                process.close()
                return
            else:
                return

    def _bury(self, process: Process) -> None:
        """Keep a dead process: what it held is only closed at the end of the test."""
        if process not in self._wrecks:
            self._wrecks.append(process)
        if self._process is process:
            self._process = None

    # --- what may happen to a worker ----------------------------------------------------

    def crash(self, *, host: bool = False) -> None:
        """Kill the worker as with kill -9: whatever was not recorded is gone.

        Within a job it does not return. From outside, the next run begins with a new worker.

        :param host: its parent dies, too, as when the machine fails: nobody is left to count
            the attempts of the messages in hand.
        """
        process = self._stack[-1] if self._stack else self._process
        if process is None:
            return
        process.die("" if host else KILLED)
        if process.running:
            raise Crashed
        self._bury(process)

    def crash_at(
        self,
        point: Point | None = None,
        *,
        queue: str | None = None,
        nth: int = 1,
        host: bool = False,
    ) -> None:
        """Have the worker killed when it reaches a fault point the nth time from now on.

        :param point: one of `qdo.testing.POINTS`; None counts all of them.
        :param queue: count only what is done for this queue.
        :raises UsageError: there is no such point.
        """
        self._world.faults.arm(lambda: self.crash(host=host), point, queue, nth)

    def lose_lease(self) -> None:
        """Have the session of the worker end: its queues are free, and it does not know yet.

        Within a job: the worker is as if frozen, others take over its queues and run until
        they are idle, and only then it goes on, to the end of the message in hand.
        """
        process = self._stack[-1] if self._stack else self._process
        if process is None:
            return
        process.lose()
        if self._process is process:
            self._process = None
        if process.running:
            self._take_over(process)
        else:
            process.close()

    def lose_lease_at(
        self, point: Point | None = None, *, queue: str | None = None, nth: int = 1
    ) -> None:
        """Have `lose_lease` happen when the worker reaches a fault point; see `crash_at`."""
        self._world.faults.arm(self.lose_lease, point, queue, nth)

    def _take_over(self, frozen: Process) -> None:
        try:
            check_no_loop(any(is_async(job.function) for job in self.app.jobs))
        except UsageError as error:
            frozen.fail(error)
        self._run()

    def hand_over(self) -> None:
        """Have the worker stop in good order, as for a deployment; the next run has a new one."""
        self._refuse_in_job("hand over: it stops its worker with `raise qdo.Stop(reason)`")
        process, self._process = self._process, None
        if process is None:
            return
        process.drain()
        if process.alive:
            process.close()
        else:
            self._bury(process)

    def unblock(self, queue: str, verdict: Verdict, which: Which = "first") -> None:
        """Decide on messages that block a queue, as `qdo unblock` does.

        :param which: position of the message, "first" or "all".
        :raises NotBlockedError: it is not blocked, or by no such message.
        :raises NotFoundError: no worker has ever had the queue.
        """
        self._change(queue, lambda node: unblocked(node, queue, verdict, which))

    def seek(self, queue: str, last: int) -> None:
        """Have a queue go on behind another position, as `qdo seek` does; 0: from the beginning.

        :raises NotFoundError: no worker has ever had the queue.
        """
        self._change(queue, lambda node: sought(node, last))

    def _change(self, queue: str, change: Callable[[QueueNode], QueueNode]) -> None:
        node = self._world.record.change(queue, change)
        if self._process is not None:
            self._process.moved(queue, node)

    def _reach(self, point: Point, queue: str) -> None:
        """Pass a fault point of a job that sends; a test that sends passes none."""
        if self._stack:
            self._stack[-1].reach(point, queue)
