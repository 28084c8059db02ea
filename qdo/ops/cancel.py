"""Cancel messages, so that they never run.

A command deletes a delayed message at the broker and writes the message's id to the action log. The
node of a queue records the cancellation of a message that waits in the queue. Only the owner of a
queue knows the messages that have not started. Therefore the command asks the owner to record their
cancellation. If the queue has no owner, the command changes the node, but only if the node has not
changed since the command read it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from qdo.brokers.base import Broker
from qdo.coordination import queue_admin
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp, NodeRead
from qdo.coordination.transactions import read
from qdo.coordination.znodes.queue_node import (
    MAX_CANCELLED,
    NEW,
    CancelOutcome,
    OutOfOrderProgress,
    QueueNode,
    cancel_outcome,
)
from qdo.errors import (
    CorruptNodeError,
    NodeRefusedError,
    NotFoundError,
    PartialFailureError,
    UnsupportedError,
    UsageError,
)
from qdo.fleet.action_machine import CANCEL, DONE, REJECTED
from qdo.fleet.actions import Asked, ask_workers, cancelling, wait_for_results
from qdo.fleet.audit import AuditTrail, read_entries
from qdo.fleet.audit_entries import MAX_ENTRIES
from qdo.ops.fleet import Fleet
from qdo.ops.peek import Found, check_names, done_of, find_messages
from qdo.positions import TIME_POSITIONS
from qdo.system.clock import clock
from qdo.text import join_some

NOT_FOUND = "not-found"
UNKNOWN = "unknown"
# Further outcomes. No message has the name; the outcome is unknown, because the owner did not
# answer; a plan would cancel the message.
WAITING = "waiting"
DELAYED = "delayed"
SUCCESSES = (CancelOutcome.CANCELLED.value, CancelOutcome.ALREADY.value)
# The outcome of each message by position, and the reason why the outcome is uncertain.
Outcomes: TypeAlias = Mapping[int, tuple[str, str]]
# Number of ids that fit into one text of an entry in the action log.
_IDS_IN_TEXT = 13
_PAUSE_SECONDS = 0.1
# Interval at which a command checks that the worker is still registered.
_LOOK_SECONDS = 0.5
_TOO_MANY = (
    f"queue {{!r}} may have at most {MAX_CANCELLED} cancelled messages that it has not passed; let"
    " it pass some, or drop all messages with `qdo purge`"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The result for one message."""

    name: str
    # The message's id; None if the message was not found.
    id: str | None
    position: int | None
    # A value of `CancelOutcome`, or a further outcome of this module.
    outcome: str
    # The owner's reason, or the reason why the outcome is uncertain.
    reason: str = ""


def check_cancelling(broker: Broker) -> None:
    """Raise UnsupportedError for a broker whose message ids only a worker knows."""
    if not broker.capabilities.peek:
        raise UnsupportedError(
            broker="SQS",
            what="cancel messages by id: a message has to be received first, which hides it from"
            " the workers",
            remedy="let the job raise qdo.Skip for them, or purge the queue at SQS",
        )


def cancel(
    fleet: Fleet,
    queue: str,
    names: Sequence[str],
    *,
    timeout_seconds: float = 5.0,
    reason: str = "",
    logged: bool = True,
    really: bool = True,
) -> list[Cancellation]:
    """Cancel waiting and delayed messages; return a result for each message.

    Two operators may call this function at the same time. A caller may repeat the call.

    :param timeout_seconds: maximum time for the owner of the queue to answer.
    :param logged: False: write no entries to the action log. A later call then does not find a
        cancelled delayed message.
    :param really: False: only return the expected results, from the recorded state.
    :raises UnsupportedError: the broker cannot cancel messages, or the owner's version of qdo is
        too old.
    """
    broker = fleet.broker
    client = fleet.client
    check_cancelling(broker)
    ids = check_names(names)
    if len(ids) > MAX_CANCELLED:
        raise UsageError(reason=f"at most {MAX_CANCELLED} ids can be given, got {len(ids)}")
    node = fleet.node(queue)
    if node is None and ((client is None and really) or queue not in broker.catalog.names()):
        raise NotFoundError(what="queue", name=queue)
    messages = find_messages(broker, queue, done_of(broker, node), ids)
    gone = _cancelled_before(fleet, queue, {*ids} - messages.keys())
    if client is None or not really:
        known = node or NEW
        return [_planned(broker, known, name, messages.get(name), gone) for name in ids]
    work = _Work(fleet, client, queue, reason, logged)
    moved = work.discard([each for each in messages.values() if each.delayed is not None])
    if moved:  # these messages have become due
        again = find_messages(broker, queue, done_of(broker, node), sorted(moved))
        messages = {**messages, **again}
    positions = sorted({each.position for each in messages.values() if each.position is not None})
    if positions and node is None:  # no leader has seen the queue yet
        if broker.positions is not TIME_POSITIONS:
            raise NotFoundError(what="queue", name=queue)
        queue_admin.create(client, fleet.layout, queue)
    outcomes = work.cancel(positions, clock() + timeout_seconds) if positions else {}
    return [result_of(name, messages.get(name), outcomes, gone) for name in ids]


