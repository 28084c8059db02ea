"""Dead letters in SQS queues of qdo's own.

SQS shows a message only to the consumer that receives it. So listing dead letters receives them
all, ten at a time, and releases them: two requests for ten, and meanwhile no other process sees
them. Retrying or discarding keeps all of them for a moment, because the next call is likely to need
others of them.

Nothing here is one transaction. A dead letter is sent again before it is deleted: an interruption
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

from qdo.aws_errors import AwsError, AwsNotFoundError
from qdo.brokers.aws.errors import BOTO_ERRORS, is_not_found, translation
from qdo.brokers.aws.s3 import Objects
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.dead_letters import (
    DeadLetterEntry,
    DeadLetterRecord,
    DeadLetterStore,
    matches,
)
from qdo.brokers.sqs.codec import pointing, size_of
from qdo.brokers.sqs.dead_letter_codec import FoundDeadLetter, digest, letter_entry, with_traceback
from qdo.brokers.sqs.dead_letter_receiver import Copy, DeadLetterReceiver, Place, ReceivedBatch
from qdo.brokers.sqs.positions import SQS_POSITIONS, make_position
from qdo.brokers.sqs.queues import SqsQueues
from qdo.brokers.sqs.sender import Sent, SqsSender
from qdo.brokers.sqs.url import FIFO, MAX_SQS_MESSAGE, SqsAddress
from qdo.errors import PartialSendError, QdoError
from qdo.positions import position_now

log = logging.getLogger(__name__)

COUNT_SECONDS = 60.0
"""How long a count of dead letters is used."""
SEEN_SECONDS = 30.0
SEEN_BYTES = 64 * 1024 * 1024
"""How long, and up to which size, listed dead letters are remembered: a command that lists them
then reads them one by one."""


class SqsDeadLetters(DeadLetterStore):
    """The dead letters of the queues below an address. Safe to use from several threads.

    Methods raise the errors of `aws.errors.translation`.

    :param notify: called with the queues of messages that were sent again.
    :param clock: seconds on a monotonic clock.
    """

    def __init__(
        self,
        client: Any,
        address: SqsAddress,
        queues: SqsQueues,
        sender: SqsSender,
        objects: Objects | None,
        notify: Callable[[Iterable[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._address = address
        self._queues = queues
        self._sender = sender
        self._objects = objects
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._receiver = DeadLetterReceiver(client, address, queues, clock)
        self._seen: dict[Place, FoundDeadLetter] = {}
        self._seen_at = 0.0
        self._counts: Mapping[str, int] = {}
        self._counted_at: float | None = None

    def store(self, record: DeadLetterRecord) -> None:
        """Store a dead letter, in a queue that is created if it is missing."""
        whole = replace(record, dead_at=record.dead_at or time.time())
        fifo = record.queue.endswith(FIFO)
        name = self._address.letter_queues[fifo]
        made = letter_entry(whole, fifo)
        if self._objects is not None and (
            len(record.body) > self._address.max_body or size_of(made) > MAX_SQS_MESSAGE
        ):
            made = pointing(made, self._objects.put(record.queue, record.body), len(record.body))
        made = with_traceback(made, record.traceback)
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

    def find(
        self,
        queue: str | None = None,
        *,
        error: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[DeadLetterEntry]:
        entries = (each.entry() for each in self._look() if queue in (None, each.record.queue))
        return [each for each in entries if matches(each, error, since, until)]

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        found = [each for each in self._look() if queue in (None, each.record.queue)]
        return [self._whole(each) for each in found]

    def get(self, queue: str, position: int) -> DeadLetterRecord | None:
        """Return one dead letter, without a request if it was listed a moment ago."""
        place = queue, SQS_POSITIONS.identity(position)
        with self._lock:
            young = self._clock() - self._seen_at <= SEEN_SECONDS
            found = self._seen.get(place) if young else None
        if found is None:
            found = next((each for each in self._look() if each.place == place), None)
        return None if found is None else self._whole(found)

    def counts(self) -> Mapping[str, int]:
        """Return the number of dead letters of each queue that has any; at most a minute old."""
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

    def _look(self) -> list[FoundDeadLetter]:
        with self._lock:
            self._receiver.release_held()
            batch = self._receiver.receive_all()
            self._receiver.release(batch)
            found = list(batch.first())
            self._remember(found)
        if batch.others:
            log.warning(
                "%d messages in the dead-letter queues %s are not dead letters of qdo; they are not"
                " listed and not retried: find out which program sent them",
                len(batch.others),
                " and ".join(self._address.letter_queues),
            )
        return found

    def _remember(self, found: Iterable[FoundDeadLetter]) -> None:
        self._seen, self._seen_at = {}, self._clock()
        size = 0
        for each in found:
            size += len(each.record.body)
            if size > SEEN_BYTES:
                break
            self._seen[each.place] = each

    def _whole(self, found: FoundDeadLetter) -> DeadLetterRecord:
        """Return a dead letter with its body, from SQS or from S3."""
        if found.pointer is None:
            return found.record
        body = None
        if self._objects is not None and self._objects.is_ours(found.pointer):
            body = self._objects.get(found.pointer)
        if body is None:
            what = f"body of dead letter {found.own_id} of queue {found.record.queue!r}: S3 object"
            name = f"{found.pointer.bucket}/{found.pointer.key}"
            remedy = "name its bucket in the broker's address, or discard the dead letter"
            raise AwsNotFoundError(what=what, name=name, region=self._address.region, remedy=remedy)
        return replace(found.record, body=body)

    # --- acting ---

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        """Send dead letters again, in the given order, then delete them.

        This is not one transaction: an interruption can leave a dead letter that was sent again.
        In a FIFO queue such a second message is not stored for five minutes.
        """
        moved = self._retry(keys)
        self._notify(queue for queue, _ in keys)
        return moved

    def _retry(self, keys: Sequence[Place]) -> list[int | None]:
        with self._lock:
            batch, taken = self._taken(keys)
            chosen = [copies for copies in taken if copies]
            sent: Sequence[Sent | None] = [None] * len(chosen)
            try:
                sent = self._sender.send([self._again(copies[0][1]) for copies in chosen])
            except PartialSendError as error:
                sent = error.details["sent"]
                raise
            finally:
                self._finish(batch, zip(chosen, sent, strict=True))
            positions = map(_position, sent)
            return [next(positions) if copies else None for copies in taken]

    def _finish(
        self, batch: ReceivedBatch, tried: Iterable[tuple[list[Copy], Sent | None]]
    ) -> None:
        """Delete the dead letters that were sent; the others stay."""
        gone: list[Copy] = []
        for copies, sent in tried:
            if sent is None:
                batch.put_back(copies)
            else:
                gone.extend(copies)
        for fault in self._delete(gone):
            log.warning("a dead letter was sent again, and stays a dead letter: %s", fault)

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        """Delete dead letters; return for each whether it existed.

        :raises AwsError: some could not be deleted; the others were.
        """
        with self._lock:
            _, taken = self._taken(keys)
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
        """Release received dead letters."""
        with self._lock:
            self._receiver.release_held()

    def _taken(self, letters: Sequence[Place]) -> tuple[ReceivedBatch, list[list[Copy]]]:
        """Receive dead letters; return the copies of each, none of a missing one."""
        self._seen = {}
        self._counted_at = None
        places = [(queue, SQS_POSITIONS.identity(position)) for queue, position in letters]
        batch = self._receiver.hold(set(places)) if places else ReceivedBatch(0.0)
        return batch, list(map(batch.take_out, places))

    def _again(self, found: FoundDeadLetter) -> Outgoing:
        letter = self._whole(found)
        headers = self.headers_again(letter, found.own_id)
        terms = None
        if letter.queue.endswith(FIFO):  # a repeated send stores it once
            terms = SendOptions(dedup_key=digest(letter, headers or ""))
        return Outgoing(letter.queue, letter.body, letter.key, headers, terms)

    def _delete(self, copies: Iterable[Copy]) -> list[str]:
        """Delete dead letters, and then their bodies in S3; return the errors."""
        done = self._receiver.delete(copies)
        pointers = [found.pointer for found, fault in done if found.pointer and fault is None]
        if pointers and self._objects is not None:
            try:
                self._objects.delete(pointers)
            except QdoError as error:  # their dead letters are deleted, and the others must follow
                log.warning(
                    "%d bodies of deleted dead letters stay in S3, the first as %s; delete them, "
                    "or let a lifecycle rule expire them: %s",
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
