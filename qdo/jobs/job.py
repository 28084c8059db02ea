"""A job: a function of the app, with its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from qdo.callables import describe_callable
from qdo.errors import PolicyError, UsageError
from qdo.fleet.limit_node import rate_of
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
