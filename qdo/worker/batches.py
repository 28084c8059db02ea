"""Turns of a queue whose job takes many messages at once: ``@app.job(batch=500)``.

How a call of the job ends, and what follows:

===========================  ==============================================================
it returns                   every message of the batch is done
it raises ``FailedAt(i)``    the messages before `i` are done; message `i` has failed, and
                             what follows is as for any job that was called for it alone
it raises something else     nothing is done, and nobody knows which message is at fault:
                             after a back-off each message of the batch is run in a batch of
                             its own, where attempts, policy and dead letter are its own
===========================  ==============================================================

So one bad message costs its batch a second run, and itself its attempts; it takes no good one
with it, and none behind it waits for longer than that. A message whose attempts are being counted
is run alone as well, and so are as many as a batch holds where one took its process with it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter, length_hint
from typing import TYPE_CHECKING

import ujson

from qdo.coordination.slots import Claim
from qdo.describe import describe
from qdo.message import Batch, Message
from qdo.outcomes import FailedAt, Retry, Stop
from qdo.policy import Policy, backoff
from qdo.positions import Positions
from qdo.worker.executors.base import NotStarted
from qdo.worker.fetching import Fetcher, Row
from qdo.worker.hands import Hands
from qdo.worker.observing import Observing
from qdo.worker.outcome import UNREADABLE, Outcomes
from qdo.worker.slot import JobAborted, MessageExpired, Slot, Turn

if TYPE_CHECKING:
    from qdo.worker.work import Work

Decode = Callable[[Slot, Claim, Row, int], "tuple[Message, BaseException | None]"]

_NO_HEADERS: Mapping[str, str] = {}
_POSITION = itemgetter(0)

_log = logging.getLogger(__name__)


class Batches:
    """Runs turns of batches.

    :param positions: what the positions of the broker mean.
    :param node: of the ids of messages, as the broker has it.
    :param decode: makes the message of a row, for an attempt of this number; with the error
        where it cannot be read.
    :param policy_for: the policy of a queue, for the pause before a batch is taken apart.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        outcomes: Outcomes,
        observing: Observing,
        hands: Hands,
        positions: Positions,
        node: int | Positions,
        decode: Decode,
        policy_for: Callable[[str], Policy],
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._fetcher = fetcher
        self._outcomes = outcomes
        self._observing = observing
        self._hands = hands
        self._hand_notes = hands.notes(positions)
        self._node = node
        self._decode = decode
        self._policy_for = policy_for
        self._clock = clock
        self._chance = chance

    def process(self, slot: Slot, claim: Claim, work: Work) -> Turn:
        """Run one batch, or wait for more messages; say how the turn ended."""
        alone = slot.alone > 0 or (claim.marks is not None and claim.marks.position > claim.done)
        try:
            rows = self._gather(slot, claim, 1 if alone else work.batch)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self._outcomes.trouble(slot, UNREADABLE, error)
        if not rows:
            return Turn.TIP
        now = self._clock()
        if not claim.open or now >= claim.lease.until:
            return Turn.MORE
        if not alone and len(rows) < work.batch and work.batch_wait_seconds:
            slot.gathering_until = slot.gathering_until or now + work.batch_wait_seconds
            if now < slot.gathering_until:
                slot.not_before = slot.gathering_until
                return Turn.WAIT
        slot.gathering_until = 0.0
        slot.hand = self._hands.take(slot.label)
        try:
            if alone:
                return self._run_alone(slot, claim, rows[0], work)
            return self._run(slot, claim, rows[: work.batch], work)
        finally:
            self._hands.give_back(slot.hand)

    def _gather(self, slot: Slot, claim: Claim, most: int) -> list[Row]:
        """Have `most` rows at hand or more; fewer only where the queue has no more."""
        rows = slot.gathered
        if rows is None:
            rows = slot.gathered = []
        self._drop_expired(slot, rows)
        while len(rows) < most:
            slot.limit = min(max(slot.limit, 2 * most), self._fetcher.most)
            batch = self._fetcher.fetch(slot, claim)
            count = length_hint(batch)
            rows.extend(batch)
            if not claim.positions.lasting:
                _find_marked(claim, rows)
            if not count:
                break
        return rows

    def _drop_expired(self, slot: Slot, rows: list[Row]) -> None:
        """Leave out what the broker has taken back."""
        source = slot.subscription
        if source is None:
            return
        for row in [row for row in rows if not source.is_held(row[0])]:
            rows.remove(row)
            self._outcomes.note_expired(slot, row[0])

    def _run_alone(self, slot: Slot, claim: Claim, row: Row, work: Work) -> Turn:
        """Run one message in a batch of its own."""
        marks, attempt = claim.marks, 1
        if marks is not None and marks.position == row[0]:
            if marks.crashed and slot.alone < work.batch:
                slot.alone = work.batch
            turn = self._outcomes.before(slot, claim, row, marks)
            if turn is not None:
                self._leave(slot, claim)
                return turn
            attempt = marks.attempts + 1
        turn = self._run(slot, claim, [row], work, attempt)
        if slot.alone and claim.done >= row[0]:
            slot.alone -= 1
        return turn

    def _run(
        self, slot: Slot, claim: Claim, rows: list[Row], work: Work, attempt: int = 1
    ) -> Turn:
        batch, fault = self._decoded(slot, claim, rows, attempt)
        if fault is not None and len(batch) == 1:
            self._outcomes.counters.attempts += 1
            return self._failed(slot, claim, rows[0], batch[0], fault)
        if fault is not None:
            batch.pop()  # the next turn comes to it, when all before it are done
        self._hand_notes[slot.hand] = batch[0].position
        slot.message = message = batch[0]
        counters = self._outcomes.counters
        try:
            work.call(batch, self._outcomes.context)  # type: ignore[arg-type]
        except MessageExpired:
            self._fetcher.clear(slot)  # what is still held is read anew
            return Turn.MORE
        except JobAborted:
            counters.attempts += 1
            counters.unsuccessful += 1
            raise
        except NotStarted:
            self._fetcher.clear(slot)
            return Turn.MORE
        except FailedAt as error:
            index = error.index
            if 0 <= index < len(batch):
                self._done(slot, claim, batch[:index])
                counters.attempts += 1
                cause = error.__cause__ or error
                return self._failed(slot, claim, rows[index], batch[index], cause)
            return self._whole(slot, claim, rows, batch, error)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a job ends no worker
            return self._whole(slot, claim, rows, batch, error)
        del message
        self._done(slot, claim, batch)
        return Turn.MORE

    def _decoded(
        self, slot: Slot, claim: Claim, rows: list[Row], attempt: int
    ) -> tuple[Batch, BaseException | None]:
        """Return the messages up to the first one that cannot be read, and why it cannot."""
        queue, fence, node, loads = slot.queue, claim.fence, self._node, ujson.loads
        try:
            # All at once, as nearly every batch can be: a call for each message would take as
            # long as decoding it.
            return Batch(
                [
                    Message(queue, position, loads(body), key, _NO_HEADERS, fence, attempt, node)
                    if headers is None
                    else _has_headers()
                    for position, body, key, headers in rows
                ]
            ), None
        except (ValueError, _HasHeaders):
            return self._decoded_singly(slot, claim, rows, attempt)

    def _decoded_singly(
        self, slot: Slot, claim: Claim, rows: list[Row], attempt: int
    ) -> tuple[Batch, BaseException | None]:
        batch = Batch()
        for row in rows:
            message, fault = self._decode(slot, claim, row, attempt)
            batch.append(message)
            if fault is not None:
                return batch, fault
        return batch, None

    def _done(self, slot: Slot, claim: Claim, batch: list[Message]) -> None:
        self._outcomes.counters.attempts += len(batch)
        if batch:
            claim.done = batch[-1].position
            self._leave(slot, claim)
            if self._observing:
                for message in batch:
                    self._observing.tell(message, "done", None)

    def _failed(
        self, slot: Slot, claim: Claim, row: Row, message: Message, error: BaseException
    ) -> Turn:
        turn = self._outcomes.failed(slot, claim, row, message, error)
        self._leave(slot, claim)
        return turn

    def _whole(
        self, slot: Slot, claim: Claim, rows: list[Row], batch: Batch, error: BaseException
    ) -> Turn:
        """Take a batch apart that failed as a whole."""
        if len(batch) == 1 or isinstance(error, Stop):
            self._outcomes.counters.attempts += 1
            return self._failed(slot, claim, rows[0], batch[0], error)
        slot.alone = len(batch)
        pause = error.after if isinstance(error, Retry) else None
        if pause is None:
            pause = backoff(1, self._policy_for(slot.queue).terms(error), self._chance())
        _log.warning(
            "queue %s: a batch of %d messages failed as a whole, each is run alone in %.2f s: %s",
            slot.queue,
            len(batch),
            pause,
            describe(error),
        )
        slot.not_before = self._clock() + max(0.0, pause)
        return Turn.WAIT

    def _leave(self, slot: Slot, claim: Claim) -> None:
        """Drop rows that are done."""
        rows = slot.gathered
        if rows:
            del rows[: bisect_right(rows, claim.done, key=_POSITION)]


def _find_marked(claim: Claim, rows: list[Row]) -> None:
    """Have the marks of the claim name a message by the position that it has now."""
    marks = claim.marks
    if marks is None:
        return
    name = claim.positions.name(marks.position)
    for position, _, _, _ in rows:
        if claim.positions.name(position) == name:
            claim.marks = replace(marks, position=position)
            return


class _HasHeaders(Exception):
    """A row has headers, which say how its body is to be read."""


def _has_headers() -> Message:
    raise _HasHeaders
