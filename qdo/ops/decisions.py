"""Operators' decisions about messages that fail, run or block their queues.

Only the owner of a queue knows the running messages. Therefore a decision about a message that has
not failed asks the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from qdo.brokers.base import Broker
from qdo.brokers.registry import kind_of
from qdo.coordination import queue_admin as operator
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.queue_admin import Which
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import MAX_LAST, FailureRecord, QueueNode
from qdo.errors import (
    AlreadyDecidedError,
    MessageNotFailingError,
    UnreachableError,
    UnsupportedError,
)
from qdo.fleet.action_machine import LOST
from qdo.fleet.actions import MAX_RUNS
from qdo.fleet.audit import AuditTrail
from qdo.ops.dead_letters import message_id
from qdo.ops.fleet import read_queue
from qdo.ops.peek import row_at
from qdo.ops.runs import ask_owner, read_runs
from qdo.positions import TIME_POSITIONS, Positions
from qdo.text import join_some, short_duration

OperatorDecision: TypeAlias = Literal["retry", "skip", "dead-letter"]
# The command of each decision, for the action log.
COMMANDS: Mapping[OperatorDecision, str] = {
    "retry": "retry-now",
    "skip": "skip",
    "dead-letter": "dead-letters add",
}
# Maximum time for the owner of a queue to name the running messages.
ASK_SECONDS = 5.0


def decide(
    client: Client,
    layout: Layout,
    queue: str,
    decision: OperatorDecision,
    which: Which,
    reason: str = "",
    by: str = "",
    running: Iterable[FailureRecord] = (),
    logged: bool = True,
) -> tuple[FailureRecord, ...]:
    """Decide about messages that fail, run or block a queue; return their failure records.

    The queue's present or next owner executes the decision immediately. "retry" retries a message
    and counts its attempts from 1. "skip" skips it. "dead-letter" stores it as a dead letter with
    its error. "skip" and "dead-letter" also end a running attempt. One transaction records the
    decision for all messages.

    :param which: positions of messages, "first" or "all".
    :param logged: False: write no entry to the action log.
    :raises NotFailingError: no message fails, a named message does not fail, or an operator has
        already decided about a named message.
    """
    with AuditTrail(client, layout, COMMANDS[decision], reason, by).change(queue) as entry:

        def record(before: QueueNode, after: QueueNode) -> CreateOp:
            decided = operator.chosen(operator.with_running(before, running), queue, which)
            messages = join_some([str(each.position) for each in decided])
            attempts = max(each.attempts for each in decided)
            return entry({"messages": messages, "attempts": attempts}, {"decision": decision})

        chosen = record if logged else None
        return operator.decide(
            client, layout, queue, decision, which, running=running, record=chosen
        )


def check_store(broker: str) -> None:
    """Raise UnsupportedError if the broker at an address cannot keep dead letters."""
    if not kind_of(broker).keeps_dead_letters(broker):
        # The owner could not execute the decision, and operators cannot revoke decisions.
        raise UnsupportedError(
            broker="Kinesis",
            what="store dead letters",
            remedy="add dead_letters=s3://BUCKET/PREFIX to the broker's address, also for workers, "
            "or use `qdo retry-now` or `qdo skip`",
        )


@dataclass(frozen=True, slots=True)
class DecisionPlan:
    """The messages that an operator named."""

    # The node of the queue, to which this plan adds the messages of `running` as failing messages.
    node: QueueNode
    # The ids of the queue's failing messages, by position.
    ids: Mapping[int, str | None]
    which: Which
    # Records of running messages that have not failed.
    running: tuple[FailureRecord, ...]


def plan_decision(
    client: Client,
    layout: Layout,
    broker: Broker | None,
    positions: Positions,
    queue: str,
    decision: OperatorDecision,
    names: Sequence[str],
    every: bool,
) -> DecisionPlan:
    """Find the messages that an operator names by id or position, the first message, or all.

    :raises UnreachableError: the owner does not name the running messages.
    """
    node = read_queue(client, layout, queue)
    ids = ids_of(broker, positions, queue, node)
    running = {} if decision == "retry" else _running(client, layout, queue, node, ids, names)
    node = operator.with_running(node, running.values())
    ids.update({each.position: id for id, each in running.items()})
    which = which_of(queue, node, ids, names, every)
    return DecisionPlan(node, ids, which, tuple(running.values()))


def _running(
    client: Client,
    layout: Layout,
    queue: str,
    node: QueueNode,
    ids: Mapping[int, str | None],
    names: Sequence[str],
) -> dict[str, FailureRecord]:
    """Return failure records, by id, for named messages that run and have not failed."""
    known = {*map(str, ids), *ids.values()}
    unknown = {name.lower() for name in names}.difference(known)
    if not unknown or not node.owner:
        return {}
    asked = ask_owner(client, layout, node.owner, queue, MAX_RUNS, ASK_SECONDS)
    found = read_runs([asked])
    fault = found.blocked.get(node.owner) or (found.silent and (asked.result or asked.outcome))
    if fault and asked.outcome != LOST:
        raise UnreachableError(what=f"{node.owner}, the owner of queue {queue!r}", reason=fault)
    return {
        each["id"]: FailureRecord(
            int(each["position"]),
            each["attempt"],
            f"an operator ended it after {short_duration(each['seconds'])}"
            + (f" at {each['where']}" if each["where"] else ""),
        )
        for each in found.items
        if unknown.intersection((each["id"], each["position"]))
    }


def ids_of(
    broker: Broker | None, positions: Positions, queue: str, node: QueueNode
) -> dict[int, str | None]:
    """Return the ids of the failing messages of a queue, by position."""
    return {each.position: id_of(broker, positions, queue, each.position) for each in node.failures}


def which_of(
    queue: str,
    node: QueueNode,
    ids: Mapping[int, str | None],
    names: Sequence[str],
    every: bool,
) -> Which:
    """Return the failing messages that an operator names; raise NotFailingError for others."""
    positioned = tuple(_position(queue, name, node.failures, ids) for name in names)
    return positioned or ("all" if every else "first")


def _position(
    queue: str, name: str, failures: Sequence[FailureRecord], ids: Mapping[int, str | None]
) -> int:
    for failure in failures:
        if name.lower() in (ids[failure.position], str(failure.position)):
            if failure.decision:
                raise AlreadyDecidedError(queue=queue, message=name, decision=failure.decision)
            return failure.position
    raise MessageNotFailingError(queue=queue, message=name)


def id_of(broker: Broker | None, positions: Positions, queue: str, position: int) -> str | None:
    """Return the id of a message, or None if the id is unknown."""
    if positions is not TIME_POSITIONS:
        return positions.message_id(position, 0)
    # A message that the broker had delayed has its id in a header.
    if broker is None or position > MAX_LAST:
        return None
    row = row_at(broker, queue, position)
    return message_id(broker, position, None if row is None else row.headers)
