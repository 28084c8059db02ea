"""The command `qdo send`, which sends one message, or JSON lines from a file or standard input."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any

import click
import ujson

from qdo.brokers.base import REFERENCE, Broker, Outgoing, SendOptions
from qdo.cli.options import DURATION, TIME, code_hint, require_app, with_settings
from qdo.cli.output import print_message
from qdo.connections.broker import open_broker_with_doorbell
from qdo.encoding import MAX_STORED_BODY_BYTES, RESERVED, JsonText, decode_strictly
from qdo.errors import InputLineError, PartialSendError, UsageError
from qdo.message import NORMAL
from qdo.queues import check_queue_name
from qdo.sending.messages import (
    NewMessage,
    TypeOf,
    body_and_kind,
    build_outgoing,
    build_send_options,
    check_options,
    check_size,
    encrypted,
)
from qdo.settings.settings import Settings
from qdo.system.files import sqlite_path
from qdo.text import join_some, pluralize, printable

if TYPE_CHECKING:
    from qdo.app import App

BATCH_MESSAGES = 1000
BATCH_BYTES = 4 << 20
CHUNK_BYTES = 1 << 18
RAISE_LIMIT = "raise the setting max_body_bytes"
# Maximum white space around a JSON body in a file. The white space is not part of the body.
SPACE_BYTES = 1024
_UTF8_MARK = b"\xef\xbb\xbf"


class LineProblem(Exception):
    """A line that cannot be sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LineFormat:
    """Converts lines to messages."""

    # The queue of all messages. If None, each line names its queue in `queue_field`.
    queue: str | None
    queue_field: str | None
    key_field: str | None
    # Maximum size of a body at the broker.
    max_bytes: int
    delay_seconds: float | None = None
    # Unix time at which messages are due.
    at: float | None = None
    # The remedy that an error names for larger bodies.
    larger: str = REFERENCE
    priority: int = NORMAL
    kind: str | None = None
    # See `Sender.type_of`; None if the app's code is unknown.
    type_of: TypeOf | None = None

    def message(self, line: bytes) -> NewMessage:
        """Return the message of a line; raise LineProblem for an invalid line."""
        if len(line) > self.max_bytes + CHUNK_BYTES:  # a part of a line (see `chunks_of_lines`)
            raise self._too_large(f"more than {self.max_bytes + CHUNK_BYTES}")
        value = checked_json(line)
        if len(line) > self.max_bytes:
            raise self._too_large(f"{len(line)}")
        queue = self.queue if self.queue is not None else _text_at(value, self.queue_field)
        key = _text_at(value, self.key_field) if self.key_field else None
        return NewMessage(
            queue,
            JsonText(line),
            key,
            delay_seconds=self.delay_seconds,
            at=self.at,
            priority=self.priority,
            kind=self.kind,
        )

    def _too_large(self, size: str) -> LineProblem:
        return LineProblem(
            f"the body must be at most {self.max_bytes} bytes with this broker, got {size}; "
            f"{self.larger}"
        )

    def outgoing(self, line: bytes) -> Outgoing:
        """Return the checked message of a line; raise LineProblem for an invalid line."""
        try:
            return _outgoing(self.message(line), self.type_of)
        except UsageError as error:
            raise LineProblem(str(error)) from error


def _outgoing(message: NewMessage, type_of: TypeOf | None) -> Outgoing:
    if type_of is not None and isinstance(message.body, JsonText):
        body_and_kind(message.queue, ujson.loads(message.body), message.kind, type_of)
    return build_outgoing(message, type_of)


