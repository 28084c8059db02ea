"""Receiving dead letters from their SQS queues, and releasing them.

SQS hides a received message from all other consumers until it is released or times out.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdo.aws_errors import AwsNotFoundError
from qdo.brokers.aws.errors import BOTO_ERRORS, translation
from qdo.brokers.sqs.codec import RECEIVED_ATTRIBUTES
from qdo.brokers.sqs.dead_letter_codec import FoundDeadLetter, letter_of
from qdo.brokers.sqs.queues import SqsQueues
from qdo.brokers.sqs.url import FIFO, SqsAddress
from qdo.system.parallel import run_parallel

HIDE_SECONDS = 60
"""How long dead letters stay hidden unless released, if there are few."""
LETTERS_PER_SECOND = 100
"""Assumed receive rate. It extends the hidden time by the number of dead letters."""
MAX_HIDE_SECONDS = 43_200
MARGIN_SECONDS = 15.0
"""Dead letters that are hidden for less than this are received again before an operation."""
_BATCH = 10

Place = tuple[str, int]
"""Queue of a message, and the identity part of its position."""
Copy = tuple[str, FoundDeadLetter]
"""URL of the queue that a dead letter is in, and the dead letter."""


@dataclass(slots=True)
class ReceivedBatch:
    """Received dead letters, hidden from all other consumers.

    :ivar until: time on the monotonic clock from which other consumers may receive them.
    :ivar letters: all copies of each dead letter, by queue and name, then by MessageId.
    """

    until: float
    letters: dict[Place, dict[str, Copy]] = field(default_factory=dict)
    others: list[tuple[str, str]] = field(default_factory=list)
    """(URL, receipt) of messages that are not dead letters of qdo."""

    def first(self) -> Iterator[FoundDeadLetter]:
        """Yield one copy of each dead letter, oldest first."""
        found = (next(iter(copies.values()))[1] for copies in self.letters.values())
        yield from sorted(found, key=lambda each: (each.record.dead_at, each.record.position))

    def receipts(self) -> list[tuple[str, str]]:
        """Return (URL, receipt) of all messages."""
        copies = (copy for each in self.letters.values() for copy in each.values())
        return [(url, found.receipt) for url, found in copies] + self.others

    def take_out(self, place: Place) -> list[Copy]:
        """Remove and return all copies of a dead letter; they stay hidden."""
        return list(self.letters.pop(place, {}).values())

    def put_back(self, copies: Iterable[Copy]) -> None:
        """Add copies that were taken out to the batch again."""
        for url, found in copies:
            self.letters.setdefault(found.place, {})[found.receipt] = (url, found)


class DeadLetterReceiver:
    """Receives the dead letters of an address. Not safe for concurrent calls.

    :param clock: seconds on a monotonic clock.
    """

    def __init__(
        self, client: Any, address: SqsAddress, queues: SqsQueues, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._address = address
        self._queues = queues
        self._clock = clock
        self._held: ReceivedBatch | None = None

    def hold(self, wanted: set[Place]) -> ReceivedBatch:
        """Return a batch that contains these dead letters, except missing ones."""
        received = self._held
        if received is None or received.until - self._clock() <= MARGIN_SECONDS:
            self.release_held()
            received = self._held = self._empty()
            self._fill(received)
        elif not wanted <= received.letters.keys():
            self._fill(received)  # held ones are hidden from this process too
        return received

    def receive_all(self) -> ReceivedBatch:
        """Receive all dead letters."""
        received = self._empty()
        try:
            self._fill(received)
        except BaseException:
            # Also after Ctrl-C: otherwise nobody sees these letters for up to 12 hours. A release
            # that fails returns its error instead of raising it, so the first error stays.
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
            if not new:  # all are received, or the first ones are visible again
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
                # From 1 s on SQS queries all of its servers, not some.
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
        """Release the held batch."""
        received, self._held = self._held, None
        if received is not None and received.until > self._clock():
            self.release(received)

    def release(self, received: ReceivedBatch) -> None:
        """Make a batch visible to others. Failed entries become visible when their time is over."""
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
        """Delete dead letters; return each with its error, None if it was deleted."""
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
        """Make one request for several messages; return the errors by index."""
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
