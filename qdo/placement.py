"""Where a job may run and for how long: what `@app.job()` is told, checked when it is told."""

from __future__ import annotations

from typing import Any, Literal

from qdo.callbacks import described
from qdo.callbacks import is_async as is_async
from qdo.errors import UsageError

ExecutorName = Literal["greenlet", "thread", "process"]
EXECUTORS = ("greenlet", "thread", "process")
ASYNCIO = "asyncio"
"""Where ``async def`` jobs run; chosen by their kind, never by name."""
LEAST_MEMORY_MIB = 32
"""A Python process that has done nothing yet takes about this much."""


def check_placement(
    function: Any,
    executor: str | None,
    timeout_seconds: float | None,
    memory_mib: int | None,
    recycle_after: int | None,
) -> None:
    """Raise UsageError, with the remedy, unless a job can run where and as it is told to."""
    name = described(function)
    if executor is not None and executor not in EXECUTORS:
        raise UsageError(
            reason=f"job {name}: executor={executor!r} is none of {', '.join(EXECUTORS)}"
        )
    if executor is not None and is_async(function):
        raise UsageError(
            reason=f"job {name} is 'async def' and runs on the asyncio loop of its worker, not "
            f"with executor={executor!r}: leave executor out, or write it with 'def'"
        )
    _check_number(name, "timeout_seconds", timeout_seconds, 0.001)
    _check_number(name, "memory_mib", memory_mib, LEAST_MEMORY_MIB)
    _check_number(name, "recycle_after", recycle_after, 1)
    if executor in ("greenlet", "thread") or is_async(function):
        _check_process_only(name, memory_mib, recycle_after)


def kind_of(job: Any, default: str) -> str:
    """Return the executor of a job: "greenlet", "thread", "process" or "asyncio".

    :param job: a `qdo.app.Job`.
    :param default: the setting `executor`.
    :raises UsageError: its options do not go with that executor.
    """
    if is_async(job.function):
        return ASYNCIO
    kind = job.executor or default
    if kind == "process" and job.batch is not None:
        raise UsageError(
            reason=f"job {job.name} takes batches, and executor 'process' is given one message "
            "at a time: give the job executor='thread' or 'greenlet', or leave batch out"
        )
    if kind != "process":
        _check_process_only(job.name, job.memory_mib, job.recycle_after)
    return str(kind)


def _check_number(name: str, option: str, value: Any, least: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise UsageError(
            reason=f"job {name}: {option}={value!r} must be a number of at least {least:g}, or None"
        )
    if option != "timeout_seconds" and not isinstance(value, int):
        raise UsageError(reason=f"job {name}: {option}={value!r} must be a whole number")


def _check_process_only(name: str, memory_mib: int | None, recycle_after: int | None) -> None:
    for option, value in (("memory_mib", memory_mib), ("recycle_after", recycle_after)):
        if value is not None:
            raise UsageError(
                reason=f"job {name}: {option} needs a process of its own: add "
                f"executor='process', or leave {option} out"
            )
