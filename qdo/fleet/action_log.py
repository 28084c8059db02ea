"""Keeps the action log small: the leader deletes entries that are too old or too many."""

from __future__ import annotations

import logging
import time

from qdo.coordination.bulk_reads import read_children
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, CommitError, Committed, DeleteOp, Rejected
from qdo.coordination.transactions import commit
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.protocol.audit_entries import surplus

_log = logging.getLogger(__name__)

AT_ONCE = 99
"""Entries deleted in a transaction."""
MOST_REFUSED = 10
"""A round ends after this many nodes that cannot be deleted; the next round passes them over."""


class ActionLogChore:
    """Deletes the surplus of the action log; a `Chore` of the leader.

    A node that cannot be deleted, because another program created nodes below it, costs only
    itself.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def __call__(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """Delete the entries that are too old or too many; return their number.

        :raises NodeRefusedError: this account may not list the log.
        :raises CoordinatorUnreachableError: the connection is lost.
        """
        folder = layout.fleet.actionlog
        names = read_children(client, [folder]).get(folder, [])
        wanted = surplus(names, time.time())
        self._refused.intersection_update(wanted)
        wanted = [name for name in wanted if name not in self._refused]
        deleted = refused = 0
        while wanted and refused < MOST_REFUSED:
            batch = wanted[:AT_ONCE]
            paths = [layout.fleet.log_entry(name) for name in batch]
            answer = commit(client, [fence, *map(DeleteOp, paths)])
            if isinstance(answer, Committed):
                deleted += len(batch)
                del wanted[:AT_ONCE]
            elif isinstance(answer, Rejected) and answer.index > 0:
                name = wanted.pop(answer.index - 1)
                if answer.fault is not CommitError.NO_NODE:
                    refused += 1
                    self._refused.add(name)
                    path = layout.fleet.log_entry(name)
                    _log.warning("cannot delete %s: %s; delete it by hand", path, answer.reason)
            else:  # deposed, or without an answer: the leader of the next period continues
                break
        return deleted
