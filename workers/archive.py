"""Stores every message in gzip files of JSON lines, in a folder or in S3.

    export QDO_ARCHIVE_URL=file:/srv/archive       # or s3://BUCKET/PREFIX
    qdo-worker qdo.programs.archive:app
    qdo send --app archive orders '{"order": 1}'

A file holds consecutive messages of one queue. Its name consists of the queue, the day, and the
positions of the last and the first message. Therefore the same messages always have the same file
name, and files sort in the order of the queue::

    orders/2026-11-21/00140145345092631279-00140145345071818127.jsonl.gz

A message is done once its file is durable, which means synced and renamed into place, or stored by
S3. After a crash messages run again. The archive skips messages that a file of the queue already
contains, so each message is stored once. There is one exception. A worker may be frozen while it
writes a file, lose its queue, and then continue. The worker's messages may then be in two files.
Readers recognize these messages by position or id.

Positions of Kinesis are longer than timestamps, and so are the file names. With SQS, a message gets
a new position in every delivery. A message that runs again after a crash is then stored twice, and
readers recognize it by its id.

S3 needs ``pip install 'qdo-queues[aws]'``. boto3 finds the credentials in its usual way.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qdo import App, Message
from qdo.errors import SettingsError
from qdo.positions import format_position, position_of_time, time_of_position
from qdo.programs._archive_storage import Place, folder_of, open_place
from qdo.programs._json import json_bytes
from qdo.programs._options import expect, option, read

SUFFIX = ".jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions:
    """Options of the program: QDO_ARCHIVE_URL."""

    PREFIX: ClassVar[str] = "QDO_ARCHIVE_"

    url: str = option("location of the files: file:FOLDER or s3://BUCKET/PREFIX")


TIME_DIGITS = 20
WIDE_DIGITS = 100
"""Digits of a position in a file name, so that names sort in the order of positions:
`TIME_DIGITS` for positions that are timestamps, `WIDE_DIGITS` for all others."""
DAY_SECONDS = 86_400.0
MAX_TIME = 2**63
"""Larger positions are not timestamps."""


@dataclass(frozen=True, slots=True)
class Span:
    """The first and the last position of a file, both inclusive."""

    first: int
    last: int

    def __contains__(self, position: int) -> bool:
        return self.first <= position <= self.last


# --- names and lines ----------------------------------------------------------------


def name_of(queue: str, span: Span, day: str) -> str:
    """Return the file name for a span of a queue. `day` is the day of the last message."""
    return f"{folder_of(queue)}/{day}/{_digits(span.last)}-{_digits(span.first)}{SUFFIX}"


def span_of(name: str) -> Span | None:
    """Return the span in a file name, or None if the file is not an archive file."""
    last, _, first = name.rpartition("/")[2].removesuffix(SUFFIX).partition("-")
    if name.endswith(SUFFIX) and _is_position(last) and _is_position(first):
        return Span(int(first), int(last))
    return None


def _is_position(digits: str) -> bool:
    return digits.isascii() and digits.isdecimal() and len(digits) <= WIDE_DIGITS


def _digits(position: int) -> str:
    return f"{position:0{TIME_DIGITS if position < MAX_TIME else WIDE_DIGITS}d}"


def _sent(message: Message) -> str:
    """Return the time at which a message was sent, in ISO 8601."""
    if message.position < MAX_TIME and message.time == time_of_position(message.position):
        return format_position(message.position)  # a float is less exact
    return format_position(position_of_time(message.time))


def day_of(message: Message) -> str:
    """Return the day in UTC of a message's position, or the day on which the message was sent."""
    is_time = message.position < MAX_TIME
    return format_position(message.position if is_time else position_of_time(message.time))[:10]


def line_of(message: Message) -> bytes:
    """Return a message as a line of JSON. A body of bytes becomes ``body_base64``."""
    row: dict[str, Any] = {
        "id": message.id,
        "queue": message.queue,
        "position": message.position,
        "time": _sent(message),
        "key": message.key,
        "headers": dict(message.headers),
    }
    if isinstance(message.body, bytes):
        row["body_base64"] = base64.b64encode(message.body).decode()
    else:
        row["body"] = message.body
    return json_bytes(row) + b"\n"


def packed(messages: Iterable[Message]) -> bytes:
    """Return the content of a file. The same messages give the same bytes."""
    return gzip.compress(b"".join(map(line_of, messages)), mtime=0)


# --- the archive --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """The fence and the last position of a queue, and the spans of its later files."""

    fence: int
    last: int
    spans: list[Span]


class Archive:
    """Writes messages to a place, each message once.

    Several threads may use the archive, but only one thread at a time for each queue.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[str, _Known] = {}

    def keep(self, messages: Sequence[Message]) -> list[str]:
        """Store consecutive messages of a queue durably; return the names of new files.

        Skip messages that are already stored.
        """
        if not messages:
            return []
        spans = self._spans(messages)
        written = []
        for held, run in itertools.groupby(
            messages, lambda each: any(each.position in span for span in spans)
        ):
            if not held:
                written.append(self._write(list(run)))
        return written

    def _write(self, messages: Sequence[Message]) -> str:
        span = Span(messages[0].position, messages[-1].position)
        name = name_of(messages[0].queue, span, day_of(messages[-1]))
        self._place.write(name, packed(messages))
        return name

    def _spans(self, messages: Sequence[Message]) -> list[Span]:
        """Return the spans of existing files that may contain these messages.

        While a claim moves forward, only files of earlier claims can contain its messages.
        Therefore list the files at the start of a claim, and again when the queue moves back
        because of another attempt or an operator's seek.
        """
        first, last = messages[0], messages[-1].position
        before = self._known.get(first.queue)
        if before is not None and before.fence == first.fence and before.last < first.position:
            spans = before.spans
        else:
            folder = folder_of(first.queue)
            names = self._place.names(folder, f"{folder}/{_start(first)}")
            spans = [span for name in names if (span := span_of(name)) is not None]
        spans = [span for span in spans if span.last >= first.position]
        self._known[first.queue] = _Known(first.fence, last, spans)
        return spans


def _start(first: Message) -> str:
    """Return the first name in a folder at which files may hold this message or a later message.

    If positions are not timestamps, times need not grow with positions. Then start a day earlier.
    """
    if first.position < MAX_TIME:
        return f"{day_of(first)}/{_digits(first.position)}"
    return f"{format_position(position_of_time(first.time - DAY_SECONDS))[:10]}/"


@contextlib.contextmanager
def job_context() -> Iterator[Archive]:
    """Yield an archive at the location from the environment.

    :raises SettingsError: an option is missing or invalid, or the location is not writable.
    """
    options = read(ArchiveOptions)
    try:
        place = open_place(options.url)
    except (OSError, ValueError) as error:
        raise SettingsError(name="QDO_ARCHIVE_URL", reason=str(error)) from error
    yield Archive(place)


app = App("archive", job_context=job_context)


# Use a thread, because compressing and syncing would block the event loop.
@app.job(executor="thread", batch=500, batch_wait_seconds=1.0)
def job(message: Message | Sequence[Message], context: Archive) -> None:
    """Store a message, or several consecutive messages, in one file."""
    messages = [message] if isinstance(message, Message) else message
    expect(context, Archive, "archive").keep(messages)
