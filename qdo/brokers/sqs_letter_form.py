"""How a dead letter stands in a queue of SQS, both ways; pure functions.

Body, headers and key stand as those of a message do. `qdo-dead-letter` is a JSON object with
everything else but the traceback, `qdo-traceback` the traceback: of the 10 attributes that SQS
takes, at most 6 are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qdo.brokers.aws_address import MAX_SQS_MESSAGE
from qdo.brokers.base import DeadLetterEntry, DeadLetterRecord
from qdo.brokers.sqs_messages import (
    EXTENDED_SIZE,
    KEY,
    Pointer,
    encoded,
    json_text,
    key_attribute,
    received,
    size_of,
)
from qdo.brokers.sqs_positions import SQS_POSITIONS
from qdo.errors import UnsupportedError

LETTER = "qdo-dead-letter"
TRACEBACK = "qdo-traceback"
MAX_ERROR = 8_000
"""Characters of an error that are kept, the first ones."""
MAX_TRACEBACK = 64_000
"""Characters of a traceback that are kept, the last ones."""


@dataclass(frozen=True, slots=True)
class Found:
    """A dead letter as it was received.

    :ivar record: its body is empty where it is in S3.
    :ivar receipt: handle to delete it with, or give it back.
    :ivar pointer: where its body is; None: in the record.
    """

    record: DeadLetterRecord
    receipt: str
    pointer: Pointer | None
    body_bytes: int

    @property
    def place(self) -> tuple[str, int]:
        """Queue and name of its message: what stays the same however often it is received."""
        return self.record.queue, SQS_POSITIONS.name(self.record.position)

    @property
    def own_id(self) -> str:
        """The MessageId that its message had."""
        return SQS_POSITIONS.message_id(self.record.position, 0)

    def entry(self) -> DeadLetterEntry:
        """Return it without body and traceback."""
        record = self.record
        return DeadLetterEntry(
            queue=record.queue,
            position=record.position,
            key=record.key,
            headers=record.headers,
            error=record.error,
            attempts=record.attempts,
            worker=record.worker,
            fence=record.fence,
            dead_at=record.dead_at,
            body_bytes=self.body_bytes,
        )


def digest(letter: DeadLetterRecord, more: str = "") -> str:
    """Return a text that is the same for the same message of the same queue."""
    text = f"{letter.queue}\n{SQS_POSITIONS.name(letter.position)}\n{more}"
    return hashlib.sha256(text.encode()).hexdigest()


def letter_entry(letter: DeadLetterRecord, fifo: bool) -> dict[str, Any]:
    """Return a dead letter as SendMessage takes it.

    In a FIFO queue each has a group of its own: those of one group hide each other. The same
    letter has the same deduplication id.
    """
    text, attributes = encoded(letter.body, letter.headers, letter.queue)
    if letter.key is not None:
        attributes[KEY] = key_attribute(letter.key, letter.queue)
    attributes[LETTER] = json_text(
        {
            "queue": letter.queue,
            "position": str(letter.position),
            "error": _text(letter.error)[:MAX_ERROR],
            "attempts": letter.attempts,
            "worker": letter.worker,
            "fence": letter.fence,
            "dead_at": letter.dead_at,
        }
    )
    made: dict[str, Any] = {"MessageBody": text, "MessageAttributes": attributes}
    if fifo:
        made["MessageGroupId"] = made["MessageDeduplicationId"] = digest(letter)
    return made


def with_traceback(made: dict[str, Any], traceback: str) -> dict[str, Any]:
    """Return an entry with as much of the end of a traceback as there is room for.

    :raises UnsupportedError: not even the letter itself has room.
    """
    room = MAX_SQS_MESSAGE - size_of(made)
    if room < 0:
        raise UnsupportedError(
            broker="SQS",
            what=f"keep a dead letter of {size_of(made)} bytes",
            remedy="name a bucket of S3 for large bodies: bucket= in the broker's address",
        )
    kept = _text(traceback)[-MAX_TRACEBACK:]
    while kept:
        attribute = json_text(kept)
        attributes = {**made["MessageAttributes"], TRACEBACK: attribute}
        whole = {**made, "MessageAttributes": attributes}
        if size_of(whole) <= MAX_SQS_MESSAGE:
            return whole
        kept = kept[(len(kept) + 1) // 2 :]
    return made


def letter_of(raw: Mapping[str, Any]) -> Found | None:
    """Return the dead letter of a received message, None where it is none of qdo's."""
    given = raw.get("MessageAttributes") or {}
    try:
        said = json.loads(given[LETTER]["StringValue"])
        message = received(raw)
        record = DeadLetterRecord(
            queue=said["queue"],
            position=int(said["position"]),
            body=b"" if message.pointer else message.body,
            key=message.key if KEY in given else None,  # its group is none of the message's
            headers=message.headers,
            error=said["error"],
            traceback=_traceback(given),
            attempts=int(said["attempts"]),
            worker=said["worker"],
            fence=int(said["fence"]),
            dead_at=float(said["dead_at"]),
        )
        size = len(message.body)
        if message.pointer is not None:
            size = int(given[EXTENDED_SIZE]["StringValue"])
    except (KeyError, ValueError, TypeError):
        return None
    return Found(record, message.receipt, message.pointer, size)


def _traceback(given: Mapping[str, Mapping[str, Any]]) -> str:
    attribute = given.get(TRACEBACK)
    return "" if attribute is None else str(json.loads(attribute["StringValue"]))


def _text(text: str) -> str:
    """Return text with stray surrogates, which have no UTF-8, spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()
