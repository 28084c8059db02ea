"""Copies the action log to where it is kept for longer: a chore of the leader."""

from __future__ import annotations

from collections.abc import Callable

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.audit_entries import AuditEntry

MOST_AT_ONCE = 500
"""Entries that are read in a round, the oldest first."""


class CopiedActionsChore:
    """Passes on each entry of the action log once; a new leader passes on all of them again.

    :param keep: called with an entry; returns whether there was room for it.
    """

    def __init__(self, keep: Callable[[AuditEntry], bool]) -> None:
        self._keep = keep
        self._copied: set[str] = set()

    def __call__(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """Pass on new entries; return 0, because it deletes nothing.

        :raises NodeRefusedError: this account may not list the log.
        :raises CoordinatorUnreachableError: the connection is lost.
        """
        folder = layout.fleet.actionlog
        names = read_children(client, [folder]).get(folder, [])
        self._copied.intersection_update(names)
        new = sorted(name for name in names if name not in self._copied)[:MOST_AT_ONCE]
        for node in read_nodes(client, [layout.fleet.log_entry(name) for name in new]):
            name = node.path.rpartition("/")[2]
            entry = AuditEntry.parse(name, node.data, node.written, node.refused)
            if entry.fault is None and not self._keep(entry):
                break
            self._copied.add(name)
        return 0
