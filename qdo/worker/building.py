"""Build the parts and the duties of a worker process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gevent.event import Event

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.coordination.protocol.checkpoints import CheckpointTotals
from qdo.jobs.job import check_policies
from qdo.message import Message
from qdo.queues import EVERYTHING, MAX_GLOBS_CHARACTERS, QueueFilter
from qdo.settings.live import LiveSettings, LogLevelFollower
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.text import pluralize
from qdo.worker.actions import OwnActions
from qdo.worker.drain import StopSignals
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
from qdo.worker.duties.membership import ClaimEvents, MembershipLoop
from qdo.worker.duties.queues import Discovery
from qdo.worker.duties.retention import Retention
from qdo.worker.duties.status_report import StatusReport
from qdo.worker.duties.timers import TimerSender
from qdo.worker.duties.watchdog import LoopWatchdog
from qdo.worker.engine.context import Engine
from qdo.worker.engine.dispatcher import Dispatcher, Loop
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

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """The environment of a worker process; the defaults are for a worker without a parent."""

    # The app as MODULE:APP, for the processes of jobs with the executor "process". "" means that
    # the settings name a job instead of an app. None means an unknown origin.
    target: str | None = None
    # Shared table of the messages in flight, which the parent reads after a crash.
    in_flight: InFlightTable = field(default_factory=lambda: InFlightTable(1))
    # Shared store of receipt handles, which the parent reads after a crash.
    receipts: SharedReceiptStore | None = None
    metrics: MetricsPage = field(default_factory=MetricsPage)
    # Queue and receipt handle of each message that dead processes held. The worker releases these
    # messages, see `Broker.release`.
    left: Sequence[tuple[str, str]] = ()
    # Whether the worker replaces an earlier process. Incompatible queues do not stop such a worker.
    restarted: bool = False
    # The processes that the worker replaces, see `WorkerReport`.
    deaths: tuple[tuple[int, float, str], ...] = ()
    # Requests the action with a given name from the parent; None without a parent.
    ask_parent: Callable[[str], None] | None = None
    # Called with the exit code when the process must exit at once. The callers are a native thread,
    # at the third stop signal, and the worker, at its end, if jobs in threads are still running.
    # None if the process is not the worker's own.
    exit: Callable[[int], None] | None = None


def filter_of(app: App, settings: Settings) -> QueueFilter:
    """Return a filter that accepts the queues of the worker's settings that have a job.

    If the globs of the jobs are too long to announce, the filter also accepts queues without a job.
    The filter excludes the names of pools, so a message sent to a queue of this name waits.
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
class WorkerParts:
    """The parts of a worker with an open broker; None for parts that its app does not need."""

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


