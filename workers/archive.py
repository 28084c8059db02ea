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
from qdo.message import format_position
from workers.archive_places import Place, folder_of, open_place
from workers.options import expect, option, read

SUFFIX = ".jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be set, as QDO_ARCHIVE_URL."""

    PREFIX: ClassVar[str] = "QDO_ARCHIVE_"

    url: str = option("where files go: file:FOLDER or s3://BUCKET/PREFIX")


@dataclass(frozen=True, slots=True)
class Span:
    """From the first position of a file to its last one, both included."""

    first: int
    last: int

    def __contains__(self, position: int) -> bool:
        return self.first <= position <= self.last


# --- names and lines ----------------------------------------------------------------


def name_of(queue: str, span: Span) -> str:
    """Return the name of the file for a span of a queue."""
    return f"{folder_of(queue)}/{_day(span.last)}/{span.last:020d}-{span.first:020d}{SUFFIX}"


def span_of(name: str) -> Span | None:
    """Return the span that a name says, None for a file of another kind."""
    last, _, first = name.rpartition("/")[2].removesuffix(SUFFIX).partition("-")
    if name.endswith(SUFFIX) and last.isdecimal() and first.isdecimal():
        return Span(int(first), int(last))
    return None


def _day(position: int) -> str:
    return format_position(position)[:10]


def line_of(message: Message) -> bytes:
    """Return a message as a line of JSON; bytes are in base64, as ``body_base64``."""
    row: dict[str, Any] = {
        "id": message.id,
        "queue": message.queue,
        "position": message.position,
        "time": format_position(message.position),
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
        name = name_of(messages[0].queue, span)
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
            start = f"{folder}/{_day(first.position)}/{first.position:020d}"
            names = self._place.names(folder, start)
            spans = [span for name in names if (span := span_of(name)) is not None]
        spans = [span for span in spans if span.last >= first.position]
        self._known[first.queue] = _Known(first.fence, last, spans)
        return spans


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
