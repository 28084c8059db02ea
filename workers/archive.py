"""Keeps every message in gzip files of JSON lines, in a folder or in S3.

    export QDO_ARCHIVE_URL=file:/srv/archive       # or s3://BUCKET/PREFIX
    qdo-worker workers.archive:app
    qdo send --app archive orders '{"order": 1}'

A file holds messages that follow each other in one queue. Its name says which: queue, day, and the
positions of the last and the first of them. So the same messages always have the same name, and
files sort in the order of the queue::

    orders/2026-11-21/00140145345092631279-00140145345071818127.jsonl.gz

A message is done once its file is durable: synced and renamed into place, or stored by S3. After
a crash messages run again; those that a file of the queue holds already are left out, so that each
is there once. The one exception is a worker that is frozen in the middle of writing a file, loses
its queue, and goes on: its messages may be in two files. Lines have position and id to tell.

With Kinesis positions are wider than times, and so are the names of files. With SQS a message gets
another position whenever it is delivered: what runs again after a crash is there twice then, and
its id tells.

S3 needs ``pip install 'qdo[aws]'``, and the credentials that boto3 finds by itself.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ujson

from qdo import App, Message
from qdo.errors import SettingsError
from qdo.message import format_position, position_of_time
from workers.archive_places import Place, folder_of, open_place
from workers.options import expect, option, read

SUFFIX = ".jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be set, as QDO_ARCHIVE_URL."""

    PREFIX: ClassVar[str] = "QDO_ARCHIVE_"

    url: str = option("where files go: file:FOLDER or s3://BUCKET/PREFIX")


TIME_DIGITS = 20
WIDE_DIGITS = 100
"""Positions have as many digits in names, so that these sort as the positions do: those that are
times, and all others."""
DAY_SECONDS = 86_400.0
MAX_TIME = 2**63
"""Beyond it a position is no time."""


@dataclass(frozen=True, slots=True)
class Span:
    """From the first position of a file to its last one, both included."""

    first: int
    last: int

    def __contains__(self, position: int) -> bool:
        return self.first <= position <= self.last


# --- names and lines ----------------------------------------------------------------


def name_of(queue: str, span: Span, day: str) -> str:
    """Return the name of the file for a span of a queue, of which the last message is of a day."""
    return f"{folder_of(queue)}/{day}/{_digits(span.last)}-{_digits(span.first)}{SUFFIX}"


def span_of(name: str) -> Span | None:
    """Return the span that a name says, None for a file of another kind."""
    last, _, first = name.rpartition("/")[2].removesuffix(SUFFIX).partition("-")
    if name.endswith(SUFFIX) and last.isdecimal() and first.isdecimal():
        return Span(int(first), int(last))
    return None


def _digits(position: int) -> str:
    return f"{position:0{TIME_DIGITS if position < MAX_TIME else WIDE_DIGITS}d}"


def _sent(message: Message) -> str:
    """Return when a message was sent, in ISO 8601."""
    is_time = message.position < MAX_TIME
    return format_position(message.position if is_time else position_of_time(message.time))


def day_of(message: Message) -> str:
    """Return the day on which a message was sent, in UTC."""
    return _sent(message)[:10]


def line_of(message: Message) -> bytes:
    """Return a message as a line of JSON; bytes are in base64, as ``body_base64``."""
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
    return ujson.dumps(row, ensure_ascii=False, escape_forward_slashes=False).encode() + b"\n"


def packed(messages: Iterable[Message]) -> bytes:
    """Return the content of a file: the same bytes for the same messages."""
    return gzip.compress(b"".join(map(line_of, messages)), mtime=0)


# --- the archive --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a queue: its claim, how far it got, and what files hold from there on."""

    fence: int
    last: int
    spans: list[Span]


class Archive:
    """Writes messages to a place, each once.

    Safe to use from several threads, one at a time for each queue.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[str, _Known] = {}

    def keep(self, messages: Sequence[Message]) -> list[str]:
        """Store messages that follow each other in a queue; return the names of new files.

        What is stored already is left out. Durable on return.
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
        """Return what files hold of messages that may have been written before.

        While a claim goes forward only what another one wrote can be there, so the place is
        asked at its start, and again after a step back: another attempt, or an operator's seek.
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
    """Return where in its folder to look for files that may hold a message or one behind it.

    Times beside positions need not grow with them: then also on the day before.
    """
    if first.position < MAX_TIME:
        return f"{day_of(first)}/{_digits(first.position)}"
    return f"{format_position(position_of_time(first.time - DAY_SECONDS))[:10]}/"


@contextlib.contextmanager
def job_context() -> Iterator[Archive]:
    """Yield an archive at the place that the environment says.

    :raises SettingsError: an option is missing or will not do, or nothing can be stored there.
    """
    options = read(Options)
    try:
        place = open_place(options.url)
    except (OSError, ValueError) as error:
        raise SettingsError(name="QDO_ARCHIVE_URL", reason=str(error)) from error
    yield Archive(place)


app = App("archive", job_context=job_context)


# Compressing and syncing would hold up the event loop.
@app.job(executor="thread", batch=500, batch_wait_seconds=1.0)
def job(message: Message | Sequence[Message], context: Archive) -> None:
    """Store a message, or several that follow each other, in one file."""
    messages = [message] if isinstance(message, Message) else message
    expect(context, Archive, "archive").keep(messages)
