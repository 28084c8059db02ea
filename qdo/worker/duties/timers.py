"""The duty "timers" of the fleet's leader sends the messages of timers.

==============================  ===================================================================
the leader dies                 consequence
==============================  ===================================================================
before it sends                 its successor sends
between sending and recording   its successor sends again; the broker recognizes the occurrence as
                                the message's deduplication key and stores nothing
==============================  ===================================================================

The same applies if two workers act at once, for instance when a frozen leader resumes. The node's
version and the leader's fence let only one worker record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from qdo.errors import FailureKind, UnsupportedError
from qdo.fleet.timer_node import TimerNode, read_timers, write_timers
from qdo.jobs.timers import Timer
from qdo.refusals import failure_kind, send_each
from qdo.sending.timers import DueTimer, send_occurrences
from qdo.text import describe, iso_time, join_some
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.leading import LeaderDuty

_log = logging.getLogger(__name__)

# Longest sleep of the leader, in seconds. The leader must notice changes of its clock.
CLOCK_SECONDS = 1.0
RETRY_SECONDS = 5.0
# Seconds between two reads of a damaged node.
REREAD_SECONDS = 60.0
# Maximum number of messages to send at once.
AT_ONCE = 500
# Maximum seconds by which a recorded time may be ahead of a correct clock.
AHEAD_SECONDS = 3600.0
# Minimum seconds from a timer's removal from the app to the deletion of the timer's node.
UNUSED_SECONDS = 30 * 86_400.0


class TimerSender(LeaderDuty):
    """Sends each due occurrence, then records the occurrence.

    :raises UnsupportedError: a timer has `unless_waiting`, and the broker cannot count messages.
    """

    name = "timers"

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
        # The time of the next check of each timer; empty until this worker leads.
        self._looks: dict[str, float] = {}
        self._is_clean = False
        counted = [each.name for each in self._timers.values() if each.unless_waiting]
        if counted and not broker.capabilities.countable:
            what = f"count messages, for unless_waiting of timer {counted[0]!r}"
            raise UnsupportedError(broker="this broker", what=what, remedy="omit unless_waiting")
        # SQS and Kinesis may reject one message of a call and store others, so send one at a time.
        self._most = AT_ONCE if broker.capabilities.lasting_dedup else 1
        if self._most == 1:
            _log.warning(
                "the broker does not deduplicate for 7 days: when a leader dies, an occurrence of a"
                " timer may be sent twice, with the same header qdo-timer"
            )

    def follow(self, member: Member | None) -> None:
        self._looks = {}
        self._is_clean = False

    def lead(self, member: Member) -> float:
        """Send and record due occurrences, as many as the broker takes; return the next delay."""
        now = self._now()
        names: list[str] = []
        try:
            if not self._looks:
                self._looks = dict.fromkeys(self._timers, now)
            if not self._is_clean and min(self._looks.values()) <= now:
                member.leader.with_fence(self._clean)
                self._is_clean = True
            names = [name for name, at in self._looks.items() if at <= now][: self._most]
            if names:
                member.leader.with_fence(partial(self._fire, member, names))
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            is_away = failure_kind(error) is FailureKind.UNREACHABLE
            failed = self._timers if is_away or not names else names
            self._retry(failed, describe(error))
        return min(max(0.0, min(self._looks.values()) - self._now()), CLOCK_SECONDS)

    def _clean(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """Mark the nodes of timers that the app has removed; delete nodes with an old mark."""
        folder = layout.fleet.timers
        old = self._now() - UNUSED_SECONDS
        nodes = read_timers(client, layout, set(names_below(client, folder)) - set(self._timers))
        marked = {name: replace(node, when="") for name, node in nodes.items() if node.when}
        write_timers(client, layout, fence, marked)
        unused = [name for name, node in nodes.items() if not node.when and node.written < old]
        commit_each(client, [(fence, DeleteOp(f"{folder}/{name}")) for name in unused])
        return 0

    def _fire(
        self, member: Member, names: list[str], client: Client, layout: Layout, fence: CheckOp
    ) -> int:
        """Send and record the due occurrences of some timers; a refusal affects only its timer."""
        now = self._now()
        due: list[DueTimer] = []
        changed: dict[str, TimerNode] = {}
        failed: dict[str, Exception | None] = {}
        nodes = read_timers(client, layout, names)
        nodes |= self._reread_ahead(client, layout, fence, nodes)
        for name in names:
            gevent.sleep(0)  # yield: counting a thousand missed occurrences takes 30 ms
            timer = self._timers[name]
            node = nodes.setdefault(name, TimerNode(int(now)))
            if node.fault is not None:
                text = "timer %s sends nothing: its node is damaged (%s); delete it"
                _log.error(text, name, node.fault)
                self._looks[name] = now + REREAD_SECONDS
                continue
            last = self._begin_of(name, node, timer)
            occurrence = timer.due(last, now)
            if occurrence is not None:
                last = occurrence.at
                try:
                    if occurrence.sends and not self._waits(member, timer):
                        due.append((timer, occurrence))
                except Exception as error:
                    if failure_kind(error) is FailureKind.UNREACHABLE:
                        raise
                    failed[name] = error
            after = timer.after(last)
            self._looks[name] = now + REREAD_SECONDS if last > now + AHEAD_SECONDS else after
            new = replace(node, last=last, when=timer.when, queue=timer.queue)
            if new != node:
                changed[name] = replace(new, next=after, by=member.name, refused="")
        ended = self._send(due, nodes, changed, failed)
        if lost := write_timers(client, layout, fence, changed):
            self._retry(lost, "another worker leads, or the coordinator gave no answer")
        if ended is not None:
            raise ended
        return 0

    def _reread_ahead(
        self, client: Client, layout: Layout, fence: CheckOp, found: Mapping[str, TimerNode]
    ) -> dict[str, TimerNode]:
        """Rewrite nodes whose `last` is far ahead; return them with the coordinator's time."""
        # Either the recorded time or this worker's clock is wrong.
        bound = self._now() + AHEAD_SECONDS
        ahead = {
            name: replace(node, refused="its last time is ahead of the clock of its leader")
            for name, node in found.items()
            if node.fault is None and node.last > bound
        }
        if not ahead:
            return {}
        write_timers(client, layout, fence, ahead)
        return read_timers(client, layout, ahead)

    def _begin_of(self, name: str, node: TimerNode, timer: Timer) -> int:
        """Return the time after which the next occurrence may follow."""
        now = int(self._now())
        if node.last <= now + AHEAD_SECONDS:
            # A schedule that the code has added, changed or restored has not missed any occurrence.
            return node.last if node.when == timer.when else max(now, node.last)
        if node.last <= node.written + AHEAD_SECONDS:
            _log.error(
                "timer %s waits until %s: the coordinator's clock is ahead of this worker's; set"
                " the clock that is wrong",
                name,
                iso_time(node.last),
            )
            return node.last
        text = "timer %s had a last time from a clock that was ahead, %s; it begins anew"
        _log.error(text, name, iso_time(node.last))
        return now

    def _send(
        self,
        due: Sequence[DueTimer],
        nodes: Mapping[str, TimerNode],
        changed: dict[str, TimerNode],
        failed: dict[str, Exception | None],
    ) -> Exception | None:
        """Send occurrences; drop nodes of unsent ones from `changed`; return the error, if any."""
        sent = send_each(
            sorted(due, key=lambda each: each[1].at),
            partial(send_occurrences, self._app),
            lambda each: each[0].queue,
        )
        failed |= {timer.name: error for (timer, _), error in (*sent.refused, *sent.held)}
        for name, error in failed.items():
            node = changed.pop(name)
            if error is not None and failure_kind(error) is FailureKind.REFUSED:
                changed |= self._refused(name, nodes[name], node, describe(error))
            else:
                self._retry([name], describe(error) if error else "its queue is busy")
        if sent.ended is not None:
            # The other occurrences stay due, because the state of their messages is unknown.
            known = {timer.name for (timer, _), _ in sent.done} | set(failed)
            for timer, _ in due:
                if timer.name not in known:
                    del changed[timer.name]
        return sent.ended

    def _refused(
        self, name: str, old: TimerNode, new: TimerNode, reason: str
    ) -> dict[str, TimerNode]:
        """Let the leader retry a refused occurrence; return the changed node, if any."""
        self._looks[name] = self._now() + RETRY_SECONDS
        node = replace(new, last=old.last, next=old.next, refused=reason, by=old.by or new.by)
        if node == old:
            return {}
        _log.error("timer %s cannot send, retrying every %g s: %s", name, RETRY_SECONDS, reason)
        return {name: node}

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
