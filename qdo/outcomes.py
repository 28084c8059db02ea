"""What a job may raise to say how its attempt ended.

Returning means done. Any other exception is a failed attempt and follows the policy of the
queue.
"""

from __future__ import annotations


class Outcome(Exception):
    """How an attempt ended, said by the job itself."""


class Retry(Outcome):
    """Run this message again, `after` seconds from now (None: the policy's back-off).

    :raises TypeError: `after` is neither a number nor None; the attempt fails of that, then.
    """

    def __init__(self, after: float | None = None) -> None:
        if after is not None and not isinstance(after, (int, float)):
            raise TypeError(f"Retry(after=...) takes seconds as a number, not {after!r}")
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
