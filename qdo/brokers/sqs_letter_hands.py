"""Taking dead letters out of their queues of SQS, and giving them back.

SQS shows messages only by giving them out, and hides them from everybody else meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdo.brokers.aws_address import FIFO, SqsAddress
from qdo.brokers.aws_errors import BOTO_ERRORS, translation
from qdo.brokers.side_by_side import side_by_side
from qdo.brokers.sqs_letter_form import Found, letter_of
from qdo.brokers.sqs_messages import RECEIVED_ATTRIBUTES
from qdo.brokers.sqs_queues import SqsQueues
from qdo.errors import AwsNotFoundError

HIDE_SECONDS = 60
"""How long letters are hidden that are not given back, if there are few."""
LETTERS_PER_SECOND = 100
"""At least so many are received in a second: the more there are, the longer they are hidden."""
MAX_HIDE_SECONDS = 43_200
MARGIN_SECONDS = 15.0
"""Nothing is begun with letters that are hidden for less than this."""
_BATCH = 10

Place = tuple[str, int]
"""Queue of a message, and what stays the same of its position."""
Copy = tuple[str, Found]
"""URL of the queue that a letter is in, and the letter."""


@dataclass(slots=True)
class Hand:
    """Letters that nobody else sees.

    :ivar until: time on the monotonic clock from which others may see them again.
    :ivar letters: all copies of each letter, by queue and name, and then by their MessageId.
    """

    until: float
    letters: dict[Place, dict[str, Copy]] = field(default_factory=dict)
    others: list[tuple[str, str]] = field(default_factory=list)
    """(URL, receipt) of messages that are no letters of qdo."""

    def first(self) -> Iterator[Found]:
        """Yield one copy of each letter, oldest first."""
        found = (next(iter(copies.values()))[1] for copies in self.letters.values())
        yield from sorted(found, key=lambda each: (each.record.dead_at, each.record.position))

    def receipts(self) -> list[tuple[str, str]]:
        """Return (URL, receipt) of everything."""
        copies = (copy for each in self.letters.values() for copy in each.values())
        return [(url, found.receipt) for url, found in copies] + self.others

    def take_out(self, place: Place) -> list[Copy]:
        """Return all copies of a letter, none where there are none; they stay hidden."""
        return list(self.letters.pop(place, {}).values())

    def put_back(self, copies: Iterable[Copy]) -> None:
        """Let letters that were taken out be among the others again."""
        for url, found in copies:
            self.letters.setdefault(found.place, {})[found.receipt] = (url, found)


class LetterHands:
    """Receives the dead letters of an address. Call its methods one at a time.

    :param clock: seconds on a monotonic clock.
    """

    def __init__(
        self, client: Any, address: SqsAddress, queues: SqsQueues, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._address = address
        self._queues = queues
        self._clock = clock
        self._hand: Hand | None = None

    def hold(self, wanted: set[Place]) -> Hand:
        """Return a hand with these letters, as far as they exist."""
        hand = self._hand
        if hand is None or hand.until - self._clock() <= MARGIN_SECONDS:
            self.give_back()
            hand = self._hand = self._empty()
            self._fill(hand)
        elif not wanted <= hand.letters.keys():
            self._fill(hand)  # what is held is hidden from us as well: only others come
        return hand

    def take(self) -> Hand:
        """Receive everything there is."""
        hand = self._empty()
        try:
            self._fill(hand)
        except BaseException:
            self.free(hand)  # others need not wait for what is of no use now
            raise
        return hand

    def _empty(self) -> Hand:
        return Hand(self._clock() + MAX_HIDE_SECONDS)

    def _fill(self, hand: Hand) -> None:
        side_by_side(lambda name: self._take_from(name, hand), self._address.letter_queues)

    def _take_from(self, name: str, hand: Hand) -> None:
        try:
            url = self._queues.url_of(name)
            about = self._queues.counts_of(name).waiting
        except AwsNotFoundError:
            return  # nothing was ever buried
        hide = min(HIDE_SECONDS + about // LETTERS_PER_SECOND, MAX_HIDE_SECONDS)
        hand.until = min(hand.until, self._clock() + hide)
        seen: set[str] = set()
        while True:
            messages = self._receive(name, url, hide)
            new = [raw for raw in messages if raw["MessageId"] not in seen]
            if not new:  # the tip, or those that were received first are not hidden any more
                hand.others.extend((url, raw["ReceiptHandle"]) for raw in messages)
                return
            seen.update(raw["MessageId"] for raw in new)
            for raw in messages:
                found = letter_of(raw)
                if found is None:
                    hand.others.append((url, raw["ReceiptHandle"]))
                else:
                    # Of one that was received again only the newest receipt is of use.
                    hand.letters.setdefault(found.place, {})[raw["MessageId"]] = (url, found)

    def _receive(self, name: str, url: str, hide: int) -> list[dict[str, Any]]:
        more = {"ReceiveRequestAttemptId": str(uuid.uuid4())} if name.endswith(FIFO) else {}
        try:
            answer = self._client.receive_message(
                QueueUrl=url,
                MaxNumberOfMessages=_BATCH,
                VisibilityTimeout=hide,
                # From 1 on SQS asks all of its servers, not some.
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

    def give_back(self) -> None:
        """Give back what is held."""
        hand, self._hand = self._hand, None
        if hand is not None and hand.until > self._clock():
            self.free(hand)

    def free(self, hand: Hand) -> None:
        """Let others see what is in a hand; what fails shows by itself a little later."""
        by_url: dict[str, list[str]] = {}
        for url, receipt in hand.receipts():
            by_url.setdefault(url, []).append(receipt)
        batches = [
            (url, receipts[start : start + _BATCH])
            for url, receipts in by_url.items()
            for start in range(0, len(receipts), _BATCH)
        ]
        side_by_side(
            lambda each: self._batch("change_message_visibility_batch", *each, VisibilityTimeout=0),
            batches,
        )

    def delete(self, copies: Iterable[Copy]) -> list[tuple[Found, str | None]]:
        """Delete letters; return each with why it could not be, None where it could."""
        by_url: dict[str, list[Found]] = {}
        for url, each in copies:
            by_url.setdefault(url, []).append(each)
        done: list[tuple[Found, str | None]] = []
        for url, found in by_url.items():
            for start in range(0, len(found), _BATCH):
                batch = found[start : start + _BATCH]
                failed = self._batch("delete_message_batch", url, [e.receipt for e in batch])
                done.extend((each, failed.get(index)) for index, each in enumerate(batch))
        return done

    def _batch(
        self, method: str, url: str, receipts: Sequence[str], **more: Any
    ) -> dict[int, str]:
        """Make one request about several messages; return by index why it failed for some."""
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
