"""Background duties, which are named greenlets, and the code of the small duties."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gevent
from gevent.event import Event

from qdo.brokers.base import OPEN_POLL, Broker
from qdo.coordination.member import Member
from qdo.errors import QdoError
from qdo.history.recorder import Recorder
from qdo.history.writer import HistoryWriter
from qdo.settings.hosts import host_shown
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.text import describe, pluralize
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.slot import Slot, SlotState

_log = logging.getLogger(__name__)

# Seconds between two looks for idle queues without a watch. The count of a doorbell reveals
# notifications before the watch.
LOOK_SECONDS = 1.0
# Maximum number of watches to request in one step. More requests would delay checkpoints.
AT_ONCE = 1000
# Seconds between two steps while more queues need a watch.
SOON_SECONDS = 0.1


class Duty(abc.ABC):
    """A named background task of a worker.

    :cvar ends_at_drain: False if the duty must also run while the worker drains.
    :ivar quiet: False while the duty has work to finish before a `burst` ends.
    """

    name: ClassVar[str]
    ends_at_drain: ClassVar[bool] = True
    quiet: bool = True

    @abc.abstractmethod
    def run(self) -> None:
        """Work until `Duties` stops the greenlet. A finished duty may return."""


class Duties:
    """The background greenlets of a worker.

    :ivar failed: name of the first duty that died; None while all duties run.
    :param on_failure: called after the death of a duty. The call must not block.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.failed: str | None = None
        self._on_failure = on_failure
        self._running: list[tuple[Duty, Any]] = []

    def start(self, duty: Duty) -> None:
        self._running.append((duty, gevent.spawn(self._guarded, duty.name, duty.run)))

    def spawn(self, function: Callable[[], None]) -> Any:
        """Run a function in a new greenlet of the duty "turns"."""
        return gevent.spawn(self._guarded, "turns", function)

    @property
    def quiet(self) -> bool:
        return all(duty.quiet for duty, _ in self._running)

    def begin_drain(self) -> None:
        """Stop the duties that end at a drain."""
        ending = [greenlet for duty, greenlet in self._running if duty.ends_at_drain]
        self._running = [each for each in self._running if not each[0].ends_at_drain]
        gevent.killall(ending)

    def end_all(self) -> None:
        ending = [greenlet for _, greenlet in self._running]
        self._running = []
        gevent.killall(ending)

    def _guarded(self, name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except gevent.GreenletExit:
            raise
        except BaseException:  # noqa: BLE001 - after any failure of a duty the worker must stop
            _log.critical("the duty %r died; this worker stops", name, exc_info=True)
            if self.failed is None:
                self.failed = name
            self._on_failure()


@dataclass(slots=True)
class CurrentMember:
    """The current registration and the state of a worker, which its duties share."""

    # The current registration; None while the worker is not registered.
    member: Member | None = None
    # A member whose coordination failed, and whose session stays open while its jobs run.
    failed: Member | None = None
    # The error of the first registration; None if it has not failed.
    start_error: QdoError | None = None
    # The state of the worker; see the table in `worker.worker`.
    state: str = "starting"

    def contact(self) -> float:
        """Return the time of the coordinator's last answer, or now without a registration."""
        return clock() if self.member is None else self.member.lease.contact

    def settled(self) -> bool:
        """Return whether the worker is registered, and has claimed all of its queues."""
        return self.member is not None and self.member.settled()


class CheckpointProgress(Duty):
    """Checkpoints the progress of long turns every `seconds`."""

    name = "progress"
    ends_at_drain = False

    def __init__(self, dispatcher: Dispatcher, seconds: float) -> None:
        self._dispatcher = dispatcher
        self._seconds = seconds

    def run(self) -> None:
        while True:
            gevent.sleep(self._seconds)
            self._dispatcher.note_progress()


class QueueAlarms(Duty):
    """Ticks the dispatcher when a queue is due. `changed` announces an earlier due time."""

    name = "alarms"
    ends_at_drain = False

    def __init__(self, dispatcher: Dispatcher, changed: Event) -> None:
        self._dispatcher = dispatcher
        self._changed = changed

    def run(self) -> None:
        while True:
            self._dispatcher.tick()
            due = self._dispatcher.due()
            self._changed.wait(None if due == float("inf") else max(0.0, due - clock()))
            self._changed.clear()


class TimeLimit(Duty):
    name = "limit"

    def __init__(self, seconds: float, finish: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._finish = finish

    def run(self) -> None:
        gevent.sleep(self._seconds)
        self._finish(f"max_seconds reached: this worker has run for {self._seconds:g} s")


class LeftMessages(Duty):
    """Releases the messages of dead processes once, before their visibility timeout."""

    name = "left"
    ends_at_drain = False

    def __init__(self, broker: Broker, left: Sequence[tuple[str, str]]) -> None:
        self._broker = broker
        self._left = left

    def run(self) -> None:
        count = sum(not receipt.startswith(OPEN_POLL) for _, receipt in self._left)
        try:
            self._broker.release(self._left)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "cannot release %s that a dead worker held; the broker delivers again after the"
                " visibility timeout: %s",
                pluralize(count, "message"),
                describe(error),
            )
        else:
            if count:
                _log.info("released %s that a dead worker held", pluralize(count, "message"))


class HistoryDuty(Duty):
    """Runs the thread that writes the history until the worker's last message has ended."""

    name = "history"
    ends_at_drain = False

    def __init__(self, settings: Settings, app: str, recorder: Recorder) -> None:
        self._writer = HistoryWriter(settings.history, app, recorder, host=host_shown(settings))

    def run(self) -> None:
        self._writer.start()
        try:
            while True:
                gevent.sleep(3600.0)
        finally:
            self._writer.close()


class DoorbellListener(Duty):
    """Watches the doorbells of the queues of one worker process."""

    name = "doorbell"

    def __init__(self, slots: Mapping[str, Slot], current: CurrentMember | None = None) -> None:
        self._slots = slots
        self._current = current if current is not None else CurrentMember()
        self._member: Member | None = None
        # The queues with a watch, and the queues that ever had a watch. A notification ends a
        # watch.
        self._watched: set[str] = set()
        self._asked: set[str] = set()

    def run(self) -> None:
        while True:
            gevent.sleep(self.step(self._current.member))

    def step(self, member: Member | None) -> float:
        """Watch the doorbells of newly idle queues; return the seconds until the next step."""
        if member is not self._member:
            self._member = member
            self._watched.clear()
            self._asked.clear()
        if member is None:
            return LOOK_SECONDS
        gone = self._asked.difference(self._slots)
        self._asked -= gone
        self._watched -= gone
        idle = [
            queue
            for queue, slot in self._slots.items()
            if slot.state is SlotState.IDLE
            and slot.subscription is not None
            and queue not in self._watched
        ]
        some = idle[:AT_ONCE]
        if some or gone:
            member.watch_doorbells(some, sorted(gone))
            self._watched.update(some)
            self._asked.update(some)
        return LOOK_SECONDS if len(some) == len(idle) else SOON_SECONDS

    def rang(self, queue: str) -> None:
        """Poll the broker for messages of a queue now, because its doorbell rang."""
        self._watched.discard(queue)
        slot = self._slots.get(queue)
        if slot is not None and slot.subscription is not None:
            slot.subscription.poll_now()
