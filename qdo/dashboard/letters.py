"""Dead letters of the dashboard: grouped by error, listed, and one with its traceback."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qdo.dashboard.board import Board
from qdo.errors import NotFoundError
from qdo.ops import dead_letters as ops
from qdo.ops.dead_letters import Filter, Letter
from qdo.sending.connections import Connections
from qdo.settings.vaults import vault_of

KIND_CHARACTERS = 200
_VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|\d+")
_BODY_KEYS = ("body", "body_base64", "body_error", "headers", "key")


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters with the same kind of error.

    :ivar kind: the error, with numbers and ids replaced by "#".
    :ivar example: the newest error of this kind.
    :ivar newest: Unix time of the newest dead letter.
    """

    kind: str
    example: str
    count: int
    queues: int
    oldest: float
    newest: float


def error_kind_of(error: str) -> str:
    """Return an error without what differs from message to message."""
    return _VARYING.sub("#", error)[:KIND_CHARACTERS]


def letters(board: Board, queues: str = "*") -> list[Letter]:
    """Return the dead letters of queues that match a glob, newest first."""

    def read(connections: Connections) -> list[Letter]:
        broker = connections.known_broker()
        found = ops.find(broker, Filter(queues), time.time()) if broker else []
        return sorted(found, key=lambda each: -each.entry.dead_at)

    return board.direct.get(("letters", queues), read)


def grouped(found: Sequence[Letter]) -> list[ErrorGroup]:
    """Return the kinds of errors of dead letters, the most frequent first."""
    groups: dict[str, list[Letter]] = {}
    for each in found:
        groups.setdefault(error_kind_of(each.entry.error), []).append(each)
    return sorted(
        (
            ErrorGroup(
                kind=kind,
                example=same[0].entry.error,
                count=len(same),
                queues=len({each.entry.queue for each in same}),
                oldest=min(each.entry.dead_at for each in same),
                newest=max(each.entry.dead_at for each in same),
            )
            for kind, same in groups.items()
        ),
        key=lambda group: (-group.count, group.kind),
    )


def exported(board: Board, chosen: Sequence[Letter]) -> list[dict[str, Any]]:
    """Return items of qdo.dead-letters/2; without bodies unless they may be shown."""

    def read(connections: Connections) -> list[dict[str, Any]]:
        broker = connections.known_broker()
        if broker is None:
            return []
        shown = board.options.show_bodies
        vault = vault_of(board.settings, board.app) if shown else None
        items = []
        for letter in chosen:
            try:
                record = ops.read(broker, letter)
            except NotFoundError:
                continue  # retried or discarded since
            item = ops.exported(letter, record, broker.positions, vault)
            for key in () if shown else _BODY_KEYS:
                item.pop(key, None)
            items.append(item)
        return items

    key = tuple((each.entry.queue, each.entry.position) for each in chosen)
    return board.direct.get(("exported", key), read)


def letter(board: Board, queue: str, id: str) -> tuple[dict[str, Any], int] | None:
    """Return one dead letter and the size of its body; None if it does not exist."""
    found = [each for each in letters(board, queue) if each.entry.queue == queue]
    named = [each for each in found if id in (each.id, str(each.entry.position))]
    items = exported(board, named[:1])
    return (items[0], named[0].entry.body_bytes) if items else None
