"""FIFO queues of the stub: groups, deduplication and repeated receives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from tests.support.aws.sqs_queue import Queue, SqsMessage
from tests.support.aws.sqs_values import SqsError

MOST_MESSAGES = 10
DEDUP_SECONDS = 300
ATTEMPT_SECONDS = 300


@dataclass(slots=True)
class _Attempt:
    at: float
    messages: list[tuple[SqsMessage, str, float]]
    """With the handle and the visibility deadline of each message."""


@dataclass(slots=True)
class _Group:
    # Ordered dicts find their first key at once, even after many deletes.
    messages: OrderedDict[int, SqsMessage] = field(default_factory=OrderedDict)
    taken: int = 0


class FifoQueue(Queue):
    """Message groups: each in order, and locked while one of its messages is in flight."""

    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self._groups: dict[str, _Group] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._dedup: OrderedDict[str, tuple[float, SqsMessage]] = OrderedDict()
        self._attempts: dict[str, _Attempt] = {}
        super().__init__(name, attributes)

    def known(self, dedup_id: str, now: float) -> SqsMessage | None:
        """Return the message that was sent with a deduplication id within five minutes."""
        while self._dedup:
            key, (at, _) = next(iter(self._dedup.items()))
            if now - at < DEDUP_SECONDS:
                break
            del self._dedup[key]
        found = self._dedup.get(dedup_id)
        return found[1] if found else None

    def receive(
        self, now: float, limit: int, visibility: int, attempt: str | None = None
    ) -> list[SqsMessage]:
        """As `Queue.receive`; the same attempt gets the same again while nothing has changed."""
        again = self._again(attempt, visibility, now) if attempt else []
        if again:
            return again
        taken = super().receive(now, limit, visibility)
        if attempt and taken:
            held = [(message, message.handle, message.visible_at) for message in taken]
            self._attempts[attempt] = _Attempt(now, held)
        return taken

    def _again(self, attempt: str, visibility: int, now: float) -> list[SqsMessage]:
        self.settle(now)
        self._attempts = {
            name: each for name, each in self._attempts.items() if now - each.at < ATTEMPT_SECONDS
        }
        found = self._attempts.get(attempt)
        if found is None or not all(
            self.messages.get(message.number) is message
            and (message.handle, message.visible_at, message.hidden) == (handle, until, "taken")
            for message, handle, until in found.messages
        ):
            return []
        for message, _, _ in found.messages:
            self._unhide(message)
            self._hide(message, "taken", now + visibility)
        found.messages = [(each, each.handle, each.visible_at) for each, _, _ in found.messages]
        return [message for message, _, _ in found.messages]

    def delete(self, handle: str, now: float) -> None:
        """Delete the in-flight message of a handle; reject an expired handle."""
        message = self._of(handle)
        if message is None:
            return
        self.settle(now)
        if message.handle != handle or message.hidden != "taken":
            raise SqsError("ReceiptHandleIsInvalid", "The receipt handle has expired")
        self._remove(message)

    def has_visible(self) -> bool:
        return bool(self._ready)

    def _group(self, message: SqsMessage) -> _Group:
        return self._groups[message.group or ""]

    def _enter(self, message: SqsMessage) -> None:
        self._groups.setdefault(message.group or "", _Group()).messages[message.number] = message
        self._dedup[message.dedup_id or ""] = (message.sent, message)

    def _leave(self, message: SqsMessage) -> None:
        name = message.group or ""
        group = self._groups[name]
        del group.messages[message.number]
        if group.messages:
            self._judge(name, group)
        else:
            del self._groups[name]
            self._ready.pop(name, None)

    def _show(self, message: SqsMessage) -> None:
        self._judge(message.group or "", self._group(message))

    def _hide(self, message: SqsMessage, why: str, until: float) -> None:
        super()._hide(message, why, until)
        group = self._group(message)
        group.taken += why == "taken"
        self._judge(message.group or "", group)

    def _unhide(self, message: SqsMessage) -> None:
        self._group(message).taken -= message.hidden == "taken"
        super()._unhide(message)

    def _judge(self, name: str, group: _Group) -> None:
        """Record whether a group can be received from."""
        head = next(iter(group.messages.values()))
        if group.taken == 0 and not head.hidden:
            self._ready.setdefault(name)
        else:
            self._ready.pop(name, None)

    def _visible(self) -> Iterator[SqsMessage]:
        # A group is no longer ready once one of its messages has been taken.
        while self._ready:
            group = self._groups[next(iter(self._ready))]
            for message in list(islice(group.messages.values(), MOST_MESSAGES)):
                if message.hidden:
                    break
                yield message

    def _put_back(self, message: SqsMessage) -> None:
        pass  # it has never left its group
