"""Assemble the parts of the worker's engine in a shared context."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.history.recorder import Recorder
from qdo.jobs.retry import PolicyInForce
from qdo.settings.live import SettingsInForce
from qdo.settings.vaults import opener_of
from qdo.system.clock import clock as boot_clock
from qdo.text import error_kind
from qdo.worker.engine.breakers import Breaker
from qdo.worker.engine.decoder import Decoder
from qdo.worker.engine.fetcher import Fetcher
from qdo.worker.engine.jobs import Compatibility, JobTable
from qdo.worker.engine.lane import LanePermits
from qdo.worker.engine.limits import Limits
from qdo.worker.engine.meters import JobMeters
from qdo.worker.engine.observers import Observers
from qdo.worker.engine.slot import Counters
from qdo.worker.executors.base import Executor
from qdo.worker.shared_memory import InFlightTable


def policy_lookup(app: App, in_force: SettingsInForce) -> Callable[[str], PolicyInForce]:
    """Return a function that returns the current failure policy of a queue."""

    def policy_of(queue: str) -> PolicyInForce:
        return in_force.now.policy_of(queue, app.job_for(queue))

    return policy_of


@dataclass(frozen=True, slots=True)
class Engine:
    """The shared parts of the engine of one worker process."""

    app: App
    broker: Broker
    fetcher: Fetcher
    decoder: Decoder
    jobs: JobTable
    limits: Limits
    observers: Observers
    # The table of messages in flight.
    in_flight: InFlightTable
    # Limits the number of lanes that run at once in all queues.
    permits: LanePermits
    policy_of: Callable[[str], PolicyInForce]
    # Returns the text to record in the queue's node for an error.
    recorded: Callable[[str], str]
    # Called with the reason when a job asks to stop the worker.
    on_stop: Callable[[str], None]
    # Returns the time, in seconds, for leases, turns and backoffs.
    clock: Callable[[], float]
    # Returns a number from 0 to 1, for delays.
    jitter: Callable[[], float]
    settings: SettingsInForce
    # The second argument of jobs and of the app's `job_failure`.
    context: Any
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def build(
        cls,
        app: App,
        broker: Broker,
        executor: Executor,
        in_force: SettingsInForce,
        *,
        in_flight: InFlightTable | None = None,
        on_stop: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = boot_clock,
        jitter: Callable[[], float] = random.random,
        context: Any = None,
    ) -> Engine:
        """Build the engine; without `in_flight`, it uses a new unshared table."""
        settings = in_force.now
        recorded = error_kind if "errors" in settings.hide else str
        recorder = Recorder(recorded=recorded) if settings.history else None
        globs = [job.queues for job in app.jobs]
        meters = JobMeters(app.job_for, clock, globs=globs) if settings.http else None
        observers = Observers(app.hooks.observers, history=recorder, meters=meters)
        limits = Limits(clock)
        opener = opener_of(settings, app.name, broker.stream_of)
        scope = settings.scope(app.name)
        fetcher = Fetcher(broker, settings.fetch, clock, settings.max_body_bytes, scope)
        in_force.on_change(lambda changed: fetcher.limit(changed.fetch))
        return cls(
            app=app,
            broker=broker,
            fetcher=fetcher,
            decoder=Decoder(broker, opener, settings.max_body_bytes),
            jobs=JobTable(
                app,
                executor,
                observers,
                Compatibility(broker),
                limits,
                lambda job: Breaker(job, clock, jitter),
            ),
            limits=limits,
            observers=observers,
            in_flight=InFlightTable(1) if in_flight is None else in_flight,
            permits=LanePermits(settings.concurrency),
            policy_of=policy_lookup(app, in_force),
            recorded=recorded,
            on_stop=on_stop,
            clock=clock,
            jitter=jitter,
            settings=in_force,
            context=context,
        )
