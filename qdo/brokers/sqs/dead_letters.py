"""Receive, retry, discard and release dead letters in qdo's dead-letter queues in SQS.

When a consumer receives a message, SQS hides the message from all other consumers until its release
or timeout. To list dead letters, qdo receives and releases them all, with two calls for ten. After
a retry or discard, qdo holds all received dead letters for a moment, because the next call probably
needs some of them.

SQS has no transactions. qdo sends the message of a dead letter again before it deletes the dead
letter, so an interruption may leave both.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qdo.broker_errors import AwsError, AwsNotFoundError
from qdo.brokers.aws.errors import BOTO_ERRORS, is_not_found, translation
from qdo.brokers.aws.s3 import Objects
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.dead_letters import (
    DeadLetterEntry,
    DeadLetterRecord,
    DeadLetterStore,
    matches,
)
from qdo.brokers.sqs.codec import (
    RECEIVED_ATTRIBUTES,
    SQS_POSITIONS,
    make_position,
    pointing,
    size_of,
)
from qdo.brokers.sqs.dead_letter_codec import (
    FoundDeadLetter,
    digest,
    letter_entry,
    letter_of,
    with_traceback,
)
from qdo.brokers.sqs.queues import SqsQueues
from qdo.brokers.sqs.sender import Sent, SqsSender
from qdo.brokers.sqs.url import FIFO, MAX_SQS_MESSAGE, SqsAddress
from qdo.errors import PartialSendError, QdoError
from qdo.positions import position_now
from qdo.system.native import run_parallel

# The time for which a few dead letters stay hidden, unless qdo releases them.
HIDE_SECONDS = 60
# The assumed receive rate. A larger number of dead letters stays hidden for longer.
LETTERS_PER_SECOND = 100
MAX_HIDE_SECONDS = 43_200
# If dead letters stay hidden for less than this time, an operation receives them again.
MARGIN_SECONDS = 15.0
_BATCH = 10

# The queue of a message, and the identity in its position.
Place = tuple[str, int]
# A dead letter, after the URL of the queue that contains it.
Copy = tuple[str, FoundDeadLetter]
log = logging.getLogger(__name__)
# The time for which a count of dead letters stays valid.
COUNT_SECONDS = 60.0
# The time for which, and the size up to which, this process caches listed dead letters. A command
# that lists dead letters then reads them one by one.
SEEN_SECONDS = 30.0
SEEN_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class ReceivedBatch:
    """Received dead letters, which are hidden from all other consumers."""

    # The monotonic time after which other consumers may receive the dead letters.
    until: float
    # All copies of each dead letter, by queue and identity, then by MessageId.
    letters: dict[Place, dict[str, Copy]] = field(default_factory=dict)
    # The URL and receipt of each message that is not a dead letter of qdo.
    others: list[tuple[str, str]] = field(default_factory=list)

    def first(self) -> Iterator[FoundDeadLetter]:
        """Yield one copy of each dead letter, oldest first."""
        found = (next(iter(copies.values()))[1] for copies in self.letters.values())
        yield from sorted(found, key=lambda each: (each.record.dead_at, each.record.position))

    def receipts(self) -> list[tuple[str, str]]:
        copies = (copy for each in self.letters.values() for copy in each.values())
        return [(url, found.receipt) for url, found in copies] + self.others

    def take_out(self, place: Place) -> list[Copy]:
        """Remove and return all copies of a dead letter, which stay hidden."""
        return list(self.letters.pop(place, {}).values())

    def put_back(self, copies: Iterable[Copy]) -> None:
        for url, found in copies:
            self.letters.setdefault(found.place, {})[found.receipt] = (url, found)


class DeadLetterReceiver:
    """Receives the dead letters of an address. Not safe for concurrent calls."""

    def __init__(
        self, client: Any, address: SqsAddress, queues: SqsQueues, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._address = address
        self._queues = queues
        self._clock = clock
        self._held: ReceivedBatch | None = None

    def hold(self, wanted: set[Place]) -> ReceivedBatch:
        """Return a batch that contains the wanted dead letters, except missing ones."""
        received = self._held
        if received is None or received.until - self._clock() <= MARGIN_SECONDS:
            self.release_held()
            received = self._held = self._empty()
            self._fill(received)
        elif not wanted <= received.letters.keys():
            self._fill(received)  # SQS hides the held letters from this process too
        return received

    def receive_all(self) -> ReceivedBatch:
        received = self._empty()
        try:
            self._fill(received)
        except BaseException:
            # Also release after Ctrl-C, because otherwise the letters stay hidden for up to 12
            # hours. A failed release does not raise its error, so the first error remains.
            self.release(received)
            raise
        return received

    def _empty(self) -> ReceivedBatch:
        return ReceivedBatch(self._clock() + MAX_HIDE_SECONDS)

    def _fill(self, received: ReceivedBatch) -> None:
        run_parallel(lambda name: self._receive_from(name, received), self._address.letter_queues)

    def _receive_from(self, name: str, received: ReceivedBatch) -> None:
        try:
            url = self._queues.url_of(name)
            about = self._queues.counts_of(name).waiting
        except AwsNotFoundError:
            return  # no dead letter was ever stored
        hide = min(HIDE_SECONDS + about // LETTERS_PER_SECOND, MAX_HIDE_SECONDS)
        received.until = min(received.until, self._clock() + hide)
        seen: set[str] = set()
        while True:
            messages = self._receive(name, url, hide)
            new = [raw for raw in messages if raw["MessageId"] not in seen]
            if not new:  # all are received, or early messages reappear
                received.others.extend((url, raw["ReceiptHandle"]) for raw in messages)
                return
            seen.update(raw["MessageId"] for raw in new)
            for raw in messages:
                found = letter_of(raw)
                if found is None:
                    received.others.append((url, raw["ReceiptHandle"]))
                else:
                    # Only the newest receipt of a message is valid.
                    received.letters.setdefault(found.place, {})[raw["MessageId"]] = (url, found)

    def _receive(self, name: str, url: str, hide: int) -> list[dict[str, Any]]:
        more = {"ReceiveRequestAttemptId": str(uuid.uuid4())} if name.endswith(FIFO) else {}
        try:
            answer = self._client.receive_message(
                QueueUrl=url,
                MaxNumberOfMessages=_BATCH,
                VisibilityTimeout=hide,
                # With a wait of 1 s or more, SQS queries all its servers.
                WaitTimeSeconds=min(self._address.wait_seconds, 1),
                MessageSystemAttributeNames=list(RECEIVED_ATTRIBUTES),
                MessageAttributeNames=["All"],
                **more,
            )
        except BOTO_ERRORS as error:
            self._queues.forget(name)
            raise translation(error, self._address.place, "queue", name) from error
        messages: list[dict[str, Any]] = answer.get("Messages", [])
        return messages

    def release_held(self) -> None:
        received = self._held
        self._held = None
        if received is not None and received.until > self._clock():
            self.release(received)

    def release(self, received: ReceivedBatch) -> None:
        """Make a batch visible to other consumers. Failed entries appear after their timeout."""
        by_url: dict[str, list[str]] = {}
        for url, receipt in received.receipts():
            by_url.setdefault(url, []).append(receipt)
        batches = [
            (url, receipts[start : start + _BATCH])
            for url, receipts in by_url.items()
            for start in range(0, len(receipts), _BATCH)
        ]
        run_parallel(
            lambda each: self._batch("change_message_visibility_batch", *each, VisibilityTimeout=0),
            batches,
        )

    def delete(self, copies: Iterable[Copy]) -> list[tuple[FoundDeadLetter, str | None]]:
        """Delete dead letters; return each with an error, or with None if SQS deleted it."""
        by_url: dict[str, list[FoundDeadLetter]] = {}
        for url, each in copies:
            by_url.setdefault(url, []).append(each)
        done: list[tuple[FoundDeadLetter, str | None]] = []
        for url, found in by_url.items():
            for start in range(0, len(found), _BATCH):
                batch = found[start : start + _BATCH]
                failed = self._batch("delete_message_batch", url, [e.receipt for e in batch])
                done.extend((each, failed.get(index)) for index, each in enumerate(batch))
        return done

    def _batch(self, method: str, url: str, receipts: Sequence[str], **more: Any) -> dict[int, str]:
        """Make one call for several messages; return the errors by index."""
        entries = [
            {"Id": str(index), "ReceiptHandle": receipt, **more}
            for index, receipt in enumerate(receipts)
        ]
        try:
            answer = getattr(self._client, method)(QueueUrl=url, Entries=entries)
        except BOTO_ERRORS as error:
            name = url.rsplit("/", 1)[-1]
            reason = str(translation(error, self._address.place, "queue", name))
            return dict.fromkeys(range(len(receipts)), reason)
        return {
            int(each["Id"]): str(each.get("Message") or each.get("Code"))
            for each in answer.get("Failed", ())
        }


class SqsDeadLetters(DeadLetterStore):
    """The dead letters of the queues below an address. Safe to use from several threads.

    :param notify: a function that a retry calls with the queues of the messages.
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
        """Return one dead letter; make no call if this process listed it a moment ago."""
        place = queue, SQS_POSITIONS.identity(position)
        with self._lock:
            young = self._clock() - self._seen_at <= SEEN_SECONDS
            found = self._seen.get(place) if young else None
        if found is None:
            found = next((each for each in self._look() if each.place == place), None)
        return None if found is None else self._whole(found)

    def counts(self) -> Mapping[str, int]:
        """Return the counts of queues with dead letters; counts are at most a minute old."""
        now = self._clock()
        if self._counted_at is None or now - self._counted_at > COUNT_SECONDS:
            some = any(map(self._count, self._address.letter_queues))
            self._counts = Counter(each.record.queue for each in self._look()) if some else {}
            self._counted_at = now
        return self._counts

    def total(self) -> int:
        """Return the approximate number of dead letters, without receiving them."""
        return sum(map(self._count, self._address.letter_queues))

    def _count(self, name: str) -> int:
        try:
            facts = self._queues.counts_of(name)
        except AwsNotFoundError:
            return 0
        return facts.waiting + facts.in_flight + facts.delayed

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
        self._seen = {}
        self._seen_at = self._clock()
        size = 0
        for each in found:
            size += len(each.record.body)
            if size > SEEN_BYTES:
                break
            self._seen[each.place] = each

    def _whole(self, found: FoundDeadLetter) -> DeadLetterRecord:
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

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        """Send dead letters again, in the given order, then delete them."""
        # After a repeated retry within five minutes, a FIFO queue does not store the message twice.
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
        """Delete the dead letters that the sender has sent; keep all others in the batch."""
        gone: list[Copy] = []
        for copies, sent in tried:
            if sent is None:
                batch.put_back(copies)
            else:
                gone.extend(copies)
        for fault in self._delete(gone):
            log.warning(
                "a dead letter was sent again, and stays a dead letter; discard it: %s", fault
            )

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        """Delete dead letters; raise AwsError if SQS could not delete some."""
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
        with self._lock:
            self._receiver.release_held()

    def _taken(self, letters: Sequence[Place]) -> tuple[ReceivedBatch, list[list[Copy]]]:
        """Receive dead letters; return the copies of each, or an empty list if it is missing."""
        self._seen = {}
        self._counted_at = None
        places = [(queue, SQS_POSITIONS.identity(position)) for queue, position in letters]
        batch = self._receiver.hold(set(places)) if places else ReceivedBatch(0.0)
        return batch, list(map(batch.take_out, places))

    def _again(self, found: FoundDeadLetter) -> Outgoing:
        letter = self._whole(found)
        headers = self.headers_again(letter, found.own_id)
        terms = None
        if letter.queue.endswith(FIFO):  # the queue stores a repeated send only once
            terms = SendOptions(dedup_key=digest(letter, headers or ""))
        return Outgoing(letter.queue, letter.body, letter.key, headers, terms)

    def _delete(self, copies: Iterable[Copy]) -> list[str]:
        """Delete dead letters, and then their bodies in S3; return the errors."""
        done = self._receiver.delete(copies)
        pointers = [found.pointer for found, fault in done if found.pointer and fault is None]
        if pointers and self._objects is not None:
            try:
                self._objects.delete(pointers)
            except QdoError as error:  # the letters are deleted, so continue
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
