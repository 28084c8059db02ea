"""Checkpoints as JSON lines: what the first line and the others hold, and what makes them damaged.

The first line names the app, the kind of its broker, and the number of lines that follow. So a
file that was cut short is not imported, and neither is that of another app.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from qdo.coordination.znodes.progress import parse_last
from qdo.encoding import decode_strictly
from qdo.errors import CheckpointFileError, CheckpointOriginError
from qdo.positions import format_last
from qdo.queues import is_path_part

SCHEMA = "qdo.checkpoints/1"
MAX_LINE_BYTES = 65_536
_MAX_POSITION = 1000
_MAX_ID = 40


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The first line of a file.

    :ivar id: random name of the export. A queue node that was moved by an import has it.
    :ivar broker: the kind of the app's broker, such as "sqlite".
    :ivar time: when it was exported, ISO 8601 in UTC.
    :ivar queues: number of checkpoints.
    """

    id: str
    app: str
    broker: str
    time: str
    queues: int

    def encode(self) -> str:
        return json.dumps(
            {
                "schema": SCHEMA,
                "id": self.id,
                "app": self.app,
                "broker": self.broker,
                "time": self.time,
                "queues": self.queues,
            }
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The progress of one queue.

    :ivar last: UUIDv1 time; 0 before the first message.
    :ivar position: the broker's own position, None if it has none.
    :ivar seek: how often operators had moved the queue.
    :ivar failing: number of failing messages, which nothing but this line remembers.
    """

    queue: str
    last: int
    position: str | None = None
    seek: int = 0
    failing: int = 0

    def encode(self) -> str:
        return json.dumps(
            {
                "queue": self.queue,
                "last": str(self.last),
                "last_time": format_last(self.last),
                "position": self.position,
                "seek": self.seek,
                "failing": self.failing,
            }
        )


def read_file(
    lines: Iterable[bytes], source: str, app: str, broker: str
) -> tuple[CheckpointFile, list[Checkpoint]]:
    """Return the checkpoints of a file, all of them checked.

    :param source: name of the file, for errors.
    :param broker: the kind of the broker that the app has now.
    :raises CheckpointFileError: a line is damaged, or lines are missing.
    :raises CheckpointOriginError: it is the file of another app, or of another kind of broker.
    """
    parsed = _values(lines, source)
    where, value = next(parsed, (f"line 1 of {source}", None))
    head = _head(value, where)
    if (head.app, head.broker) != (app, broker):
        raise CheckpointOriginError(
            source=source, app=head.app, broker=head.broker, own_app=app, own_broker=broker
        )
    found: dict[str, Checkpoint] = {}
    for where, value in parsed:
        each = _checkpoint(value, where)
        if each.queue in found:
            raise CheckpointFileError(where=where, reason=f"queue {each.queue!r} occurs twice")
        found[each.queue] = each
    if len(found) != head.queues:
        reason = f"the first line announces {head.queues} queues, got {len(found)}"
        raise CheckpointFileError(where=source, reason=reason)
    return head, list(found.values())


def _values(lines: Iterable[bytes], source: str) -> Iterator[tuple[str, Any]]:
    """Yield the value of each line that is not empty, with the name of the line."""
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {source}"
        if len(line) > MAX_LINE_BYTES:
            reason = f"it must have at most {MAX_LINE_BYTES} bytes"
            raise CheckpointFileError(where=where, reason=reason)
        if not line.strip():
            continue
        try:
            value = decode_strictly(line.decode())
        except (ValueError, RecursionError) as error:
            reason = f"it must be JSON: {error}"
            raise CheckpointFileError(where=where, reason=reason) from error
        yield where, value


def _head(value: Any, where: str) -> CheckpointFile:
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA:
        reason = f"its schema must be {SCHEMA}, got {found!r:.60}"
        raise CheckpointFileError(where=where, reason=reason)
    texts = [_text(value, name, where) for name in ("id", "app", "broker", "time")]
    if len(texts[0]) > _MAX_ID:
        raise CheckpointFileError(where=where, reason=f"id must have at most {_MAX_ID} characters")
    return CheckpointFile(texts[0], texts[1], texts[2], texts[3], _count(value, "queues", where))


def _checkpoint(value: Any, where: str) -> Checkpoint:
    if not isinstance(value, dict):
        raise CheckpointFileError(where=where, reason="it must be a JSON object")
    queue = _text(value, "queue", where)
    if not is_path_part(queue):
        raise CheckpointFileError(where=where, reason=f"{queue!r:.100} cannot be a queue name")
    last, fault = parse_last(_text(value, "last", where))
    if fault is not None:
        raise CheckpointFileError(where=where, reason=fault)
    position = value.get("position")
    if position is not None and len(_text(value, "position", where)) > _MAX_POSITION:
        reason = f"position must have at most {_MAX_POSITION} characters"
        raise CheckpointFileError(where=where, reason=reason)
    counts = _count(value, "seek", where), _count(value, "failing", where)
    return Checkpoint(queue, last, position, *counts)


def _text(value: dict[str, Any], name: str, where: str) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not found:
        raise CheckpointFileError(where=where, reason=f"{name} must be text, got {found!r:.60}")
    return found


def _count(value: dict[str, Any], name: str, where: str) -> int:
    found = value.get(name)
    if type(found) is not int or found < 0:
        raise CheckpointFileError(where=where, reason=f"{name} must be a number, got {found!r:.60}")
    return found
