"""Dead letters: finding them, sending them again, discarding and exporting them."""

from __future__ import annotations

import binascii
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qdo.brokers.base import Broker, DeadLetterEntry, DeadLetterRecord
from qdo.encoding import decode_strictly
from qdo.errors import NotFoundError, UsageError
from qdo.headers import ID, is_raw, parsed
from qdo.message import format_position
from qdo.positions import TIMES, Positions

CHUNK_LETTERS = 100
CHUNK_BYTES = 16 * 1024 * 1024
"""What one transaction sends again or discards, at most, beyond its first letter."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters.

    :ivar queues: glob of their queues.
    :ivar error: text that the error holds, upper or lower case.
    :ivar older_seconds: set aside at least so long ago.
    :ivar newer_seconds: set aside at most so long ago.
    """

    queues: str = "*"
    error: str | None = None
    older_seconds: float | None = None
    newer_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter with the id of its message."""

    id: str
    entry: DeadLetterEntry


@dataclass(frozen=True, slots=True)
class Named:
    """What was found of the dead letters that were asked for by name.

    :ivar missing: the names that no dead letter has.
    """

    letters: tuple[Letter, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """What came of one dead letter.

    :ivar done: False where it was gone meanwhile: somebody else acted.
    :ivar position: of the message, where the letter was sent again.
    """

    letter: Letter
    done: bool
    position: int | None = None


def find(broker: Broker, wanted: Filter, now: float) -> list[Letter]:
    """Return the dead letters that a filter lets through, oldest first.

    :param now: Unix time from which their ages count.
    """
    older, newer = wanted.older_seconds, wanted.newer_seconds
    entries = broker.find_dead_letters(
        None if _is_glob(wanted.queues) else wanted.queues,
        error=wanted.error,
        since=None if newer is None else now - newer,
        until=None if older is None else now - older,
    )
    return [
        _letter(broker, entry) for entry in entries if fnmatchcase(entry.queue, wanted.queues)
    ]


def named(broker: Broker, queue: str, names: Sequence[str]) -> Named:
    """Return the dead letters of a queue with these message ids or positions.

    :raises UsageError: a name is neither, or is the id of several letters.
    """
    letters = [_letter(broker, entry) for entry in broker.find_dead_letters(queue)]
    found: dict[int, Letter] = {}
    missing = []
    for name in names:
        matching = [each for each in letters if _is_named(each, name, broker)]
        if not matching:
            _check_name(name)
        if len(matching) > 1:
            positions = ", ".join(str(each.entry.position) for each in matching)
            raise UsageError(reason=f"{len(matching)} dead letters have the id {name}: {positions}")
        if matching:
            found[matching[0].entry.position] = matching[0]
        else:
            missing.append(name)
    return Named(tuple(found.values()), tuple(missing))


def _is_named(letter: Letter, name: str, broker: Broker) -> bool:
    # Also the id that its position would give: a log line may have named it so.
    by_position = broker.positions.message_id(letter.entry.position, broker.id_node)
    return name.lower() in (letter.id, by_position, str(letter.entry.position))


def _check_name(name: str) -> None:
    """Raise for what can be the name of no dead letter, whatever the broker."""
    if re.fullmatch(r"[0-9]+(:[0-9]+)?", name):
        return
    try:
        uuid.UUID(name)
    except ValueError as error:
        reason = f"{name!r} is neither the id of a message nor a position"
        raise UsageError(reason=reason) from error


def read(broker: Broker, letter: Letter) -> DeadLetterRecord:
    """Return everything of a dead letter.

    :raises NotFoundError: it is gone meanwhile.
    """
    found = broker.dead_letter(letter.entry.queue, letter.entry.position)
    if found is None:
        raise NotFoundError(what="dead letter", name=letter.id)
    return found


def retry(broker: Broker, letters: Sequence[Letter]) -> Iterator[Done]:
    """Send dead letters again: each becomes the newest message of its queue, in their order.

    Yields what came of each once that is certain. Where an error ends it, those that were not
    yielded are dead letters still.
    """
    for chunk in _chunks(letters):
        moved = broker.retry_dead_letters([_key(each) for each in chunk])
        for letter, position in zip(chunk, moved, strict=True):
            yield Done(letter, position is not None, position)


def discard(broker: Broker, letters: Sequence[Letter]) -> Iterator[Done]:
    """Delete dead letters for good; yields as `retry`."""
    for chunk in _chunks(letters):
        gone = broker.discard_dead_letters([_key(each) for each in chunk])
        for letter, done in zip(chunk, gone, strict=True):
            yield Done(letter, done)


def sent_time(position: int, positions: Positions) -> str:
    """Return when the message with a position was sent, in ISO 8601."""
    return format_position(positions.last(position))


def exported(
    letter: Letter, record: DeadLetterRecord, positions: Positions = TIMES
) -> dict[str, Any]:
    """Return everything of a dead letter as JSON can hold it.

    The body is `body` where it was sent as JSON, and `body_base64` where it is bytes, or cannot
    be decoded.
    """
    headers = parsed(record.headers)
    item: dict[str, Any] = {
        "queue": record.queue,
        "id": letter.id,
        "position": str(record.position),
        "time": sent_time(record.position, positions),
        "dead_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.dead_at)),
        "attempts": record.attempts,
        "error": record.error,
        "traceback": record.traceback,
        "worker": record.worker,
        "fence": record.fence,
        "key": record.key,
        "headers": record.headers if headers is None else headers,
    }
    if not (headers and is_raw(headers)):
        try:
            value = decode_strictly(record.body.decode())
            json.dumps(value, allow_nan=False)  # 1e999 is JSON, and infinite in Python
        except (ValueError, RecursionError):
            pass
        else:
            return {**item, "body": value}
    return {**item, "body_base64": binascii.b2a_base64(record.body, newline=False).decode()}


def _letter(broker: Broker, entry: DeadLetterEntry) -> Letter:
    known = (parsed(entry.headers) or {}).get(ID)
    return Letter(known or broker.positions.message_id(entry.position, broker.id_node), entry)


def _key(letter: Letter) -> tuple[str, int]:
    return letter.entry.queue, letter.entry.position


def _is_glob(text: str) -> bool:
    return any(character in text for character in "*?[")


def _chunks(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    chunk: list[Letter] = []
    size = 0
    for letter in letters:
        chunk.append(letter)
        size += letter.entry.body_bytes
        if len(chunk) == CHUNK_LETTERS or size > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
