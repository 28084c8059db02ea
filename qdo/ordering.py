"""Which messages of a queue wait for each other: what `@app.job()` is told, checked at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from qdo.errors import UsageError

if TYPE_CHECKING:
    from qdo.policy import Policy

Order = Literal["queue", "key", "none"]
CONCURRENCY = 10
"""Messages of one queue in hand at once, where the job says nothing and order allows it."""
MOST_CONCURRENCY = 10_000
MOST_BATCH = 10_000


def check_order(
    name: str, order: str, concurrency: int | None, checkpoint: str, policy: Policy | None
) -> None:
    """Raise UsageError, with the remedy, for options of the job `name` that do not go together."""
    if order not in get_args(Order):
        raise _refused(name, f"order={order!r} is none of {', '.join(get_args(Order))}")
    if concurrency is not None and not _whole(concurrency, MOST_CONCURRENCY):
        raise _refused(
            name, f"concurrency={concurrency!r} is no whole number from 1 to {MOST_CONCURRENCY}"
        )
    if order == "queue":
        if concurrency not in (None, 1):
            raise _refused(
                name,
                f"concurrency={concurrency} needs messages that do not wait for each other: add "
                "order='key' or order='none', or leave it out",
            )
        return
    if checkpoint == "message":
        raise _refused(
            name,
            "checkpoint='message' records one message after the other, and with "
            f"order={order!r} they do not end so: use order='queue', or leave checkpoint out",
        )
    if order == "none" and policy is not None and blocks(policy):
        raise _refused(
            name,
            "order='none' and a policy that blocks contradict each other, for no message waits "
            "for the failed one: use order='queue' or 'key', or then='dead-letter'",
        )


def blocks(policy: Policy) -> bool:
    """Return whether a queue may come to stand still by a policy."""
    return policy.then == "block" or any(rule.then == "block" for rule in policy.rules)


def check_batch(
    name: str, batch: int | None, batch_wait_seconds: float, order: str, executor: str | None
) -> None:
    """Raise UsageError, with the remedy, unless the job `name` can be given so many messages."""
    wait: Any = batch_wait_seconds
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait <= 3600:
        raise _refused(name, f"batch_wait_seconds={wait!r} is no number of seconds from 0 to 3600")
    if batch is None:
        if wait:
            raise _refused(
                name, "batch_wait_seconds is for jobs that take batches: add batch=500, or so"
            )
        return
    if not _whole(batch, MOST_BATCH):
        raise _refused(name, f"batch={batch!r} is no whole number from 1 to {MOST_BATCH}")
    if order == "key":
        raise _refused(
            name,
            f"batch={batch} takes the messages of a queue one batch after the other, so that none "
            "waits for its own key only, as order='key' says: leave one of them out",
        )
    if executor == "process":
        raise _refused(
            name,
            "a batch cannot be given to executor='process', which is given one message at a "
            "time: use executor='thread', or leave batch out",
        )


def _whole(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _refused(name: str, reason: str) -> UsageError:
    return UsageError(reason=f"job {name}: {reason}")
