"""The requests to a server, and its injected failures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Count:
    """The requests of one action to one queue.

    :ivar entries: messages in the requests or their responses.
    :ivar empty: receives without messages.
    :ivar errors: rejected as a whole.
    """

    action: str
    queue: str
    requests: int = 0
    entries: int = 0
    empty: int = 0
    errors: int = 0


@dataclass(slots=True)
class RequestLog:
    """Counts by action and queue."""

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def of(self, action: str, queue: str) -> Count:
        found = self.counts.get((action, queue))
        if found is None:
            found = self.counts[action, queue] = Count(action, queue)
        return found

    def as_json(self) -> list[dict[str, Any]]:
        """Return one object for each action and queue."""
        return [asdict(count) for count in self.counts.values()]


@dataclass(slots=True)
class EntryFault:
    """A rule for entries of batches that fail.

    :ivar entries: how many fail.
    """

    action: str
    queue: str
    entries: int = 1
    code: str = "InternalError"
    sender_fault: bool = False


class EntryFaults:
    """The rules, oldest first."""

    def __init__(self) -> None:
        self._rules: list[EntryFault] = []

    def add(self, rule: dict[str, Any]) -> None:
        """Add a rule; its keys are those of `EntryFault`."""
        self._rules.append(EntryFault(**rule))

    def clear(self) -> None:
        self._rules.clear()

    def next(self, action: str, queue: str, identity: str) -> dict[str, Any] | None:
        """Return the failure of an entry, None for success."""
        for rule in self._rules:
            if (rule.action, rule.queue) == (action, queue):
                rule.entries -= 1
                if not rule.entries:
                    self._rules.remove(rule)
                told = {"Code": rule.code, "Message": "It was told to fail."}
                return {"Id": identity, "SenderFault": rule.sender_fault, **told}
        return None
