"""When the leader last did each chore, and with which result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import (
    ANY_VERSION,
    CheckOp,
    CommitError,
    CreateOp,
    NodeRead,
    Rejected,
    SetOp,
)
from qdo.coordination.transactions import commit, read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode, load


@dataclass(frozen=True, slots=True)
class ChoreRecord:
    """The last time that a chore was done.

    :ivar at: Unix time of the leader's clock at its end; None if the node does not say it.
    :ivar seconds: how long it took.
    :ivar deleted: number of nodes that it deleted.
    :ivar leader: the worker that did it.
    :ivar fault: why it failed, None if it did not.
    """

    chore: str
    at: float | None = None
    seconds: float | None = None
    deleted: int | None = None
    leader: str | None = None
    fault: str | None = None

    @classmethod
    def parse(cls, chore: str, value: Any, leader: str | None) -> ChoreRecord:
        """Return a record from its JSON; values of wrong types count as missing."""
        found = value if isinstance(value, dict) else {}
        at, seconds, deleted = (found.get(each) for each in ("at", "seconds", "deleted"))
        fault = found.get("fault")
        return cls(
            chore,
            at=_number(at),
            seconds=_number(seconds),
            deleted=deleted if type(deleted) is int else None,
            leader=leader,
            fault=fault if isinstance(fault, str) else None,
        )


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e12 else None


def write_records(
    client: Client, layout: Layout, fence: CheckOp, leader: str, records: Sequence[ChoreRecord]
) -> int:
    """Write the records of one round; return 0, because it deletes nothing.

    A lost answer changes nothing: the next round writes the node again.

    :raises NodeRefusedError: this account may not write the node.
    :raises CoordinatorUnreachableError: the connection is lost.
    """
    kept = ("at", "seconds", "deleted", "fault")
    chores = {
        each.chore: {key: value for key, value in asdict(each).items() if key in kept}
        for each in records
    }
    data = encode({"leader": leader, "chores": chores})
    path = layout.fleet.chores
    answer = commit(client, [fence, SetOp(path, data, ANY_VERSION)])
    if isinstance(answer, Rejected) and answer.fault is CommitError.NO_NODE:
        commit(client, [fence, CreateOp(path, data)])
    return 0


def read_records(client: Client, layout: Layout) -> tuple[list[ChoreRecord], str | None]:
    """Return the records in the order in which the chores are done, and why they cannot be read.

    :raises NodeRefusedError: this account may not read the node.
    :raises CoordinatorUnreachableError: no answer in time.
    """
    node = read(client, layout.fleet.chores)
    value, fault = load(node.data if isinstance(node, NodeRead) else b"")
    chores, leader = value.get("chores", {}), value.get("leader")
    if fault is None and not isinstance(chores, dict):
        chores, fault = {}, "`chores` must be an object"
    by = leader if isinstance(leader, str) else None
    found = chores if fault is None else {}
    return [ChoreRecord.parse(name, each, by) for name, each in found.items()], fault
