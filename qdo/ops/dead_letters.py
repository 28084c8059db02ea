"""Finds, groups, retries, discards and exports dead letters, and shows the bodies of messages.

A failed request is a dead letter of its pool. Operators handle failed messages and failed requests
with the same commands.
"""

from __future__ import annotations

import binascii
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from qdo.brokers.base import Broker
from qdo.brokers.dead_letters import DeadLetterEntry, DeadLetterRecord, matches
from qdo.brokers.request_store import steps_to_forget
from qdo.brokers.requests import FAILED, OVER, RequestRecord
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
from qdo.errors import BodyDecodeError, FailureKind, KeyMissingError, NotFoundError, UsageError
from qdo.positions import TIME_POSITIONS, Positions, format_position, position_of_time
from qdo.queues import is_glob
from qdo.refusals import Passage, failure_kind, send_each
from qdo.text import describe, iso_time

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault

# Maximum nesting of a body that commands show as JSON. Python cannot indent 400 levels.
MAX_DEPTH = 100
CHUNK_LETTERS = 100
# Limits of a transaction that retries or discards. Only the first dead letter may exceed the size.
CHUNK_BYTES = 16 * 1024 * 1024
KIND_CHARACTERS = 200
_VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|\d+")


def message_id(broker: Broker, position: int, headers: str | None = None) -> str:
    """Return the id of a stored message: an earlier id from a header, or the id of its position."""
    earlier = (parsed(headers) or {}).get(ID)
    if isinstance(earlier, str) and earlier:
        return earlier
    return broker.positions.message_id(position, broker.id_node)


def decrypted(
    queue: str, body: bytes, headers: str | None, vault: BodyVault | None
) -> tuple[bytes, str | None, str | None]:
    """Decrypt a message. Return its body, its headers, and the reason if decryption failed.

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


def body_value(body: bytes, headers: str | None) -> dict[str, Any]:
    """Return the body as `body` if a JSON copy can hold the value, otherwise as `body_base64`."""
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


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects dead letters."""

    queues: str = "*"
    # Text in the error, in upper or lower case.
    error: str | None = None
    # Minimum time since the message became a dead letter.
    older_seconds: float | None = None
    # Maximum time since the message became a dead letter.
    newer_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, with the id of the message or request."""

    id: str
    # For a failed request, the queue is the pool, the position is missing, and worker and fence
    # come from the last take.
    entry: DeadLetterEntry
    # The failed request without its body; None for a message.
    request: RequestRecord | None = None

    @property
    def kind(self) -> str:
        return "message" if self.request is None else "request"

    @property
    def name(self) -> str:
        """Unique name of the dead letter: a JSON list of kind, queue or pool, and place."""
        return json.dumps([self.kind, self.entry.queue, self.place])

    @property
    def place(self) -> str:
        """Name within the queue or pool: the position of a message, or the id of a request."""
        return str(self.entry.position) if self.request is None else self.id


@dataclass(frozen=True, slots=True)
class Selected:
    """The dead letters that `named` found."""

    letters: tuple[Letter, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LetterResult:
    """The result of retrying or discarding one dead letter."""

    letter: Letter
    # False if another operator has retried or discarded the dead letter first.
    done: bool
    # New position of the message after a retry.
    position: int | None = None
    # The reason why the dead letter was not retried, or None.
    error: str | None = None


def find(broker: Broker, wanted: Filter, now: float) -> list[Letter]:
    """Return the dead letters that match a filter, oldest first.

    :param now: current Unix time, from which the ages are computed.
    """
    since = None if wanted.newer_seconds is None else now - wanted.newer_seconds
    until = None if wanted.older_seconds is None else now - wanted.older_seconds
    queue = None if is_glob(wanted.queues) else wanted.queues
    entries = broker.dead_letters.find(queue, error=wanted.error, since=since, until=until)
    letters = [_letter(broker, each) for each in entries]
    failed = _failed(broker, queue)
    letters += [each for each in failed if matches(each.entry, wanted.error, since, until)]
    if failed:
        letters.sort(key=lambda each: each.entry.dead_at)
    return [each for each in letters if fnmatchcase(each.entry.queue, wanted.queues)]


def _failed(broker: Broker, pool: str | None) -> list[Letter]:
    """Return the failed requests of a pool, or of all pools, as dead letters."""
    if not broker.capabilities.requests:
        return []
    requests = broker.requests.records(pool, (OVER,), sys.maxsize, outcome=FAILED)
    return [Letter(each.id, _of_request(each).entry(), each) for each in requests]


def _of_request(request: RequestRecord) -> DeadLetterRecord:
    body, headers = request.content
    return DeadLetterRecord(
        queue=request.pool,
        position=0,
        body=body,
        key=None,
        headers=headers,
        error=request.error or "",
        traceback="",
        attempts=request.failed,
        worker=request.take.owner,
        fence=request.take.number,
        dead_at=request.ended,
    )


def counts(broker: Broker) -> dict[str, int]:
    """Return the number of dead letters by queue or pool."""
    found = dict(broker.dead_letters.counts())
    pools = broker.requests.counts() if broker.capabilities.requests else {}
    for pool, each in pools.items():
        if each.failed:
            found[pool] = found.get(pool, 0) + each.failed
    return found


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Failures with the same error."""

    # "message" or "request" for dead letters, "timer", or "outbox" for refused messages.
    kind: str
    # The error text, in which "#" replaces numbers and ids.
    error: str
    count: int
    # Number of affected queues, pools, timers or tables.
    queues: int
    # Unix time of the oldest failure, or None. `newest` is the time of the newest failure.
    oldest: float | None = None
    newest: float | None = None


