"""One running worker process: what it is made of, how it lives, how it stops.

=========  ==============================================================  ==================
state      meaning                                                         next
=========  ==============================================================  ==================
starting   broker open, no registration yet                                running, stopped
running    registered: claims queues, runs jobs                            draining
draining   takes nothing new, finishes what is in hand, releases           stopped
stopped    session closed, nothing is held                                 -
=========  ==============================================================  ==================

A lost session does not change the state: the process registers again, as a new worker, and
waits as long as that takes. It starts no message meanwhile, for every claim is gone.

The way down, in this order (`Worker._drain`):

1. Take nothing new: the broker's wake-ups, discovery and registration end, and every claim is
   closed. First, or the work to finish would grow while it is being finished.
2. Let the messages in hand finish, for at most `drain_seconds`. What has not ended then, or when
   a second signal comes, is named and aborted: its message is not done and its next owner
   runs it again.
3. Record the final `last` of each queue and release it, as soon as its message has ended. After
   the jobs, or a queue would have a second owner while its message still runs here.
4. Tear down the job context. After the last job, because jobs use it.
5. Close the session. After the releases, which need it; it frees whatever could not be released.
6. Close the broker. Last, because jobs and contexts send messages through it to their end.

With ``burst`` the worker drains by itself once everything is done, here and at other workers:
see `burst`. Messages that arrive meanwhile prolong it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event

import qdo
from qdo.app import App
from qdo.brokers import open_broker
from qdo.brokers.base import Broker
from qdo.brokers.subscription import OPEN_POLL
from qdo.coordination.lease import clock
from qdo.describe import counted, describe
from qdo.filters import QueueFilter
from qdo.message import Message
from qdo.policies import check_policies, policy_for
from qdo.policy import Policy
from qdo.ringing import ring_for
from qdo.settings import Settings
from qdo.stopping import SIGN
from qdo.storage import absolute
from qdo.worker.burst import Burst
from qdo.worker.discovery import Discovery, Retention, come_and_go
from qdo.worker.dispatcher import Dispatcher
from qdo.worker.doorman import Doorman
from qdo.worker.drain import Drain
from qdo.worker.duties import Duties
from qdo.worker.enrolment import Enrolment
from qdo.worker.executors.base import Executor
from qdo.worker.executors.choice import Executors
from qdo.worker.executors.limited import LimitedExecutor
from qdo.worker.hands import Hands
from qdo.worker.lags import lags
from qdo.worker.pipeline import Pipeline
from qdo.worker.receipts import Receipts
from qdo.worker.registrar import Enrolled, Registrar
from qdo.worker.suitability import check_jobs
from qdo.worker.wakes import Wakes
from qdo.worker.watchdog import Watchdog

if TYPE_CHECKING:
    from qdo.outbox import Relay

_log = logging.getLogger(__name__)

DESCRIBE_SECONDS = 10.0
"""How often the component node is refreshed."""


class Worker:
    """A worker process of an app.

    :param registrar: makes registrations; by default at the settings' coordinator.
    :param exit_process: called with the exit code when the process must end at once: from a
        native thread when the worker was asked to stop for the third time, and when jobs in
        threads go on at the end.
    :param target: the app as MODULE:APP, for jobs with the executor "process"; "" when it was
        made around the job that the settings name.
    :param hands: where to keep word of the messages in hand for whoever survives this process.
    :param receipts: the same for what the broker lets it hold.
    :param left: queue and receipt of what dead processes held, to be given back; see
        `Broker.give_back`.
    :param again: it takes the place of a process that ran: queues that suit no job do not stop it.
    """

    def __init__(
        self,
        app: App,
        settings: Settings,
        *,
        registrar: Registrar | None = None,
        exit_process: Callable[[int], None] | None = None,
        target: str | None = None,
        hands: Hands | None = None,
        receipts: Receipts | None = None,
        left: Sequence[tuple[str, str]] = (),
        again: bool = False,
    ) -> None:
        self.app = app
        self.settings = settings
        self.state = "starting"
        self._registrar = registrar if registrar is not None else Registrar(settings)
        self._exit_process = exit_process
        self._executors = Executors(settings, target, self._may_start)
        self._hands = hands
        self._receipts = receipts if receipts is not None else Receipts()
        self._left = left
        self._again = again
        self._policy = Policy(
            settings.attempts, settings.backoff_seconds, settings.backoff_max_seconds
        )
        self._stop_requests = 0
        self._news = Event()
        self._alarm: Any = None
        self._finished = False
        self._started_at = time.time()
        self._timers_changed = Event()
        self._discover = Event()
        self._broker: Broker
        self._pipeline: Pipeline
        self._dispatcher: Dispatcher
        self._enrolment: Enrolment
        self._relay: Relay | None = None
        self._doorman: Doorman | None = None
        self._duties = Duties(self._news.set)

    # --- life -------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask to stop: the first call drains, the second aborts running jobs and releases.

        Only sets flags: for signal handlers, and any thread.
        """
        self._stop_requests += 1
        if self._alarm is not None:
            self._alarm.send()

    def _stop_for_job(self, reason: str) -> None:
        """Drain because a job said so; a worker that drains already is asked nothing more."""
        if not self._stop_requests:
            _log.warning("a job asks this worker to stop: %s", reason)
            self.request_stop()

    def run(self) -> int:
        """Work until asked to stop, or with `burst` until all is done; return the exit code.

        0: stopped in good order; 1: a job could not be finished, or a part of the worker died.

        :raises UsageError: a job cannot run where it is told to, asks for more than the broker
            can give, or policies contradict.
        :raises UnreachableError: broker or coordinator cannot be reached at the start.
        """
        self._executors.check(self.app.jobs)
        check_policies(self.app.jobs, self.settings.policies, self._policy)
        self._alarm = gevent.get_hub().loop.async_()
        self._alarm.start(self._news.set)
        try:
            self._broker = open_broker(self.settings.broker, self.app.name)
            self._registrar.told_aside = come_and_go(self._broker)
            ringer = ring_for(self._broker, self.settings, self.app.name)
            with contextlib.ExitStack() as stack:
                for each in (ringer, self._broker, self.app):
                    if each is not None:
                        stack.callback(each.close)
                takes = QueueFilter(self.settings.queues, self.settings.exclude).matcher()
                check_jobs(self.app, self._broker, takes, self._policy_of, refuse=not self._again)
                code = self._serve()
            _log.info("step 6: the broker is closed; exit code %d", code)
            return code
        finally:
            self.state = "stopped"
            SIGN.show(False)
            self._alarm.stop()
            self._alarm.close()
            self._alarm = None

    def _policy_of(self, queue: str) -> Policy:
        job = self.app.job_for(queue)
        return policy_for(queue, job, self.settings.policies, self._policy)

    def _serve(self) -> int:
        settings = self.settings
        _log.info(
            "app %s, broker %s, coordinator %s",
            self.app.name,
            absolute(settings.broker),
            absolute(settings.coordinator),
        )
        self._pipeline = Pipeline(
            self.app,
            self._broker,
            self._limited(self._executors),
            policy=self._policy,
            policies=settings.policies,
            on_stop=self._stop_for_job,
            hands=self._hands,
            fetch=settings.fetch,
            turn_seconds=settings.turn_seconds,
            lanes=settings.concurrency,
        )
        self._dispatcher = Dispatcher(
            self._pipeline,
            concurrency=settings.concurrency,
            spawn=self._duties.spawn,
            schedule=self._timers_changed.set,
            on_quiet=self._news.set,
        )
        self._pipeline.lent = self._dispatcher.lent
        self._discovery = Discovery(self._broker, clock)
        self._relay = self._made_relay()
        self._doorman = self._made_doorman()
        self._enrolment = Enrolment(
            self._registrar,
            self._dispatcher,
            self._pipeline.counters,
            self._component,
            self._registered,
            self._news.set,
            settings.connect_seconds,
        )
        watchdog = Watchdog(settings.session_timeout_seconds, tick=self._look_for_exit)
        watchdog.start()
        try:
            with self.app.job_context() as context:
                self._pipeline.context = context
                try:
                    self._work()
                finally:
                    clean = self._drain()
                    self._leave_if_stuck()
                    self._executors.close()
            _log.info("step 4: the job context is torn down")
        finally:
            self._enrolment.close()
            watchdog.stop()
        if self._enrolment.refusal is not None:
            raise self._enrolment.refusal
        return 0 if clean and self._duties.failed is None else 1

    def _work(self) -> None:
        """Start the duties, and wait for a reason to stop."""
        self._broker.keep_receipts(self._receipts)
        if self._left:
            gevent.spawn(self._give_back)
        wakes = Wakes(self._woken)
        stop_listening = self._broker.listen(wakes.post)
        try:
            for name, duty in (
                ("registration", self._enrolment.run),
                ("timers", self._run_timers),
                ("progress", self._note_progress),
                ("component", self._describe_for_ever),
                ("discovery", self._discover_for_ever),
                ("retention", self._retire_for_ever),
                *((("outbox", self._relay_for_ever),) if self._relay else ()),
                *((("doorbell", self._listen_for_ever),) if self._doorman else ()),
                *((("burst", self._finish_burst),) if self.settings.burst else ()),
                *((("limit", self._finish_in_time),) if self.settings.max_seconds else ()),
            ):
                self._duties.start(name, duty)
            while not self._should_stop():
                self._news.wait()
                self._news.clear()
        finally:
            stop_listening()
            wakes.close()

    def _give_back(self) -> None:
        """Have messages received again that a dead process held, without waiting for them."""
        count = sum(not receipt.startswith(OPEN_POLL) for _, receipt in self._left)
        try:
            self._broker.give_back(self._left)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "%d messages that a dead worker held are seen only after their visibility"
                " time-out: %s",
                count,
                describe(error),
            )
        else:
            if count:
                _log.info("given back of what a dead worker held: %s", counted(count, "message"))

    def _should_stop(self) -> bool:
        return bool(
            self._stop_requests or self._duties.failed or self._finished or self._enrolment.refusal
        )

    def _look_for_exit(self) -> None:
        """Exit even where the event loop is blocked; runs on the watchdog's thread."""
        if self._stop_requests >= 3 and self._exit_process is not None:
            _log.error("asked to stop for the third time: exiting at once")
            self._exit_process(1)

    # --- the way down -----------------------------------------------------------------

    def _drain(self) -> bool:
        """Stop as the module's docstring says; return whether everything was finished."""
        self.state = "draining"
        SIGN.show(True)
        _log.info("step 1: taking nothing new")
        self._duties.end("registration", "discovery", "retention", "outbox", "doorbell")
        self._duties.end("burst", "limit")
        member = self._enrolment.member
        if member is not None:
            self._describe(member)
        drain = Drain(
            self._dispatcher,
            self.settings.drain_seconds,
            self._news,
            lambda: self._stop_requests >= 2,
        )
        clean = drain.run(member)
        self._duties.end_all()
        counts = ", ".join(f"{n} {name}" for name, n in self._pipeline.counters.dump().items())
        _log.info("in all: %s", counts)
        return clean

    def _leave_if_stuck(self) -> None:
        """End the process if jobs go on in threads that nothing can stop.

        Closing the session would free their queues while their messages still run. Whoever
        buries this process closes it: then nothing of it runs any more.
        """
        under_way = self._executors.under_way()
        if under_way and self._exit_process is not None:
            _log.error(
                "%d jobs cannot be stopped: this process ends at once, without tearing down the"
                " job context; their queues are free when it is dead",
                under_way,
            )
            self._exit_process(1)

    def _may_start(self, message: Message) -> bool:
        """Return whether a message of a turn under way may (still) be started."""
        slot = self._dispatcher.slots.get(message.queue)
        claim = None if slot is None else slot.claim
        if claim is None or not claim.open or claim.fence != message.fence:
            return False
        return clock() < claim.lease.until

    # --- duties -------------------------------------------------------------

    def _registered(self, member: Enrolled) -> None:
        self.state = "running"
        self._describe(member)

    def _woken(self, names: set[str]) -> None:
        self._dispatcher.wake(names)
        if self._discovery.heard(names):
            self._discover.set()

    def _run_timers(self) -> None:
        """Bring back queues whose time has come."""
        while True:
            self._dispatcher.tick()
            due = self._dispatcher.due()
            self._timers_changed.wait(None if due == float("inf") else max(0.0, due - clock()))
            self._timers_changed.clear()

    def _note_progress(self) -> None:
        """Have recorded what long turns have done so far."""
        while True:
            gevent.sleep(self.settings.checkpoint_seconds)
            self._dispatcher.note_progress()

    def _describe_for_ever(self) -> None:
        """Refresh the component node."""
        while True:
            gevent.sleep(DESCRIBE_SECONDS)
            if self._enrolment.member is not None:
                self._describe(self._enrolment.member)

    def _describe(self, member: Enrolled) -> None:
        member.refresh_component(self._component(member.name))

    def _component(self, name: str) -> dict[str, Any]:
        counts = self._pipeline.counters.dump()
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": qdo.__version__,
            "started": self._started_at,
            "state": self.state,
            "worker": name,
            "concurrency": self.settings.concurrency,
            "queues": len(self._dispatcher.slots),
            **counts,
            "behind": lags(self._dispatcher.slots.values()),
        }

    def _discover_for_ever(self) -> None:
        while True:
            pause = self._discovery.step(self._enrolment.member)
            self._discover.wait(pause)
            self._discover.clear()

    def _retire_for_ever(self) -> None:
        retention = Retention(self._broker, self.settings.retention_seconds, clock)
        while True:
            gevent.sleep(retention.step(self._dispatcher.slots))

    def _made_relay(self) -> Relay | None:
        if not self.app.outboxes:
            return None
        from qdo.outbox import Relay  # imports SQLAlchemy, which not every app has

        return Relay(self.app.outboxes, self._broker)

    def _relay_for_ever(self) -> None:
        """Send what is in the outboxes of the app, while this worker leads."""
        while self._relay is not None:
            gevent.sleep(self._relay.step(self._enrolment.member))

    def _made_doorman(self) -> Doorman | None:
        if not self.settings.doorbell or not self._broker.polled:
            return None
        doorman = Doorman(self._dispatcher.slots)
        self._registrar.on_ring = doorman.rang
        return doorman

    def _listen_for_ever(self) -> None:
        """Listen at the doorbells of queues that rest."""
        while self._doorman is not None:
            gevent.sleep(self._doorman.step(self._enrolment.member))

    def _finish_burst(self) -> None:
        """End the worker once everything is done."""
        takes = QueueFilter(self.settings.queues, self.settings.exclude).matcher()
        burst = Burst(self.app, self._broker, self._registrar, self._own_done, clock, takes)
        while (pause := burst.step()) is not None:
            gevent.sleep(pause)
        self._finish("every queue is done: this worker, started with burst, ends")

    def _finish_in_time(self) -> None:
        """End the worker when it has run for `max_seconds`."""
        gevent.sleep(self.settings.max_seconds)
        self._finish(f"{self.settings.max_seconds:g} s, the max_seconds of this worker, are over")

    def _limited(self, executor: Executor) -> Executor:
        """Return an executor that ends the worker after `max_messages`."""
        most = self.settings.max_messages
        if not most:
            return executor
        reason = f"{most} messages, the max_messages of this worker, were started"
        return LimitedExecutor(executor, most, lambda: self._finish(reason))

    def _finish(self, reason: str) -> None:
        """Have the worker drain and end by itself."""
        _log.info("%s", reason)
        self._finished = True
        self._news.set()

    def _own_done(self) -> bool:
        member = self._enrolment.member
        if member is None or not member.settled() or not self._dispatcher.all_idle():
            return False
        return self._relay is None or self._relay.quiet
