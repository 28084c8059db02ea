"""Warnings for operators about queues whose settings would lose or move messages."""

from __future__ import annotations

from qdo.brokers.sqs.broker import LONGEST_RETENTION_SECONDS, advice
from qdo.brokers.sqs.queues import QueueAttributes, Redrive
from qdo.jobs.retry import Rule
from tests.support.policies import in_force

DAY = 86_400
KEPT = QueueAttributes(0.0, retention_seconds=LONGEST_RETENTION_SECONDS)


def redriven(receives: int, target: str = "broken") -> QueueAttributes:
    return QueueAttributes(0.0, LONGEST_RETENTION_SECONDS, redrive=Redrive(target, receives))


def test_nothing_to_say() -> None:
    """Room for ten receives an attempt; days enough, or a policy that never blocks."""
    facts = {"a": redriven(100), "b": KEPT, "c": QueueAttributes(0.0, retention_seconds=4 * DAY)}
    policies = {"a": in_force(attempts=10), "b": in_force(then="block"), "c": in_force(then="skip")}
    assert advice(facts, policies) == []
    assert advice({}, {}) == []


def test_trap_05_a_redrive_policy_that_comes_too_early() -> None:
    """One sentence for each target, with the queues and the number that would do for all."""
    facts = {f"q{n}": redriven(5) for n in range(8)} | {"x": redriven(5, "other")}
    policies = {name: in_force(attempts=3) for name in facts}
    policies["q3"] = in_force(attempts=1, rules=(Rule(ValueError, attempts=7),))
    first, second = advice(facts, policies)
    assert first.startswith("SQS itself moves messages of q0, q1, q2, q3, q4 and 3 more to broken")
    assert "after 5 receives" in first
    assert "raise maxReceiveCount to 70" in first
    assert "messages of x to other" in second


def test_trap_06_a_fifo_redrive_policy_breaks_its_order() -> None:
    """The warning states this, and why such a queue should not have one."""
    (said,) = advice({"a.fifo": redriven(5)}, {"a.fifo": in_force()})
    assert "breaks the order of their groups" in said


def test_trap_07_messages_behind_a_blocked_one_do_not_expire() -> None:
    """Where a policy, or a rule of it, blocks."""
    facts = {name: QueueAttributes(0.0, retention_seconds=4 * DAY) for name in "abc"}
    policies = {
        "a": in_force(then="block"),
        "b": in_force(rules=(Rule(ValueError, then="block"),)),
        "c": in_force(),
    }
    (said,) = advice(facts, policies)
    assert "may block a, b, and SQS deletes what waits there after 4 days" in said
    assert "raise MessageRetentionPeriod to 1209600" in said