def error_kind_of(error: str) -> str:
    """Return an error text in which "#" replaces the parts that differ between messages."""
    text = _VARYING.sub("#", error)
    return text if len(text) <= KIND_CHARACTERS else f"{text[:KIND_CHARACTERS]}..."


def grouped(letters: Sequence[Letter]) -> list[ErrorGroup]:
    """Return the kinds of errors in dead letters, the most frequent first."""
    kinds: dict[tuple[str, str], list[DeadLetterEntry]] = {}
    for each in letters:
        kinds.setdefault((each.kind, error_kind_of(each.entry.error)), []).append(each.entry)
    groups = [
        ErrorGroup(
            kind=kind,
            error=error,
            count=len(same),
            queues=len({each.queue for each in same}),
            oldest=min(each.dead_at for each in same),
            newest=max(each.dead_at for each in same),
        )
        for (kind, error), same in kinds.items()
    ]
    return sorted(groups, key=lambda group: (-group.count, group.kind, group.error))


def named(broker: Broker, queue: str, names: Sequence[str]) -> Selected:
    """Return the dead letters of a queue or pool that have these ids or positions.

    :raises UsageError: a name is not an id or a position, or several dead letters have the id.
    """
    letters = [_letter(broker, entry) for entry in broker.dead_letters.find(queue)]
    failed = {each.id: each for each in _failed(broker, queue)}
    found: dict[str, Letter] = {}
    missing = []
    for name in names:
        matching = [each for each in letters if _is_named(each, name, broker)]
        if name in failed:
            matching.append(failed[name])
        if not matching and not broker.capabilities.requests:
            _check_name(name)
        if len(matching) > 1:
            places = ", ".join(each.place for each in matching)
            raise UsageError(reason=f"{len(matching)} dead letters have the id {name}: {places}")
        if matching:
            found[matching[0].place] = matching[0]
        else:
            missing.append(name)
    return Selected(tuple(found.values()), tuple(missing))


