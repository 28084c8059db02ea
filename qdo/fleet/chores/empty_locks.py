"""Deletes the folders of locks that nobody has used for an hour: a chore of the leader."""

from __future__ import annotations

from collections.abc import Callable

from qdo.coordination.bulk_reads import pipelined, read_children
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, Committed, DeleteOp, NoResponse
from qdo.coordination.transactions import commit
from qdo.coordination.znodes.layout import Layout
from qdo.system.clock import clock

IDLE_SECONDS = 3600.0
MOST_AT_ONCE = 1000
"""Folders that are deleted in a round."""


class EmptyLocksChore:
    """Deletes folders in which nothing has changed for an hour, as this leader has seen.

    The coordinator rejects the deletion of a folder with a contender. A contender that comes later
    finds no folder, and its process makes one.

    :param now: a monotonic time in seconds.
    """

    def __init__(self, now: Callable[[], float] = clock) -> None:
        self._now = now
        self._empty: dict[str, tuple[int, float]] = {}

    def __call__(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """Delete the folders of idle locks; return their number.

        :raises NodeRefusedError: this account may not list the locks.
        :raises CoordinatorUnreachableError: the connection is lost.
        """
        locks = layout.fleet.locks
        folders = [
            layout.fleet.lock(name) for name in read_children(client, [locks]).get(locks, [])
        ]
        now = self._now()
        before, self._empty = self._empty, {}
        for folder, stat in pipelined(client, client.exists_async, folders):
            if stat is not None and not isinstance(stat, Exception) and not stat.numChildren:
                # The zxid at which a child last came or went.
                change, since = before.get(folder, (0, now))
                self._empty[folder] = stat.pzxid, since if change == stat.pzxid else now
        idle = [each for each, (_, since) in self._empty.items() if now - since >= IDLE_SECONDS]
        deleted = 0
        for folder in idle[:MOST_AT_ONCE]:
            answer = commit(client, [fence, DeleteOp(folder)])
            if isinstance(answer, Committed):
                deleted += 1
            elif isinstance(answer, NoResponse) or answer.index == 0:
                break  # deposed, or without an answer: a later period continues
        return deleted
