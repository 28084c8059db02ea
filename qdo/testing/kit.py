"""The testing kit, which runs an app in memory with a worker's engine and a simulated clock.

One worker runs at a time, in the thread of the test. After it crashes, loses its lease, hands over
or stops, a new worker resumes from the recorded progress, as in a fleet.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Unpack

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.brokers.catalog import Backlog
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.callables import is_async
from qdo.coordination.queue_admin import Which, with_decision, with_seek
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.encoding import encode_body
from qdo.errors import NoJobError, NotSettledError, UsageError
from qdo.ingest import WebhookEndpoints
from qdo.ops.decisions import OperatorDecision
from qdo.outcomes import OutcomeName
from qdo.queues import QueueFilter
from qdo.requests.calls import cancel_overdue
from qdo.sending.messages import NewMessage, outgoing_of
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.system.twins import in_thread, twin
from qdo.testing.clock import TOLERANCE_SECONDS, Clock
from qdo.testing.database import WritesWatch
from qdo.testing.faults import Crashed, Point, SendingBroker, Step
from qdo.testing.inline_executor import NO_JOB, check_no_loop
from qdo.testing.kit_operators import KitOperators
from qdo.testing.memory_fleet import (
    KitPauses,
    KitRelay,
    KitStreams,
    KitTimers,
    MemoryDocuments,
    MemoryLocks,
)
from qdo.testing.process import Process
from qdo.testing.state import Attempt, State
from qdo.text import join_some, pluralize

if TYPE_CHECKING:
    from qdo.sending.messages import MessageOptions
    from qdo.settings.given import GivenSettings

MOST_ATTEMPTS = 100_000
LONGEST_SECONDS = 366 * 86_400.0
KILLED = "the worker process died of SIGKILL"
# Without any handler, as under unittest, Python prints warnings on stderr: 20 tracebacks for a job
# that always fails. Handlers of the tests still get them.
_QUIET = logging.NullHandler()


class Results:
    """Messages, attempts and progress of an app under test.

    :ivar broker: stores the messages and dead letters. While the kit is open, it is also
        `app.broker`.
    """

    def __init__(self, world: State, sender: SendingBroker) -> None:
        self.broker: Broker = sender
        self._sender = sender
        self._world = world

    @property
    def steps(self) -> list[Step]:
        """All fault points that workers have reached, in order."""
        return list(self._world.faults.steps)

    @property
    def faults_left(self) -> int:
        """Number of requested faults that have not happened.

        The number must be 0 at the end of a test.
        """
        return self._world.faults.pending()

    @property
    def stops(self) -> list[str]:
        """The reasons of all `qdo.Stop` exceptions."""
        return list(self._world.stops)

    def attempts(
        self, queue: str | None = None, outcome: OutcomeName | None = None
    ) -> list[Attempt]:
        """Return the ended attempts in order, optionally only those of one queue or outcome.

        Attempts that a crash interrupted are not included.
        """
        return [
            each
            for each in self._world.attempts
            if queue in (None, each.queue) and outcome in (None, each.outcome)
        ]

    def done(self, queue: str | None = None) -> list[Any]:
        """Return the bodies of done messages, in order and with repetitions."""
        return [each.body for each in self.attempts(queue, "done")]

    def skipped(self, queue: str | None = None) -> list[Any]:
        """Return the bodies of skipped messages in order."""
        return [each.body for each in self.attempts(queue, "skip")]

    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        """Return the stored dead letters of a queue, or of all queues, oldest first."""
        return self.broker.dead_letters.records(queue)

    def requests(self, pool: str | None = None) -> list[dict[str, Any]]:
        """Return the requests of a pool, or of all pools, oldest first.

        Each request has the format of ``qdo requests show --body -o json``, with the keys `id`,
        `state`, `outcome`, `result`, `error`, `failed`, `take` and more. `Handle.result` reads
        bytes.
        """
        return self._world.requests(pool)

    def blocked(self) -> dict[str, FailureRecord]:
        """Return the failure records of messages that block queues, by queue."""
        return {queue: marks for queue, marks in self._marks().items() if marks.blocked}

    def failing(self) -> dict[str, FailureRecord]:
        """Return the failure records of messages that wait for a retry, by queue."""
        return {queue: marks for queue, marks in self._marks().items() if not marks.blocked}

    def last(self, queue: str) -> int:
        """Return the recorded position up to which all messages of a queue are done."""
        return self._world.record.node(queue).last

    def waiting(self, queue: str) -> list[Any]:
        """Return the bodies of the messages after `last`, in order."""
        self._sender.deliver()
        return [
            self._world.body_of(queue, row) for row in self._world.rows(queue, self.last(queue))
        ]

    def backlog(self, queue: str) -> Backlog:
        """Return the backlog after `last`, and the number of delayed messages."""
        self._sender.deliver()
        return self.broker.catalog.backlog(queue, self.last(queue))

    def _without_job(self) -> dict[str, str]:
        """Describe the messages and requests, also delayed ones, of each name that has no job."""
        self._sender.deliver()
        found = {}
        for queue in self.broker.catalog.names():
            if self._world.app.job_for(queue) is None or self._world.is_pool(queue):
                backlog = self.backlog(queue)
                if count := backlog.count + backlog.delayed:
                    found[queue] = f"{pluralize(count, 'message')} of queue {queue!r}"
        for pool, counts in self.broker.requests.counts().items():
            if counts.waiting and not self._world.is_pool(pool):
                found[pool] = f"{pluralize(counts.waiting, 'request')} of pool {pool!r}"
        return found

    def _describe_waiting(self) -> str:
        retries = [
            f"a message of queue {queue!r} after {pluralize(failure.attempts, 'attempt')} "
            f"({failure.error or 'crashed'})"
            for queue, failure in self.failing().items()
        ]
        delayed = [
            f"{pluralize(count, 'delayed message')} of queue {queue!r}"
            for queue in self.broker.catalog.names()
            if (count := self.backlog(queue).delayed)
        ]
        requests = [
            f"{pluralize(each.waiting, 'request')} of pool {pool!r}"
            for pool, each in self.broker.requests.counts().items()
            if each.waiting
        ]
        return join_some(
            [*retries, *delayed, *requests] or ["a message in an outbox, or an incomplete batch"]
        )

    def _marks(self) -> dict[str, FailureRecord]:
        record = self._world.record
        marks = {queue: record.node(queue).failure for queue in record.queues()}
        return {queue: failure for queue, failure in marks.items() if failure is not None}


class TestKit(Results):
    """An app under test, as a context manager.

    >>> with TestKit(app) as kit:
    ...     id = app.send("mail-eu", {"to": "Ada"})
    ...     kit.run_until_idle()
    mail to Ada

    Until the kit is closed, every `app.send` sends to the kit. Settings come only from the code and
    from `settings`, not from the settings file or the environment.

    :ivar limits: the limits of the app's jobs, like `qdo limits`. Initially, limits have no effect.
    :ivar holds: pauses of queues, like `qdo pause` and `qdo resume`.
    :ivar streams: splits and merges shards, like `qdo streams split` and `merge`.
    :param app: the app to test, with its jobs and hooks.
    :param clock: a clock to share with another kit.
    :param chance: returns the random number of each backoff. By default it returns 1: each backoff
        takes its full time in every run.
    :param without_job: glob or globs of queues and pools without a job. Messages and requests may
        remain there.
    :param most_attempts: maximum number of jobs that a run may start. A run that exceeds this
        number ends with a UsageError.
    :param settings: settings by name. They override the settings in the code.
    :raises UsageError: another open kit tests the same app or has another clock.
    """

    __test__ = False  # pytest collects classes that begin with Test

    def __init__(
        self,
        app: App,
        *,
        clock: Clock | None = None,
        chance: Callable[[], float] = lambda: 1.0,
        without_job: str | Iterable[str] = (),
        most_attempts: int = MOST_ATTEMPTS,
        **settings: Unpack[GivenSettings],
    ) -> None:
        logging.getLogger("qdo").addHandler(_QUIET)
        self.app = app
        self.clock = Clock() if clock is None else clock
        chosen = Settings().underlaid(app.given, app.origin).merged(settings, "TestKit")
        world = State(app, chosen, self.clock, chance, KitPauses(self._held), most=most_attempts)
        super().__init__(world, SendingBroker(world.store, app.name, self._reach, self._paused))
        self.broker.requests.serve = self._serve  # see `RequestStore.serve`
        self._serving = threading.Lock()
        self.limits = world.limits
        self.holds = world.pauses
        globs = (without_job,) if isinstance(without_job, str) else tuple(without_job)
        self._expected = QueueFilter(globs)
        self.streams = KitStreams(self.broker.streams)
        self._relay = KitRelay(app, self.broker)
        self._process: Process | None = None
        self._thread = 0
        self._stack: list[Process] = []
        self._dead: list[Process] = []
        acting = KitOperators(world, self._sender, self._owner, self._change)
        locks = MemoryLocks(self.limits, acting)
        watch = WritesWatch(lambda: self._stack[-1].fail if self._stack else None)
        with contextlib.ExitStack() as undo:
            undo.callback(self._sender.disconnect)
            undo.enter_context(watch.installed())
            undo.enter_context(self.clock.installed())
            undo.enter_context(app.override_broker(self.broker, chosen))
            live = SettingsInForce(chosen)
            undo.enter_context(app.override_coordinator(MemoryDocuments(), locks, live))
            self._timers = KitTimers(app, self.clock, self.backlog)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Close the remaining job contexts, and restore the broker of the app.

        :raises NoJobError: messages or requests remain in queues or pools without a job that
            `without_job` does not match.
        """
        unexpected = {
            name: waiting
            for name, waiting in self._without_job().items()
            if not self._expected.takes(name)
        }
        self._close()
        if unexpected:
            globs = ", ".join(map(repr, unexpected))
            raise NoJobError(waiting=join_some([*unexpected.values()]), globs=globs)

    def _close(self) -> None:
        with self._undo:
            if self._process is not None:
                self._keep_dead(self._process)
            with contextlib.ExitStack() as closing:
                for process in self._dead:
                    closing.callback(process.close)
                self._dead = []

    def __enter__(self) -> TestKit:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close()

    async def __aenter__(self) -> TestKit:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await in_thread(partial(self.__exit__, *error))

    def send(
        self,
        queue: str,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Send a message with the parameters of `App.send`. No job runs yet."""
        # Storing in memory does not block the loop of a test, about which `App.send` would warn.
        message = NewMessage(queue, body, key, headers, **options)
        return self.app._store([outgoing_of(message, None, self.app.type_of)])[0]

    def deliver(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> int:
        """Deliver a webhook as if its signature were valid; return the status of the answer.

        >>> kit.deliver("/github", {"action": "opened"}, {"x-github-event": "issues"})
        202

        :param body: bytes, or a JSON value.
        """
        if path not in self.app.webhooks:
            return 404
        lower = {name.lower(): text for name, text in (headers or {}).items()}
        data = body if isinstance(body, bytes) else encode_body(path, body)
        return WebhookEndpoints(self.app, {}).store(path, lower, data)

    adeliver = twin(deliver)

    def run_until_idle(self) -> None:
        """Run all jobs that can run now, without moving the clock.

        Messages that wait for a backoff, for their due time or for an operator continue to wait.
        After a crash or a lost lease, the next worker continues immediately. `qdo.Stop` ends the
        run, and the next run begins with a new worker. The kit sends messages from outboxes
        immediately.

        :raises NotSettledError: the run would not end. The error names the queue with the most
            attempts.
        """
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Let time pass, and run each message and timer at its due time."""
        self._reject_in_job("run other jobs; use kit.spend(seconds) in it for the time it takes")
        check_no_loop(self._uses_loop())
        target = self.clock.passed() + seconds
        if not target >= self.clock.passed():
            self.clock.move(seconds)  # raises the error
        self._world.left = self._world.most
        self._thread = threading.get_ident()
        self._run()
        while (due := self._next_due()) <= target + TOLERANCE_SECONDS:
            self._go_to(due)
        self.clock.move_to(target)

    arun_until_idle = twin(run_until_idle)
    aadvance = twin(advance)

    def run_until_settled(self, most_seconds: float = LONGEST_SECONDS) -> float:
        """Let time pass until the only waiting messages wait for an operator.

        :return: the seconds that passed.
        :raises NotSettledError: messages would still wait after `most_seconds`. The error names the
            waiting messages.
        """
        began = self.clock.passed()
        self.run_until_idle()
        while (due := self._due()) is not None:
            due = self._next_due()  # timers never settle, but continue while a message waits
            if due - began > most_seconds:
                raise NotSettledError(
                    goal=f"settle within {most_seconds:g} s",
                    waiting=f"{self._describe_waiting()} would wait until {due - began:g} s",
                    remedy="allow more with most_seconds=",
                )
            self._go_to(due)
        return self.clock.passed() - began

    arun_until_settled = twin(run_until_settled)

    def _serve(self) -> bool:
        """Run jobs while code of the test, such as an endpoint, waits for a result.

        :return: whether it ran, or let time pass until the next message is due.
        """
        if self._stack or not self._serving.acquire(blocking=False):
            return False  # a job waits, or another thread runs the jobs
        try:
            done = len(self._world.attempts)
            self.run_until_idle()
            if done == len(self._world.attempts):
                if self._due() is None:
                    return False
                self.advance(self._next_due() - self.clock.passed())
            return True
        finally:
            self._serving.release()

    def _uses_loop(self) -> bool:
        return self.app.hooks.on_loop or any(is_async(job.function) for job in self.app.jobs)

    def spend(self, seconds: float) -> None:
        """Let time pass within a job, for example to simulate a slow service.

        As in a worker, a job with `timeout_seconds` is interrupted at its timeout.
        """
        if not self._stack:
            raise UsageError(reason=NO_JOB)
        self._stack[-1].spend(seconds)

    def _reject_in_job(self, what: str) -> None:
        """End the run if a job calls a method that only tests may call."""
        if self._stack:
            self._stack[-1].fail(UsageError(reason=f"a job under test cannot {what}"))

    def _go_to(self, due: float) -> None:
        self.clock.move_to(due)
        self._world.store.tick()
        self._run()

    def _due(self) -> float | None:
        """Return the time on the clock at which the next message is due, or None."""
        if self._process is None:
            return None  # the worker has stopped, and without a worker no message becomes due
        delayed = (self._world.store.next_due(), self._relay.next_due())
        moments = [self.clock.passed_at(each) for each in delayed if each is not None]
        due = min([self._process.due(), *moments])
        return None if due == inf else due

    def _next_due(self) -> float:
        """Return the time on the clock at which the next message or timer is due, or inf."""
        due = self._due()
        timer = self._timers.next_due()
        moments = [inf if due is None else due]
        deadline = self._world.store.next_deadline()
        if self._process is not None:
            moments += [
                self.clock.passed_at(each) for each in (timer, deadline) if each is not None
            ]
        return min(moments)

    def _run(self) -> None:
        """Run the worker and its successors until a worker is idle or stops."""
        self._run_once()
        while cancel_overdue(self.app):  # the leader does this
            self._run_once()

    def _run_once(self) -> None:
        while True:
            process = self._owner()
            self._stack.append(process)
            try:
                process.run()
            except BaseException:
                process.die("")
                raise
            finally:
                self._stack.pop()
                if not process.alive:
                    self._keep_dead(process)
            if process is not self._process:
                if process.alive:
                    process.close()  # the worker lost its lease, and its last message has ended
            elif process.stopping is not None:
                self._process = None
                process.close()
                return
            elif not (self._sender.deliver() or self._relay.relay() or self._timers.send()):
                return

    def _owner(self) -> Process:
        if self._process is None:
            self._process = Process(self._world)
        return self._process

    def _keep_dead(self, process: Process) -> None:
        """Keep a dead process until the end of the test. The kit then closes its resources."""
        if process not in self._dead:
            self._dead.append(process)
        if self._process is process:
            self._process = None

    def crash(self, *, host: bool = False) -> None:
        """Kill the worker as with kill -9. Progress that the worker has not recorded is lost.

        Within a job, this call does not return. Outside of jobs, the next run begins with a new
        worker.

        :param host: the parent process also dies, as if the machine failed. Then no process counts
            the attempts of the messages in flight.
        """
        process = self._stack[-1] if self._stack else self._process
        if process is None:
            return
        process.die("" if host else KILLED)
        if process.running:
            raise Crashed
        self._keep_dead(process)

    def crash_at(
        self,
        point: Point | None = None,
        *,
        queue: str | None = None,
        nth: int = 1,
        host: bool = False,
    ) -> None:
        """Kill the worker when it reaches a fault point the nth time, counted from now.

        :param point: one of `qdo.testing.POINTS`; None counts all points.
        :param queue: count only the points of this queue.
        """
        self._world.faults.arm(lambda: self.crash(host=host), point, queue, nth)

    def lose_lease(self) -> None:
        """End the session of the worker, whose queues become free before the worker notices.

        Within a job, the worker is frozen. Other workers take over its queues and run until they
        are idle. Then the frozen worker continues until the end of its message in flight.
        """
        process = self._stack[-1] if self._stack else self._process
        if process is None:
            return
        if not self._stack:
            check_no_loop(self._uses_loop())
        process.lose()
        if self._process is process:
            self._process = None
        if process.running:
            self._take_over(process)
        else:
            process.close()

    alose_lease = twin(lose_lease)

    def lose_lease_at(
        self, point: Point | None = None, *, queue: str | None = None, nth: int = 1
    ) -> None:
        """Call `lose_lease` when the worker reaches a fault point.

        For the parameters, see `crash_at`.
        """
        self._world.faults.arm(self.lose_lease, point, queue, nth)

    def _take_over(self, frozen: Process) -> None:
        try:
            in_thread = threading.get_ident() != self._thread
            check_no_loop(self._uses_loop(), in_thread)
        except UsageError as error:
            frozen.fail(error)
        self._run()

    def hand_over(self) -> None:
        """Stop the worker cleanly, as for a deployment. The next run has a new worker."""
        self._reject_in_job("hand over; to stop its worker, it can `raise qdo.Stop(reason)`")
        process = self._process
        if process is None:
            return
        check_no_loop(self._uses_loop())
        self._process = None
        process.drain()
        if process.alive:
            process.close()
        else:
            self._keep_dead(process)

    ahand_over = twin(hand_over)

    def decide(self, queue: str, decision: OperatorDecision, which: Which = "first") -> None:
        """Decide about failing messages, like `qdo retry-now`, `skip` and `dead-letters add`.

        :param which: positions of messages, "first" or "all".
        :raises NotFailingError: no message fails or blocks the queue, or a named message does not.
        :raises NotFoundError: no worker has ever owned the queue.
        """
        self._change(queue, lambda node: with_decision(node, queue, decision, which))

    def seek(self, queue: str, last: int) -> None:
        """Move a queue to another position, like `qdo seek`. 0 is the beginning."""
        self._change(queue, lambda node: with_seek(node, last))

    def _change(self, queue: str, change: Callable[[QueueNode], QueueNode]) -> None:
        node = self._world.record.change(queue, change)
        if self._process is not None:
            self._process.moved(queue, node)

    def _held(self) -> None:
        if self._process is not None:
            self._process.gate.apply(self.holds.pauses)

    def _reach(self, point: Point, queue: str) -> None:
        """Pass a fault point of a job that sends. Sending from the test has no fault points."""
        if self._stack:
            self._stack[-1].reach(point, queue)

    def _paused(self, request: str) -> None:
        if self._stack:
            self._stack[-1].paused(request)