def _is_named(letter: Letter, name: str, broker: Broker) -> bool:
    # Also accept the id of the position, because log lines may contain this id.
    by_position = message_id(broker, letter.entry.position)
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

    :raises NotFoundError: the dead letter no longer exists.
    """
    if letter.request is None:
        found = broker.dead_letters.get(letter.entry.queue, letter.entry.position)
    else:
        request = broker.requests.find(letter.id)
        is_dead = request is not None and request.outcome == FAILED
        found = _of_request(request) if request is not None and is_dead else None
    if found is None:
        raise NotFoundError(what="dead letter", name=letter.id)
    return found


def retry(broker: Broker, letters: Sequence[Letter]) -> Iterator[LetterResult]:
    """Send dead letters again, in the given order, as the newest messages of their queues.

    A failed request waits again in its pool.

    Yield each result as soon as the result is certain. If the broker refuses a dead letter,
    continue with the others. If a queue is busy, keep its remaining dead letters. After an error,
    dead letters without a result are unchanged.
    """
    busy: set[str] = set()

    def move(some: Sequence[Letter]) -> list[int | None]:
        return broker.dead_letters.retry([_key(each) for each in some])

    for chunk in _chunks(_messages(letters)):
        waiting = [each for each in chunk if each.entry.queue in busy]
        free = [each for each in chunk if each.entry.queue not in busy]
        if broker.capabilities.lasting_dedup:
            sent = send_each(free, move, lambda each: each.entry.queue)
        else:  # SQS and Kinesis may have sent a part of a refused group
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
    # A lambda, because `requests` raises for a broker without requests.
    yield from _each_request(
        letters,
        lambda id: broker.requests.retry(id, steps_to_forget(broker.requests, id)),
    )


def _messages(letters: Sequence[Letter]) -> list[Letter]:
    return [each for each in letters if each.request is None]


def discard(broker: Broker, letters: Sequence[Letter]) -> Iterator[LetterResult]:
    """Delete dead letters permanently. Yield results like `retry`."""
    for chunk in _chunks(_messages(letters)):
        gone = broker.dead_letters.discard([_key(each) for each in chunk])
        for letter, done in zip(chunk, gone, strict=True):
            yield LetterResult(letter, done)
    yield from _each_request(letters, lambda id: broker.requests.expire([id]) > 0)


def _each_request(letters: Sequence[Letter], act: Callable[[str], bool]) -> Iterator[LetterResult]:
    """Act on each failed request.

    If the broker refuses a request, continue with the other requests.
    """
    for letter in letters:
        if letter.request is None:
            continue
        try:
            done = act(letter.id)
        except Exception as error:
            if failure_kind(error) is FailureKind.UNREACHABLE:
                raise
            yield LetterResult(letter, False, error=describe(error))
        else:
            yield LetterResult(letter, done)


def sent_time(position: int, positions: Positions) -> str:
    """Return the time at which the message at a position was sent, in ISO 8601."""
    return format_position(positions.to_time(position))


def exact_time(seconds: float | None) -> str | None:
    """Return a Unix time in ISO 8601 with microseconds."""
    return None if seconds is None else format_position(position_of_time(seconds))


def exported(
    letter: Letter,
    record: DeadLetterRecord,
    positions: Positions = TIME_POSITIONS,
    vault: BodyVault | None = None,
) -> dict[str, Any]:
    """Return a complete dead letter as a JSON value.

    The key of the body is `body` for JSON that a copy can hold, and `body_base64` otherwise. If
    decryption fails, the body stays encrypted, and `body_error` has the reason.

    :param vault: decrypts the body; None without keys.
    """
    body_bytes = len(record.body)
    body, stored, undecrypted = decrypted(record.queue, record.body, record.headers, vault)
    record = replace(record, body=body, headers=stored)
    headers = parsed(record.headers)
    sent, due = (stored_time(headers or {}, name) for name in (SENT, DUE))
    if letter.request is not None:
        sent = letter.request.asked
    return {
        "queue": record.queue,
        "id": letter.id,
        "kind": letter.kind,
        "position": str(record.position) if letter.request is None else None,
        "time": exact_time(sent) or sent_time(record.position, positions),
        "due_time": exact_time(due),
        "dead_time": iso_time(record.dead_at),
        "attempts": record.attempts,
        "error": record.error,
        "traceback": record.traceback,
        "worker": record.worker,
        "fence": record.fence,
        "key": record.key,
        "headers": record.headers if headers is None else headers,
        "body_bytes": body_bytes,
        **({} if undecrypted is None else {"body_error": undecrypted}),
        **body_value(record.body, record.headers),
    }


def _letter(broker: Broker, entry: DeadLetterEntry) -> Letter:
    return Letter(message_id(broker, entry.position, entry.headers), entry)


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
            chunk = []
            size = 0
    if chunk:
        yield chunk
