"""The checks' view of queues and of their owners."""

from __future__ import annotations

from typing import Any


class Tenure:
    """One worker's ownership of one queue, from the claim's transaction to its end.

    :ivar base: where the present run began: `last` at the claim, or where a seek went.
    :ivar done: the last message that ended in the present run, `base` before the first.
    :ivar cursor: the last message that was started in the present run.
    :ivar in_flight: the message that is running.
    :ivar seeks: where operators moved the queue since the present run began.
    :ivar deleted: the queue was marked as deleted meanwhile.
    :ivar marks: of a failing message, as the claim's transaction left them.
    """

    __slots__ = (
        "base", "cursor", "deleted", "done", "fence", "in_flight", "marks", "queue", "released",
        "seeks", "worker", "zxid",
    )  # fmt: skip

    def __init__(self, queue: str, worker: str, zxid: int, last: int) -> None:
        self.queue = queue
        self.worker = worker
        self.zxid = zxid
        self.base = self.done = self.cursor = last
        self.in_flight: int | None = None
        self.seeks: list[int] = []
        self.fence = 0
        self.released = False
        self.deleted = False
        self.marks: dict[str, Any] | None = None

    def begin(self, position: int) -> None:
        """Begin a new run where an operator moved the queue."""
        self.base = self.done = self.cursor = position


class QueueHistory:
    """The known state of one queue; `last` is None while only its owner can know it."""

    __slots__ = ("fence", "last", "tenures")

    def __init__(self) -> None:
        self.last: int | None = 0
        self.tenures: list[Tenure] = []
        self.fence = 0
