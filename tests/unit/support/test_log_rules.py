"""The rules of limits notice too much, and who is passed over."""

from __future__ import annotations

from itertools import count

from qdo.coordination.znodes.queue_node import QueueNode
from qdo.fleet.limit_node import LimitNode, ShareHolder
from tests.soak.log_rules import LimitRules, unlogged
from tests.support.zookeeper_txn_log import NodeChange, Txn


def rules_of(*nodes: LimitNode) -> LimitRules:
    """Return the rules after these versions of one limit."""
    rules, zxid = LimitRules("/qdo"), count(1)
    path = "/qdo/limits/crm"
    rules.replay(Txn(next(zxid), 1, (NodeChange(path, node.encode()),)) for node in nodes)
    return rules


def held(*permits: int, most: int = 2) -> LimitNode:
    """Return a limit whose permits are held by processes a, b, c, each of which wants one."""
    shares = zip("abc", permits, strict=False)
    return LimitNode(max=most, permits=tuple(ShareHolder(name, has, 1) for name, has in shares))


def test_shares_over_the_limit_are_noticed() -> None:
    assert len(rules_of(held(1, 1), held(1, 1, 1)).violations) == 1


def test_after_a_limit_was_lowered_shares_may_only_fall() -> None:
    assert rules_of(held(2, 1, most=3), held(2, 1), held(1, 1)).violations == []
    assert len(rules_of(held(2, 1, most=4), held(2, 1), held(2, 2)).violations) == 1


def test_starts_over_the_burst_are_noticed() -> None:
    node = LimitNode(rate=5.0, burst=1, starts=(ShareHolder("a", 1, 1), ShareHolder("b", 1, 1)))
    assert len(rules_of(node).violations) == 1


def test_turns_of_others_are_counted_while_one_waits() -> None:
    turns = [held(1, 0, 0), held(0, 1, 0), held(1, 0, 0), held(0, 1, 0)]
    rules = rules_of(*turns, held(0, 0, 1))
    assert rules.turns == {"a": 2, "b": 2, "c": 1}
    assert rules.most_overtaken == 2


def test_changes_of_operators_without_an_entry_are_noticed() -> None:
    entry = NodeChange("/qdo/actionlog/1-a", b"{}")
    changes = [NodeChange("/qdo/queues/a", QueueNode(seek=seek).encode()) for seek in range(3)]
    logged = [Txn(zxid, 1, (each, entry)) for zxid, each in enumerate(changes)]
    assert list(unlogged(logged, "/qdo")) == []
    assert len(list(unlogged([logged[0], logged[1], Txn(3, 1, (changes[2],))], "/qdo"))) == 1
