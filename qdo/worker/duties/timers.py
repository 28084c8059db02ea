"""The duty "schedule": sends the messages of timers. Only the leader of the fleet does it.

==============================  ===================================================================
the leader dies                 consequence
==============================  ===================================================================
before it sends                 its successor sends
between sending and recording   its successor sends again; the broker recognizes the occurrence as
                                the message's deduplication key and stores nothing
==============================  ===================================================================

The same applies to two workers at once, for instance when a frozen leader resumes: the version of
the node, and the leader's fence, let only one of them record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import gevent

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.coordination.bulk_reads import names_below
from qdo.coordination.client import Client
from qdo.coordination.member import Member
from qdo.coordination.protocol.machine import CheckOp, DeleteOp
from qdo.coordination.transactions import commit_each
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError, UnreachableError, UnsupportedError
from qdo.fleet.timer_node import TimerNode, read_timers, write_timers
from qdo.jobs.timers import Timer
from qdo.sending.timers import DueTimer, recognizes, send_occurrences
from qdo.text import describe, join_some
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.leading import LeaderDuty

_log = logging.getLogger(__name__)

CLOCK_SECONDS = 1.0
"""Longest sleep of the leader: it notices within this time that its clock was set."""
RETRY_SECONDS = 5.0
REREAD_SECONDS = 60.0
"""How often the leader looks at a node that is damaged."""
AT_ONCE = 500
"""Messages that are sent at once."""
UNUSED_SECONDS = 30 * 86_400.0
"""How long after its removal from the app a new leader deletes the node of a timer."""


class TimerSender(LeaderDuty):
    """Sends each occurrence that is due, and then records it.

    :param now: Unix time in seconds.
    :raises UnsupportedError: `unless_waiting` needs a broker that counts messages.
    """

    name = "schedule"

    def __init__(
        self,
        app: App,
        broker: Broker,
        current: CurrentMember | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(current)
        self._app = app
        self._timers = app.timers
        self._broker = broker
        self._now = now
        self._looks: dict[str, float] = {}
        """When to look at each timer; empty until this worker leads."""
        counted = [each.name for each in self._timers.values() if each.unless_waiting]
        if counted and not broker.capabilities.countable:
            what = f"count messages, for unless_waiting of timer {counted[0]!r}"
            raise UnsupportedError(broker="this broker", what=what, remedy="omit unless_waiting")
        # SQS and Kinesis may reject one message and store the others: these must not come again.
        self._most = AT_ONCE if recognizes(broker.capabilities) else 1
        if self._most == 1:
            _log.warning(
                "the broker does not deduplicate for 7 days: when a leader dies, an occurrence of a"
                " timer may be sent twice, with the same header qdo-timer"
            )

    def follow(self, member: Member | None) -> None:
        self._looks = {}

    def lead(self, member: Member) -> float:
        """Send and record what is due, as much as the broker takes at once."""
        now, names = self._now(), list[str]()
        try:
            if not self._looks:
                self._looks = dict.fromkeys(self._timers, now)
                member.leader.do_chore(self._clean)
            names = [name for name, at in self._looks.items() if at <= now][: self._most]
            if names:
                member.leader.do_chore(partial(self._fire, member, names))
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            rejected = isinstance(error, QdoError) and not isinstance(error, UnreachableError)
            self._retry(names if rejected else self._timers, describe(error))
        return min(max(0.0, min(self._looks.values()) - self._now()), CLOCK_SECONDS)

    def _clean(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """Mark the nodes of timers that the app has no more, and delete those marked long ago."""
        folder, old = layout.fleet.timers, self._now() - UNUSED_SECONDS
        found = read_timers(client, layout, set(names_below(client, folder)) - set(self._timers))
        marked = {name: replace(node, when="") for name, node in found.items() if node.when}
        write_timers(client, layout, fence, marked)
        unused = [name for name, node in found.items() if not node.when and node.written < old]
        commit_each(client, [(fence, DeleteOp(f"{folder}/{name}")) for name in unused])
        return 0

    def _fire(
        self, member: Member, names: list[str], client: Client, layout: Layout, fence: CheckOp
    ) -> int:
        """Send and record what is due of some timers."""
        now, due, changed = self._now(), list[DueTimer](), dict[str, TimerNode]()
        found = read_timers(client, layout, names)
        for name in names:
            gevent.sleep(0)  # counting a thousand missed occurrences takes 30 ms
            timer, node = self._timers[name], found.get(name, TimerNode(int(now)))
            if node.fault is not None:
                text = "timer %s sends nothing: its node is damaged (%s); delete it"
                _log.error(text, name, node.fault)
                self._looks[name] = now + REREAD_SECONDS
                continue
            occurrence, last = timer.due(node.last, now), node.last
            if occurrence is not None:
                last = occurrence.at
                if occurrence.sends and not self._waits(member, timer):
                    due.append((timer, occurrence))
            then = self._looks[name] = timer.after(last)
            if occurrence is not None or (node.when, node.queue) != (timer.when, timer.queue):
                node = replace(node, last=last, next=then, by=member.name)
                changed[name] = replace(node, when=timer.when, queue=timer.queue)
        if due:
            send_occurrences(self._app, sorted(due, key=lambda each: each[1].at))
        if lost := write_timers(client, layout, fence, changed):
            self._retry(lost, "another worker leads, or the coordinator gave no answer")
        return 0

    def _waits(self, member: Member, timer: Timer) -> bool:
        if not timer.unless_waiting:
            return False
        node = member.leader.read_queues([timer.queue]).get(timer.queue)
        backlog = self._broker.catalog.backlog(timer.queue, node.last if node else 0)
        return bool(backlog.count or backlog.delayed)

    def _retry(self, names: Iterable[str], reason: str) -> None:
        self._looks |= dict.fromkeys(names, self._now() + RETRY_SECONDS)
        text = "cannot send or record timers %s, retrying in %g s: %s"
        _log.warning(text, join_some(list(names)), RETRY_SECONDS, reason)
