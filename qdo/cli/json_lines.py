"""JSON lines to messages: reading chunks of lines, and sending them in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any

from qdo.brokers.base import REFERENCE, Broker, Outgoing
from qdo.encoding import MAX_STORED_BODY_BYTES, JsonText, decode_strictly
from qdo.errors import BodyError, InputLineError, PartialSendError, QdoError, UsageError
from qdo.sending.messages import NewMessage, build_outgoing
from qdo.text import join_some

BATCH_MESSAGES = 1000
BATCH_BYTES = 4 << 20
CHUNK_BYTES = 1 << 18
_UTF8_MARK = b"\xef\xbb\xbf"


class LineProblem(Exception):
    """A line that cannot be sent, and the error to raise for it."""

    def __init__(self, kind: type[QdoError], reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LineFormat:
    """How lines become messages.

    :ivar queue: the queue of all messages, or None: each line names its queue in `queue_field`.
    :ivar max_bytes: the largest body that the broker takes.
    :ivar larger: the remedy for larger bodies.
    :ivar at: Unix time at which the messages are to be delivered, None for now.
    """

    queue: str | None
    queue_field: str | None
    key_field: str | None
    max_bytes: int
    at: float | None = None
    larger: str = REFERENCE

    def message(self, line: bytes) -> NewMessage:
        """Return the message of a line; its body is the unchanged line.

        :raises LineProblem: the line is not JSON, too large, or lacks a field.
        """
        if len(line) > self.max_bytes + CHUNK_BYTES:  # perhaps only a part, see `chunks_of_lines`
            raise self._too_large(f"more than {self.max_bytes + CHUNK_BYTES}")
        value = checked_json(line)
        if len(line) > self.max_bytes:
            raise self._too_large(f"{len(line)}")
        queue = self.queue if self.queue is not None else _text_at(value, self.queue_field)
        key = _text_at(value, self.key_field) if self.key_field else None
        return NewMessage(queue, JsonText(line), key, at=self.at)

    def _too_large(self, size: str) -> LineProblem:
        return LineProblem(
            InputLineError,
            f"the body must be at most {self.max_bytes} bytes with this broker, got {size}; "
            f"{self.larger}",
        )

    def outgoing(self, line: bytes) -> Outgoing:
        """Return the checked message of a line in the form that brokers take.

        :raises LineProblem: as `message`, or the message is invalid.
        """
        try:
            return build_outgoing(self.message(line))
        except UsageError as error:
            raise LineProblem(InputLineError, str(error)) from error


def checked_json(text: bytes) -> Any:
    """Return the value of a JSON text.

    :raises LineProblem: it is not valid JSON.
    """
    try:
        return decode_strictly(text.decode())
    except (ValueError, RecursionError) as error:
        raise LineProblem(BodyError, _reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _text_at(value: Any, name: str | None) -> str:
    if not isinstance(value, dict):
        raise LineProblem(InputLineError, f"it must be a JSON object with the field {name!r}")
    if name not in value:
        raise LineProblem(InputLineError, f"it has no field {name!r}")
    found = value[name]
    if isinstance(found, str):
        return found
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    raise LineProblem(InputLineError, f"its field {name!r} must be text or an integer")


@dataclass(slots=True)
class LineSender:
    """Sends lines in batches and counts the messages that were sent.

    :ivar sent: messages stored durably.
    :ivar line: number of the last line whose message is stored, counted from 1.
    """

    broker: Broker
    form: LineFormat
    source: str
    encrypt: Callable[[list[Outgoing]], list[Outgoing]] = lambda messages: messages
    sent: int = 0
    line: int = 0
    _number: int = 0
    _size: int = 0
    _batch: list[Outgoing] = field(default_factory=list)
    _lines: list[int] = field(default_factory=list)

    def run(self, chunks: Iterable[list[bytes]], progress: Callable[[int], object]) -> int:
        """Send all lines except empty ones; return the number of messages.

        Slow input is sent as it arrives: a batch ends with the lines that can be read at once.

        :param progress: called with the bytes of each chunk after it was sent.
        :raises BodyError: a line is not JSON; everything before it was sent.
        :raises InputLineError: a line is JSON but not a message; everything before it was sent.
        """
        for lines in chunks:
            for line in lines:
                self._add(line)
            self._flush()
            progress(sum(map(len, lines)))
        return self.sent

    def _add(self, line: bytes) -> None:
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(_UTF8_MARK)
        line = line.strip()
        if not line:
            return
        try:
            message = self.form.outgoing(line)
        except LineProblem as problem:
            number = self._number
            self._number -= 1
            self._flush()
            where = f"line {number} of {self.source}"
            raise problem.kind(where=where, reason=problem.reason, sent=self.sent) from problem
        self._batch.append(message)
        self._lines.append(self._number)
        self._size += len(line)
        if len(self._batch) >= BATCH_MESSAGES or self._size >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            try:
                self.broker.send_many(self.encrypt(self._batch))
            except PartialSendError as error:
                self.sent += error.details["done"]
                lines = [self._lines[index] for index in error.details["unsent"]]
                raise PartialSendError(
                    **{**error.details, "rest": f"lines {join_some(lines)} of {self.source}"}
                ) from error
            self.sent += len(self._batch)
            self._batch = []
            self._lines = []
            self._size = 0
        self.line = self._number


def chunks_of_lines(
    stream: BufferedReader, longest: int = MAX_STORED_BODY_BYTES
) -> Iterator[list[bytes]]:
    """Yield lists of lines, each as soon as it can be read, line ends included.

    :param longest: a line that has more bytes is yielded in parts, so that it can be refused
        before it takes all memory.
    """
    begun: list[bytes] = []  # parts of a line whose end was not read yet
    size = 0
    while data := stream.read1(CHUNK_BYTES):
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*begun, whole[0]])
            begun, size = [], 0
            yield [line + b"\n" for line in whole]
        if rest:
            begun.append(rest)
            size += len(rest)
        if size > longest + CHUNK_BYTES:
            yield [b"".join(begun)]
            begun, size = [], 0
    if begun:
        yield [b"".join(begun)]
