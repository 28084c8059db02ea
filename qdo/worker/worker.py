"""Run one worker process from its start to its shutdown.

=========  ==============================================================  ==================
state      meaning                                                         next
=========  ==============================================================  ==================
starting   broker open, not registered yet                                 running, stopped
running    registered: claims queues, runs jobs                            draining
draining   takes no new messages, finishes those in flight, releases       stopped
stopped    session closed, no queue is owned                               -
=========  ==============================================================  ==================

A lost session does not change the state. The process tries to register again as a new worker,
without a time limit. Until then the process starts no message, because all its claims are gone.

Comments in this module number the five steps of the start and the six steps of the shutdown, with
the reasons for their order. The log also numbers the steps of the shutdown. With ``burst`` the
worker drains by itself once all messages are processed, see `duties.burst`. `building` makes the
parts.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.connections.broker import attach_doorbell
from qdo.errors import DatabaseError, QdoError, UnreachableError
from qdo.jobs.job import check_policies
from qdo.jobs.middleware import AwaitedContext
from qdo.queues import QueueFilter
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.system.home_loop import LoopMailbox
from qdo.system.logs import enable_again
from qdo.system.processes import SIGN
from qdo.text import describe
from qdo.worker.building import ProcessContext as ProcessContext
from qdo.worker.building import WorkerBuilder, WorkerParts, filter_of
from qdo.worker.drain import ABORT_SECONDS, Drain
from qdo.worker.duties.duty import Duty
from qdo.worker.duties.member_factory import MemberFactory
from qdo.worker.duties.membership import REGISTER_BACKOFF, leave
from qdo.worker.engine.context import policy_lookup
from qdo.worker.engine.jobs import check_jobs, check_pools
from qdo.worker.shared_memory import SharedReceiptStore

if TYPE_CHECKING:
    from qdo.settings.given import GivenSettings

_log = logging.getLogger(__name__)


class Worker:
    """A worker process of an app.

    >>> qdo.Worker(app, burst=True).run()
    0

    :param settings: by default, the settings of the app.
    :param process: data from the parent process; None without a parent.
    :param members: makes registrations; by default, at the coordinator in the settings.
    :param given: settings by name, which override `settings`.
    """

    def __init__(
        self,
        app: App,
        settings: Settings | None = None,
        process: ProcessContext | None = None,
        members: MemberFactory | None = None,
        **given: Unpack[GivenSettings],
    ) -> None:
        if settings is None or given:
            app.use((settings or app.settings).merged(given, "Worker"))
            settings = app.anchor()
        self.app = app
        self.settings = settings
        self._builder = WorkerBuilder(
            app, settings, process or ProcessContext(), members or MemberFactory(settings)
        )
        self._stop = self._builder.stop
        self._duties = self._builder.duties
        self._current = self._builder.current
        self._unusable: QdoError | None = None

    @property
    def state(self) -> str:
        """The state of this worker; see the table in the module's docstring."""
        return self._current.state

    def request_stop(self) -> None:
        """Ask the worker to stop. The first call drains, the second aborts running jobs.

        This method only sets flags, so signal handlers and any thread may call it.
        """
        self._stop.signal()

    def run(self) -> int:
        """Work until a request to stop, or with `burst`, until all messages are processed.

        :returns: the exit code: 0 after a clean stop, 1 if a job did not finish or a part of the
          worker died.
        :raises UsageError: a job cannot run in its executor or needs more than the broker supports,
          or policies contradict each other.
        :raises UnreachableError: the broker or the coordinator is unreachable at the start.
        :raises SchemaNewerError: this version of qdo cannot use the broker's schema any more. The
          worker has released its queues.
        """
        # Start 1: check the app. This step is first, because it needs no connection.
        self._builder.executors.check(self.app.jobs)
        check_pools(self.app.jobs, self.settings.broker)
        check_policies(self.app.jobs, self.settings.policies, self.settings.default_policy)
        # Start 2: listen for stop signals. This step precedes the opening of the broker, which may
        # take `connect_seconds`.
        self._stop.open()
        try:
            # Start 3: open the broker. This step precedes the job context, because the context may
            # send messages.
            broker = self._open_broker()
            broker.max_read_bytes = self.settings.max_body_bytes
            broker.on_unusable = self._end_without_store
            notifier = attach_doorbell(broker, self.settings, self.app.name)
            with contextlib.ExitStack() as stack:
                live = self._builder.live.in_force
                stack.enter_context(self.app.override_coordinator(live=live))
                for each in (notifier, broker, self.app):
                    if each is not None:
                        stack.callback(each.close)
                code = self._serve(broker)
                # Stop 6: close the broker. This step is last, because jobs and contexts send
                # messages.
            _log.info("step 6: the broker is closed; exit code %d", code)
            return code
        finally:
            self._current.state = "stopped"
            SIGN.show(False)
            self._stop.close()

    def _end_without_store(self, error: QdoError) -> None:
        """Drain, because the process can no longer use the broker; any thread may call this."""
        if self._unusable is None:
            self._unusable = error
            _log.error("%s; this worker releases its queues and ends", describe(error))
            self._stop.finish("the broker's store is not usable")

    def _open_broker(self) -> Broker:
        """Open the broker; if it is unreachable, retry for `connect_seconds`."""
        settings = self.settings
        attempt = 0
        deadline = clock() + settings.connect_seconds
        while True:
            try:
                return open_broker(settings.broker, self.app.name, settings.max_queues)
            except UnreachableError as error:
                attempt += 1
                pause = REGISTER_BACKOFF.delay(attempt, random.random())  # spread the pauses
                lasts = isinstance(error, DatabaseError)  # a bad file or a newer schema
                if lasts or clock() + pause > deadline:
                    raise
                _log.warning("cannot open the broker: %s; retrying in %.1f s", error, pause)
                if self._stop.wakeup.wait(pause):
                    raise

    def _serve(self, broker: Broker) -> int:
        takes = filter_of(self.app, self.settings)
        self._check_jobs(broker, takes)
        _log.info(
            "app %s, broker %s, coordinator %s",
            self.app.name,
            self.settings.broker,
            self.settings.coordinator,
        )
        watchdog = self._builder.watchdog()
        watchdog.start()
        try:
            # Start 4: enter the job context. This step precedes the registration. The context may
            # compute for minutes, and a registered worker would own queues in this time.
            with self._job_context() as context:
                enable_again("the context of the app")
                watchdog.started()
                parts = self._builder.parts(broker, takes, context)
                duties = self._builder.build_duties(parts)
                try:
                    # Start 5: start the duties. The first duty registers, and then the worker
                    # claims queues.
                    self._work(parts, duties)
                finally:
                    clean = self._drain(parts)
                    self._stop.outlast_stuck_jobs(self._builder.executors.under_way)
                # Stop 4: tear down the job context. This step follows the last job, because jobs
                # use the context.
            _log.info("step 4: the job context is torn down")
        finally:
            # Stop 5: close the session. This step follows the releases, which need the session. The
            # close frees the queues that the worker has not released.
            leave(self._builder.members, self._current)
            watchdog.stop()
        if self._current.start_error is not None:
            raise self._current.start_error
        if self._unusable is not None:
            raise self._unusable
        return 0 if clean and (self._duties.failed or self._stop.dead_thread) is None else 1

    @contextlib.contextmanager
    def _job_context(self) -> Iterator[Any]:
        """Enter the job context, and close the executors when its block ends."""
        executors = self._builder.executors
        self.app.hooks.wait = executors.wait
        manager = self.app.hooks.job_context()
        with contextlib.ExitStack() as stack:
            # The loop of the async jobs leaves an async context, so it ends later.
            on_loop = isinstance(manager, AwaitedContext)
            if on_loop:
                stack.callback(executors.close)
            context = stack.enter_context(manager)
            if not on_loop:
                stack.callback(executors.close)
            yield context

    def _check_jobs(self, broker: Broker, takes: QueueFilter) -> None:
        """Raise UsageError if the broker offers less than the jobs require."""
        check_jobs(
            self.app,
            broker,
            takes.matcher(),
            policy_lookup(self.app, self._builder.live.in_force),
            # A restarted process must run even if incompatible queues have appeared since the first
            # start.
            refuse=not self._builder.process.restarted,
            concurrency=[self.settings.concurrency] * self.settings.processes,
        )

    def _work(self, parts: WorkerParts, duties: list[Duty]) -> None:
        """Run the duties, and wait for a reason to stop."""
        broker = parts.broker
        broker.attach_receipt_store(self._builder.process.receipts or SharedReceiptStore())
        mailbox = LoopMailbox()

        def woken(names: set[str]) -> None:
            parts.dispatcher.wake(names)
            parts.discovery.names_received(names)

        # Brokers report on other threads, but the engine runs only on this loop.
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

    def _drain(self, parts: WorkerParts) -> bool:
        """Do the first three steps of the shutdown; return whether all messages have finished."""
        self._current.state = "draining"
        SIGN.show(True)
        if self._current.start_error is not None:
            self._duties.end_all()
            return True  # the worker has claimed no queue
        # Stop 1: take no new messages. This step is first, because otherwise more work would arrive
        # while the worker finishes. Wakes and discovery end, and the claims close.
        _log.info("step 1: taking no new messages")
        self._duties.begin_drain()
        if parts.pools is not None:
            parts.pools.drain()
        parts.status.refresh()
        # Stop 2: let the messages in flight finish for `drain_seconds`. Then, or at a second stop
        # signal, abort the remaining messages. The next owners repeat aborted messages. Stop 3:
        # record `last` of each queue, and release the queue after its message has ended. An earlier
        # release would give the queue a second owner while its message still runs in this process.
        counters = parts.pipeline.counters
        member = self._current.member
        drain = Drain(
            parts.dispatcher,
            self.settings.drain_seconds,
            self._stop.wakeup,
            lambda: self._stop.signals >= 2,
        )
        clean = drain.run(member, session_lost=member is None and counters.lost > 0)
        if parts.pools is not None:
            parts.pools.join(ABORT_SECONDS)
        self._duties.end_all()
        counts = ", ".join(f"{n} {name}" for name, n in counters.dump().items())
        _log.info("totals: %s", counts)
        return clean
