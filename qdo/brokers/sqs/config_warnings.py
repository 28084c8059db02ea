"""Warnings about SQS settings that lose messages that fail or wait; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qdo.brokers.sqs.attributes import QueueAttributes, Redrive
from qdo.brokers.sqs.url import FIFO
from qdo.jobs.policy import Policy
from qdo.text import join_some

RECEIVES_PER_ATTEMPT = 10
"""A redrive policy should allow this many receives for each attempt of a job: after handovers and
crashes, messages are received again whose job never ran."""
LONGEST_RETENTION_SECONDS = 14 * 86_400


def advice(facts: Mapping[str, QueueAttributes], policies: Mapping[str, Policy]) -> list[str]:
    """Return necessary changes to queues, as sentences with the remedy.

    :param facts: attributes of each queue.
    :param policies: failure policy of each.
    """
    return [*_on_redrive(facts, policies), *_on_retention(facts, policies)]


def _on_redrive(
    facts: Mapping[str, QueueAttributes], policies: Mapping[str, Policy]
) -> Iterable[str]:
    """Yield a sentence for each target to which SQS itself would move messages too early."""
    low: dict[Redrive, list[str]] = {}
    for queue, each in facts.items():
        needed = RECEIVES_PER_ATTEMPT * _attempts(policies[queue])
        if each.redrive is not None and each.redrive.max_receives < needed:
            low.setdefault(each.redrive, []).append(queue)
    for redrive, queues in low.items():
        needed = RECEIVES_PER_ATTEMPT * max(_attempts(policies[queue]) for queue in queues)
        order = ", which breaks the order of their groups" if _any_fifo(queues) else ""
        yield (
            f"SQS itself moves messages of {join_some(queues)} to {redrive.target} after "
            f"{redrive.max_receives} receives, without their error and maybe without ever having "
            f"been tried{order}: raise maxReceiveCount to {needed}, or remove the redrive policy"
        )


def _on_retention(
    facts: Mapping[str, QueueAttributes], policies: Mapping[str, Policy]
) -> Iterable[str]:
    short: dict[int, list[str]] = {}
    for queue, each in facts.items():
        if each.retention_seconds < LONGEST_RETENTION_SECONDS and _may_block(policies[queue]):
            short.setdefault(each.retention_seconds, []).append(queue)
    for seconds, queues in short.items():
        yield (
            f"a failing message may block {join_some(queues)}, and SQS deletes what waits there "
            f"after {seconds / 86_400:g} days: raise MessageRetentionPeriod to "
            f"{LONGEST_RETENTION_SECONDS}, 14 days"
        )


def _attempts(policy: Policy) -> int:
    """Return how many attempts a message gets at most, whatever its error."""
    return max([policy.attempts, *(rule.attempts or 0 for rule in policy.rules)])


def _may_block(policy: Policy) -> bool:
    return policy.then == "block" or any(rule.then == "block" for rule in policy.rules)


def _any_fifo(queues: Iterable[str]) -> bool:
    return any(queue.endswith(FIFO) for queue in queues)