def _cancelled_before(fleet: Fleet, queue: str, ids: Set[str]) -> Set[str]:
    """Return the ids of delayed messages that an operator has cancelled."""
    # The broker has deleted these messages, so only the action log knows them. If this account may
    # not read the log, return no ids.
    cancelled: set[str] = set()
    if fleet.client is not None and ids:
        with suppress(NodeRefusedError):
            for entry in read_entries(
                fleet.client,
                fleet.layout,
                limit=MAX_ENTRIES,
                selects=lambda entry: (entry.command, entry.target) == (CANCEL, queue),
            ):
                texts = (entry.before or {}).values()
                cancelled.update(*(text.split() for text in texts if isinstance(text, str)))
    return ids & cancelled


def _absent(name: str, cancelled: Set[str]) -> Cancellation:
    if name in cancelled:
        return Cancellation(name, name, None, CancelOutcome.ALREADY.value)
    return Cancellation(name, None, None, NOT_FOUND)


def result_of(name: str, found: Found | None, outcomes: Outcomes, gone: Set[str]) -> Cancellation:
    if found is None:
        return _absent(name, gone)
    if found.position is None:
        return Cancellation(name, found.id, None, CancelOutcome.CANCELLED.value)
    return Cancellation(name, found.id, found.position, *outcomes[found.position])


def _planned(
    broker: Broker, node: QueueNode, name: str, message: Found | None, gone: Set[str]
) -> Cancellation:
    if message is None:
        return _absent(name, gone)
    if message.position is None:
        return Cancellation(name, message.id, None, DELAYED)
    outcome = _outcome(broker, node, message.position)
    shown = WAITING if outcome is CancelOutcome.CANCELLED else outcome.value
    return Cancellation(name, message.id, message.position, shown)


def check_outcomes(queue: str, results: Sequence[Cancellation]) -> None:
    """Raise NotFoundError or PartialFailureError unless every message was cancelled."""
    failed = [each for each in results if each.outcome not in (*SUCCESSES, WAITING, DELAYED)]
    if failed and all(each.outcome == NOT_FOUND for each in results):
        names = join_some([each.name for each in failed])
        raise NotFoundError(what=f"message in queue {queue!r}", name=names)
    if failed:
        raise PartialFailureError(
            done=len(results) - len(failed),
            total=len(results),
            what="messages can be cancelled",
            rest=join_some([f"{each.name} ({each.outcome})" for each in failed]),
        )


def _outcome(broker: Broker, node: QueueNode, position: int) -> CancelOutcome:
    return cancel_outcome(node.out_of_order, node.failures, done_of(broker, node), position)


