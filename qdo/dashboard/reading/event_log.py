"""What has changed between the readings of a dashboard, in bounded memory."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import translate

from qdo.errors import NodeRefusedError
from qdo.fleet.audit import READ_AT_ONCE, entry_names, read_named
from qdo.fleet.audit_entries import AuditEntry
from qdo.ops.changes import KINDS, ChangeSum, Difference, Look, changes, summed_up
from qdo.ops.items import Judged
from qdo.sending.connections import Connections
from qdo.text import shorten

MOST_EVENTS = 1000
COMMAND = "command"
EVENT_KINDS = (*KINDS, COMMAND)
"""What visitors filter by: all commands of operators are one kind."""
_TEXT_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class SeenChange:
    """A change.

    :ivar at: Unix time of the reading that found it.
    """

    at: float
    change: Difference

    @property
    def kind(self) -> str:
        """One of `EVENT_KINDS`."""
        return self.change.kind if self.change.kind in KINDS else COMMAND

    @property
    def is_sum(self) -> bool:
        """Whether it stands for many changes."""
        return isinstance(self.change, ChangeSum)


class EventLog:
    """The newest changes, and the last look, with which the next one is compared.

    :ivar begin: Unix time of the first reading, 0.0 before it.
    :ivar fault: why commands of operators are missing, None if they are not.
    """

    def __init__(self) -> None:
        self.begin = 0.0
        self.fault: str | None = None
        self._events: deque[SeenChange] = deque(maxlen=MOST_EVENTS)
        self._before: Look | None = None
        self._unread: Collection[str] = ()
        self._known: set[str] | None = None

    def compare(
        self,
        at: float,
        judged: Judged,
        workers: list[str],
        unread: Collection[str],
        entries: list[AuditEntry],
    ) -> None:
        """Keep what has changed since the last reading.

        What could not be read has not changed: such a reading is compared with its like only.
        """
        before, after = self._before, Look(judged, workers, entries)
        if before is None:
            self.begin = at
        else:
            if set(unread) != set(self._unread):
                before = Look(judged, workers, ())
            self._events.extend(
                SeenChange(at, _bounded(each)) for each in summed_up(changes(before, after))
            )
        self._before, self._unread = replace(after, entries=()), unread

    def new_entries(self, connections: Connections) -> list[AuditEntry]:
        """Return the entries of the action log since the last call, newest first."""
        client, layout = connections.client, connections.layout
        if client is None:
            return []
        try:
            names = entry_names(client, layout)
        except NodeRefusedError as error:
            self.fault = str(error)
            return []
        self.fault = None
        found = set(names)
        new = [] if self._known is None else sorted(found - self._known, reverse=True)
        entries = read_named(client, layout, new[:READ_AT_ONCE])
        self._known = found
        return entries

    def newest(self, glob: str = "*", kinds: Collection[str] = ()) -> list[SeenChange]:
        """Return events, newest first.

        :param glob: matches the subject. Sums match every glob: they may contain a match.
        :param kinds: of `EVENT_KINDS`; all if there are none.
        """
        matches = re.compile(translate(glob)).match
        return [
            each
            for each in reversed(tuple(self._events))
            if (not kinds or each.kind in kinds)
            and (glob == "*" or each.is_sum or matches(each.change.subject))
        ]


def _bounded(change: Difference) -> Difference:
    """Return a change with texts of limited length; names of queues are short enough."""
    texts = {
        name: shorten(getattr(change, name), _TEXT_CHARACTERS)
        for name in ("kind", "subject", "before", "after", "reason", "by")
    }
    return replace(change, **texts)
