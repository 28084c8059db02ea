"""The leader's duty "requests" returns the requests of dead workers to their pools.

The duty first reads the owners of requests. After a `sync`, the duty reads the existing workers. A
worker registers before it takes a request, so an unlisted owner is dead, and its name is never
reused. Without the `sync`, a lagging server might not know a new worker yet.

The duty looks for dead workers after each change of the leader's list of workers. The list does not
show a worker that came and went between two reads. So every second, the leader also reads the
folder's count of all arrivals and departures.
"""

from __future__ import annotations

import logging
import time

from qdo.brokers.request_store import EXPIRED_AT_ONCE, RequestStore
from qdo.brokers.requests import FAILED, OVER
from qdo.coordination.client import Client
from qdo.coordination.leader_queues import current_names
from qdo.coordination.member import Member
from qdo.coordination.protocol.machine import CheckOp
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.requests.calls import cancel_overdue
from qdo.sending.sender import Sender
from qdo.settings.live import SettingsInForce
from qdo.system.clock import clock
from qdo.text import describe, pluralize
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.leading import LOOK_SECONDS, LeaderDuty

_log = logging.getLogger(__name__)

# Maximum seconds between two looks for dead owners, even if no worker has come or gone.
EVERY_SECONDS = 30.0
# Seconds between two reads of the count of arrivals and departures.
COUNT_SECONDS = 1.0
# Maximum rounds of deletes in one look. More rounds would delay the next look for workers.
EXPIRY_ROUNDS = 10


class Returner(LeaderDuty):
    """Puts back requests of dead workers, cancels late requests, and deletes expired requests.

    Failed requests stay within the limits of dead letters.

    Two leaders do no harm, because each leader puts back only requests of dead workers.
    """

    name = "requests"

    def __init__(
        self,
        app: Sender,
        store: RequestStore,
        settings: SettingsInForce,
        current: CurrentMember | None = None,
    ) -> None:
        super().__init__(current)
        self._app = app
        self._store = store
        self._settings = settings
        self._names: frozenset[str] = frozenset()
        self._changes = -1
        self._ask_at = self._look_at = 0.0

    def lead(self, member: Member) -> float:
        """Look for requests of dead workers; return the seconds until the next step."""
        names = member.leader.worker_names()
        now = clock()
        if names == self._names and now < self._ask_at:
            return LOOK_SECONDS
        try:
            cancel_overdue(self._app)
            member.leader.with_fence(self._look)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            text = "cannot look for requests of workers that are gone, retrying in 1 s: %s"
            _log.warning(text, describe(error), exc_info=not isinstance(error, QdoError))
            return 1.0
        self._names = names
        self._ask_at = now + COUNT_SECONDS
        return LOOK_SECONDS

    def _look(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        now = clock()
        folder = client.exists(layout.workers)
        # Read the count first, so that a worker that goes during the look causes another look.
        changes = -1 if folder is None else folder.cversion
        if changes == self._changes and now < self._look_at:
            return 0
        count = self._give_back(client, layout, fence)
        more = all(self._store.expire() for _ in range(EXPIRY_ROUNDS))
        self._prune()
        # Set these only after the look, so that the duty repeats a failed look.
        self._changes = changes
        self._look_at = now + (COUNT_SECONDS if more else EVERY_SECONDS)
        return count

    def _prune(self) -> None:
        """Delete the oldest failed requests of each pool beyond the limits of dead letters."""
        settings = self._settings.now
        most = settings.dead_letter_limit
        seconds = settings.dead_letter_retention_seconds
        pools = self._store.counts() if most or seconds else {}
        for pool, counts in pools.items():
            excess = max(0, counts.failed - most) if most else 0
            limit = max(excess, EXPIRED_AT_ONCE) if counts.failed else 0
            oldest = self._store.records(pool, (OVER,), limit, outcome=FAILED) if limit else []
            before = time.time() - seconds if seconds else 0.0
            ids = [
                record.id
                for rank, record in enumerate(oldest)
                if rank < excess or record.ended < before
            ]
            count = self._store.expire(ids) if ids else 0
            if count:
                _log.warning(
                    "pool %s: deleted its oldest %s, as dead_letter_limit and"
                    " dead_letter_retention_seconds say",
                    pool,
                    pluralize(count, "failed request"),
                )

    def _give_back(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        # Read owners before workers. In the other order, a new worker would lose its requests.
        owners = self._store.owners()
        if not owners:
            return 0
        workers = current_names(client, layout.workers)
        count = 0
        gone = [owner for owner in owners if owner not in workers]
        for owner in gone:
            requests = self._store.give_back(owner)
            _log.warning("gave back %s of %s, which is gone", pluralize(requests, "request"), owner)
            count += requests
        return count
