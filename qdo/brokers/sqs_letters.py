"""Dead letters in queues of SQS that are qdo's own.

SQS shows messages only by giving them out. So looking at dead letters receives them all, ten by
ten, and gives them back: two requests for ten, and meanwhile nobody else sees them. Whoever acts on
letters keeps all of them for a moment, because the next ones are likely to be among them.

Nothing here is one transaction. A letter is sent again before it is deleted: what ends in between
leaves both.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qdo.brokers.aws_address import FIFO, MAX_SQS_MESSAGE, SqsAddress
from qdo.brokers.aws_errors import BOTO_ERRORS, is_not_found, translation
from qdo.brokers.base import DeadLetterEntry, DeadLetterRecord, Outgoing, Terms
from qdo.brokers.embedded_letters import retried_headers
from qdo.brokers.s3 import Objects
from qdo.brokers.sqs_letter_form import (
    Found,
    digest,
    letter_entry,
    with_traceback,
)
from qdo.brokers.sqs_letter_hands import Copy, Hand, LetterHands, Place
from qdo.brokers.sqs_messages import pointing, size_of
from qdo.brokers.sqs_positions import SQS_POSITIONS, make_position
from qdo.brokers.sqs_queues import SqsQueues
from qdo.brokers.sqs_sending import Sent, SqsSender
from qdo.errors import AwsError, AwsNotFoundError, PartlySentError, QdoError
from qdo.message import position_now

log = logging.getLogger(__name__)

COUNT_SECONDS = 60.0
"""Letters are counted no more often."""
SEEN_SECONDS = 30.0
SEEN_BYTES = 64 * 1024 * 1024
"""How long, and up to which size, letters that were looked at are remembered: whoever listed them
reads them one by one."""

class SqsLetters:
    """The dead letters of the queues below an address. Safe to use from several threads.

    Methods raise what `aws_errors.translation` makes of errors.

    :param clock: seconds on a monotonic clock.
    """

    def __init__(
        self,
        client: Any,
        address: SqsAddress,
        queues: SqsQueues,
        sender: SqsSender,
        objects: Objects | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._address = address
        self._queues = queues
        self._sender = sender
        self._objects = objects
        self._clock = clock
        self._lock = threading.Lock()
        self._hands = LetterHands(client, address, queues, clock)
        self._seen: dict[Place, Found] = {}
        self._seen_at = 0.0
        self._counts: Mapping[str, int] = {}
        self._counted_at: float | None = None

    def bury(self, letter: DeadLetterRecord) -> None:
        """Store a dead letter, in a queue that is created if it is missing."""
        whole = replace(letter, dead_at=letter.dead_at or time.time())
        fifo = letter.queue.endswith(FIFO)
        name = self._address.letter_queues[fifo]
        made = letter_entry(whole, fifo)
        if self._objects is not None and (
            len(letter.body) > self._address.max_body or size_of(made) > MAX_SQS_MESSAGE
        ):
            made = pointing(made, self._objects.put(letter.queue, letter.body), len(letter.body))
        made = with_traceback(made, letter.traceback)
        for fresh in (False, True):
            url = self._queues.url_of(name, "fifo" if fifo else "standard")
            try:
                self._client.send_message(QueueUrl=url, **made)
            except BOTO_ERRORS as error:
                self._queues.forget(name)
                if fresh or not is_not_found(error):
                    raise translation(error, self._address.place, "queue", name) from error
            else:
                return

    # --- looking ---

    def entries(self) -> list[DeadLetterEntry]:
        """Return all letters without bodies and tracebacks, oldest first."""
        return [each.entry() for each in self._look()]

    def records(self) -> list[DeadLetterRecord]:
        """Return all letters, oldest first."""
        return [self._whole(each) for each in self._look()]

    def record(self, queue: str, position: int) -> DeadLetterRecord | None:
        """Return one letter; one that was listed a moment ago costs no request."""
        place = queue, SQS_POSITIONS.name(position)
        with self._lock:
            young = self._clock() - self._seen_at <= SEEN_SECONDS
            found = self._seen.get(place) if young else None
        if found is None:
            found = next((each for each in self._look() if each.place == place), None)
        return None if found is None else self._whole(found)

    def counts(self) -> Mapping[str, int]:
        """Return how many letters each queue has, of those that have any; a minute old at most."""
        now = self._clock()
        if self._counted_at is None or now - self._counted_at > COUNT_SECONDS:
            some = any(map(self._has_some, self._address.letter_queues))
            self._counts = Counter(each.record.queue for each in self._look()) if some else {}
            self._counted_at = now
        return self._counts

    def _has_some(self, name: str) -> bool:
        try:
            facts = self._queues.counts_of(name)
        except AwsNotFoundError:
            return False
        return facts.waiting + facts.in_flight + facts.delayed > 0

    def _look(self) -> list[Found]:
        with self._lock:
            self._hands.give_back()
            hand = self._hands.take()
            self._hands.free(hand)
            found = list(hand.first())
            self._remember(found)
        return found

    def _remember(self, found: Iterable[Found]) -> None:
        self._seen, self._seen_at = {}, self._clock()
        size = 0
        for each in found:
            size += len(each.record.body)
            if size > SEEN_BYTES:
                break
            self._seen[each.place] = each

    def _whole(self, found: Found) -> DeadLetterRecord:
        """Return a letter with its body, wherever that is."""
        if found.pointer is None:
            return found.record
        body = None
        if self._objects is not None and self._objects.is_ours(found.pointer):
            body = self._objects.get(found.pointer)
        if body is None:
            what = f"body of dead letter {found.own_id} of queue {found.record.queue!r}: S3 object"
            name = f"{found.pointer.bucket}/{found.pointer.key}"
            remedy = "name its bucket in the broker's address, or discard the letter"
            raise AwsNotFoundError(
                what=what, name=name, region=self._address.region, remedy=remedy
            )
        return replace(found.record, body=body)

    # --- acting ---

    def retry(self, letters: Sequence[Place]) -> list[int | None]:
        """Send letters again in the given order, then delete them; return their new positions."""
        with self._lock:
            hand, taken = self._taken(letters)
            chosen = [copies for copies in taken if copies]
            sent: Sequence[Sent | None] = [None] * len(chosen)
            try:
                sent = self._sender.send([self._again(copies[0][1]) for copies in chosen])
            except PartlySentError as error:
                sent = error.details["sent"]
                raise
            finally:
                self._finish(hand, zip(chosen, sent, strict=True))
            positions = map(_position, sent)
            return [next(positions) if copies else None for copies in taken]

    def _finish(self, hand: Hand, tried: Iterable[tuple[list[Copy], Sent | None]]) -> None:
        """Delete letters that were sent; the others stay letters."""
        gone: list[Copy] = []
        for copies, sent in tried:
            if sent is None:
                hand.put_back(copies)
            else:
                gone.extend(copies)
        for fault in self._delete(gone):
            log.warning("a dead letter was sent again, and stays a dead letter: %s", fault)

    def discard(self, letters: Sequence[Place]) -> list[bool]:
        """Delete letters; return for each whether it existed.

        :raises AwsError: some could not be deleted; the others are.
        """
        with self._lock:
            _, taken = self._taken(letters)
            faults = self._delete(copy for copies in taken for copy in copies)
        if faults:
            raise AwsError(
                service="SQS",
                action="sqs:DeleteMessage",
                resource=f"{len(faults)} dead letters",
                code="first",
                reason=faults[0],
            )
        return list(map(bool, taken))

    def close(self) -> None:
        """Give back what is held."""
        with self._lock:
            self._hands.give_back()

    def _taken(self, letters: Sequence[Place]) -> tuple[Hand, list[list[Copy]]]:
        """Return the copies of each letter, none of what does not exist."""
        self._seen = {}
        self._counted_at = None
        places = [(queue, SQS_POSITIONS.name(position)) for queue, position in letters]
        hand = self._hands.hold(set(places)) if places else Hand(0.0)
        return hand, list(map(hand.take_out, places))

    def _again(self, found: Found) -> Outgoing:
        letter = self._whole(found)
        headers = retried_headers(letter.headers, found.own_id)
        terms = None
        if letter.queue.endswith(FIFO):  # sending it twice by accident stores it once
            terms = Terms(dedup_key=digest(letter, headers or ""))
        return Outgoing(letter.queue, letter.body, letter.key, headers, terms)

    def _delete(self, copies: Iterable[Copy]) -> list[str]:
        """Delete letters, and then the bodies they have in S3; return why some were not."""
        done = self._hands.delete(copies)
        pointers = [found.pointer for found, fault in done if found.pointer and fault is None]
        if pointers and self._objects is not None:
            try:
                self._objects.delete(pointers)
            except QdoError as error:  # their letters are gone, and others are to follow
                log.warning(
                    "%d bodies of deleted dead letters stay in S3, the first as %s: %s",
                    len(pointers),
                    pointers[0].key,
                    error,
                )
        return [
            f"{found.own_id} of queue {found.record.queue!r}: {fault}"
            for found, fault in done
            if fault is not None
        ]


def _position(sent: Sent) -> int:
    return make_position(position_now(), sent.sequence, uuid.UUID(sent.id).int)
