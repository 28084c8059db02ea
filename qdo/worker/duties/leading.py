"""The shared loop of the leader's duties, and the leader's chores."""

from __future__ import annotations

import abc
import json
import logging
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial

import gevent

from qdo.coordination.leader_queues import Act
from qdo.coordination.member import Member
from qdo.errors import NodeRefusedError, UnreachableError
from qdo.fleet.audit_entries import AuditEntry, Values, cut, old_outputs, surplus
from qdo.fleet.chores import (
    ChoreRecord,
    CopiedActionsChore,
    EmptyLocksChore,
    LostActionsChore,
    SurplusChore,
    write_records,
)
from qdo.fleet.components import LevelChore
from qdo.fleet.settings_machine import surplus_versions
from qdo.history.recorder import MAX_KEPT, RecordedAction, Recorder
from qdo.system.clock import clock
from qdo.text import pluralize
from qdo.worker.duties.duty import CurrentMember, Duty

_log = logging.getLogger(__name__)

# Seconds between a follower's checks for leadership. The check only reads memory.
LOOK_SECONDS = 0.1
PERIOD_SECONDS = 60.0


class LeaderDuty(Duty):
    """A duty that acts while its worker leads.

    Two workers may act at once, because a deposed leader may still believe that it leads. Each duty
    explains why two acting workers do no harm.
    """

    look_seconds: float = LOOK_SECONDS

    def __init__(self, current: CurrentMember | None = None) -> None:
        self._current = current if current is not None else CurrentMember()

    def run(self) -> None:
        while True:
            gevent.sleep(self.step(self._current.member))

    def step(self, member: Member | None) -> float:
        """Act if this worker leads; return the seconds until the next step."""
        if member is None or not member.leader.is_leader():
            self.follow(member)
            return self.look_seconds
        return self.lead(member)

    def follow(self, member: Member | None) -> None:
        """Reset the duty, because this worker does not lead or is not registered."""

    @abc.abstractmethod
    def lead(self, member: Member) -> float:
        """Act once; return the seconds until the next step."""


def keep_action(recorder: Recorder, entry: AuditEntry) -> bool:
    """Pass an entry of the action log to the history; return False if the recorder is full."""
    if len(recorder.actions) >= MAX_KEPT:
        return False
    recorder.actions.append(
        RecordedAction(
            entry.id,
            entry.at,
            entry.by,
            entry.account,
            entry.command,
            entry.target,
            _as_json(entry.before),
            _as_json(entry.after),
            entry.reason,
        )
    )
    return True


def _as_json(values: Values | None) -> str | None:
    return None if values is None else json.dumps(dict(values))


def further_chores(recorder: Recorder | None) -> list[tuple[str, Act]]:
    """Return the additional chores of a worker with a history."""
    if recorder is None:
        return []
    return [("copied-actions", CopiedActionsChore(partial(keep_action, recorder)))]


class Chores(LeaderDuty):
    """Does all chores in sequence, once in each period, while this worker leads.

    The leader repeats a failed chore in the next period. A deposed leader that still does a chore
    does no harm, because the fence rejects its transactions.
    """

    name = "chores"

    def __init__(
        self,
        current: CurrentMember | None,
        further: Iterable[tuple[str, Act]] = (),
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        super().__init__(current)
        # Jitter prevents all workers from running during an election.
        self.look_seconds = period_seconds * random.uniform(0.9, 1.1)
        self._chores: Sequence[tuple[str, Act]] = (
            *further,
            ("lost-actions", LostActionsChore()),
            ("action-outputs", SurplusChore(lambda each: each.fleet.actionoutput, old_outputs)),
            ("action-log", SurplusChore(lambda layout: layout.fleet.actionlog, surplus)),
            ("format-level", LevelChore()),
            ("live-settings", SurplusChore(lambda each: each.fleet.settings, surplus_versions)),
            ("empty-locks", EmptyLocksChore()),
        )

    def run(self) -> None:
        gevent.sleep(self.look_seconds)
        super().run()

    def lead(self, member: Member) -> float:
        """Do each chore once and record its result; return the seconds until the next round."""
        records = []
        for name, chore in self._chores:
            if member is not self._current.member or not member.leader.is_leader():
                return self.look_seconds
            records.append(self._do(member, name, chore))
        write = partial(write_records, leader=member.name, records=records)
        try:
            member.leader.with_fence(write)
        except (UnreachableError, NodeRefusedError) as error:
            _log.warning(
                "cannot write when chores were done: %s; `qdo doctor` shows older ones", error
            )
        return self.look_seconds

    def _do(self, member: Member, name: str, chore: Act) -> ChoreRecord:
        began = clock()
        count = 0
        fault = None
        try:
            count = member.leader.with_fence(chore)
        except (UnreachableError, NodeRefusedError) as error:
            fault = cut(str(error))
            _log.warning("chore %s failed: %s; retrying in %.0f s", name, error, self.look_seconds)
        if count:
            _log.info("chore %s: deleted %s", name, pluralize(count, "node"))
        seconds = round(clock() - began, 3)
        return ChoreRecord(name, round(time.time(), 3), seconds, count, fault=fault)
