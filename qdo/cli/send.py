"""`qdo send`: one message, or JSON lines from a file or standard input."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BufferedReader

import click

from qdo.brokers import open_broker
from qdo.brokers.base import Outgoing
from qdo.cli.lines import Fault, Form, Sending, chunks_of_lines
from qdo.cli.output import say
from qdo.cli.shell import require_app, with_settings
from qdo.encoding import encode_headers
from qdo.errors import BodyError, LineError, UsageError
from qdo.names import check_queue_name
from qdo.settings import Settings


@click.command()
@click.argument("queue", required=False)
@click.argument("body", required=False)
@click.option("-f", "--file", "path", metavar="FILE", help="JSON lines to send; - is stdin.")
@click.option("--queue-field", metavar="FIELD", help="Field of a line that names its queue.")
@click.option("--key-field", metavar="FIELD", help="Field of a line that is the message's key.")
@click.option("--key", metavar="TEXT", help="Key of a single message.")
@click.option("--header", "headers", metavar="NAME=TEXT", multiple=True, help="May be repeated.")
@with_settings("app", "broker")
def send(
    queue: str | None,
    body: str | None,
    path: str | None,
    queue_field: str | None,
    key_field: str | None,
    key: str | None,
    headers: tuple[str, ...],
    settings: Settings,
) -> None:
    """Send a message with a JSON BODY to QUEUE, or one for each line of a file.

    \b
    qdo send --app hello greetings '{"name": "Ada"}'
    qdo send --app churn --file commits.jsonl --queue-field repo
    producer | qdo send --app hello greetings --file -

    A message is durable when it is reported as sent. A bad line ends the command: everything
    before it is sent, and how much that is stands on stderr.
    """
    app = require_app(settings)
    if path is None:
        if queue is None or body is None or queue_field or key_field:
            raise UsageError(
                reason="give QUEUE and BODY, or --file FILE with QUEUE or --queue-field FIELD"
            )
        _send_one(settings, app, queue, body, key, _headers(headers))
        return
    if body is not None or key or headers or (queue is None) == (queue_field is None):
        raise UsageError(
            reason="with --file give either QUEUE or --queue-field FIELD, and no BODY, --key "
            "or --header"
        )
    if queue is not None:
        check_queue_name(queue)
    _send_file(settings, app, path, queue, queue_field, key_field)


def _headers(pairs: tuple[str, ...]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    for name, equals, _ in split:
        if not name or not equals:
            raise UsageError(reason=f"{name!r} is no header: write --header NAME=TEXT")
    return {name: text for name, _, text in split}


def _send_one(
    settings: Settings,
    app: str,
    queue: str,
    body: str,
    key: str | None,
    headers: Mapping[str, str],
) -> None:
    form = Form(check_queue_name(queue), None, None, max_bytes=sys.maxsize)
    message = form.message(os.fsencode(body).strip())
    if isinstance(message, Fault):
        raise UsageError(
            reason=f"the body is not valid JSON: {message.reason}; text needs quotes of its own: "
            "'\"text\"'"
        )
    whole = Outgoing(queue, message.body, key, encode_headers(headers) if headers else None)
    with ExitStack() as stack:
        broker = open_broker(settings.broker, app)
        stack.callback(broker.close)
        print(broker.send(whole), flush=True)


def _send_file(
    settings: Settings,
    app: str,
    path: str,
    queue: str | None,
    queue_field: str | None,
    key_field: str | None,
) -> None:
    with ExitStack() as stack:
        stream, source = _opened(path, stack)
        broker = open_broker(settings.broker, app)
        stack.callback(broker.close)
        form = Form(queue, queue_field, key_field, broker.capabilities.max_body_bytes)
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
        say(f"sent {sending.sent} messages, up to line {sending.line} of {sending.source}")
        raise
    say(f"sent {sending.sent} messages")


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
