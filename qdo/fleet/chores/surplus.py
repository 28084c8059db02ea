"""Keeps folders small: the leader deletes nodes that are too old or too many."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from qdo.coordination.bulk_reads import read_children
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, CommitError, Committed, DeleteOp, Rejected
from qdo.coordination.transactions import commit
from qdo.coordination.znodes.layout import Layout

_log = logging.getLogger(__name__)

AT_ONCE = 99
"""Nodes deleted in a transaction."""
MOST_REFUSED = 10
"""A round ends after this many nodes that cannot be deleted; the next round passes them over."""


class SurplusChore:
    """Deletes the surplus of a folder; a `Chore` of the leader.

    A node that cannot be deleted, because another program created nodes below it, costs only
    itself.

    :param folder: returns the path of the folder.
    :param surplus: returns the names to delete, from all names and the Unix time.
    """

    def __init__(
        self,
        folder: Callable[[Layout], str],
        surplus: Callable[[Collection[str], float], list[str]],
    ) -> None:
        self._folder = folder
        self._surplus = surplus
        self._refused: set[str] = set()

    def __call__(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """Delete the nodes that are too old or too many; return their number.

        :raises NodeRefusedError: this account may not list the folder.
        :raises CoordinatorUnreachableError: the connection is lost.
        """
        folder = self._folder(layout)
        names = read_children(client, [folder]).get(folder, [])
        wanted = self._surplus(names, time.time())
        self._refused.intersection_update(wanted)
        wanted = [name for name in wanted if name not in self._refused]
        deleted = refused = 0
        while wanted and refused < MOST_REFUSED:
            batch = wanted[:AT_ONCE]
            paths = [f"{folder}/{name}" for name in batch]
            answer = commit(client, [fence, *map(DeleteOp, paths)])
            if isinstance(answer, Committed):
                deleted += len(batch)
                del wanted[:AT_ONCE]
            elif isinstance(answer, Rejected) and answer.index > 0:
                name = wanted.pop(answer.index - 1)
                if answer.fault is not CommitError.NO_NODE:
                    refused += 1
                    self._refused.add(name)
                    _log.warning(
                        "cannot delete %s/%s: %s; delete it by hand", folder, name, answer.reason
                    )
            else:  # deposed, or without an answer: the leader of the next period continues
                break
        return deleted