def checked_json(text: bytes) -> Any:
    """Return the value of a JSON text, or raise LineProblem."""
    try:
        return decode_strictly(text.decode())
    except (ValueError, RecursionError) as error:
        raise LineProblem(f"not valid JSON: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _text_at(value: Any, name: str | None) -> str:
    if not isinstance(value, dict):
        raise LineProblem(f"it must be a JSON object with the field {name!r}")
    if name not in value:
        raise LineProblem(f"it has no field {name!r}")
    content = value[name]
    if isinstance(content, str):
        return content
    if isinstance(content, int) and not isinstance(content, bool):
        return str(content)
    raise LineProblem(f"its field {name!r} must be text or an integer")


class Strays:
    """The queues that no job of the app takes. Empty if the app's code is unknown."""

    def __init__(self, app: App | None) -> None:
        self._app = app
        self._seen: dict[str, bool] = {}

    def note(self, queue: str) -> None:
        if self._app is not None and self._app.jobs and queue not in self._seen:
            self._seen[queue] = self._app.job_for(queue) is None

    def report(self) -> None:
        strays = [repr(queue) for queue, is_stray in self._seen.items() if is_stray]
        if strays and self._app is not None:
            globs = join_some([job.queues for job in self._app.jobs])
            print_message(
                f"hint: no job of app {self._app.name!r} takes {pluralize(len(strays), 'queue')} "
                f"({join_some(strays)}); its jobs are for {globs}"
            )


@dataclass(slots=True)
class LineSender:
    """Sends lines in batches and counts the messages that were sent."""

    broker: Broker
    line_format: LineFormat
    source: str
    encrypt: Callable[[list[Outgoing]], list[Outgoing]] = lambda messages: messages
    note: Callable[[str], object] = lambda queue: None
    # Number of durably stored messages.
    sent: int = 0
    # Number of the last line with a stored message, counted from 1.
    line: int = 0
    _number: int = 0
    _size: int = 0
    _batch: list[Outgoing] = field(default_factory=list)
    _lines: list[int] = field(default_factory=list)

    def run(self, chunks: Iterable[list[bytes]], progress: Callable[[int], object]) -> int:
        """Send all lines except empty lines; return the number of messages.

        A batch contains only the lines that can be read immediately. Therefore slow input is sent
        without delay.

        :param progress: a function to call with the size of each sent chunk.
        :raises InputLineError: a line is not a message. All lines before this line have been sent.
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
            message = self.line_format.outgoing(line)
        except LineProblem as problem:
            number = self._number
            self._number -= 1  # `line` counts only sent lines
            self._flush()
            where = f"line {number} of {self.source}"
            raise InputLineError(where=where, reason=problem.reason, sent=self.sent) from problem
        self.note(message.queue)
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
    """Yield lists of lines, with line ends, as soon as the lines can be read.

    :param longest: maximum length. A longer line comes in parts. The caller can then reject the
        line before it fills the memory.
    """
    begun: list[bytes] = []  # the parts of an unfinished line
    size = 0
    while data := stream.read1(CHUNK_BYTES):
        *whole, part = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*begun, whole[0]])
            begun = []
            size = 0
            yield [line + b"\n" for line in whole]
        if part:
            begun.append(part)
            size += len(part)
        if size > longest + CHUNK_BYTES:
            yield [b"".join(begun)]
            begun = []
            size = 0
    if begun:
        yield [b"".join(begun)]


@click.command()
@click.argument("queue", required=False)
@click.argument("body", required=False)
@click.option("-f", "--file", "path", metavar="FILE", help="JSON lines to send; - is stdin.")
@click.option("--queue-field", metavar="FIELD", help="Field of a line that names its queue.")
@click.option("--key-field", metavar="FIELD", help="Field of a line that is the message's key.")
@click.option("--key", metavar="TEXT", help="Key of a single message.")
@click.option("--header", "headers", metavar="NAME=TEXT", multiple=True, help="May be repeated.")
@click.option("--raw", is_flag=True, help="Send BODY, or the whole FILE, as bytes instead of JSON.")
@click.option(
    "--delay",
    "delay_seconds",
    type=DURATION,
    help="Deliver after this delay: 90, 15m, 2h, 7d; with a file, each line.",
)
@click.option("--at", type=TIME, help="Deliver at this time: ISO 8601, or a Unix time.")
@click.option(
    "--dedup-key",
    metavar="TEXT",
    help="Store no second message with this key; print the id of the first.",
)
@click.option(
    "--dedup-seconds", type=DURATION, help="Length of the deduplication window; default 5m."
)
@click.option(
    "--priority",
    type=click.IntRange(0, 9),
    default=NORMAL,
    show_default=True,
    help='0 is the most urgent, for jobs with order="priority"; with a file, of each line.',
)
@click.option("--kind", metavar="NAME", help="Kind of the message; with a file, of each line.")
@with_settings("app", "broker", "group", pass_app=True)
def send(
    queue: str | None,
    body: str | None,
    path: str | None,
    queue_field: str | None,
    key_field: str | None,
    key: str | None,
    headers: tuple[str, ...],
    raw: bool,
    dedup_key: str | None,
    dedup_seconds: float | None,
    code: App | None,
    settings: Settings,
    **terms: Any,
) -> None:
    """Send a message with a JSON BODY to QUEUE, or one for each line of a file.

    \b
    qdo send --app hello:app greetings '{"name": "Ada"}' --delay 15m
    qdo send --app churn --file commits.jsonl --queue-field repo
    qdo send --app images thumbnails --raw --file photo.jpg --header content-type=image/jpeg
    producer | qdo send --app hello:app greetings --file -

    A message is durable once it is reported as sent. An invalid line ends the command: everything
    before it is sent, and the error has its number. JSON text needs double quotes: '"Ada"'. Numbers
    too large for a float, half surrogate pairs, and keys twice in an object are rejected.
    """
    require_app(settings)
    strays = Strays(code)
    options = _options(terms["delay_seconds"], terms["at"], dedup_key, dedup_seconds)
    type_of = None if code is None else code.type_of
    if queue is not None:
        check_queue_name(queue)
    if path is None or raw:
        if queue is None or (body is None) == (path is None) or queue_field or key_field:
            raise _misused(raw)
        content = _content(queue, body, path, raw, settings)
        dedup: dict[str, Any] = {"dedup_key": dedup_key, "dedup_seconds": dedup_seconds}
        strays.note(queue)
        message = NewMessage(queue, content, key, _headers(headers), **dedup, **terms)
        _send_one(settings, _outgoing(message, type_of))
    else:
        is_unclear = (queue is None) == (queue_field is None)
        if is_unclear or body is not None or key or headers or dedup_key:
            raise _misused_file()
        line_format = LineFormat(queue, queue_field, key_field, 0, type_of=type_of, **terms)
        _send_file(settings, path, line_format, options, strays.note)
    strays.report()


def _misused(raw: bool) -> UsageError:
    return UsageError(
        reason="with --raw give QUEUE, and either BODY or --file FILE"
        if raw
        else "give QUEUE and BODY, or --file FILE with QUEUE or --queue-field FIELD"
    )


def _misused_file() -> UsageError:
    return UsageError(
        reason="with --file give either QUEUE or --queue-field FIELD, and no BODY, --key, "
        "--header or --dedup-key"
    )


def _headers(pairs: tuple[str, ...]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    for name, equals, text in split:
        if not name or not equals:
            pair = name + equals + text
            raise UsageError(reason=f"--header must have the form NAME=TEXT, got {pair!r}")
        if name.startswith(RESERVED):
            raise UsageError(
                reason=f"header {name!r}: names that begin with {RESERVED} are reserved for qdo; "
                "choose another name"
            )
    return {name: text for name, _, text in split}


def _options(
    delay: float | None, at: float | None, dedup_key: str | None, dedup_seconds: float | None
) -> SendOptions | None:
    if delay is not None and at is not None:
        raise UsageError(reason="give --delay or --at, not both")
    if dedup_seconds is not None and dedup_key is None:
        raise UsageError(reason="--dedup-seconds requires --dedup-key: it is the key's window")
    return build_send_options(delay, at, dedup_key, dedup_seconds)


def _content(
    queue: str, body: str | None, path: str | None, raw: bool, settings: Settings
) -> bytes:
    """Return BODY or the content of FILE. Read only the beginning of a file that is too large."""
    if body is not None:
        data = os.fsencode(body)
    else:
        with ExitStack() as stack:
            data = _opened(path or "-", stack)[0].read(settings.max_body_bytes + SPACE_BYTES)
        check_size(Outgoing(queue, data.strip()), settings.max_body_bytes)
    return data if raw else _json(data)


def _json(data: bytes) -> JsonText:
    text = data.strip()
    try:
        checked_json(text)
    except LineProblem as problem:
        raise UsageError(
            reason=f"the body is {problem.reason}; text must be quoted: "
            "'\"text\"'; for bytes use --raw"
        ) from problem
    return JsonText(text)


def _send_one(settings: Settings, outgoing: Outgoing) -> None:
    check_size(outgoing, settings.max_body_bytes)
    encrypted([outgoing], settings, settings.app, str)  # without a usable key, create no file
    with _broker(settings, outgoing.terms) as broker:
        (outgoing,) = encrypted([outgoing], settings, settings.app, broker.stream_of)
        print(printable(str(broker.send(outgoing))), flush=True)


@contextmanager
def _broker(settings: Settings, options: SendOptions | None) -> Iterator[Broker]:
    hint = code_hint(settings, "broker")
    path = sqlite_path(settings.broker) or settings.broker
    is_new = bool(hint) and not os.path.exists(path)
    with open_broker_with_doorbell(settings, settings.app) as broker:
        check_options(broker.capabilities, options, settings.broker)
        yield broker
    if is_new:
        print_message(f"hint: created {path}{hint}")


def _send_file(
    settings: Settings,
    path: str,
    line_format: LineFormat,
    options: SendOptions | None,
    note: Callable[[str], object],
) -> None:
    with ExitStack() as stack:
        stream, source = _opened(path, stack)
        broker = stack.enter_context(_broker(settings, options))
        able = broker.capabilities
        limit = min(able.max_body_bytes, settings.max_body_bytes)
        larger = able.larger_bodies if limit == able.max_body_bytes else RAISE_LIMIT
        line_format = replace(line_format, max_bytes=limit, larger=larger)
        encrypt = partial(
            encrypted, settings=settings, app=settings.app, stream_of=broker.stream_of
        )
        sender = LineSender(broker, line_format, source, encrypt, note)
        with _report_count(sender), _progress(stream, source) as progress:
            sender.run(chunks_of_lines(stream, limit), progress)


@contextmanager
def _report_count(sender: LineSender) -> Iterator[None]:
    """Report the number of sent messages on stderr, or in the error about a line."""
    try:
        yield
    except InputLineError:
        raise
    except BaseException:
        sent = pluralize(sender.sent, "message")
        print_message(f"sent {sent}, up to line {sender.line} of {sender.source}")
        raise
    print_message(f"sent {pluralize(sender.sent, 'message')}")


def _opened(path: str, stack: ExitStack) -> tuple[BufferedReader, str]:
    if path == "-":
        stream = sys.stdin.buffer
        if not isinstance(stream, BufferedReader):
            raise UsageError(reason="standard input cannot be read as bytes")
        return stream, "standard input"
    try:
        return stack.enter_context(open(path, "rb")), path
    except OSError as error:
        raise UsageError(reason=f"--file {path}: {error.strerror}") from error


@contextmanager
def _progress(stream: BufferedReader, source: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar if stderr is a terminal.

    Yield a function to call with the number of bytes.
    """
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import Progress

    status = os.fstat(stream.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else None
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(f"sending {source}"), total=total)
        yield lambda size: bar.advance(task, size)
