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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import gevent

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.coordination.client import Client
from qdo.coordination.member import Member
from qdo.coordination.protocol.machine import CheckOp
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError, UnreachableError, UnsupportedError
from qdo.fleet.timer_node import TimerLedger, TimerNode
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
        *,
        send: Callable[[Sequence[DueTimer]], object] | None = None,
        ledger: Callable[[Client, Layout, CheckOp], TimerLedger] = TimerLedger,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(current)
        self._timers = app.timers
        self._broker = broker
        self._send = send if send is not None else partial(send_occurrences, app)
        self._ledger = ledger
        self._now = now
        self._term: tuple[str, int] | None = None
        """Worker and fence for which the nodes were read; None: they must be read."""
        self._nodes: dict[str, TimerNode] = {}
        self._next: dict[str, float] = {}
        """When to look at each timer; one without a node is damaged."""
        counted = [each.name for each in self._timers.values() if each.unless_waiting]
        if counted and not broker.capabilities.countable:
            what = f"count messages, for unless_waiting of timer {counted[0]!r}"
            raise UnsupportedError(broker="this broker", what=what, remedy="omit unless_waiting")
        if not recognizes(broker.capabilities):
            _log.warning(
                "the broker does not deduplicate for 7 days: when a leader dies, an occurrence of a"
                " timer may be sent twice, with the same header qdo-timer"
            )

    def lead(self, member: Member) -> float:
        """Send and record all that is due."""
        try:
            member.leader.do_chore(partial(self._act, member.name))
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            self._term = None
            text = "cannot send the messages of timers, retrying in %g s: %s"
            _log.warning(text, RETRY_SECONDS, describe(error))
        if self._term is None:
            return RETRY_SECONDS
        soonest = min(self._next.values(), default=float("inf"))
        return min(max(0.0, soonest - self._now()), CLOCK_SECONDS)

    def _act(self, worker: str, client: Client, layout: Layout, fence: CheckOp) -> int:
        ledger, now = self._ledger(client, layout, fence), self._now()
        due = [name for name, at in self._next.items() if at <= now]
        if self._term != (worker, fence.version) or not self._nodes.keys() >= set(due):
            self._term = worker, fence.version
            self._begin(ledger, worker, int(now))
            due = [name for name, at in self._next.items() if at <= now]
        # SQS and Kinesis may reject one message and store the others: these must not come again.
        most = AT_ONCE if recognizes(self._broker.capabilities) else 1
        for start in range(0, len(due), most):
            if self._term is not None:
                self._fire(ledger, worker, due[start : start + most], now)
        return 0

    def _begin(self, ledger: TimerLedger, worker: str, now: int) -> None:
        """Read the nodes, and make them fit the timers."""
        found, changed, self._nodes = ledger.read(), {}, {}
        self._next = dict.fromkeys(self._timers, now + REREAD_SECONDS)
        for name, timer in self._timers.items():
            node = found.pop(name, TimerNode(now))
            if node.fault is not None:
                text = "timer %s sends nothing: its node is damaged (%s); delete it"
                _log.error(text, name, node.fault)
                continue
            self._nodes[name], self._next[name] = node, timer.after(node.last)
            if (node.when, node.queue) != (timer.when, timer.queue):
                changed[name] = self._recorded(worker, name, node.last)
        ledger.write({name: replace(node, when="") for name, node in found.items() if node.when})
        old = now - UNUSED_SECONDS
        ledger.delete(name for name, node in found.items() if not node.when and node.written < old)
        self._record(ledger, changed)

    def _recorded(self, worker: str, name: str, last: int) -> TimerNode:
        timer, node = self._timers[name], self._nodes[name]
        when, queue, then = timer.when, timer.queue, timer.after(last)
        return replace(node, last=last, next=then, when=when, queue=queue, by=worker)

    def _fire(self, ledger: TimerLedger, worker: str, names: Sequence[str], now: float) -> None:
        """Send and record what is due of some timers."""
        due: list[DueTimer] = []
        quiet: list[DueTimer] = []
        for name in names:
            gevent.sleep(0)  # counting a thousand missed occurrences takes 30 ms
            timer = self._timers[name]
            if (occurrence := timer.due(self._nodes[name].last, now)) is not None:
                sends = occurrence.sends and not (
                    timer.unless_waiting and self._waits(ledger, name)
                )
                (due if sends else quiet).append((timer, occurrence))
        due.sort(key=lambda each: each[1].at)
        changed = {
            timer.name: self._recorded(worker, timer.name, occurrence.at)
            for timer, occurrence in (*quiet, *self._sent(due, now))
        }
        self._next.update({name: node.next for name, node in changed.items()})
        self._record(ledger, changed)

    def _waits(self, ledger: TimerLedger, name: str) -> bool:
        queue = self._timers[name].queue
        backlog = self._broker.catalog.backlog(queue, ledger.recorded(queue))
        return bool(backlog.count or backlog.delayed)

    def _sent(self, due: Sequence[DueTimer], now: float) -> Sequence[DueTimer]:
        """Send messages; return those that were sent: all, or none if the broker rejects them."""
        try:
            if due:
                self._send(due)
        except UnreachableError:
            raise
        except QdoError as error:
            names = [timer.name for timer, _ in due]
            self._next.update(dict.fromkeys(names, now + RETRY_SECONDS))
            text = "cannot send timers %s, retrying in %g s: %s"
            _log.warning(text, join_some(names), RETRY_SECONDS, error)
            return ()
        return due

    def _record(self, ledger: TimerLedger, changed: dict[str, TimerNode]) -> None:
        versions = ledger.write(changed)
        for name, version in versions.items():
            self._nodes[name] = replace(changed[name], version=version)
        if lost := sorted(changed.keys() - versions.keys()):
            self._term = None
            text = "timers %s are not recorded, unless another worker leads: reading them again"
            _log.warning(text, join_some(lost))
