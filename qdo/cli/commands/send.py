"""`qdo send`: one message, or JSON lines from a file or standard input."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import BufferedReader

import click

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.cli.app_settings import code_hint
from qdo.cli.durations import parse_duration, parse_time
from qdo.cli.framework import require_app, with_settings
from qdo.cli.json_lines import (
    LineFormat,
    LineProblem,
    LineSender,
    checked_json,
    chunks_of_lines,
)
from qdo.cli.output import print_message
from qdo.encoding import RESERVED, JsonText
from qdo.errors import BodyError, InputLineError, UsageError
from qdo.queues import check_queue_name
from qdo.sending.doorbell import open_broker_with_doorbell
from qdo.sending.messages import (
    NewMessage,
    build_outgoing,
    build_send_options,
    check_size,
    check_terms,
    encrypted,
)
from qdo.settings.settings import Settings
from qdo.text import pluralize, printable

RAISE_LIMIT = "raise the setting max_body_bytes"
SPACE_BYTES = 1024
"""White space around a JSON body in a file, which does not count."""


@click.command()
@click.argument("queue", required=False)
@click.argument("body", required=False)
@click.option("-f", "--file", "path", metavar="FILE", help="JSON lines to send; - is stdin.")
@click.option("--queue-field", metavar="FIELD", help="Field of a line that names its queue.")
@click.option("--key-field", metavar="FIELD", help="Field of a line that is the message's key.")
@click.option("--key", metavar="TEXT", help="Key of a single message.")
@click.option("--header", "headers", metavar="NAME=TEXT", multiple=True, help="May be repeated.")
@click.option("--raw", is_flag=True, help="Send BODY, or the whole FILE, as bytes instead of JSON.")
@click.option("--delay", metavar="DURATION", help="Deliver after this delay: 90, 15m, 2h, 7d.")
@click.option("--at", metavar="TIME", help="Deliver at this time: ISO 8601, or a Unix time.")
@click.option("--dedup-key", metavar="TEXT", help="Send only if this key was not sent recently.")
@click.option(
    "--dedup-seconds", metavar="DURATION", help="Length of the deduplication window; default 5m."
)
@with_settings("app", "broker", "group")
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
    qdo send --app hello:app greetings '{"name": "Ada"}'
    qdo send --app hello:app greetings '{"name": "Ada"}' --delay 15m
    qdo send --app churn --file commits.jsonl --queue-field repo
    qdo send --app images thumbnails --raw --file photo.jpg --header content-type=image/jpeg
    producer | qdo send --app hello:app greetings --file -

    A message is durable once it is reported as sent. An invalid line ends the command: everything
    before it is sent, and the number of sent messages is reported on stderr.
    """
    app = require_app(settings)
    names = _headers(headers)
    options = _options(delay, at, dedup_key, dedup_seconds)
    if path is None or raw:
        if queue is None or (body is None) == (path is None) or queue_field or key_field:
            raise UsageError(
                reason="with --raw give QUEUE, and either BODY or --file FILE"
                if raw
                else "give QUEUE and BODY, or --file FILE with QUEUE or --queue-field FIELD"
            )
        check_queue_name(queue)
        data = os.fsencode(body) if body is not None else _contents(path or "-", queue, settings)
        _send_one(settings, app, _message(queue, data if raw else _json(data), key, names, options))
        return
    if body is not None or key or headers or dedup_key or (queue is None) == (queue_field is None):
        raise UsageError(
            reason="with --file give either QUEUE or --queue-field FIELD, and no BODY, --key, "
            "--header or --dedup-key"
        )
    if queue is not None:
        check_queue_name(queue)
    due = None if options is None else options.due
    _send_file(settings, app, path, LineFormat(queue, queue_field, key_field, 0, due), options)


