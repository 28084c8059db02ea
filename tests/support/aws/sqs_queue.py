"""Queues of the stub: visibility and order of messages.

No I/O and no clock: the time is an argument, in Unix seconds. The semantics are those of the SQS
documentation, or else the observed behavior of AWS.
"""

from __future__ import annotations

import abc
import heapq
import json
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.aws.sqs_values import SqsError, invalid

MOST_SECONDS = 43_200


@dataclass(slots=True, eq=False)
class SqsMessage:
    """A message in a queue.

    :ivar number: order of arrival, over all queues.
    :ivar hidden: in flight ("taken"), not due yet ("delayed"), or visible ("").
    """

    number: int
    id: str
    body: str
    attributes: Mapping[str, Any]
    group: str | None
    dedup_id: str | None
    sent: float
    visible_at: float = 0.0
    hidden: str = ""
    receives: int = 0
    first_received: float = 0.0
    handle: str = ""
    source_arn: str | None = None

    @property
    def sequence(self) -> str:
        """The 20 digits of its SequenceNumber."""
        return f"{18_849_000_000_000_000_000 + 256 * self.number:020d}"


class Queue(abc.ABC):
    """A queue; see `StandardQueue` and `sqs_fifo.FifoQueue`.

    :ivar bury: takes a message that was received too often.
    """

    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name = name
        self.attributes = attributes
        self.tags: dict[str, str] = {}
        self.bury: Callable[[Queue, SqsMessage, float], None] | None = None
        self.messages: dict[int, SqsMessage] = {}
        self.hidden = {"taken": 0, "delayed": 0}
        self._changes: list[tuple[float, int, int]] = []
        self._turn = 0
        policy = json.loads(self.attributes.get("RedrivePolicy") or "{}")
        self.max_receives = int(policy.get("maxReceiveCount", 0))
        self.dead_letter_arn = str(policy.get("deadLetterTargetArn", ""))

    def number_of(self, name: str) -> int:
        return int(self.attributes[name])

    # --- sending and receiving

    def add(self, message: SqsMessage, delay: int, now: float) -> None:
        """Add a message that is visible after `delay` seconds."""
        self.messages[message.number] = message
        self._enter(message)
        if delay:
            self._hide(message, "delayed", now + delay)
        else:
            self._show(message)

    def receive(
        self, now: float, limit: int, visibility: int, attempt: str | None = None
    ) -> list[SqsMessage]:
        """Return up to `limit` messages, and hide them for `visibility` seconds."""
        self.settle(now)
        taken: list[SqsMessage] = []
        for message in self._visible():
            if len(taken) >= limit:
                self._put_back(message)
                break
            if self.bury and self.max_receives and message.receives >= self.max_receives:
                self._remove(message)
                self.bury(self, message, now)
            else:
                self._take(message, visibility, now)
                taken.append(message)
        return taken

    def _take(self, message: SqsMessage, visibility: int, now: float) -> None:
        message.receives += 1
        message.first_received = message.first_received or now
        message.handle = f"{self.name}/{message.number}/{message.receives}/{secrets.token_hex(4)}"
        self._hide(message, "taken", now + visibility)

    # --- receipt handles

    @abc.abstractmethod
    def delete(self, handle: str, now: float) -> None:
        """Delete the message of a receipt handle."""

    def change(self, handle: str, seconds: int, now: float) -> None:
        """Make a message visible after a number of seconds."""
        message = self._of(handle)
        if message is None:
            raise invalid(
                "ReceiptHandle",
                handle,
                "Message does not exist or is not available for visibility timeout change.",
            )
        self.settle(now)
        if message.handle != handle or message.hidden != "taken":
            raise SqsError(
                "MessageNotInflight", "The specified message isn't in flight: see its handle."
            )
        self._unhide(message)
        self._hide(message, "taken", now + seconds)
        self.settle(now)

    def _of(self, handle: str) -> SqsMessage | None:
        """Return the message of a handle, None if it is gone."""
        name, _, rest = handle.rpartition("/")[0].rpartition("/")[0].rpartition("/")
        if not rest.isdigit():
            raise SqsError("ReceiptHandleIsInvalid", "The input receipt handle is invalid.")
        if name != self.name:
            raise SqsError(
                "ReceiptHandleIsInvalid",
                f'The receipt handle "{handle}" is not valid for this queue.',
            )
        return self.messages.get(int(rest))

    # --- time

    def settle(self, now: float) -> None:
        """Make messages visible whose time has come."""
        while self._changes and self._changes[0][0] <= now:
            at, _, number = heapq.heappop(self._changes)
            message = self.messages.get(number)
            if message is not None and message.hidden and message.visible_at == at:
                self._unhide(message)
                self._show(message)

    def next_change(self) -> float | None:
        """Return when something may become visible by itself."""
        return self._changes[0][0] if self._changes else None

    def _hide(self, message: SqsMessage, why: str, until: float) -> None:
        message.hidden = why
        message.visible_at = until
        self.hidden[why] += 1
        self._turn += 1
        heapq.heappush(self._changes, (until, self._turn, message.number))

    def _unhide(self, message: SqsMessage) -> None:
        self.hidden[message.hidden] -= 1
        message.hidden = ""

    def _remove(self, message: SqsMessage) -> None:
        if message.hidden:
            self._unhide(message)
        del self.messages[message.number]
        self._leave(message)

    # --- differences

    @abc.abstractmethod
    def has_visible(self) -> bool:
        """Return whether a receive may find something; call `settle` first."""

    @abc.abstractmethod
    def _enter(self, message: SqsMessage) -> None:
        """Give a message its place."""

    @abc.abstractmethod
    def _leave(self, message: SqsMessage) -> None:
        """Take a message from its place."""

    @abc.abstractmethod
    def _show(self, message: SqsMessage) -> None:
        """Let a message be found."""

    @abc.abstractmethod
    def _visible(self) -> Iterator[SqsMessage]:
        """Yield receivable messages; each is taken, removed or put back meanwhile."""

    @abc.abstractmethod
    def _put_back(self, message: SqsMessage) -> None:
        """Take back messages that were yielded but not delivered."""


class StandardQueue(Queue):
    """Messages in about the order in which they became visible."""

    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self._line: deque[SqsMessage] = deque()
        super().__init__(name, attributes)

    def delete(self, handle: str, now: float) -> None:
        """Delete, but without effect and without error where it was received again since."""
        message = self._of(handle)
        if message is not None and message.handle == handle:
            self._remove(message)

    def has_visible(self) -> bool:
        while self._line and self._line[0].number not in self.messages:
            self._line.popleft()
        return bool(self._line)

    def _enter(self, message: SqsMessage) -> None:
        pass

    def _leave(self, message: SqsMessage) -> None:
        pass  # one that stands in the line is passed over there

    def _show(self, message: SqsMessage) -> None:
        self._line.append(message)

    def _visible(self) -> Iterator[SqsMessage]:
        while self.has_visible():
            yield self._line.popleft()

    def _put_back(self, message: SqsMessage) -> None:
        self._line.appendleft(message)
