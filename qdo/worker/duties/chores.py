"""The duty "chores": the leader deletes nodes that nobody needs any more."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import gevent

from qdo.coordination.leader_queues import Chore
from qdo.errors import NodeRefusedError, UnreachableError
from qdo.fleet.action_log import ActionLogChore
from qdo.worker.duties.member_api import CurrentMember
from qdo.worker.duties.runner import Duty

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0


class Chores(Duty):
    """Does the chores one after the other while this worker leads, once in each period.

    A chore that fails is repeated in the next period. Two workers that do the same chore, because
    one does not know yet that it was deposed, do no harm: the fence rejects its transactions.
    """

    name = "chores"

    def __init__(self, current: CurrentMember, period_seconds: float = PERIOD_SECONDS) -> None:
        self._current = current
        self._period_seconds = period_seconds
        self._chores: Sequence[tuple[str, Chore]] = (("action log", ActionLogChore()),)

    def run(self) -> None:
        while True:
            # Not at the same moment in all workers: an election may just be under way.
            gevent.sleep(self._period_seconds * random.uniform(0.9, 1.1))  # nosec B311
            self.step()

    def step(self) -> None:
        """Do each chore once, if this worker leads."""
        for what, chore in self._chores:
            member = self._current.member
            if member is None or not member.is_leader():
                return
            try:
                count = member.leader.do_chore(chore)
            except (UnreachableError, NodeRefusedError) as error:
                _log.warning(
                    "cannot clean up the %s: %s; retrying in %.0f s",
                    what,
                    error,
                    self._period_seconds,
                )
            else:
                if count:
                    _log.info("%s: deleted the %d oldest entries", what, count)
