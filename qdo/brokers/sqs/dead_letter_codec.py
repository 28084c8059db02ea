"""Encode dead letters for SQS, and decode received dead letters, with pure functions.

Dead letters encode body, headers and key like messages. The attribute `qdo-traceback` contains the
traceback, and `qdo-dead-letter` is a JSON object with all other fields. A dead letter uses at most
6 of the 10 attributes that SQS allows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.dead_letters import DeadLetterEntry, DeadLetterRecord, checked_fields
from qdo.brokers.sqs.codec import (
    KEY,
    SQS_POSITIONS,
    decode_received,
    encode_message,
    json_text,
    key_attribute,
    size_of,
)
from qdo.brokers.sqs.url import MAX_SQS_MESSAGE
from qdo.encoding import utf8_text
from qdo.errors import UnsupportedError

LETTER = "qdo-dead-letter"
TRACEBACK = "qdo-traceback"
# The maximum length of errors in characters. Longer errors lose their end.
MAX_ERROR = 8_000
# The maximum length of tracebacks in characters. Longer tracebacks lose their beginning.
MAX_TRACEBACK = 64_000


@dataclass(frozen=True, slots=True)
class FoundDeadLetter:
    """A received dead letter."""

    # The record of the dead letter, with an empty body if the body is in S3.
    record: DeadLetterRecord
    receipt: str
    # The location of the body in S3; None: the body is in the record.
    pointer: BodyPointer | None
    body_bytes: int

    @property
    def place(self) -> tuple[str, int]:
        """The queue and identity of the message, which are the same in every receive."""
        return self.record.queue, SQS_POSITIONS.identity(self.record.position)

    @property
    def own_id(self) -> str:
        return SQS_POSITIONS.message_id(self.record.position, 0)

    def entry(self) -> DeadLetterEntry:
        return replace(self.record.entry(), body_bytes=self.body_bytes)


def digest(letter: DeadLetterRecord, more: str = "") -> str:
    """Return a digest of the queue and identity of a dead letter's message, and of `more`."""
    text = f"{letter.queue}\n{SQS_POSITIONS.identity(letter.position)}\n{more}"
    return hashlib.sha256(text.encode()).hexdigest()


def letter_entry(letter: DeadLetterRecord, fifo: bool) -> dict[str, Any]:
    """Return the SendMessage entry of a dead letter."""
    # In a FIFO queue each dead letter has a separate message group, because a received message
    # hides the rest of its group. The same dead letter always has the same deduplication id.
    try:
        text, attributes = encode_message(letter.body, letter.headers, letter.queue)
    except Exception:  # noqa: BLE001 - faulty headers must not keep a message waiting forever
        spelled_out = json.dumps(letter.headers)
        text, attributes = encode_message(letter.body, spelled_out, letter.queue)
    if letter.key is not None:
        attributes[KEY] = key_attribute(utf8_text(letter.key), letter.queue)
    attributes[LETTER] = json_text(
        {
            "queue": letter.queue,
            "position": str(letter.position),
            "error": utf8_text(letter.error)[:MAX_ERROR],
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
    """Return an entry with a traceback, shortened at its beginning if it does not fit."""
    room = MAX_SQS_MESSAGE - size_of(made)
    if room < 0:
        raise UnsupportedError(
            broker="SQS",
            what=f"keep a dead letter of {size_of(made)} bytes",
            remedy="name a bucket of S3 for large bodies: bucket= in the broker's address",
        )
    kept = utf8_text(traceback)[-MAX_TRACEBACK:]
    while kept:
        attribute = json_text(kept)
        attributes = {**made["MessageAttributes"], TRACEBACK: attribute}
        whole = {**made, "MessageAttributes": attributes}
        if size_of(whole) <= MAX_SQS_MESSAGE:
            return whole
        kept = kept[(len(kept) + 1) // 2 :]
    return made


def letter_of(raw: Mapping[str, Any]) -> FoundDeadLetter | None:
    """Return the dead letter of a received message; None if qdo did not store the message."""
    given = raw.get("MessageAttributes") or {}
    try:
        fields = json.loads(given[LETTER]["StringValue"])
        message = decode_received(raw, own=True)
        record = DeadLetterRecord(
            body=b"" if message.pointer else message.body,
            key=message.key if KEY in given else None,  # the message group is not the key
            headers=message.headers,
            traceback=_traceback(given),
            **checked_fields(fields),
        )
        size = message.size if message.pointer else len(message.body)
    except Exception:  # noqa: BLE001 - a foreign message must not hide dead letters
        return None
    return FoundDeadLetter(record, message.receipt, message.pointer, size)


def _traceback(given: Mapping[str, Mapping[str, Any]]) -> str:
    attribute = given.get(TRACEBACK)
    return "" if attribute is None else str(json.loads(attribute["StringValue"]))
