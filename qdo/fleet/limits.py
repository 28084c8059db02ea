"""Set, delete and list the limits of an app.

Functions raise NodeRefusedError if the account may not change a limit, and
CoordinatorUnreachableError after a timeout. After a timeout, a change may have taken effect.
`find_limit` and `delete_limit` raise LimitNotFoundError. `client` is None if the coordinator is a
file that does not exist yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qdo.coordination.bulk_reads import names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp, DeleteOp, NodeRead, Op, SetOp
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout, clients_of
from qdo.errors import LimitNotFoundError, UsageError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.components import require_format_level
from qdo.fleet.limit_node import MOST, LimitNode, default_burst, is_count, rate_of
from qdo.fleet.names import checked_name
from qdo.text import did_you_mean

# Workers below this format level start jobs without permits.
LIMITS_LEVEL = 1


@dataclass(frozen=True, slots=True)
class LimitWish:
    """An operator's change of a limit; None leaves a value unchanged."""

    # A number of permits, or "none" to remove the number.
    max: str | None = None
    # A rate such as "50/s", or "none" to remove the rate.
    rate: str | None = None
    burst: str | None = None
    reason: str | None = None

    def applied(self, name: str, node: LimitNode) -> LimitNode:
        """Return the changed limit; raise UsageError for impossible values or without values."""
        most = node.max
        rate = node.rate
        burst = node.burst
        if self.max is not None:
            most = None if self.max == "none" else _count(name, "max", self.max, 0)
        if self.rate is not None:
            rate = None if self.rate == "none" else _rate(name, self.rate)
            if rate is not None and (node.rate != rate):
                burst = default_burst(rate)
        if self.burst is not None:
            burst = _count(name, "burst", self.burst, 1)
        if most is None and rate is None:
            remedy = "give --max or --rate, or delete it with `qdo limits delete`"
            raise UsageError(
                reason=f"limit {name!r} must have max or rate, or both; {remedy}", name=name
            )
        if self.burst is not None and rate is None:
            remedy = "give --rate, or omit --burst"
            raise UsageError(
                reason=f"limit {name!r} must have a rate if it has a burst; {remedy}", name=name
            )
        reason = node.reason if self.reason is None else self.reason
        terms = replace(node, max=most, rate=rate, burst=burst, reason=reason)
        return replace(terms, declared=False, fault=None)


def _count(name: str, value: str, text: str, least: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not is_count(number, least):
        raise _impossible(name, value, f"be an integer from {least} to {MOST}", text)
    return number


def _impossible(name: str, value: str, needs: str, found: str) -> UsageError:
    reason = f"{value} of limit {name!r} must {needs}, got {found!r}; see `qdo limits set --help`"
    return UsageError(reason=reason, name=name)


def _rate(name: str, text: str) -> float:
    try:
        return rate_of(text)
    except ValueError as error:
        needs = str(error).removeprefix("must ").partition(", got ")[0]
        raise _impossible(name, "rate", needs, text) from error


def plan_limit(
    client: Client | None, layout: Layout, name: str, wish: LimitWish
) -> tuple[LimitNode | None, LimitNode]:
    """Return the present limit, or None, and the limit that `set_limit` would write.

    Raise RejectedError if a worker is too old for limits.
    """
    path = layout.fleet.limit(checked_name("limit", name))
    wish.applied(name, LimitNode(max=0, rate=1.0))  # check the values before creating nodes
    if client is None:
        return None, wish.applied(name, LimitNode())
    require_format_level(client, layout, LIMITS_LEVEL, "limits")
    node = read(client, path)
    before = LimitNode.parse(node.data) if isinstance(node, NodeRead) else None
    return before, wish.applied(name, before or LimitNode())


def set_limit(client: Client, layout: Layout, name: str, wish: LimitWish) -> LimitNode:
    """Create or change a limit, and return the limit.

    Keep the shares in use. Raise the errors of `plan_limit`.
    """
    plan_limit(client, layout, name, wish)
    path = layout.fleet.limit(name)
    make_folder(client, layout.fleet.limits)
    after = LimitNode()

    def is_mine(node: NodeRead) -> bool:
        return limit_terms(LimitNode.parse(node.data)) == limit_terms(after)

    with AuditTrail(client, layout, "limits set", wish.reason or "").change(name) as entry:

        def decide(node: Node) -> Sequence[Op]:
            nonlocal after
            before = LimitNode.parse(node.data) if isinstance(node, NodeRead) else LimitNode()
            after = wish.applied(name, before)
            write: Op = CreateOp(path, after.encode())
            if isinstance(node, NodeRead):
                write = SetOp(path, after.encode(), node.version)
            return [write, entry(limit_terms(before), limit_terms(after))]

        change(client, path, decide, root=layout.root, is_mine=is_mine)
    return after


def limit_terms(node: LimitNode) -> dict[str, Any]:
    burst = None if node.rate is None else node.burst
    return {"max": node.max, "rate": node.rate, "burst": burst, "reason": node.reason}


def find_limit(client: Client | None, layout: Layout, name: str) -> LimitNode:
    found = list_limits(client, layout) if client is not None else {}
    if checked_name("limit", name) not in found:
        raise LimitNotFoundError(name=name, hint=did_you_mean(name, found))
    return found[name]


def delete_limit(client: Client, layout: Layout, name: str, reason: str = "") -> None:
    """Delete a limit. The queues of its jobs wait until a limit with this name exists again."""
    find_limit(client, layout, name)
    path = layout.fleet.limit(name)
    with AuditTrail(client, layout, "limits delete", reason).change(name) as entry:

        def decide(node: Node) -> Sequence[Op] | None:
            if not isinstance(node, NodeRead):
                return None
            before = limit_terms(LimitNode.parse(node.data))
            return [DeleteOp(path, node.version), entry(before, {})]

        change(client, path, decide, root=layout.root)


def list_limits(client: Client, layout: Layout) -> dict[str, LimitNode]:
    """Return the limits by name, without the shares of departed processes."""
    names = names_below(client, layout.fleet.limits)
    nodes = read_nodes(client, [layout.fleet.limit(name) for name in names])
    # List processes after reading the limits, because a process creates its node before it holds a
    # share.
    clients = names_below(client, clients_of(layout.root))
    alive = {*names_below(client, layout.workers), *(f"client/{name}" for name in clients)}
    return {
        node.path.rpartition("/")[2]: LimitNode.parse(node.data).held_by(alive) for node in nodes
    }
