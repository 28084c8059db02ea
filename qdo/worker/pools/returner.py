"""The duty "requests" of the leader: gives back the requests of workers that are gone.

It first reads which workers own requests, and only then, after a `sync`, which workers exist: a
worker is registered before it takes a request, so one that is not listed then is gone, and its name
is never used again. Without the `sync`, a server that lags might not know a new worker yet.
"""

from __future__ import annotations

import logging

from qdo.brokers.requests import RequestStore
from qdo.coordination.client import Client
from qdo.coordination.leader_queues import current_names
from qdo.coordination.member import Member
from qdo.coordination.protocol.machine import CheckOp
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.system.clock import clock
from qdo.text import describe, pluralize
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.leading import LOOK_SECONDS, LeaderDuty

_log = logging.getLogger(__name__)

EVERY_SECONDS = 30.0
"""How often the leader looks for owners when no worker has left."""


class Returner(LeaderDuty):
    """Gives back, and deletes requests that are over and kept long enough.

    Two leaders do no harm: a request of a worker that is gone can only be given back.
    """

    name = "requests"

    def __init__(self, store: RequestStore, current: CurrentMember | None = None) -> None:
        super().__init__(current)
        self._store = store
        self._known: frozenset[str] = frozenset()
        self._next_at = 0.0

    def lead(self, member: Member) -> float:
        """Look for workers that are gone; return the seconds until the next look."""
        workers, now = member.leader.worker_names(), clock()
        if not self._known - workers and now < self._next_at:
            self._known = workers
            return LOOK_SECONDS
        try:
            member.leader.do_chore(self._give_back)
            while self._store.expire():
                pass
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            text = "cannot look for requests of workers that are gone, retrying in 1 s: %s"
            _log.warning(text, describe(error), exc_info=not isinstance(error, QdoError))
            return 1.0
        self._known, self._next_at = workers, now + EVERY_SECONDS
        return LOOK_SECONDS

    def _give_back(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        owners = self._store.owners()
        if not owners:
            return 0
        workers = current_names(client, layout, layout.workers)
        count = 0
        for owner in (each for each in owners if each not in workers):
            given = self._store.give_back(owner)
            _log.warning("gave back %s of %s, which is gone", pluralize(given, "request"), owner)
            count += given
        return count
