"""Exceptions with which a job ends its attempt, and the event that observers get.

If a job returns, its message is done. After any other exception, the attempt has failed, and the
policy of the queue applies.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias


class Outcome(Exception):
    """An end of an attempt that its job has chosen."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep all attributes when the exception moves between processes."""
        return _rebuilt, (type(self), self.args, self.__dict__.copy())


def _rebuilt(kind: type[Outcome], args: tuple[Any, ...], state: dict[str, Any]) -> Outcome:
    outcome = kind.__new__(kind, *args)
    outcome.args = args
    outcome.__dict__.update(state)
    return outcome


class Retry(Outcome):
    """Retry this message `after` seconds from now (None: the policy's backoff).

    :param counts: whether this attempt counts as failed. Pass False if an outside service tells the
        job to wait. Then the number of retries has no limit.
    :raises TypeError: `after` is not a number or None, or `counts` is not a bool. The attempt then
        fails with this error.
    """

    def __init__(self, after: float | None = None, *, counts: bool = True) -> None:
        value: Any = after
        if not (value is None or (isinstance(value, (int, float)) and math.isfinite(value))):
            raise TypeError(f"after of Retry must be a number of seconds or None, got {value!r}")
        if not isinstance(counts, bool):
            raise TypeError(f"counts of Retry must be True or False, got {counts!r}")
        super().__init__(f"retry after {after} s" if after is not None else "retry")
        self.after = after
        self.counts = counts


class DeadLetter(Outcome):
    """Store this message as a dead letter with a reason, and continue with the next message."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Skip(Outcome):
    """Skip this message permanently. The worker logs the message's id and the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FailedAt(Outcome):
    """The messages of a batch before this index are done. The message at the index has failed.

    Raise this exception ``from`` the error to record. The policy applies to this error.

    :param index: index of the failed message, counted from 0.
    :raises TypeError: `index` is not an integer. The whole batch then fails with this error.
    """

    def __init__(self, index: int) -> None:
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"the index of FailedAt must be an integer, got {index!r}") from None
        super().__init__(f"message {number} of the batch failed")
        self.index = number


class Stop(Outcome):
    """Stop the worker cleanly. This message is not done, and the attempt does not count.

    Raise this exception in a job that cannot process any message, for example because the disk is
    full. The next owner of the queue runs the message again.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JobInterrupt(BaseException):
    """Raised inside a job that must end now, because of its timeout or an abort of its worker.

    The executors "greenlet" and "thread" raise this exception. ``except Exception`` in a job does
    not catch this exception, which is not an `Exception`. A job may catch the exception to clean
    up, but must then raise it again or raise an outcome.
    """


# The possible ends of an attempt. ``wait`` is a retry without a failed attempt. ``lost`` means that
# another worker owns the queue now and runs the message again.
OutcomeName: TypeAlias = Literal[
    "done", "retry", "wait", "dead-letter", "skip", "block", "stop", "lost"
]


@dataclass(frozen=True, slots=True)
class Event:
    """An attempt that has ended.

    :ivar attempt: number of the attempt, from 1.
    :ivar error: the error as one line, or the reason of a dead letter, skip or stop; None if the
        job returned.
    :ivar seconds: duration of the job. 0 if the job did not run, because an operator ended the
        message or the message killed its last process.
    :ivar worker: name of the worker node.
    """

    queue: str
    message_id: str
    position: int
    attempt: int
    outcome: OutcomeName
    error: str | None
    seconds: float
    worker: str
