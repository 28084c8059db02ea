"""A log in memory whose positions are no times, that cannot count, and where questions are dear."""

from __future__ import annotations

from collections.abc import Sequence

from qdo.brokers.base import Backlog, Capabilities, DeadLetterRecord
from qdo.errors import NotFoundError
from qdo.message import position_of_time
from qdo.positions import Positions
from tests.support.memory_broker import MemoryBroker, Rows

_BITS = 64


class WidePositions(Positions):
    """A sequence number and a time; recorded as ``#NUMBER``."""

    def begin(self, last: int, position: str | None) -> int:
        if position is None:
            return last
        if not position.startswith("#") or not position[1:].isdigit():
            raise ValueError(f"{position!r} is no #NUMBER")
        return int(position[1:]) << _BITS | last

    def last(self, position: int) -> int:
        return position & ((1 << _BITS) - 1)

    def text(self, position: int) -> str | None:
        return f"#{position >> _BITS}" if position >> _BITS else None

    def message_id(self, position: int, node: int) -> str:
        return f"{position >> _BITS}:0"


WIDE = WidePositions()


def wide(number: int, unix_time: float) -> int:
    """Return the position of a message."""
    return number << _BITS | position_of_time(unix_time)


class WideBroker(MemoryBroker):
    """See the module's docstring.

    :ivar ages: `behind_seconds` by queue; a queue without one vanished meanwhile.
    :ivar asked: the queue and position of every question for a backlog.
    :ivar descent: parents by queue.
    """

    capabilities = Capabilities(
        ordered=True, seekable=True, countable=False, delay=False, peek=True, max_body_bytes=10**6
    )
    positions = WIDE
    finished_text = "#999"
    backlog_budget = 3

    def __init__(self) -> None:
        super().__init__()
        self.ages: dict[str, float] = {}
        self.asked: list[tuple[str, int]] = []
        self.descent: dict[str, tuple[str, ...]] = {}
        self.moved: list[tuple[str, int]] = []

    def put_at(self, queue: str, position: int, body: bytes = b"1") -> None:
        """Store a message at a position."""
        self.stored.setdefault(queue, []).append((position, body, None, None))

    def queues(self) -> list[str]:
        return sorted({*self.stored, *self.ages, *self.descent})

    def parents(self, queue: str) -> Sequence[str]:
        return self.descent.get(queue, ())

    def backlog(self, queue: str, after: int) -> Backlog:
        self.asked.append((queue, after))
        if queue not in self.ages:
            raise NotFoundError(what="queue", name=queue)
        rows: Rows = [row for row in self.stored.get(queue, []) if row[0] > after]
        head = self.stored[queue][-1][0] if self.stored.get(queue) else 0
        oldest = rows[0][0] if rows else None
        return Backlog(bool(rows), oldest, head, 0, True, self.ages[queue] if rows else 0.0)

    def retry_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[int | None]:
        self.moved += letters
        return [wide(1000, 1_700_000_000.0) for _ in letters]

    def discard_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[bool]:
        return [True for _ in letters]

    def add_letter(self, queue: str, position: int) -> None:
        """Set a message aside."""
        self.letters.append(
            DeadLetterRecord(queue, position, b"1", None, None, "E: no", "", 3, "w", 7, 1.7e9)
        )
