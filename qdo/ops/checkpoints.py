"""Export the recorded positions of queues as JSON lines, and import them.

The first line names the app, the kind of its broker, and the number of lines that follow. Therefore
an import rejects a truncated file and the file of another app.

An import first plans, then moves each queue to its position in a separate transaction, like a seek.
The import writes the id of the file into the node of each moved queue. An operator can repeat an
interrupted import, because an import skips the queues that have this id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from qdo.brokers.base import Broker
from qdo.coordination import queue_admin
from qdo.coordination.bulk_reads import names_below
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.queue_admin import is_deleted
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode, parse_last
from qdo.encoding import decode_strictly
from qdo.errors import (
    AuditRefusedError,
    CheckpointFileError,
    QdoError,
    UnreachableError,
    UsageError,
)
from qdo.fleet.audit import AuditTrail
from qdo.ops.fleet import Fleet, read_queues
from qdo.ops.seek import QueuePosition, recorded
from qdo.positions import format_last
from qdo.queues import is_path_part

SCHEMA = "qdo.checkpoints/1"
MAX_LINE_BYTES = 65_536
_MAX_POSITION = 1000
_MAX_ID = 40
# The effect of an import on a queue: move the queue; create its missing node; skip a queue that is
# already at the position or has the id of the file; skip a queue whose position does not exist.
MOVE = "move"
CREATE = "create"
SAME = "same"
IMPORTED = "imported"
SKIPPED = "skipped"
# Maximum number of nodes that an export holds in memory.
READ_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The first line of a file."""

    # Random name of the export. An import writes this name into the node of each moved queue.
    id: str
    app: str
    # The kind of the app's broker, such as "sqlite".
    broker: str
    # Time of the export, in ISO 8601 and UTC.
    time: str
    queues: int

    def encode(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The progress of one queue."""

    queue: str
    # UUIDv1 time; 0 before the first message.
    last: int
    # The position in the broker's own form, or None.
    position: str | None = None
    # Number of times that operators have moved the queue.
    seek: int = 0
    # Number of failing messages. The file does not contain their failure records.
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
    """Check the checkpoints of a file, and return them.

    :param broker: the kind of the app's current broker.
    :raises CheckpointFileError: a line is damaged, or lines are missing.
    :raises UsageError: the file belongs to another app or another kind of broker.
    """
    parsed = _values(lines, source)
    where, value = next(parsed, (f"line 1 of {source}", None))
    head = _head(value, where)
    if (head.app, head.broker) != (app, broker):
        raise UsageError(
            reason=f"{source} has checkpoints of app {head.app!r} with a {head.broker} broker, and "
            f"this is app {app!r} with a {broker} broker, whose positions differ; nothing was "
            "changed; name that app",
            source=source,
            app=head.app,
        )
    checkpoints: dict[str, Checkpoint] = {}
    for where, value in parsed:
        each = _checkpoint(value, where)
        if each.queue in checkpoints:
            raise CheckpointFileError(where=where, reason=f"queue {each.queue!r} occurs twice")
        checkpoints[each.queue] = each
    if len(checkpoints) != head.queues:
        reason = f"the first line announces {head.queues} queues, got {len(checkpoints)}"
        raise CheckpointFileError(where=source, reason=reason)
    return head, list(checkpoints.values())


def _values(lines: Iterable[bytes], source: str) -> Iterator[tuple[str, Any]]:
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
    seek = _count(value, "seek", where)
    failing = _count(value, "failing", where)
    return Checkpoint(queue, last, position, seek, failing)


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


@dataclass(frozen=True, slots=True)
class ImportStep:
    """The effect of an import on one queue."""

    queue: str
    outcome: str
    # The recorded position; None if the node does not exist or cannot be read.
    before: QueuePosition | None
    # The position after which the queue resumes; None if the queue is skipped.
    after: QueuePosition | None
    # The reason why the import skips the queue, or chooses a position that differs from the file.
    note: str | None = None
    error: str | None = None
    done: bool = False


def plan_import(fleet: Fleet, checkpoints: Sequence[Checkpoint], id: str) -> list[ImportStep]:
    """Return the effect of an import, without changing anything."""
    broker = fleet.broker
    listed = frozenset(broker.catalog.names())
    nodes = read_queues(fleet.client, fleet.layout, [each.queue for each in checkpoints])
    return [_step(broker, each, nodes.get(each.queue), listed, id) for each in checkpoints]


def _step(
    broker: Broker,
    checkpoint: Checkpoint,
    node: QueueNode | None,
    listed: frozenset[str],
    id: str,
) -> ImportStep:
    queue = checkpoint.queue
    before = None
    if node is not None and node.fault is None:
        before = QueuePosition(node.last, node.position)
    if node is not None and queue_admin.is_imported(node, id):
        return ImportStep(queue, IMPORTED, before, before, "this file has moved it before")
    if queue not in listed:
        return ImportStep(queue, SKIPPED, before, None, "the broker has no such queue")
    try:
        after, note = _placed(broker, checkpoint)
    except UnreachableError:
        raise
    except QdoError as error:  # one unreadable shard must not hide the other shards
        return ImportStep(queue, SKIPPED, before, None, str(error))
    if after is None:
        return ImportStep(queue, SKIPPED, before, None, note)
    if node is None:
        return ImportStep(queue, CREATE, before, after, note)
    return ImportStep(queue, SAME if before == after else MOVE, before, after, note)


def _placed(broker: Broker, checkpoint: Checkpoint) -> tuple[QueuePosition | None, str | None]:
    queue = checkpoint.queue
    last = checkpoint.last
    position = checkpoint.position
    end = broker.capabilities.end_position_text
    if position is not None and position == end:
        if broker.catalog.is_reopened(queue):
            return None, "it was finished, but a queue of the same name was created"
        return QueuePosition(last, position), None
    try:
        done = broker.positions.resume_after(last, position)
    except ValueError as error:
        return None, str(error)
    if broker.positions.to_text(done) is not None and not broker.catalog.has_position(queue, done):
        return None, f"it has no message at {position}"
    backlog = broker.catalog.backlog(queue, done)
    head = broker.positions.to_time(backlog.head)
    if position is None and last > head:
        return QueuePosition(head), "the file has a position after its last message"
    note = "messages after this position have expired" if backlog.lost else None
    return QueuePosition(last, position), note


def execute_step(fleet: Fleet, step: ImportStep, id: str, reason: str = "") -> ImportStep:
    """Move one queue. Return the executed step, or a step with the error of the queue's node."""
    # The owner of the queue finishes its message in flight and resumes from the new position.
    if step.after is None or step.outcome == IMPORTED:
        return step
    client = fleet.connected(step.queue)
    layout = fleet.layout
    finished = fleet.broker.capabilities.end_position_text
    try:
        with AuditTrail(client, layout, "admin checkpoints import", reason).change(
            step.queue
        ) as entry:

            def record(before: QueueNode, after: QueueNode) -> CreateOp:
                return entry(recorded(before), {**recorded(after), "file": id})

            if step.outcome == SAME:
                queue_admin.mark(client, layout, step.queue, id, record)
            else:
                node = QueueNode(step.after.last, position=step.after.position)
                queue_admin.place(client, layout, step.queue, node, id, finished, record)
    except (UnreachableError, AuditRefusedError):
        raise
    except QdoError as error:
        return replace(step, error=str(error))
    return replace(step, done=True)


@dataclass(frozen=True, slots=True)
class Export:
    """The recorded positions of queues. `faults` maps each unreadable queue to the reason."""

    checkpoints: list[Checkpoint]
    faults: Mapping[str, str]


def read_checkpoints(client: Client, layout: Layout, glob: str = "*") -> Export:
    """Return the positions of the matching queues, sorted by name.

    Omit queues that no longer exist at the broker, but include finished shards.
    """
    listed = names_below(client, layout.queues)
    names = [name for name in listed if fnmatchcase(name, glob)]
    checkpoints: list[Checkpoint] = []
    faults: dict[str, str] = {}
    for start in range(0, len(names), READ_AT_ONCE):
        nodes = read_queues(client, layout, names[start : start + READ_AT_ONCE])
        for name, node in nodes.items():
            if node.fault is not None:
                faults[name] = node.fault
            elif not is_deleted(node):
                failing = len(node.failures)
                checkpoints.append(Checkpoint(name, node.last, node.position, node.seek, failing))
    return Export(checkpoints, faults)
