"""The requests to a server, and its injected failures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Count:
    """The requests of one action to one queue.

    :ivar entries: messages in the requests or their responses.
    :ivar empty: receives without messages.
    :ivar errors: rejected as a whole.
    """

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
            found = self.counts[action, queue] = Count()
        return found

    def as_json(self) -> list[dict[str, Any]]:
        """Return one object for each action and queue."""
        return [
            {
                "action": action,
                "queue": queue,
                "requests": count.requests,
                "entries": count.entries,
                "empty": count.empty,
                "errors": count.errors,
            }
            for (action, queue), count in self.counts.items()
        ]


@dataclass(slots=True)
class _Injected:
    action: str
    queue: str
    left: int
    skip: int
    code: str
    sender_fault: bool
    done: bool


class EntryFaults:
    """Rules for entries of batches that fail, oldest first."""

    def __init__(self) -> None:
        self._rules: deque[_Injected] = deque()

    def add(self, rule: dict[str, Any]) -> None:
        """Add a rule.

        Its keys: ``action`` and ``queue`` ("" for any), ``entries`` (how many fail, 1), ``skip``
        (how many go well before, 0), ``code`` ("InternalError"), ``sender_fault`` (false) and
        ``done`` (false; true: the entry is carried out and reported as failed all the same).
        """
        self._rules.append(
            _Injected(
                action=rule.get("action", ""),
                queue=rule.get("queue", ""),
                left=int(rule.get("entries", 1)),
                skip=int(rule.get("skip", 0)),
                code=rule.get("code", "InternalError"),
                sender_fault=bool(rule.get("sender_fault", False)),
                done=bool(rule.get("done", False)),
            )
        )

    def clear(self) -> None:
        self._rules.clear()

    def next(self, action: str, queue: str, identity: str) -> tuple[dict[str, Any] | None, bool]:
        """Return the failure of an entry, if any, and whether to execute the entry."""
        for rule in self._rules:
            if rule.action not in ("", action) or rule.queue not in ("", queue):
                continue
            if rule.skip:
                rule.skip -= 1
                return None, True
            rule.left -= 1
            if rule.left <= 0:
                self._rules.remove(rule)
            failure = {
                "Id": identity,
                "SenderFault": rule.sender_fault,
                "Code": rule.code,
                "Message": "It was told to fail.",
            }
            return failure, rule.done
        return None, True
