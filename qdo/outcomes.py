"""What a job may raise to say how its attempt ended.

Returning means done. Any other exception is a failed attempt and follows the policy of the
queue.
"""

from __future__ import annotations

import math
import operator
from typing import Any


class Outcome(Exception):
    """How an attempt ended, said by the job itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Go from process to process with all attributes; the text alone would not do."""
        return _rebuilt, (type(self), self.args, self.__dict__.copy())


def _rebuilt(kind: type[Outcome], args: tuple[Any, ...], state: dict[str, Any]) -> Outcome:
    outcome = kind.__new__(kind, *args)
    outcome.args = args
    outcome.__dict__.update(state)
    return outcome


class Retry(Outcome):
    """Run this message again, `after` seconds from now (None: the policy's back-off).

    :raises TypeError: `after` is neither a number nor None; the attempt fails of that, then.
    """

    def __init__(self, after: float | None = None) -> None:
        value: Any = after
        if not (value is None or (isinstance(value, (int, float)) and math.isfinite(value))):
            raise TypeError(f"Retry(after={value!r}): give a number of seconds, or nothing")
        super().__init__(f"retry after {after} s" if after is not None else "retry")
        self.after = after


class DeadLetter(Outcome):
    """Set this message aside with a reason, and go on with the next one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Skip(Outcome):
    """Pass this message over for good, by name and with a reason, which is logged."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FailedAt(Outcome):
    """The messages of a batch before this index are done; the one at it has failed.

    Raise it ``from`` the error that is to be recorded and judged by the policy.

    :param index: counted from 0.
    :raises TypeError: `index` is no whole number; the batch fails of that, then, as a whole.
    """

    def __init__(self, index: int) -> None:
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"FailedAt({index!r}): give the number of the message") from None
        super().__init__(f"message {number} of the batch failed")
        self.index = number


class Stop(Outcome):
    """Stop the worker in good order: this message is not done and no attempt is counted.

    For a job that finds that no message can be handled here, such as on a disk that is full. The
    queue goes to its next owner, which runs the message again.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
