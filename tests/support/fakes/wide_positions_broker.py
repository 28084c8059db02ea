"""An in-memory log that cannot count, with positions that are not times and costly queries."""

from __future__ import annotations

from collections.abc import Sequence

from qdo.brokers.base import Capabilities
from qdo.brokers.catalog import Backlog
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.errors import NotFoundError
from qdo.positions import Positions, position_of_time
from tests.support.fakes.scripted_broker import (
    Rows,
    ScriptedBroker,
    ScriptedCatalog,
    ScriptedDeadLetters,
)

_BITS = 64


class WidePositions(Positions):
    """A sequence number and a time; recorded as ``#NUMBER``."""

    def resume_after(self, last: int, position: str | None) -> int:
        if position is None:
            return last
        if not position.startswith("#") or not position[1:].isdigit():
            raise ValueError(f"{position!r} is no #NUMBER")
        return int(position[1:]) << _BITS | last

    def to_time(self, position: int) -> int:
        return position & ((1 << _BITS) - 1)

    def to_text(self, position: int) -> str | None:
        return f"#{position >> _BITS}" if position >> _BITS else None

    def message_id(self, position: int, node: int) -> str:
        return f"{position >> _BITS}:0"


WIDE = WidePositions()


def wide(number: int, unix_time: float) -> int:
    """Return the position of a message."""
    return number << _BITS | position_of_time(unix_time)


class WideBroker(ScriptedBroker):
    """See the module's docstring.

    :ivar ages: `behind_seconds` by queue; a queue without one vanished meanwhile.
    :ivar asked: the queue and position of every question for a backlog.
    :ivar descent: parents by queue.
    """

    capabilities = Capabilities(
        ordered=True,
        seekable=True,
        countable=False,
        delay=False,
        peek=True,
        max_body_bytes=10**6,
        end_position_text="#999",
        backlog_budget=3,
    )
    positions = WIDE

    def __init__(self) -> None:
        super().__init__()
        self.ages: dict[str, float] = {}
        self.asked: list[tuple[str, int]] = []
        self.descent: dict[str, tuple[str, ...]] = {}
        self.moved: list[tuple[str, int]] = []
        self.catalog = WideCatalog(self)
        self.dead_letters = WideDeadLetters(self)

    def put_at(self, queue: str, position: int, body: bytes = b"1") -> None:
        """Store a message at a position."""
        self.stored.setdefault(queue, []).append((position, body, None, None))

    def add_letter(self, queue: str, position: int) -> None:
        """Set a message aside."""
        self.letters.append(
            DeadLetterRecord(queue, position, b"1", None, None, "E: no", "", 3, "w", 7, 1.7e9)
        )


class WideCatalog(ScriptedCatalog):
    _broker: WideBroker

    def names(self) -> list[str]:
        return sorted({*self._broker.stored, *self._broker.ages, *self._broker.descent})

    def parents(self, queue: str) -> Sequence[str]:
        return self._broker.descent.get(queue, ())

    def backlog(self, queue: str, after: int) -> Backlog:
        broker = self._broker
        broker.asked.append((queue, after))
        if queue not in broker.ages:
            raise NotFoundError(what="queue", name=queue)
        rows: Rows = [row for row in broker.stored.get(queue, []) if row[0] > after]
        head = broker.stored[queue][-1][0] if broker.stored.get(queue) else 0
        oldest = rows[0][0] if rows else None
        age = broker.ages[queue] if rows else 0.0
        return Backlog(bool(rows), oldest, head, approximate=True, behind_seconds=age)


class WideDeadLetters(ScriptedDeadLetters):
    _broker: WideBroker

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        self._broker.moved += keys
        return [wide(1000, 1_700_000_000.0) for _ in keys]

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        return [True for _ in keys]
