"""One running worker process: its parts, its life and its shutdown.

=========  ==============================================================  ==================
state      meaning                                                         next
=========  ==============================================================  ==================
starting   broker open, not registered yet                                 running, stopped
running    registered: claims queues, runs jobs                            draining
draining   takes no new messages, finishes those in flight, releases       stopped
stopped    session closed, no queue is owned                               -
=========  ==============================================================  ==================

A lost session does not change the state: the process registers again as a new worker, however
long that takes. Until then it starts no message, because every claim is gone.

The shutdown, in this order (`Worker._drain`):

1. Take no new messages: the broker's wake-ups, discovery and registration end, and every claim
   is closed. This comes first: otherwise more work would arrive while the worker finishes.
2. Let the messages in flight finish, for at most `drain_seconds`. After that, or at a second
   stop signal, the worker logs and aborts the remaining ones. An aborted message is not done,
   and its next owner runs it again.
3. Record the final `last` of each queue and release it as soon as its message has ended. Not
   before the jobs: the queue would have a second owner while its message still runs here.
4. Tear down the job context. After the last job, because jobs use it.
5. Close the session. After the releases, which need it; this frees any unreleased queue.
6. Close the broker. Last, because jobs and contexts send messages through it until they end.

With ``burst`` the worker drains by itself once all messages are processed: see `duties.burst`.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gevent.event import Event

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.connections.broker import attach_doorbell
from qdo.coordination.protocol.checkpoints import CheckpointTotals
from qdo.errors import DatabaseError, UnreachableError
from qdo.jobs.job import check_policies
from qdo.message import Message
from qdo.queues import EVERYTHING, MAX_GLOBS_CHARACTERS, QueueFilter
from qdo.settings.live import LiveSettings, LogLevelFollower
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.system.home_loop import LoopMailbox
from qdo.system.logs import enable_again
from qdo.system.processes import SIGN
from qdo.text import pluralize
from qdo.worker.actions import OwnActions
from qdo.worker.drain import ABORT_SECONDS, Drain, StopSignals
from qdo.worker.duties.burst import Burst
from qdo.worker.duties.duty import (
    CheckpointProgress,
    CurrentMember,
    DoorbellListener,
    Duties,
    Duty,
    HistoryDuty,
    LeftMessages,
    QueueAlarms,
    TimeLimit,
)
from qdo.worker.duties.leading import Chores, further_chores
from qdo.worker.duties.member_factory import MemberFactory, MemberParts
from qdo.worker.duties.membership import REGISTER_BACKOFF, ClaimEvents, MembershipLoop, leave
from qdo.worker.duties.queues import Discovery
from qdo.worker.duties.retention import Retention
from qdo.worker.duties.status_report import StatusReport
from qdo.worker.duties.timers import TimerSender
from qdo.worker.duties.watchdog import LoopWatchdog
from qdo.worker.engine.context import Engine, policy_lookup
from qdo.worker.engine.dispatcher import Dispatcher, Loop
from qdo.worker.engine.jobs import check_jobs, check_pools
from qdo.worker.engine.pauses import PauseGate
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.engine.slot import Slot
from qdo.worker.executors.base import Executor
from qdo.worker.executors.router import ExecutorRouter, LimitedExecutor
from qdo.worker.metrics.duty import MetricsDuty
from qdo.worker.metrics.monitor import MetricsPage
from qdo.worker.shared_memory import InFlightTable, SharedReceiptStore

if TYPE_CHECKING:
    from qdo.worker.pools.duty import PoolDuty


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """The surroundings of a worker process; the defaults are for a worker without a parent.

    :ivar target: the app as MODULE:APP, which jobs with the executor "process" import; "" if
        the app was built around the job named in the settings; None if its origin is unknown.
    :ivar in_flight: shared table of the messages in flight. The parent reads it after a crash.
    :ivar receipts: shared store of the receipt handles held at the broker, for the same purpose.
    :ivar metrics: where the worker publishes its metrics for the parent.
    :ivar left: queue and receipt handle of each message that dead processes held. The worker
        releases them, see `Broker.release`.
    :ivar restarted: the worker replaces a process that ran before. Queues that suit no job then
        do not stop it.
    :ivar deaths: the processes that it replaces, see `WorkerReport`.
    :ivar ask_parent: asks the parent for the action that an operator wants, by the name of the
        action; None without a parent.
    :ivar exit: called with the exit code when the process must exit at once: from a native
        thread at the third stop signal, and at the end if jobs in threads are still running.
    """

    target: str | None = None
    in_flight: InFlightTable = field(default_factory=lambda: InFlightTable(1))
    receipts: SharedReceiptStore | None = None
    metrics: MetricsPage = field(default_factory=MetricsPage)
    left: Sequence[tuple[str, str]] = ()
    restarted: bool = False
    deaths: tuple[tuple[int, float, str], ...] = ()
    ask_parent: Callable[[str], None] | None = None
    exit: Callable[[int], None] | None = None


_log = logging.getLogger(__name__)


def filter_of(app: App, settings: Settings) -> QueueFilter:
    """Return the filter of a worker: it takes the queues of its settings that have a job.

    If the globs of the jobs are too long to announce, it also takes queues without a job. A pool is
    no queue: a message that was sent to its name waits.
    """
    globs = sorted(job.queues for job in app.jobs if not job.pool)
    pools = {job.queues for job in app.jobs if job.pool} - {*settings.exclude}
    size = sum(map(len, globs))
    jobs = EVERYTHING.jobs if "*" in globs else tuple(globs)
    if size > MAX_GLOBS_CHARACTERS and jobs != EVERYTHING.jobs:
        _log.warning(
            "the globs of the jobs have %d characters, and a worker announces at most %d; queues"
            " without a job may be assigned to this worker, and wait; use fewer globs",
            size,
            MAX_GLOBS_CHARACTERS,
        )
        jobs = EVERYTHING.jobs
    named = tuple(sorted(pools))
    return QueueFilter(settings.queues, (*settings.exclude, *named), jobs, named)


@dataclass(frozen=True, slots=True)
class _Running:
    """The parts of a worker whose broker is open; None what its app or settings do not need."""

    broker: Broker
    takes: QueueFilter
    pipeline: Pipeline
    dispatcher: Dispatcher
    gate: PauseGate
    status: StatusReport
    discovery: Discovery
    listener: DoorbellListener | None
    pools: PoolDuty | None
    totals: CheckpointTotals


class Worker:
    """A worker process of an app.

    :param process: data from the parent process; not needed without a parent.
    :param members: makes registrations; by default at the coordinator of the settings.
    """

    def __init__(
        self,
        app: App,
        settings: Settings,
        process: ProcessContext | None = None,
        members: MemberFactory | None = None,
    ) -> None:
        self.app = app
        self.settings = settings
        self._process = process if process is not None else ProcessContext()
        self._members = members if members is not None else MemberFactory(settings)
        self._status_due = Event()
        self._alarms_changed = Event()
        self._live = LiveSettings(
            settings,
            app.origin,
            check=lambda changed: check_policies(
                app.jobs, changed.policies, changed.default_policy
            ),
            publish=self._status_due.set,
        )
        self._live.in_force.on_change(LogLevelFollower(settings).changed)
        self._executors = ExecutorRouter(settings, self._process.target, self._may_start)
        self._stop = StopSignals(self._process.exit)
        self._duties = Duties(self._stop.wakeup.set)
        self._current = CurrentMember()
        self._slots: dict[str, Slot] = {}

    @property
    def state(self) -> str:
        """The state of this worker, see the module's table."""
        return self._current.state

    def request_stop(self) -> None:
        """Ask the worker to stop: the first call drains, the second aborts running jobs.

        Only sets flags: for signal handlers, and any thread.
        """
        self._stop.signal()

    def run(self) -> int:
        """Work until asked to stop, or with `burst` until all messages are processed.

        :returns: the exit code. 0: stopped cleanly; 1: a job could not be finished, or a part
            of the worker died.
        :raises UsageError: a job cannot run with its executor, needs more than the broker
            supports, or policies contradict each other.
        :raises UnreachableError: broker or coordinator cannot be reached at the start.
        """
        settings = self.settings
        self._executors.check(self.app.jobs)
        check_pools(self.app.jobs, settings.broker)
        check_policies(self.app.jobs, settings.policies, settings.default_policy)
        self._stop.open()
        try:
            broker = self._open_broker()
            broker.max_read_bytes = settings.max_body_bytes
            notifier = attach_doorbell(broker, settings, self.app.name)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.app.override_coordinator(live=self._live.in_force))
                for each in (notifier, broker, self.app):
                    if each is not None:
                        stack.callback(each.close)
                code = self._serve(broker)
            _log.info("step 6: the broker is closed; exit code %d", code)
            return code
        finally:
            self._current.state = "stopped"
            SIGN.show(False)
            self._stop.close()

    def _open_broker(self) -> Broker:
        """Open the broker; while it cannot be reached, try for `connect_seconds`."""
        settings, attempt = self.settings, 0
        deadline = clock() + settings.connect_seconds
        while True:
            try:
                return open_broker(settings.broker, self.app.name, settings.max_queues)
            except UnreachableError as error:
                attempt += 1
                pause = REGISTER_BACKOFF.delay(attempt, random.random())  # spreads pauses
                lasts = isinstance(error, DatabaseError)  # a file, or a newer schema
                if lasts or clock() + pause > deadline:
                    raise
                _log.warning("cannot open the broker: %s; retrying in %.1f s", error, pause)
                if self._stop.wakeup.wait(pause):
                    raise

    def _serve(self, broker: Broker) -> int:
        settings = self.settings
        takes = filter_of(self.app, settings)
        policy_of = policy_lookup(self.app, self._live.in_force)
        refuse = not self._process.restarted
        concurrency = [settings.concurrency] * settings.processes
        check_jobs(self.app, broker, takes.matcher(), policy_of, refuse, concurrency)
        addresses = settings.broker, settings.coordinator
        _log.info("app %s, broker %s, coordinator %s", self.app.name, *addresses)
        watchdog = self._watchdog()
        watchdog.start()
        try:
            with self.app.hooks.job_context() as context:
                enable_again("the context of the app")
                watchdog.started()
                running = self._build(broker, takes, context)
                duties = self._build_duties(running)
                try:
                    self._work(running, duties)
                finally:
                    clean = self._drain(running)
                    self._stop.exit_if_stuck(self._executors.under_way())
                    self._executors.close()
            _log.info("step 4: the job context is torn down")
        finally:
            leave(self._members, self._current)
            watchdog.stop()
        if self._current.start_error is not None:
            raise self._current.start_error
        return 0 if clean and (self._duties.failed or self._stop.dead_thread) is None else 1

    def _watchdog(self) -> LoopWatchdog:
        return LoopWatchdog(
            self.settings.session_timeout_seconds,
            self._process.in_flight.loop,
            [job.timeout_seconds for job in self.app.jobs],
            contact=self._current.contact,
            tick=self._stop.exit_if_demanded,
            exit=self._process.exit,
        )

    def _build(self, broker: Broker, takes: QueueFilter, context: Any) -> _Running:
        pipeline = Pipeline(
            Engine.build(
                self.app,
                broker,
                self._executor(),
                self._live.in_force,
                in_flight=self._process.in_flight,
                on_stop=self._stop.request,
                context=context,
            )
        )
        loop = Loop(
            spawn=self._duties.spawn,
            schedule=self._alarms_changed.set,
            on_quiet=self._stop.wakeup.set,
        )
        dispatcher = Dispatcher(
            pipeline, concurrency=self.settings.concurrency, loop=loop, slots=self._slots
        )
        rings, gate = self.settings.doorbell and broker.capabilities.doorbell, PauseGate(dispatcher)
        return _Running(
            broker,
            takes,
            pipeline,
            dispatcher,
            gate,
            StatusReport(
                dispatcher,
                pipeline,
                self.app.jobs,
                self._live,
                self._current,
                self._status_due,
                self._process.deaths,
            ),
            Discovery(broker, clock, self._current),
            DoorbellListener(self._slots, self._current) if rings else None,
            self._pools(broker, pipeline, dispatcher, gate),
            CheckpointTotals(),
        )

    def _pools(
        self, broker: Broker, pipeline: Pipeline, dispatcher: Dispatcher, gate: PauseGate
    ) -> PoolDuty | None:
        if not any(job.pool for job in self.app.jobs):
            return None
        # Most apps have none: their workers need no memory for its modules.
        from qdo.worker.pools.duty import PoolDuty

        takes = QueueFilter(self.settings.queues, self.settings.exclude).matcher()
        parts = dispatcher, gate, pipeline.permits, takes, self._current
        return PoolDuty(self.app, broker.requests, *parts)

    def _executor(self) -> Executor:
        most = self.settings.max_messages
        if not most:
            return self._executors
        reason = f"max_messages reached: this worker has started {pluralize(most, 'message')}"
        return LimitedExecutor(self._executors, most, partial(self._stop.finish, reason))

    def _member_parts(self, running: _Running) -> MemberParts:
        pipeline, listener = running.pipeline, running.listener
        actions = OwnActions(
            self._stop,
            self._live.in_force,
            self._process.ask_parent,
            running.status.runs,
            pipeline.cancellations(self._slots),
        )
        return MemberParts(
            broker=running.broker,
            filter=running.takes,
            make_machines=partial(pipeline.limits.join, self.app.jobs, self.app.limits),
            actions=actions.table(),
            gate=running.gate,
            live=self._live,
            on_doorbell=None if listener is None else listener.rang,
            totals=running.totals,
        )

    def _build_duties(self, running: _Running) -> list[Duty]:
        """Make the duties: a new periodic task of a worker is one more line here."""
        pipeline, dispatcher = running.pipeline, running.dispatcher
        events = partial(ClaimEvents, dispatcher, pipeline.counters, running.gate, pipeline.history)
        membership = MembershipLoop(
            self._members,
            self._member_parts(running),
            self._current,
            events,
            running.status,
            self._process.in_flight,
            on_start_error=self._stop.wakeup.set,
        )
        return [
            membership,
            QueueAlarms(dispatcher, self._alarms_changed),
            CheckpointProgress(dispatcher, self.settings.checkpoint_seconds),
            running.status,
            running.discovery,
            Retention(running.broker, self._slots, self._live.in_force, clock),
            Chores(self._current, further_chores(pipeline.history)),
            *self._optional_duties(running),
        ]

    def _optional_duties(self, running: _Running) -> Iterator[Duty]:
        settings, broker, pipeline = self.settings, running.broker, running.pipeline
        if self._process.left:
            yield LeftMessages(broker, self._process.left)
        if pipeline.history is not None:
            yield HistoryDuty(settings, self.app.name, pipeline.history)
        if pipeline.meters is not None:
            parts = broker, running.dispatcher, pipeline, self._current
            yield MetricsDuty(*parts, running.totals, self._process.metrics, self.app)
        if self.app.outboxes:
            # Imports SQLAlchemy, which not every app has.
            from qdo.worker.duties.outbox_relay import Relay

            yield Relay(self.app.outboxes, broker, self._current)
        if running.pools is not None:
            from qdo.worker.pools.returner import Returner

            yield running.pools
            yield Returner(broker.requests, self._live.in_force, self._current)
        if self.app.timers:
            yield TimerSender(self.app, broker, self._current)
        if running.listener is not None:
            yield running.listener
        if settings.burst:
            takes, is_idle = running.takes.matcher(), partial(self._is_idle, running.dispatcher)
            survey, finish = self._members.survey, self._stop.finish
            yield Burst(self.app, broker, takes, survey, is_idle, finish)
        if settings.max_seconds:
            yield TimeLimit(settings.max_seconds, self._stop.finish)

    def _work(self, running: _Running, duties: list[Duty]) -> None:
        """Run the duties, and wait for a reason to stop."""
        broker = running.broker
        broker.attach_receipt_store(self._process.receipts or SharedReceiptStore())
        mailbox = LoopMailbox()

        def woken(names: set[str]) -> None:
            running.dispatcher.wake(names)
            running.discovery.names_received(names)

        stop_listening = broker.listen(lambda names: mailbox.post(partial(woken, set(names))))
        try:
            for duty in duties:
                self._duties.start(duty)
            while not self._should_stop():
                self._stop.wakeup.wait()
                self._stop.wakeup.clear()
        finally:
            stop_listening()
            mailbox.close()

    def _should_stop(self) -> bool:
        failed = self._duties.failed or self._stop.dead_thread or self._current.start_error
        return bool(self._stop.signals or self._stop.finished or failed)

    def _may_start(self, message: Message) -> bool:
        """Return whether a message of a turn under way may (still) be started; for any thread."""
        slot = self._slots.get(message.queue)
        claim = None if slot is None else slot.claim
        if claim is None or not claim.open or claim.fence != message.fence:
            return False
        return clock() < claim.lease.until

    def _is_idle(self, dispatcher: Dispatcher) -> bool:
        """Return whether all queues of this worker are claimed and fully processed."""
        return self._current.settled() and dispatcher.all_idle() and self._duties.quiet

    def _drain(self, running: _Running) -> bool:
        """Stop as the module's docstring says; return whether every message was finished."""
        self._current.state = "draining"
        SIGN.show(True)
        if self._current.start_error is not None:
            self._duties.end_all()
            return True  # nothing was claimed, and the error says why
        _log.info("step 1: taking no new messages")
        self._duties.begin_drain()
        if running.pools is not None:
            running.pools.drain()
        running.status.refresh()
        budget = self.settings.drain_seconds
        stop, counters = self._stop, running.pipeline.counters
        drain = Drain(running.dispatcher, budget, stop.wakeup, lambda: stop.signals >= 2)
        member = self._current.member
        clean = drain.run(member, session_lost=member is None and counters.lost > 0)
        if running.pools is not None:
            running.pools.join(ABORT_SECONDS)
        self._duties.end_all()
        counts = ", ".join(f"{n} {name}" for name, n in counters.dump().items())
        _log.info("totals: %s", counts)
        return clean
