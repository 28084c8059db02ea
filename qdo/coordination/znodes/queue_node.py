"""The value of a queue node, and an overview of all nodes.

========================  ====================  ==================================================
node                      kind                  value
========================  ====================  ==================================================
workers/worker-N          ephemeral sequential  ``{"queues": [...]}``; ``"reread"`` after a seek,
                                                ``"filter"`` if only some queues match it
queues/<queue>            persistent            ``{"last": "N"}``; ``owner``, ``seek``,
                                                ``onward``, ``position``, ``failing`` or
                                                ``blocked``, ``done_ranges``, ``cancelled``,
                                                ``other_failures``, ``unconfirmed``
assignments/worker-N      persistent            ``{"queues": [...]}``
rebalancer                persistent            ``{"worker": "worker-N"}``; its version is a fence
election/candidate-N      ephemeral sequential  ``{"worker": "worker-N"}``
components/<kind>/host-N  ephemeral sequential  host, pid, version, started, state, ...
doorbells/<queue>         persistent            none; its version counts notifications
========================  ====================  ==================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qdo.coordination.znodes.progress import (
    MAX_LAST,
    FailureRecord,
    OutOfOrderProgress,
    parse_last,
)
from qdo.coordination.znodes.values import (
    MAX_QUEUE_BYTES,
    MAX_VALUE_BYTES,
    encode,
    is_flat,
    load,
    string_tuple,
)
from qdo.positions import TIME_POSITIONS, Positions
from qdo.queues import is_path_part

_MOST_GROWTH = 6
"""A value that is written again may take this many times its bytes: 1e15 becomes
1000000000000000.0."""


@dataclass(frozen=True, slots=True)
class QueueNode:
    """The progress of a queue, and its owner.

    :ivar last: all messages up to this position are done; 0 before the first message.
    :ivar owner: name of the owning worker node; "" while free, or if it cannot be a znode name.
    :ivar seek: how often operators changed the node.
    :ivar onward: how many of these changes let an owner keep its progress: they did not move the
        queue back.
    :ivar position: the broker's own position, for brokers whose positions are not times.
    :ivar deleted: whether the queue is marked as deleted; no worker claims it then.
    :ivar fault: why the node cannot be read or written; such a queue is not processed.
    :ivar failure: failure record of a message after `last`, None while none fails.
    :ivar out_of_order: progress beyond `last`, None if messages are processed strictly in order.
    :ivar extra: keys of other tools, kept unchanged.
    :ivar unconfirmed: names of messages that are done but that the broker may deliver again; see
        `Subscription.unconfirmed`.
    """

    last: int = 0
    owner: str = ""
    seek: int = 0
    position: str | None = None
    deleted: bool = False
    fault: str | None = None
    failure: FailureRecord | None = None
    extra: tuple[tuple[str, Any], ...] = ()
    out_of_order: OutOfOrderProgress | None = None
    unconfirmed: tuple[str, ...] = ()
    onward: int = 0

    @property
    def blocking(self) -> tuple[FailureRecord, ...]:
        """The records of the messages that wait for an operator, the foremost first."""
        return tuple(each for each in self.failures if each.blocked)

    @property
    def retrying(self) -> tuple[FailureRecord, ...]:
        """The records of the messages that wait for their next attempt, the foremost first."""
        return tuple(each for each in self.failures if not each.blocked and not each.decision)

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The records of all failing messages, the foremost first."""
        others = () if self.out_of_order is None else self.out_of_order.other_failures
        return others if self.failure is None else (self.failure, *others)

    @classmethod
    def parse(cls, data: bytes | None, refused: str | None = None) -> QueueNode:
        """Parse a node; never raises: `fault` has the reason if it is unreadable.

        An empty value is a queue without progress. `last` may end in an L, as old writers left it,
        and have surrounding spaces.

        :param refused: why the coordinator did not return the data.
        """
        if refused is not None:
            return cls(fault=refused)
        size = 0 if data is None else len(data)
        if data is not None and size > MAX_VALUE_BYTES and not is_flat(data):
            return cls(fault=_too_long(size))
        value, fault = load(data)
        if not value:
            return cls(fault=fault)
        if size * _MOST_GROWTH > MAX_QUEUE_BYTES:
            size = max(size, len(encode(value)))
        last, fault = parse_last(value.pop("last", ""))
        owner = value.pop("owner", "")
        seek, onward = value.pop("seek", 0), value.pop("onward", 0)
        position = value.pop("position", None)
        deleted = value.pop("deleted", False)
        failing, blocked = value.pop("failing", None), value.pop("blocked", None)
        failure = FailureRecord.parse(blocked if blocked is not None else failing)
        out_of_order = OutOfOrderProgress.parse(
            last,
            value.pop("done_ranges", None),
            value.pop("other_failures", None),
            value.pop("cancelled", None),
        )
        unconfirmed = string_tuple(value.pop("unconfirmed", None))
        if size > MAX_QUEUE_BYTES:
            # Keys of other tools are dropped: without them, a seek or the owner can repair it.
            value.clear()
            fault = _too_long(size)
        return cls(
            last=last,
            owner=owner if isinstance(owner, str) and is_path_part(owner) else "",
            seek=_count(seek),
            position=position if isinstance(position, str) else None,
            deleted=bool(deleted),
            fault=fault,
            failure=failure if failure is not None and failure.position > last else None,
            extra=tuple(value.items()),
            out_of_order=out_of_order,
            unconfirmed=unconfirmed,
            onward=_count(onward),
        )

    def checked(self, positions: Positions) -> QueueNode:
        """Return the node with a `fault` if its `position` is not valid for the broker."""
        if positions is not TIME_POSITIONS and self.fault is None:
            try:
                positions.resume_after(self.last, self.position)
            except ValueError as error:
                return replace(self, fault=f"cannot read the position: {error}")
        return self

    def encode(self) -> bytes:
        value: dict[str, Any] = {"last": str(self.last) if self.last else ""}
        if self.owner:
            value["owner"] = self.owner
        if self.seek:
            value["seek"] = self.seek
        if self.onward:
            value["onward"] = self.onward
        if self.position is not None:
            value["position"] = self.position
        if self.deleted:
            value["deleted"] = True
        if self.failure is not None:
            value["blocked" if self.failure.blocked else "failing"] = self.failure.dump()
        if self.out_of_order is not None:
            value.update(self.out_of_order.dump(self.last))
        if self.unconfirmed:
            value["unconfirmed"] = list(self.unconfirmed)
        value.update(self.extra)
        return encode(value)

    def owned_by(self, worker: str) -> QueueNode:
        return replace(self, owner=worker)

    def moved_to(
        self, last: int, position: str | None = None, done: int | None = None
    ) -> QueueNode:
        """Return the node with another `last`; a failure record before it is dropped.

        Progress beyond `last` counts from it, so it is dropped as well; the caller sets it again.

        :param done: `last` as a position of the broker, if its positions are not times.
        """
        failure = self.failure
        done = last if done is None else done
        # Not `replace`, which takes three times as long: 6 % of a checkpoint.
        return QueueNode(
            last,
            self.owner,
            self.seek,
            position,
            self.deleted,
            self.fault,
            failure if failure is None or failure.position > done else None,
            self.extra,
            onward=self.onward,
        )

    def continues(self, before: QueueNode) -> bool:
        """Return whether all operators' changes since an older node let its owner go on."""
        return self.seek - before.seek == self.onward - before.onward

    def with_failure(self, failure: FailureRecord | None) -> QueueNode:
        """Return the node with this record, unless its message is done."""
        kept = failure if failure is None or failure.position > self.last else None
        return self if kept == self.failure else replace(self, failure=kept)


NEW = QueueNode()
"""Of a queue that has no node."""


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= MAX_LAST else 0


def _too_long(size: int) -> str:
    return f"the value must be at most {MAX_QUEUE_BYTES} bytes, got {size}"
