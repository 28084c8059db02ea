"""Find, retry, discard and export dead letters, and show the bodies of stored messages."""

from __future__ import annotations

import binascii
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from qdo.brokers.base import Broker
from qdo.brokers.dead_letters import DeadLetterEntry, DeadLetterRecord
from qdo.encoding import (
    DUE,
    ID,
    SENT,
    decode_strictly,
    is_deeper,
    is_raw,
    key_id_of,
    parsed,
    stored_time,
)
from qdo.errors import BodyDecodeError, KeyMissingError, NotFoundError, UsageError
from qdo.positions import TIME_POSITIONS, Positions, format_position, position_of_time
from qdo.queues import is_glob
from qdo.refusals import Passage, send_each
from qdo.text import describe, iso_time

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault


def decrypted(
    queue: str, body: bytes, headers: str | None, vault: BodyVault | None
) -> tuple[bytes, str | None, str | None]:
    """Return body and headers of a message, decrypted, and why they could not be.

    :param vault: decrypts the body; None without keys.
    """
    id = key_id_of(body)
    if id is None:
        return body, headers, None
    try:
        if vault is None:
            raise KeyMissingError(queue=queue, key=id, place="the setting keys")
        return *vault.open(queue, body, headers), None
    except (BodyDecodeError, KeyMissingError) as error:
        return body, headers, str(error)


MAX_DEPTH = 100
"""Deepest nesting of a body that commands show as JSON: Python cannot indent 400 levels."""


def body_value(body: bytes, headers: str | None) -> dict[str, Any]:
    """Return `body` if it is JSON that a copy can hold, and `body_base64` otherwise."""
    read = parsed(headers)
    if not (read and is_raw(read)):
        try:
            value = decode_strictly(body.decode())
        except (ValueError, RecursionError):
            pass
        else:
            if not is_deeper(value, MAX_DEPTH):
                return {"body": value}
    return {"body_base64": binascii.b2a_base64(body, newline=False).decode()}


