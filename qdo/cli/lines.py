"""JSON lines into messages: reading, checking, and sending them in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any

from qdo.brokers.base import REFERENCE, Broker, Outgoing, Terms
from qdo.describe import few
from qdo.encoding import decode_strictly
from qdo.errors import BodyError, LineError, PartlySentError, QdoError, QueueNameError
from qdo.names import check_queue_name

BATCH_MESSAGES = 1000
BATCH_BYTES = 4 << 20
CHUNK_BYTES = 1 << 18
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a line cannot be sent."""

    kind: type[QdoError]
    reason: str


@dataclass(frozen=True, slots=True)
class Form:
    """How lines become messages.

    :ivar queue: the queue of all of them, or None: each names its own in `queue_field`.
    :ivar max_bytes: the largest body that the broker takes.
    :ivar larger: what to do about larger ones.
    :ivar terms: when they are to be stored.
    """

    queue: str | None
    queue_field: str | None
    key_field: str | None
    max_bytes: int
    terms: Terms | None = None
    larger: str = REFERENCE

    def message(self, line: bytes) -> Outgoing | Fault:
        """Return the message of a line; its body is the line as it stands."""
        try:
            value = decode_strictly(line.decode())
        except (ValueError, RecursionError) as error:
            return Fault(BodyError, _why(error))
        if len(line) > self.max_bytes:
            return Fault(
                LineError,
                f"the body has {len(line)} bytes, the broker takes {self.max_bytes}: {self.larger}",
            )
        queue = self.queue if self.queue is not None else _text_at(value, self.queue_field)
        if isinstance(queue, Fault):
            return queue
        key = _text_at(value, self.key_field) if self.key_field else None
        if isinstance(key, Fault):
            return key
        try:
            return Outgoing(check_queue_name(queue), line, key, None, self.terms)
        except QueueNameError as error:
            return Fault(LineError, str(error))


def _why(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is no UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _text_at(value: Any, name: str | None) -> str | Fault:
    if not isinstance(value, dict):
        return Fault(LineError, f"it is no JSON object and so has no field {name!r}")
    if name not in value:
        return Fault(LineError, f"it has no field {name!r}")
    found = value[name]
    if isinstance(found, str):
        return found
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return Fault(LineError, f"its field {name!r} is neither text nor a whole number")


@dataclass(slots=True)
class Sending:
    """Sends lines in batches, and knows at every moment what was sent.

    :ivar sent: messages stored durably.
    :ivar line: number of the last line whose message is stored, counted from 1.
    """

    broker: Broker
    form: Form
    source: str
    sent: int = 0
    line: int = 0
    _number: int = 0
    _size: int = 0
    _batch: list[Outgoing] = field(default_factory=list)
    _lines: list[int] = field(default_factory=list)

    def run(self, chunks: Iterable[list[bytes]], told: Callable[[int], object]) -> int:
        """Send all lines; return how many messages. Empty lines are passed over.

        What comes slowly is sent as it comes: a batch ends with what can be read at once.

        :param told: called with the bytes of each chunk once it is sent.
        :raises BodyError: a line is no JSON; everything before it was sent.
        :raises LineError: a line is JSON but no message; everything before it was sent.
        """
        for lines in chunks:
            for line in lines:
                self._add(line)
            self._flush()
            told(sum(map(len, lines)))
        return self.sent

    def _add(self, line: bytes) -> None:
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(_UTF8_MARK)
        line = line.strip()
        if not line:
            return
        message = self.form.message(line)
        if isinstance(message, Fault):
            number = self._number
            self._number -= 1
            self._flush()
            where = f"line {number} of {self.source}"
            raise message.kind(where=where, reason=message.reason, sent=self.sent)
        self._batch.append(message)
        self._lines.append(self._number)
        self._size += len(line)
        if len(self._batch) >= BATCH_MESSAGES or self._size >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            try:
                self.broker.send_many(self._batch)
            except PartlySentError as error:
                self.sent += error.details["done"]
                lines = [self._lines[index] for index in error.details["unsent"]]
                raise PartlySentError(
                    **{**error.details, "rest": f"lines {few(lines)} of {self.source}"}
                ) from error
            self.sent += len(self._batch)
            self._batch = []
            self._lines = []
            self._size = 0
        self.line = self._number


def chunks_of_lines(stream: BufferedReader) -> Iterator[list[bytes]]:
    """Yield lists of lines, each as soon as it can be read, line ends included."""
    begun: list[bytes] = []  # parts of a line whose end was not read yet
    while data := stream.read1(CHUNK_BYTES):
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*begun, whole[0]])
            begun = []
            yield [line + b"\n" for line in whole]
        if rest:
            begun.append(rest)
    if begun:
        yield [b"".join(begun)]
