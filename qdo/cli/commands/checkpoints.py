"""`qdo admin checkpoints`: save the positions of queues in a file, and import them."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TextIO

import click

from qdo.brokers.registry import kind_of
from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import open_connections
from qdo.cli.options import require_app, with_settings
from qdo.cli.output import iso_time, print_message
from qdo.cli.readings import SHARED
from qdo.connections.opened import Connections
from qdo.errors import NotFoundError, PartialFailureError, UnsupportedError
from qdo.ops.checkpoints import (
    CREATE,
    MAX_LINE_BYTES,
    MOVE,
    SKIPPED,
    CheckpointFile,
    ImportStep,
    execute_step,
    plan_import,
    read_checkpoints,
    read_file,
)
from qdo.ops.seek import EARLIEST, QueuePosition, check_seekable
from qdo.positions import format_last
from qdo.settings.settings import Settings
from qdo.text import join_some, pluralize

SCHEMA = "qdo.checkpoints-import/1"
_COLUMNS = ("queue", "old", "new", "outcome", "note")
_CHANGES = (MOVE, CREATE)


@click.group()
def checkpoints() -> None:
    """Save the positions of queues in a file, and move queues to the positions of a file."""


@checkpoints.command("export")
@click.argument("glob", default="*")
@click.option("-f", "--file", "target", metavar="FILE|-", default="-", help="Write it there. [-]")
@with_settings(*SHARED)
def export_file(glob: str, target: str, settings: Settings) -> None:
    """Write the recorded position of each matching queue as a line of JSON.

    This reads the coordinator only, and changes nothing. Workers may be running. Export before a
    risky deploy, or every hour in case the coordinator is lost. SQS has no positions to keep.
    """
    app = require_app(settings)
    _check_kind(settings)
    with open_connections(settings, broker=False) as connections:
        taken = time.time()
        client = connections.client
        read = read_checkpoints(client, connections.layout, glob) if client is not None else None
    listed = read.checkpoints if read is not None else []
    kind = settings.broker.partition(":")[0]
    head = CheckpointFile(secrets.token_hex(6), app, kind, iso_time(taken) or "", len(listed))
    with _written(target) as out:
        out.write(f"{head.encode()}\n")
        out.writelines(f"{each.encode()}\n" for each in listed)
    if target != "-":
        print_message(f"exported the positions of {pluralize(len(listed), 'queue')}")
    if read is not None and read.faults:
        raise PartialFailureError(
            done=len(listed),
            total=len(listed) + len(read.faults),
            what="queues have a position that can be read",
            rest=join_some([f"{name} ({fault})" for name, fault in read.faults.items()]),
        )


@checkpoints.command("import")
@click.argument("file", type=click.File("rb"))
@changing(*SHARED)
def import_file(file: BinaryIO, consent: Consent, settings: Settings) -> None:
    """Move queues to the positions in FILE, which `qdo admin checkpoints export` wrote; - is stdin.

    Moving backwards processes messages again; moving forwards skips messages. Workers may be
    running: each owner finishes its message in flight and resumes after the new position. If the
    command is interrupted, repeat it: queues that this file has moved are skipped (`imported`).

    The whole file is checked first; a damaged line, another app or another kind of broker is an
    error (2). A position after the last message becomes the end of the queue. If messages after it
    have expired, the oldest one left is next, and NOTE says so. A missing queue or position is
    skipped: exit code 4. Attempts count from 1 again, and messages that were done out of order run
    again. A new coordinator gets the nodes.
    """
    app = require_app(settings)
    _check_kind(settings)
    source = "standard input" if file.name in ("-", "<stdin>") else str(file.name)
    kind = settings.broker.partition(":")[0]
    head, listed = read_file(_lines(file), source, app, kind)
    with open_connections(settings) as connections:
        fleet = connections.known_fleet()
        if fleet is None:
            raise NotFoundError(what="broker", name=settings.broker)
        check_seekable(fleet.broker)
        steps = plan_import(fleet, listed, head.id)
    changes = sum(each.outcome in _CHANGES for each in steps)
    what = f"move {pluralize(changes, 'queue')}"
    if consent.given(what, _effect(steps).show, asks=changes > 0):
        with open_connections(settings, create=True) as connections:
            _execute(connections, steps, head.id, consent)
    _raise_for_rest(steps)


def _execute(connections: Connections, steps: list[ImportStep], id: str, consent: Consent) -> None:
    fleet = connections.known_fleet()
    if fleet is None or fleet.client is None:
        raise NotFoundError(what="coordinator or broker of app", name=connections.layout.root)
    try:
        for index, step in enumerate(steps):
            steps[index] = execute_step(fleet, step, id, consent.reason)
    finally:  # show the executed steps even if other steps failed
        _effect(steps).show(consent.form)


def _check_kind(settings: Settings) -> None:
    """Raise UnsupportedError for a broker whose positions only one owner can use."""
    if not kind_of(settings.broker).positions.stable:
        raise UnsupportedError(
            broker="this broker",
            what="continue a queue at a position",
            remedy="it deletes messages when they are done, so it has the progress itself",
        )


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines. Cut a line that is too long. The caller then rejects the line."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


@contextlib.contextmanager
def _written(target: str) -> Iterator[TextIO]:
    if target == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    if os.path.exists(target) and not os.path.isfile(target):
        with open(target, "w", encoding="utf-8") as out:  # never replace a device or pipe
            yield out
        return
    folder, name = os.path.split(os.path.realpath(target))
    fd, part = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder)
    try:
        with open(fd, "w", encoding="utf-8") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise


def _effect(steps: Sequence[ImportStep]) -> Effect:
    return Effect(SCHEMA, _COLUMNS, [_item(each) for each in steps], _cells)


def _cells(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "old": item["old_time"],
        "new": item["new_time"],
        "note": item["error"] or item["note"],
    }


def _item(step: ImportStep) -> dict[str, Any]:
    return {
        "queue": step.queue,
        "old": _exact(step.before),
        "old_time": _time(step.before),
        "new": _exact(step.after),
        "new_time": _time(step.after),
        "outcome": step.outcome,
        "executed": step.done,
        "note": step.note,
        "error": step.error,
    }


def _exact(at: QueuePosition | None) -> str | None:
    if at is None:
        return None
    return at.position or (str(at.last) if at.last > 2 else EARLIEST)


def _time(at: QueuePosition | None) -> str | None:
    if at is None:
        return None
    return at.position or format_last(at.last) or EARLIEST


def _raise_for_rest(steps: Sequence[ImportStep]) -> None:
    failed = [each.queue for each in steps if each.error or each.outcome == SKIPPED]
    if failed:
        raise PartialFailureError(
            done=len(steps) - len(failed),
            total=len(steps),
            what="queues have a position of the file",
            rest=join_some(failed),
        )
