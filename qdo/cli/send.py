"""`qdo send`: one message, or JSON lines from a file or standard input."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import BufferedReader

import click

from qdo.brokers import open_broker
from qdo.brokers.base import Broker, Outgoing, Terms
from qdo.cli.lines import Fault, Form, Sending, chunks_of_lines
from qdo.cli.output import say
from qdo.cli.shell import require_app, with_settings
from qdo.cli.times import moment_of, seconds_of
from qdo.describe import counted
from qdo.encoding import encoded
from qdo.errors import BodyError, LineError, UsageError
from qdo.headers import RESERVED
from qdo.names import check_queue_name
from qdo.ringing import ring_for
from qdo.sending import check_terms, terms
from qdo.settings import Settings


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options say about every message."""

    key: str | None
    headers: Mapping[str, str]
    terms: Terms | None
    raw: bool


@click.command()
@click.argument("queue", required=False)
@click.argument("body", required=False)
@click.option("-f", "--file", "path", metavar="FILE", help="JSON lines to send; - is stdin.")
@click.option("--queue-field", metavar="FIELD", help="Field of a line that names its queue.")
@click.option("--key-field", metavar="FIELD", help="Field of a line that is the message's key.")
@click.option("--key", metavar="TEXT", help="Key of a single message.")
@click.option("--header", "headers", metavar="NAME=TEXT", multiple=True, help="May be repeated.")
@click.option("--raw", is_flag=True, help="Send BODY, or all of FILE, as bytes, not as JSON.")
@click.option("--delay", metavar="DURATION", help="Deliver so much later: 90, 15m, 2h, 7d.")
@click.option("--at", metavar="TIME", help="Deliver at this time: ISO 8601, or a Unix time.")
@click.option("--dedup-key", metavar="TEXT", help="Send only if this key was not sent lately.")
@click.option("--dedup-seconds", metavar="DURATION", help="What lately means; default 5m.")
@with_settings("app", "broker")
def send(
    queue: str | None,
    body: str | None,
    path: str | None,
    queue_field: str | None,
    key_field: str | None,
    key: str | None,
    headers: tuple[str, ...],
    raw: bool,
    delay: str | None,
    at: str | None,
    dedup_key: str | None,
    dedup_seconds: str | None,
    settings: Settings,
) -> None:
    """Send a message with a JSON BODY to QUEUE, or one for each line of a file.

    \b
    qdo send --app hello greetings '{"name": "Ada"}'
    qdo send --app hello greetings '{"name": "Ada"}' --delay 15m
    qdo send --app churn --file commits.jsonl --queue-field repo
    qdo send --app images thumbnails --raw --file photo.jpg --header content-type=image/jpeg
    producer | qdo send --app hello greetings --file -

    A message is durable when it is reported as sent. A bad line ends the command: everything
    before it is sent, and how much that is stands on stderr.
    """
    app = require_app(settings)
    wanted = Wanted(key, _headers(headers), _terms(delay, at, dedup_key, dedup_seconds), raw)
    if path is None or raw:
        if queue is None or (body is None) == (path is None) or queue_field or key_field:
            raise UsageError(
                reason="give QUEUE and BODY, or --file FILE with QUEUE or --queue-field FIELD"
                if not raw
                else "with --raw give QUEUE, and either BODY or --file FILE"
            )
        check_queue_name(queue)
        data = os.fsencode(body) if body is not None else _contents(path or "-")
        _send_one(settings, app, queue, data, wanted)
        return
    if body is not None or key or headers or dedup_key or (queue is None) == (queue_field is None):
        raise UsageError(
            reason="with --file give either QUEUE or --queue-field FIELD, and no BODY, --key, "
            "--header or --dedup-key"
        )
    if queue is not None:
        check_queue_name(queue)
    _send_file(settings, app, path, Form(queue, queue_field, key_field, 0, wanted.terms))


def _headers(pairs: tuple[str, ...]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    for name, equals, _ in split:
        if not name or not equals:
            raise UsageError(reason=f"{name!r} is no header: write --header NAME=TEXT")
        if name.startswith(RESERVED):
            raise UsageError(reason=f"header {name!r}: qdo itself gives the headers {RESERVED}*")
    return {name: text for name, _, text in split}


def _terms(
    delay: str | None, at: str | None, dedup_key: str | None, dedup_seconds: str | None
) -> Terms | None:
    if delay is not None and at is not None:
        raise UsageError(reason="give --delay or --at, not both")
    if dedup_seconds is not None and dedup_key is None:
        raise UsageError(reason="--dedup-seconds is the window of a --dedup-key: give one")
    return terms(
        None if delay is None else seconds_of(delay, "--delay"),
        None if at is None else moment_of(at, "--at"),
        dedup_key,
        None if dedup_seconds is None else seconds_of(dedup_seconds, "--dedup-seconds"),
    )


def _contents(path: str) -> bytes:
    """Return what stands in a file."""
    with ExitStack() as stack:
        return _opened(path, stack)[0].read()


def _send_one(settings: Settings, app: str, queue: str, data: bytes, wanted: Wanted) -> None:
    if wanted.raw:
        body, head = encoded(queue, data, wanted.headers)
    else:
        body, head = _checked_json(queue, data), encoded(queue, None, wanted.headers)[1]
    whole = Outgoing(queue, body, wanted.key, head, wanted.terms)
    with _broker(settings, app, wanted.terms) as broker:
        print(broker.send(whole), flush=True)


def _checked_json(queue: str, data: bytes) -> bytes:
    """Return a body as it stands, once it is certain to be JSON."""
    message = Form(queue, None, None, max_bytes=sys.maxsize).message(data.strip())
    if isinstance(message, Fault):
        raise UsageError(
            reason=f"the body is not valid JSON: {message.reason}; text needs quotes of its own: "
            "'\"text\"', and bytes --raw"
        )
    return message.body


@contextmanager
def _broker(settings: Settings, app: str, wanted: Terms | None) -> Iterator[Broker]:
    broker = open_broker(settings.broker, app)
    ringer = ring_for(broker, settings, app)
    with closing(ringer) if ringer is not None else nullcontext(), closing(broker):
        check_terms(broker.capabilities, wanted, settings.broker)
        yield broker


def _send_file(settings: Settings, app: str, path: str, form: Form) -> None:
    with ExitStack() as stack:
        stream, source = _opened(path, stack)
        broker = stack.enter_context(_broker(settings, app, form.terms))
        able = broker.capabilities
        form = replace(form, max_bytes=able.max_body_bytes, larger=able.larger_bodies)
        sending = Sending(broker, form, source)
        with _count_said(sending), _progress(stream, source) as told:
            sending.run(chunks_of_lines(stream), told)


@contextmanager
def _count_said(sending: Sending) -> Iterator[None]:
    """Say on stderr how much was sent, however it ends; the errors of a line say it themselves."""
    try:
        yield
    except (BodyError, LineError):
        raise
    except BaseException:
        sent = counted(sending.sent, "message")
        say(f"sent {sent}, up to line {sending.line} of {sending.source}")
        raise
    say(f"sent {counted(sending.sent, 'message')}")


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
    """Show a bar on stderr where that is a terminal; yields what tells it of bytes read."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import Progress

    status = os.fstat(stream.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else None
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"sending {source}", total=total)
        yield lambda size: bar.advance(task, size)
