"""Checks the options of `@app.job()`, such as executor, limits, order and batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from qdo.callables import check_hook, describe_callable, is_async
from qdo.errors import UsageError
from qdo.fleet.limit_node import rate_of
from qdo.queues import name_error

if TYPE_CHECKING:
    from qdo.jobs.retry import Policy


ExecutorName = Literal["greenlet", "thread", "process"]
Order = Literal["queue", "key", "none", "priority"]

EXECUTORS = get_args(ExecutorName)
ORDERS = get_args(Order)
# The executor of ``async def`` jobs. Only the kind of the function selects this executor.
ASYNCIO = "asyncio"
LEAST_TIMEOUT_SECONDS = 0.001
MOST_TIMEOUT_SECONDS = 1e6
# Approximate memory of a new Python process.
LEAST_MEMORY_MIB = 32
# Default number of messages of a queue in flight if the order allows several.
CONCURRENCY = 10
MOST_CONCURRENCY = 10_000
MOST_BATCH = 10_000
MOST_COUNT = 10**9
MOST_LIMITS = 16


class RunOptions(TypedDict, total=False):
    """The parameters of `App.job` that jobs for messages, batches and requests share."""

    executor: ExecutorName | None
    timeout_seconds: float | None
    memory_mib: int | None
    recycle_after: int | None
    policy: Policy | None
    concurrency: int | None
    limits: Collection[str]
    per_queue_rate: str | None
    body: Any
    kind: str | None


def check_job(function: Any, first: str = "message") -> None:
    """Raise UsageError unless `function` accepts the argument `first` and a context."""
    check_hook(function, (first, "context"), "job", may_be_async=True)


def check_placement(
    function: Any,
    executor: str | None,
    timeout_seconds: float | None,
    memory_mib: int | None,
    recycle_after: int | None,
) -> None:
    """Raise UsageError, with the remedy, unless the executor and the limits suit the job."""
    name = describe_callable(function)
    if executor is not None and executor not in EXECUTORS:
        raise UsageError(
            reason=f"job {name}: executor must be one of {', '.join(EXECUTORS)}, got {executor!r}"
        )
    if executor is not None and is_async(function):
        raise UsageError(
            reason=f"job {name} is 'async def' and runs on the asyncio loop of its worker, not "
            f"with executor={executor!r}; omit executor, or write the job with 'def'"
        )
    _check_timeout(name, timeout_seconds)
    _check_count(name, "memory_mib", memory_mib, LEAST_MEMORY_MIB)
    _check_count(name, "recycle_after", recycle_after, 1)
    if executor in ("greenlet", "thread") or is_async(function):
        _check_process_only(name, memory_mib, recycle_after)


def kind_of(job: Any, default: str) -> str:
    """Return the executor of a `Job`, or `default`; raise UsageError for an invalid executor."""
    if is_async(job.function):
        return ASYNCIO
    kind = job.executor or default
    if kind == "process" and job.batch is not None:
        raise UsageError(
            reason=f"job {job.name} takes batches, but executor 'process' takes one message at a "
            "time; give the job executor='thread' or 'greenlet', or omit batch"
        )
    if kind != "process":
        _check_process_only(job.name, job.memory_mib, job.recycle_after)
    return str(kind)


def _check_timeout(name: str, value: Any) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and LEAST_TIMEOUT_SECONDS <= value <= MOST_TIMEOUT_SECONDS):
        raise _invalid(
            name,
            f"timeout_seconds must be a number from {LEAST_TIMEOUT_SECONDS:g} to "
            f"{MOST_TIMEOUT_SECONDS:g}, or None for no limit, got {value!r}",
        )


def _check_count(name: str, option: str, value: Any, least: int) -> None:
    if value is not None and not _in_range(value, MOST_COUNT, least):
        allowed = f"an integer from {least} to {MOST_COUNT}, or None"
        raise _invalid(name, f"{option} must be {allowed}, got {value!r}")


def _check_process_only(name: str, memory_mib: int | None, recycle_after: int | None) -> None:
    for option, value in (("memory_mib", memory_mib), ("recycle_after", recycle_after)):
        if value is not None:
            raise UsageError(
                reason=f"job {name}: {option} requires executor='process'; add it, or omit {option}"
            )


def check_order(
    name: str, order: str, concurrency: int | None, checkpoint: str, policy: Policy | None
) -> None:
    """Raise UsageError, with the remedy, for options of job `name` that contradict each other."""
    if order not in ORDERS:
        raise _invalid(name, f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if concurrency is not None and not _in_range(concurrency, MOST_CONCURRENCY):
        most = MOST_CONCURRENCY
        raise _invalid(
            name, f"concurrency must be an integer from 1 to {most}, got {concurrency!r}"
        )
    if order in ("queue", "priority") and concurrency not in (None, 1):
        raise _invalid(
            name,
            f"concurrency={concurrency} requires messages that do not wait for each other; "
            "add order='key' or order='none', or omit concurrency",
        )
    if order == "queue":
        return
    if checkpoint == "message":
        raise _invalid(
            name,
            f"checkpoint='message' records messages one by one, but with order={order!r} they "
            "do not finish one by one; use order='queue', or omit checkpoint",
        )
    if order == "none" and policy is not None and policy.blocks:
        raise _invalid(
            name,
            "order='none' and a policy that blocks contradict each other, because no message "
            "waits for the failed one; use order='queue' or 'key', or then='dead-letter'",
        )


def check_pool(
    name: str, order: str, batch: int | None, checkpoint: str, policy: Policy | None
) -> None:
    """Raise UsageError for options that are invalid for a job of pools."""
    given = {"order": order != "queue", "batch": batch, "checkpoint": checkpoint != "interval"}
    given["then='block'"] = policy is not None and policy.blocks
    for option in (option for option, is_given in given.items() if is_given):
        raise _invalid(name, f"pool=True runs requests one by one and in parallel; omit {option}")


def check_batch(
    name: str, batch: int | None, batch_wait_seconds: float, order: str, executor: str | None
) -> None:
    """Raise UsageError, with the remedy, unless the job `name` can run such batches."""
    wait: Any = batch_wait_seconds
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait <= 3600:
        raise _invalid(
            name, f"batch_wait_seconds must be a number of seconds from 0 to 3600, got {wait!r}"
        )
    if batch is None:
        if wait:
            raise _invalid(name, "batch_wait_seconds requires batch; add one, such as batch=500")
        return
    if not _in_range(batch, MOST_BATCH):
        raise _invalid(name, f"batch must be an integer from 1 to {MOST_BATCH}, got {batch!r}")
    if order in ("key", "priority"):
        raise _invalid(
            name,
            f"batch={batch} processes a queue batch by batch, so its messages wait for more than "
            f"their own {order}, which contradicts order={order!r}; omit one of them",
        )
    if executor == "process":
        raise _invalid(
            name,
            "executor='process' takes one message at a time, not a batch; use "
            "executor='thread', or omit batch",
        )


def check_limits(limits: Any, per_queue_rate: Any) -> tuple[str, ...]:
    """Return the names of a job's limits; raise UsageError for invalid limits."""
    if isinstance(limits, str) or not isinstance(limits, Collection) or len(limits) > MOST_LIMITS:
        raise UsageError(
            reason=f"limits must be a list of at most {MOST_LIMITS} names such as ['crm'], "
            f"got {limits!r}"
        )
    for each in limits:
        reason = name_error(each) if isinstance(each, str) else "it is not a string"
        if reason:
            raise UsageError(reason=f"limits must be names of limits, got {each!r}: {reason}")
    if per_queue_rate is not None:
        try:
            rate_of(per_queue_rate)
        except ValueError as error:
            raise UsageError(reason=f"per_queue_rate {error}") from error
    return tuple(sorted(set(limits)))


def _in_range(value: Any, most: int, least: int = 1) -> bool:
    return type(value) is int and least <= value <= most


def _invalid(name: str, reason: str) -> UsageError:
    return UsageError(reason=f"job {name}: {reason}")