CHUNK_LETTERS = 100
CHUNK_BYTES = 16 * 1024 * 1024
"""Limits of one transaction that retries or discards; its first dead letter may be larger."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A selection of dead letters.

    :ivar error: text that the error contains, ignoring case.
    :ivar older_seconds: minimum age as a dead letter.
    :ivar newer_seconds: maximum age as a dead letter.
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
class Selected:
    """The dead letters that were found by name."""

    letters: tuple[Letter, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LetterResult:
    """The result of retrying or discarding one dead letter.

    :ivar done: False if it no longer existed: another operator was faster.
    :ivar position: new position of the message after a retry.
    :ivar error: why it stays a dead letter, None if it does not.
    """

    letter: Letter
    done: bool
    position: int | None = None
    error: str | None = None


def find(broker: Broker, wanted: Filter, now: float) -> list[Letter]:
    """Return the dead letters that match a filter, oldest first.

    :param now: Unix time to which their ages refer.
    """
    older, newer = wanted.older_seconds, wanted.newer_seconds
    entries = broker.dead_letters.find(
        None if is_glob(wanted.queues) else wanted.queues,
        error=wanted.error,
        since=None if newer is None else now - newer,
        until=None if older is None else now - older,
    )
    return [_letter(broker, entry) for entry in entries if fnmatchcase(entry.queue, wanted.queues)]


def named(broker: Broker, queue: str, names: Sequence[str]) -> Selected:
    """Return the dead letters of a queue with these message ids or positions.

    :raises UsageError: a name is neither, or is the id of several dead letters.
    """
    letters = [_letter(broker, entry) for entry in broker.dead_letters.find(queue)]
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
    return Selected(tuple(found.values()), tuple(missing))


def _is_named(letter: Letter, name: str, broker: Broker) -> bool:
    # Also accept the id that its position would give: log lines may contain it.
    by_position = broker.positions.message_id(letter.entry.position, broker.id_node)
    return name.lower() in (letter.id, by_position, str(letter.entry.position))


def _check_name(name: str) -> None:
    """Raise UsageError for text that cannot name a dead letter of any broker."""
    if re.fullmatch(r"[0-9]+(:[0-9]+)?", name):
        return
    try:
        uuid.UUID(name)
    except ValueError as error:
        reason = f"a dead letter must be named by its message's id or position, got {name!r}"
        raise UsageError(reason=reason) from error


def read(broker: Broker, letter: Letter) -> DeadLetterRecord:
    """Return a complete dead letter.

    :raises NotFoundError: it no longer exists.
    """
    found = broker.dead_letters.get(letter.entry.queue, letter.entry.position)
    if found is None:
        raise NotFoundError(what="dead letter", name=letter.id)
    return found


def retry(broker: Broker, letters: Sequence[Letter]) -> Iterator[LetterResult]:
    """Send dead letters again in their order: each becomes the newest message of its queue.

    Yields each result as soon as it is certain. One that the broker refuses concerns no other;
    behind one whose queue is busy, those of its queue stay, too. After an error, those that were
    not yielded are still dead letters.
    """
    busy: set[str] = set()

    def move(some: Sequence[Letter]) -> list[int | None]:
        return broker.dead_letters.retry([_key(each) for each in some])

    for chunk in _chunks(letters):
        waiting = [each for each in chunk if each.entry.queue in busy]
        free = [each for each in chunk if each.entry.queue not in busy]
        if broker.capabilities.lasting_dedup:
            sent = send_each(free, move, lambda each: each.entry.queue)
        else:  # SQS and Kinesis may have sent some of those that they refuse together
            sent = Passage(list(zip(free, move(free), strict=True)))
        for letter, position in sent.done:
            yield LetterResult(letter, position is not None, position)
        for letter, error in sent.refused:
            yield LetterResult(letter, False, error=describe(error))
        for letter in (*(each for each, _ in sent.held), *waiting):
            busy.add(letter.entry.queue)
            yield LetterResult(letter, False, error="its queue is busy")
        if sent.ended is not None:
            raise sent.ended


def discard(broker: Broker, letters: Sequence[Letter]) -> Iterator[LetterResult]:
    """Delete dead letters permanently; yields like `retry`."""
    for chunk in _chunks(letters):
        gone = broker.dead_letters.discard([_key(each) for each in chunk])
        for letter, done in zip(chunk, gone, strict=True):
            yield LetterResult(letter, done)


def sent_time(position: int, positions: Positions) -> str:
    """Return the time at which the message with a position was sent, in ISO 8601."""
    return format_position(positions.to_time(position))


def _iso(seconds: float) -> str:
    return format_position(position_of_time(seconds))


def exported(
    letter: Letter,
    record: DeadLetterRecord,
    positions: Positions = TIME_POSITIONS,
    vault: BodyVault | None = None,
) -> dict[str, Any]:
    """Return a complete dead letter as a JSON value.

    The key of the body is `body` if it is JSON that a copy can hold, and `body_base64` otherwise.
    A body that cannot be decrypted stays encrypted, and `body_error` has the reason.

    :param vault: decrypts the body; None without keys.
    """
    body, stored, undecrypted = decrypted(record.queue, record.body, record.headers, vault)
    record = replace(record, body=body, headers=stored)
    headers = parsed(record.headers)
    sent, due = (stored_time(headers or {}, name) for name in (SENT, DUE))
    return {
        "queue": record.queue,
        "id": letter.id,
        "position": str(record.position),
        "time": sent_time(record.position, positions) if sent is None else _iso(sent),
        "due_time": None if due is None else _iso(due),
        "dead_time": iso_time(record.dead_at),
        "attempts": record.attempts,
        "error": record.error,
        "traceback": record.traceback,
        "worker": record.worker,
        "fence": record.fence,
        "key": record.key,
        "headers": record.headers if headers is None else headers,
        **({} if undecrypted is None else {"body_error": undecrypted}),
        **body_value(record.body, record.headers),
    }


def _letter(broker: Broker, entry: DeadLetterEntry) -> Letter:
    known = (parsed(entry.headers) or {}).get(ID)
    return Letter(known or broker.positions.message_id(entry.position, broker.id_node), entry)


def _key(letter: Letter) -> tuple[str, int]:
    return letter.entry.queue, letter.entry.position


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