class WorkerBuilder:
    """Builds one worker. The constructor builds the parts that need no open broker."""

    def __init__(
        self, app: App, settings: Settings, process: ProcessContext, members: MemberFactory
    ) -> None:
        self.app = app
        self.settings = settings
        self.process = process
        self.members = members
        self.stop = StopSignals(process.exit)
        self.duties = Duties(self.stop.wakeup.set)
        self.current = CurrentMember()
        self.executors = ExecutorRouter(settings, process.target, self._may_start)
        self._status_due = Event()
        self._alarms_changed = Event()
        self.live = LiveSettings(
            settings,
            app.origin,
            check=lambda changed: check_policies(
                app.jobs, changed.policies, changed.default_policy
            ),
            publish=self._status_due.set,
        )
        self.live.in_force.on_change(LogLevelFollower(settings).changed)
        # Executors and the listener share this dict with the dispatcher, which is built later.
        self._slots: dict[str, Slot] = {}

    def _may_start(self, message: Message) -> bool:
        """Return whether the executor may still start a message of a running turn; thread-safe."""
        slot = self._slots.get(message.queue)
        claim = None if slot is None else slot.claim
        if claim is None or not claim.open or claim.fence != message.fence:
            return False
        return clock() < claim.lease.until

    def watchdog(self) -> LoopWatchdog:
        return LoopWatchdog(
            self.settings.session_timeout_seconds,
            self.process.in_flight.loop,
            [job.timeout_seconds for job in self.app.jobs],
            contact=self.current.contact,
            tick=self.stop.exit_if_demanded,
            exit=self.process.exit,
        )

    def parts(self, broker: Broker, takes: QueueFilter, context: Any) -> WorkerParts:
        """Return the parts of a worker; `context` is the second argument of its jobs."""
        pipeline = Pipeline(
            Engine.build(
                self.app,
                broker,
                self._executor(),
                self.live.in_force,
                in_flight=self.process.in_flight,
                on_stop=self.stop.request,
                context=context,
            )
        )
        dispatcher = Dispatcher(
            pipeline,
            concurrency=self.settings.concurrency,
            loop=Loop(
                spawn=self.duties.spawn,
                schedule=self._alarms_changed.set,
                on_quiet=self.stop.wakeup.set,
            ),
            slots=self._slots,
        )
        gate = PauseGate(dispatcher)
        rings = self.settings.doorbell and broker.capabilities.doorbell
        return WorkerParts(
            broker,
            takes,
            pipeline,
            dispatcher,
            gate,
            StatusReport(
                dispatcher,
                pipeline,
                self.app.jobs,
                self.live,
                self.current,
                self._status_due,
                self.process.deaths,
            ),
            Discovery(broker, clock, self.current),
            DoorbellListener(self._slots, self.current) if rings else None,
            self._pools(broker, pipeline, dispatcher, gate),
            CheckpointTotals(),
        )

    def _executor(self) -> Executor:
        most = self.settings.max_messages
        if not most:
            return self.executors
        reason = f"max_messages reached: this worker has started {pluralize(most, 'message')}"
        return LimitedExecutor(self.executors, most, partial(self.stop.finish, reason))

    def _pools(
        self, broker: Broker, pipeline: Pipeline, dispatcher: Dispatcher, gate: PauseGate
    ) -> PoolDuty | None:
        if not any(job.pool for job in self.app.jobs):
            return None
        # Import late, so that the workers of apps without pools do not load these modules.
        from qdo.worker.pools.duty import PoolDuty

        return PoolDuty(
            self.app,
            broker.requests,
            dispatcher,
            gate,
            pipeline.permits,
            QueueFilter(self.settings.queues, self.settings.exclude).matcher(),
            self.current,
        )

    def build_duties(self, parts: WorkerParts) -> list[Duty]:
        """Make the duties. Add a line here for each new periodic task of a worker."""
        return [
            self._membership(parts),
            QueueAlarms(parts.dispatcher, self._alarms_changed),
            CheckpointProgress(parts.dispatcher, self.settings.checkpoint_seconds),
            parts.status,
            parts.discovery,
            Retention(parts.broker, self._slots, self.live.in_force, clock),
            Chores(self.current, further_chores(parts.pipeline.history)),
            *self._optional_duties(parts),
        ]

    def _membership(self, parts: WorkerParts) -> MembershipLoop:
        pipeline = parts.pipeline
        actions = OwnActions(
            self.stop,
            self.live.in_force,
            self.process.ask_parent,
            parts.status.runs,
            pipeline.cancellations(self._slots),
        )
        member_parts = MemberParts(
            broker=parts.broker,
            filter=parts.takes,
            make_machines=partial(pipeline.limits.join, self.app.jobs, self.app.limits),
            actions=actions.table(),
            gate=parts.gate,
            live=self.live,
            on_doorbell=None if parts.listener is None else parts.listener.rang,
            totals=parts.totals,
        )
        return MembershipLoop(
            self.members,
            member_parts,
            self.current,
            partial(ClaimEvents, parts.dispatcher, pipeline.counters, parts.gate, pipeline.history),
            parts.status,
            self.process.in_flight,
            on_start_error=self.stop.wakeup.set,
        )

    def _optional_duties(self, parts: WorkerParts) -> Iterator[Duty]:
        settings = self.settings
        broker = parts.broker
        pipeline = parts.pipeline
        if self.process.left:
            yield LeftMessages(broker, self.process.left)
        if pipeline.history is not None:
            yield HistoryDuty(settings, self.app.name, pipeline.history)
        if pipeline.meters is not None:
            yield MetricsDuty(
                broker,
                parts.dispatcher,
                pipeline,
                self.current,
                parts.totals,
                self.process.metrics,
                self.app,
            )
        if self.app.outboxes:
            # Import late, because the module needs SQLAlchemy, which not every app has.
            from qdo.worker.duties.outbox_relay import Relay

            yield Relay(self.app.outboxes, broker, self.current)
        if parts.pools is not None:
            from qdo.worker.pools.returner import Returner

            yield parts.pools
            yield Returner(self.app, broker.requests, self.live.in_force, self.current)
        if self.app.timers:
            yield TimerSender(self.app, broker, self.current)
        if parts.listener is not None:
            yield parts.listener
        if settings.burst:
            yield Burst(
                self.app,
                broker,
                parts.takes.matcher(),
                self.members.survey,
                partial(self._is_idle, parts.dispatcher),
                self.stop.finish,
            )
        if settings.max_seconds:
            yield TimeLimit(settings.max_seconds, self.stop.finish)

    def _is_idle(self, dispatcher: Dispatcher) -> bool:
        """Return whether this worker has claimed and fully processed all of its queues."""
        return self.current.settled() and dispatcher.all_idle() and self.duties.quiet
