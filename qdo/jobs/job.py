"""A job: a function of the app, with its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from qdo.callables import describe_callable, is_async
from qdo.errors import PolicyError, UsageError
from qdo.fleet.limit_node import rate_of
from qdo.jobs.kinds import KindJob, Kinds
from qdo.jobs.options import (
    CONCURRENCY,
    ExecutorName,
    Order,
    check_batch,
    check_job,
    check_limits,
    check_order,
    check_placement,
    check_pool,
)
from qdo.jobs.policy_tables import QueuePolicy, may_overlap
from qdo.jobs.retry import Policy, PolicyInForce, policy_fault
from qdo.message import Message

JobFunction = Callable[[Message, Any], Any]
Checkpoint = Literal["interval", "message"]


@dataclass(frozen=True, slots=True)
class Job:
    """A function that processes messages, with its options.

    :ivar function: the worker calls ``function(message, context)`` and ignores the result.
    :ivar queues: glob of the job's queues.
    :ivar checkpoint: "interval" records progress every `checkpoint_seconds`. "message" also records
        progress after every message, before the next message of the queue starts.
    :ivar executor: where the job runs. None uses the setting `executor`. ``async def`` jobs run on
        an asyncio loop.
    :ivar timeout_seconds: time limit of a message, or None.
    :ivar memory_mib: memory limit of the job's process and its child processes. Above the limit,
        the worker kills them (executor "process").
    :ivar recycle_after: number of messages after which the worker replaces the job's process
        (executor "process").
    :ivar policy: the consequences of failed attempts. None uses the policy in the settings.
    :ivar order: "queue": one message of a queue at a time; "key": one message of each key;
        "none": any; "priority": one message at a time, the most urgent first.
    :ivar concurrency: maximum number of messages of one queue in flight; None for the default of
        `order`.
    :ivar batch: maximum size of the `qdo.Batch` for each call. With None, each call gets one
        message.
    :ivar batch_wait_seconds: time for which an incomplete batch waits for more messages.
    :ivar limits: names of limits. A call needs a permit of each limit.
    :ivar per_queue_rate: maximum rate of starts of each queue, such as "5/s", or None.
    :ivar pool: whether the job runs the requests of pools and returns their results.
    :ivar kinds: the functions for the kinds of messages. None if no app has registered the job.
    """

    function: JobFunction
    queues: str = "*"
    checkpoint: Checkpoint = "interval"
    executor: ExecutorName | None = None
    timeout_seconds: float | None = None
    memory_mib: int | None = None
    recycle_after: int | None = None
    policy: Policy | None = None
    order: Order = "queue"
    concurrency: int | None = None
    batch: int | None = None
    batch_wait_seconds: float = 0.0
    limits: tuple[str, ...] = ()
    per_queue_rate: str | None = None
    pool: bool = False
    # Not compared, because workers look up jobs in each turn.
    kinds: Kinds | None = field(default=None, compare=False, repr=False)

    @classmethod
    def checked(cls, function: Callable[..., Any], **options: Any) -> Job:
        """Return a job with these options of `App.job`; raise UsageError for the first mistake."""
        options["limits"] = check_limits(options.get("limits", ()), options.get("per_queue_rate"))
        job = cls(function, **options)
        check_job(function, "message" if job.batch is None else "batch")
        name = job.name
        if job.pool:
            check_pool(name, job.order, job.batch, job.checkpoint, job.policy)
            job = replace(job, order="none")
        check_order(name, job.order, job.concurrency, job.checkpoint, job.policy)
        check_batch(name, job.batch, job.batch_wait_seconds, job.order, job.executor)
        check_placement(
            function, job.executor, job.timeout_seconds, job.memory_mib, job.recycle_after
        )
        return job

    def joined(self, member: KindJob, earlier: Job | None) -> Job:
        """Return a job of this function and those of an earlier job of the same queues.

        :raises UsageError: both have a function for the kind, or options that differ.
        """
        members: tuple[KindJob, ...] = (member,)
        if earlier is not None and earlier.kinds is not None:
            self._check_shares(member, earlier, earlier.kinds)
            members = (*earlier.kinds.members, member)
        kinds = Kinds(members)
        return replace(self, function=kinds.function(), kinds=kinds)

    def _check_shares(self, member: KindJob, earlier: Job, kinds: Kinds) -> None:
        if any(each.kind == member.kind for each in kinds.members):
            what = "without a kind" if member.kind is None else f"of kind {member.kind!r}"
            raise UsageError(
                reason=f"job {self.name}: job {earlier.name} takes messages {what} of "
                f"{self.queues!r} already; give one of them another kind, or other queues"
            )
        rule = f"jobs {earlier.name} and {self.name} of {self.queues!r} must"
        for option in fields(self):
            if not option.compare or option.name == "function":
                continue
            values = [getattr(job, option.name) for job in (earlier, self)]
            if values[0] != values[1]:
                text = f"{rule} have the same {option.name}, got {values[0]!r} and {values[1]!r}"
                raise UsageError(reason=f"{text}; a queue has one job for its worker")
        if is_async(earlier.function) != is_async(self.function):
            raise UsageError(reason=f"{rule} both be written with 'async def', or both with 'def'")
        if self.batch is not None:
            reason = f"{rule} be one job if they take batches, which have messages of all kinds"
            raise UsageError(reason=f"{reason}; omit batch, or choose by message.kind in the job")

    @property
    def lanes(self) -> int:
        """Maximum number of messages of a queue in flight at once."""
        if self.order in ("queue", "priority"):
            return 1
        return CONCURRENCY if self.concurrency is None else self.concurrency

    @property
    def queue_seconds(self) -> float:
        """Minimum time between two starts of a queue, or 0."""
        return 1 / rate_of(self.per_queue_rate) if self.per_queue_rate else 0.0

    @property
    def rest_seconds(self) -> float:
        """Maximum time between two messages of a healthy queue, excluding the job's duration."""
        return max(self.queue_seconds, self.batch_wait_seconds)

    @property
    def name(self) -> str:
        """The function as MODULE:FUNCTION, for logs."""
        return describe_callable(self.function)


def check_declaration(queues: Any, checkpoint: Any, policy: Any) -> None:
    """Raise UsageError for options of `App.job` that are invalid for every function."""
    if callable(queues):
        raise UsageError(reason="write @app.job() with parentheses")
    if not isinstance(queues, str):
        raise UsageError(
            reason=f"queues must be one glob, got {queues!r}; register the job once for each of "
            "several globs"
        )
    if checkpoint not in get_args(Checkpoint):
        raise UsageError(reason=f"checkpoint must be 'interval' or 'message', got {checkpoint!r}")
    if policy is not None and not isinstance(policy, Policy):
        raise UsageError(reason=f"policy must be a qdo.Policy, got {policy!r}")


def check_policies(
    jobs: Iterable[Job], tables: Sequence[QueuePolicy], default: PolicyInForce
) -> None:
    """Raise PolicyError for mistakes in policies at startup, not at the first failure."""
    for job in jobs:
        below = _policy_of(job, default)
        for table in tables:
            if may_overlap(table.queues, job.queues):
                merged = table.override(below)
                if job.order == "none" and merged.blocks:
                    raise policy_fault(
                        f"it may block queues of job {job.name}, but with order='none' no "
                        "message waits for another; remove then='block', or change the order",
                        table.name,
                    )


def _policy_of(job: Job, default: PolicyInForce) -> PolicyInForce:
    try:
        return default if job.policy is None else job.policy.over(default)
    except PolicyError as error:
        raise policy_fault(
            error.details["reason"], f"the policy of job {job.name}: {error.details['where']}"
        ) from error
