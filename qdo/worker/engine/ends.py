"""End the messages of a claim, with the code that queues and pools of requests share.

`queue_ends` records the progress and the failures of a queue in its node. `request_ends` records
the end of a request in its row at the broker. The engine calls `Outcomes`, and `Outcomes` calls one
of the two modules.
"""

from __future__ import annotations

import abc
import logging

from qdo.backoff import Backoff
from qdo.errors import BodyDecodeError, UnsupportedError
from qdo.jobs.retry import Decision, StopWorker
from qdo.message import Message
from qdo.outcomes import Outcome
from qdo.text import describe, describe_traceback
from qdo.worker.engine.context import Engine
from qdo.worker.engine.jobs import Turn
from qdo.worker.engine.slot import UNREADABLE, Row, Slot, TurnResult, where

_log = logging.getLogger(__name__)
# `qdo.worker.line_limit` limits the lines of this logger for all queues together.
_broker_log = logging.getLogger(f"{__name__}.broker")
# This logger has no limit, because the last line of a worker must give the reason for its stop.
_stop_log = logging.getLogger(f"{__name__}.stop")

# Delays of a queue after failures of its broker. The worker retries forever.
BROKER_BACKOFF = Backoff(0.1, 5.0)
# Seconds between two checks for a missing key.
KEY_SECONDS = 2.0
EXPIRED_REASON = "the broker took it back; it runs when it is received again"


def own_traceback(error: BaseException) -> str:
    """Return the traceback of an error; "" if the code did not raise the error."""
    raised = error.__traceback__ is not None or error.__cause__ is not None
    return describe_traceback(error) if raised else ""


def traceback_for_log(error: BaseException | None, important: bool = True) -> BaseException | None:
    """Return an error if its traceback belongs in the log, otherwise None.

    The log has the traceback of a message's first and last failure; at level debug, of each
    failure. If the job chose the outcome, or if the body does not fit the job, the traceback is
    useless, unless the outcome has a cause.
    """
    if error is None or not (important or _log.isEnabledFor(logging.DEBUG)):
        return None
    chosen = isinstance(error, Outcome | BodyDecodeError) and error.__cause__ is None
    return None if chosen or error.__traceback__ is None else error


class Ends(abc.ABC):
    """Ends attempts that did not return. Each outcome has one method."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._broker = engine.broker
        self._fetcher = engine.fetcher
        self._observers = engine.observers
        self._counters = engine.counters

    @abc.abstractmethod
    def apply(
        self, turn: Turn, row: Row, message: Message, error: BaseException, decision: Decision
    ) -> TurnResult:
        """Carry out a decision about a failed attempt while the claim is in force."""

    @abc.abstractmethod
    def wait_for_key(
        self, turn: Turn, row: Row, message: Message, error: BaseException
    ) -> TurnResult:
        """Let a message wait for its key, without counting an attempt."""

    @abc.abstractmethod
    def note_expired(self, slot: Slot, position: int) -> None:
        """Record that the broker took back a message from this worker."""

    def wait(self, slot: Slot, seconds: float) -> TurnResult:
        """Make a slot wait, and drop its fetched rows; return the result of the turn."""
        slot.not_before = self._engine.clock() + seconds
        self._fetcher.clear(slot)
        return TurnResult.WAIT

    def broker_failed(self, slot: Slot, what: str, error: BaseException) -> TurnResult:
        """Let a queue wait after a broker failure; the queue resumes after ``claim.done``."""
        slot.broker_failures += 1
        self._counters.broker_errors += 1
        delay = BROKER_BACKOFF.delay(slot.broker_failures, self._engine.jitter())
        # The subscription of a polled broker has its own backoff before it polls.
        own = slot.subscription is not None and what == UNREADABLE
        when = "with growing delays" if own else f"in {delay:.2f} s"
        # An unsupported operation fails until an operator changes the setup, so log an error.
        level = logging.ERROR if isinstance(error, UnsupportedError) else logging.WARNING
        _broker_log.log(level, "%s: %s, retrying %s: %s", where(slot), what, when, describe(error))
        return self.wait(slot, delay)

    def stop(self, slot: Slot, message: Message, decision: StopWorker) -> TurnResult:
        """Let the worker drain; the attempt does not count."""
        self._counters.stopped += 1
        self._counters.attempts -= 1
        self._fetcher.clear(slot)
        self._observers.report(message, "stop", decision.reason)
        _stop_log.warning(
            "%s: message %s stops the worker; the next owner of the queue runs it: %s",
            where(slot),
            message.id,
            decision.reason,
        )
        # Stop after logging, so that this line gives the reason for the drain.
        self._engine.on_stop(decision.reason)
        return TurnResult.HELD
