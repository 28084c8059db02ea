"""The duty "chores": the leader deletes nodes that nobody needs any more."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial

import gevent

from qdo.coordination.leader_queues import Chore
from qdo.errors import NodeRefusedError, UnreachableError
from qdo.fleet.chores.empty_locks import EmptyLocksChore
from qdo.fleet.chores.lost_actions import LostActionsChore
from qdo.fleet.chores.records import ChoreRecord, write_records
from qdo.fleet.chores.surplus import SurplusChore
from qdo.fleet.levels import LevelChore
from qdo.fleet.protocol.audit_entries import cut, old_outputs, surplus
from qdo.fleet.settings_node import surplus_versions
from qdo.system.clock import clock
from qdo.text import pluralize
from qdo.worker.duties.member_api import CurrentMember, MemberApi
from qdo.worker.duties.runner import Duty

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0


class Chores(Duty):
    """Does the chores one after the other while this worker leads, once in each period.

    A chore that fails is repeated in the next period. Two workers that do the same chore, because
    one does not know yet that it was deposed, do no harm: the fence rejects its transactions.

    :param further: chores that are done first, by name.
    """

    name = "chores"

    def __init__(
        self,
        current: CurrentMember,
        further: Iterable[tuple[str, Chore]] = (),
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._current = current
        self._period_seconds = period_seconds
        self._chores: Sequence[tuple[str, Chore]] = (
            *further,
            ("lost-actions", LostActionsChore()),
            ("action-outputs", SurplusChore(lambda each: each.fleet.actionoutput, old_outputs)),
            ("action-log", SurplusChore(lambda layout: layout.fleet.actionlog, surplus)),
            ("format-level", LevelChore()),
            ("live-settings", SurplusChore(lambda each: each.fleet.settings, surplus_versions)),
            ("empty-locks", EmptyLocksChore()),
        )

    def run(self) -> None:
        while True:
            # Not at the same moment in all workers: an election may just be under way.
            gevent.sleep(self._period_seconds * random.uniform(0.9, 1.1))  # nosec B311
            self.step()

    def step(self) -> None:
        """Do each chore once, if this worker leads, and write down what became of it."""
        member = self._current.member
        if member is None:
            return
        records = []
        for name, chore in self._chores:
            if member is not self._current.member or not member.is_leader():
                return
            records.append(self._do(member, name, chore))
        write = partial(write_records, leader=member.name, records=records)
        try:
            member.leader.do_chore(write)
        except (UnreachableError, NodeRefusedError) as error:
            _log.warning("cannot write when chores were done: %s; `qdo chores` lags behind", error)

    def _do(self, member: MemberApi, name: str, chore: Chore) -> ChoreRecord:
        began, count, fault = clock(), 0, None
        try:
            count = member.leader.do_chore(chore)
        except (UnreachableError, NodeRefusedError) as error:
            fault = cut(str(error))
            _log.warning(
                "chore %s failed: %s; retrying in %.0f s", name, error, self._period_seconds
            )
        if count:
            _log.info("chore %s: deleted %s", name, pluralize(count, "node"))
        seconds = round(clock() - began, 3)
        return ChoreRecord(name, round(time.time(), 3), seconds, count, fault=fault)