def _headers(pairs: tuple[str, ...]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    for name, equals, text in split:
        if not name or not equals:
            given = name + equals + text
            raise UsageError(reason=f"--header must have the form NAME=TEXT, got {given!r}")
        if name.startswith(RESERVED):
            raise UsageError(
                reason=f"header {name!r}: names that begin with {RESERVED} are reserved for qdo; "
                "choose another name"
            )
    return {name: text for name, _, text in split}


def _options(
    delay: str | None, at: str | None, dedup_key: str | None, dedup_seconds: str | None
) -> SendOptions | None:
    if delay is not None and at is not None:
        raise UsageError(reason="give --delay or --at, not both")
    if dedup_seconds is not None and dedup_key is None:
        raise UsageError(reason="--dedup-seconds requires --dedup-key: it is the key's window")
    return build_send_options(
        None if delay is None else parse_duration(delay, "--delay"),
        None if at is None else parse_time(at, "--at"),
        dedup_key,
        None if dedup_seconds is None else parse_duration(dedup_seconds, "--dedup-seconds"),
    )


def _contents(path: str, queue: str, settings: Settings) -> bytes:
    """Return a body from a file; read no more of a body that is too large than shows this."""
    with ExitStack() as stack:
        data = _opened(path, stack)[0].read(settings.max_body_bytes + SPACE_BYTES)
    check_size(Outgoing(queue, data.strip()), settings.max_body_bytes)
    return data


def _json(data: bytes) -> JsonText:
    """Return a body unchanged if it is valid JSON."""
    text = data.strip()
    try:
        checked_json(text)
    except LineProblem as problem:
        raise UsageError(
            reason=f"the body is not valid JSON: {problem.reason}; text must be quoted: "
            "'\"text\"'; for bytes use --raw"
        ) from problem
    return JsonText(text)


def _message(
    queue: str,
    body: bytes,
    key: str | None,
    headers: Mapping[str, str],
    options: SendOptions | None,
) -> NewMessage:
    if options is None:
        return NewMessage(queue, body, key, headers)
    dedup_seconds = None if options.dedup_key is None else options.dedup_seconds
    return NewMessage(
        queue,
        body,
        key,
        headers,
        at=options.due,
        dedup_key=options.dedup_key,
        dedup_seconds=dedup_seconds,
    )


def _send_one(settings: Settings, app: str, message: NewMessage) -> None:
    outgoing = build_outgoing(message)
    check_size(outgoing, settings.max_body_bytes)
    (outgoing,) = encrypted([outgoing], settings, app)
    with _broker(settings, app, outgoing.terms) as broker:
        print(printable(str(broker.send(outgoing))), flush=True)


@contextmanager
def _broker(settings: Settings, app: str, options: SendOptions | None) -> Iterator[Broker]:
    hint = code_hint(settings, "broker")
    path = settings.broker.removeprefix("sqlite:")
    is_new = bool(hint) and not os.path.exists(path)
    with open_broker_with_doorbell(settings, app) as broker:
        check_terms(broker.capabilities, options, settings.broker)
        yield broker
    if is_new:
        print_message(f"hint: created {path}{hint}")


def _send_file(
    settings: Settings, app: str, path: str, form: LineFormat, options: SendOptions | None
) -> None:
    with ExitStack() as stack:
        stream, source = _opened(path, stack)
        broker = stack.enter_context(_broker(settings, app, options))
        able = broker.capabilities
        limit = min(able.max_body_bytes, settings.max_body_bytes)
        larger = able.larger_bodies if limit == able.max_body_bytes else RAISE_LIMIT
        form = replace(form, max_bytes=limit, larger=larger)
        encrypt = partial(encrypted, settings=settings, app=app)
        sender = LineSender(broker, form, source, encrypt)
        with _report_count(sender), _progress(stream, source) as progress:
            sender.run(chunks_of_lines(stream, limit), progress)


@contextmanager
def _report_count(sender: LineSender) -> Iterator[None]:
    """Report on stderr how much was sent, however it ends; the errors of a line include it."""
    try:
        yield
    except (BodyError, InputLineError):
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
    """Show a bar on stderr if it is a terminal; yield a function to call with the bytes read."""
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