class _OwnedByAnother(Exception):
    """Another worker has claimed the queue."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Cancels messages of one queue."""

    fleet: Fleet
    client: Client
    queue: str
    reason: str
    logged: bool

    def discard(self, delayed: Sequence[Found]) -> set[str]:
        numbers = {each.delayed.number: each.id for each in delayed if each.delayed is not None}
        if not numbers:
            return set()
        gone = self.fleet.broker.delayed.discard(self.queue, numbers)
        ids = [numbers[each] for each in sorted(gone)]
        if gone and self.logged:
            parts = range(0, len(ids), _IDS_IN_TEXT)
            before = {
                f"messages-{start}" if start else "messages": " ".join(
                    ids[start : start + _IDS_IN_TEXT]
                )
                for start in parts
            }
            trail = AuditTrail(self.client, self.fleet.layout, CANCEL, self.reason)
            fault = trail.note(self.queue, before, {"cancelled": len(gone)})
            if fault is not None:
                _log.warning(
                    "queue %s: messages were cancelled without an entry in the action log, %s: %s",
                    self.queue,
                    join_some(ids),
                    fault,
                )
        return {id for number, id in numbers.items() if number not in gone}

    def cancel(self, positions: Sequence[int], deadline: float) -> Outcomes:
        """Cancel messages that have a position; return the outcome and reason of each."""
        why = dead = ""
        # The owner of the queue may change at any time. Repeat until the owner has answered, or
        # until this process has changed the node of a queue without an owner.
        while True:
            owner = self._live_owner()
            answers: Mapping[int, CancelOutcome] | None = None
            if owner is None:
                try:
                    answers, dead = self._record(positions)
                except _OwnedByAnother:
                    continue
            else:
                answers, fault = self._ask(owner, positions, deadline)
                why = fault or why
            if answers is not None:
                return {each: _with_reason(answers.get(each), why, dead) for each in positions}
            if clock() > deadline:
                return self._unanswered(positions, why)
            self.client.handler.sleep_func(_PAUSE_SECONDS)

    def _unanswered(self, positions: Sequence[int], why: str) -> Outcomes:
        """Return the outcomes that the node records, because the owner has not answered."""
        node = self._node()
        outcomes = {each: _outcome(self.fleet.broker, node, each) for each in positions}
        waiting = CancelOutcome.CANCELLED
        return {
            each: (UNKNOWN, why) if outcomes[each] is waiting else _with_reason(outcomes[each], why)
            for each in positions
        }

    def _node(self) -> QueueNode:
        node = self.fleet.node(self.queue)
        if node is None:
            raise NotFoundError(what="queue", name=self.queue)
        return node

    def _live_owner(self) -> str | None:
        """Return the owner of the queue if the owner's session may be open, otherwise None."""
        # Read the owner's node after the queue's node. An owner whose node is missing does not
        # return.
        owner = self._node().owner
        return owner if owner and self._lives(owner) else None

    def _record(self, positions: Sequence[int]) -> tuple[dict[int, CancelOutcome], str]:
        """Record the cancellation of messages in the node.

        Return the outcomes, and the name of a dead owner.
        """
        outcomes: dict[int, CancelOutcome] = {}
        dead = ""

        def change(node: QueueNode) -> QueueNode:
            if node.fault is not None:
                raise CorruptNodeError(queue=self.queue, reason=node.fault)
            if node.owner and self._lives(node.owner):
                raise _OwnedByAnother
            nonlocal dead
            dead = node.owner
            outcomes.update({each: _outcome(self.fleet.broker, node, each) for each in positions})
            new = [each for each in positions if outcomes[each] is CancelOutcome.CANCELLED]
            if not new:
                return node
            progress = (node.out_of_order or OutOfOrderProgress()).with_cancelled(new)
            if len(progress.cancelled) > MAX_CANCELLED:
                raise UsageError(reason=_TOO_MANY.format(self.queue))
            return replace(node, out_of_order=progress)

        with AuditTrail(self.client, self.fleet.layout, CANCEL, self.reason).change(
            self.queue
        ) as entry:

            def record(before: QueueNode, after: QueueNode) -> CreateOp:
                new = [each for each in positions if outcomes[each] is CancelOutcome.CANCELLED]
                return entry({"messages": join_some(list(map(str, new)))}, {"cancelled": len(new)})

            queue_admin.change_node(
                self.client,
                self.fleet.layout,
                self.queue,
                change,
                sought=0,
                record=record if self.logged else None,
            )
        return outcomes, dead

    def _lives(self, owner: str) -> bool:
        return isinstance(read(self.client, self.fleet.layout.worker(owner)), NodeRead)

    def _ask(
        self, owner: str, positions: Sequence[int], deadline: float
    ) -> tuple[dict[int, CancelOutcome] | None, str]:
        asked: list[Asked] = []
        seconds = max(0.1, deadline - clock())
        for args in cancelling(self.queue, positions):
            asked += ask_workers(
                self.client,
                self.fleet.layout,
                [owner],
                CANCEL,
                args,
                within_seconds=seconds,
                reason=self.reason,
                logged=self.logged,
            )
        while any(each.seconds is None for each in asked) and clock() < deadline:
            lives = self._lives(owner)
            wait_for_results(self.client, self.fleet.layout, asked, min(seconds, _LOOK_SECONDS))
            if not lives:
                break
        answers: dict[int, CancelOutcome] = {}
        for each in asked:
            if each.outcome == REJECTED:
                raise UnsupportedError(
                    broker=f"the owner of the queue, {owner},",
                    what=f"cancel messages ({each.result})",
                    remedy="update qdo on all hosts",
                )
            if each.outcome != DONE or not each.output:
                return None, f"{owner}: {each.result or each.outcome}"
            found = json.loads(each.output)
            answers |= {int(position): CancelOutcome(found[position]) for position in found}
        return answers, ""


def _with_reason(outcome: CancelOutcome | None, why: str, dead: str = "") -> tuple[str, str]:
    """Return the outcome of a message, and the reason if the outcome is uncertain."""
    if outcome is None or (why and outcome is CancelOutcome.DONE):
        return UNKNOWN, why
    # A dead owner may have run the message since its last checkpoint.
    if dead and outcome is CancelOutcome.CANCELLED:
        return outcome.value, f"it may have run: {dead} has died without releasing the queue"
    return outcome.value, ""
