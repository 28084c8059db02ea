"""The limits of a testing kit: its one process has all permits and starts of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qdo.app import App
from qdo.errors import UsageError
from qdo.fleet.limit_node import MOST, is_count
from qdo.fleet.names import checked_name
from qdo.fleet.protocol.pools import Pool, StartPool
from qdo.fleet.rates import default_burst, rate_of
from qdo.jobs.job import Job


class KitLimit:
    """What the kit allows of one limit: everything, until a test sets it.

    :ivar max: permits at once, None for any number.
    :ivar borrowed: permits that `App.limit` has.
    :ivar starts: the tokens of its rate.
    """

    def __init__(self) -> None:
        self.max: int | None = None
        self.borrowed = 0
        self.starts = StartPool()
        self.starts.unlimited = True

    def change(self, max: int | None, rate: float | None, burst: int, now: float) -> None:
        """Allow so much from now on; the whole burst may start at once."""
        self.max, starts = max, self.starts
        starts.unlimited = rate is None
        starts.limit(0, now)
        starts.set_rate((rate or 0.0) / burst, now)
        starts.limit(burst, now)
        starts.refund(burst)

    def has_free(self, in_use: int, now: float) -> bool:
        """Return whether a message may be started now, beside those in use."""
        permitted = self.max is None or in_use + self.borrowed < self.max
        return permitted and self.starts.has_free(now)


class KitShare:
    """One limit as the engine of one process uses it.

    It is to the engine what `qdo.fleet.protocol.shares.LimitShare` is in a fleet. A process that
    has lost its lease returns its permits to nobody, so each process counts its own.
    """

    fault: str | None = None
    has_share = True

    def __init__(self, limit: KitLimit, clock: Callable[[], float]) -> None:
        self.starts = limit.starts
        self.pools: tuple[Pool, ...] = (limit.starts,)
        self._limit = limit
        self._clock = clock
        self._in_use = 0

    @property
    def why(self) -> str | None:
        """Why nothing can be had of it at all, None if it can."""
        return "its max is 0" if self._limit.max == 0 else None

    def has_free(self) -> bool:
        """Return whether a message may be started now."""
        return self._limit.has_free(self._in_use, self._clock())

    def take(self) -> None:
        """Take a permit and a start, after `has_free`."""
        self._in_use += 1
        self.starts.take()

    def give_back(self) -> bool:
        """Return a permit; False: nobody else must hear of it."""
        self._in_use -= 1
        return False

    def wait(self, count: int) -> bool:
        """Set how many callers wait; False: nobody else must hear of it."""
        self.starts.waiting = count
        return False

    def awaits_token(self) -> bool:
        """Return False: the kit asks for `due` by itself."""
        return False

    def due(self) -> float:
        """Return when a waiting caller can start, if nothing but time is missing."""
        now = self._clock()
        if not self.starts.waiting or self.starts.has_free(now):
            return float("inf")
        return self.starts.next_at(now)


class KitLimits:
    """The limits of an app under test, as `qdo limits` sets those of a fleet.

    :param app: the app under test.
    :param clock: seconds on the clock of the kit.
    """

    def __init__(self, app: App, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock
        self._limits: dict[str, KitLimit] = {}

    def set(
        self,
        name: str,
        *,
        max: int | None = None,
        rate: str | None = None,
        burst: int | None = None,
    ) -> None:
        """Set a limit, like `qdo limits set`; without `max` and `rate` it allows everything.

        :param rate: starts such as "50/s", "5/m" or "100/h", on the clock of the kit.
        :param burst: starts above the rate; the default is those of one second.
        :raises UsageError: a value is invalid, or a job with several messages of a queue in
            flight needs the limit: the kit cannot let these wait.
        :raises SharedNameError: the name cannot be that of a limit.
        """
        if max is not None and not is_count(max, 0):
            raise UsageError(reason=f"max must be an integer from 0 to {MOST}, got {max!r}")
        if burst is not None and (rate is None or not is_count(burst, 1)):
            reason = f"burst must be an integer from 1 to {MOST}, with a rate, got {burst!r}"
            raise UsageError(reason=reason)
        try:
            starts = None if rate is None else rate_of(rate)
        except ValueError as error:
            raise UsageError(reason=f"rate {error}") from None
        for job in self._app.jobs:
            if name in job.limits and job.order != "queue":
                raise UsageError(
                    reason=f"limit {name!r} must be one of jobs with order='queue', got that of "
                    f"the job for {job.queues!r} with order={job.order!r}; test it without a limit"
                )
        most = burst or (1 if starts is None else default_burst(starts))
        limit = self._limit(checked_name("limit", name))
        limit.change(max, starts, most, self._clock())

    def shares(self, jobs: Iterable[Job]) -> dict[str, KitShare]:
        """Return the shares of a new process, for its engine."""
        names = {name for job in jobs for name in job.limits}
        return {name: KitShare(self._limit(name), self._clock) for name in sorted(names)}

    def borrow(self, name: str) -> Callable[[], None] | None:
        """Take a permit for `App.limit`; return the function that returns it, None for none."""
        limit = self._limit(name)
        if not limit.has_free(0, self._clock()):
            return None
        limit.starts.take()
        limit.borrowed += 1

        def give_back() -> None:
            limit.borrowed -= 1

        return give_back

    def _limit(self, name: str) -> KitLimit:
        return self._limits.setdefault(name, KitLimit())


class KitPermits:
    """The permits that `App.limit` gets in a kit. Nobody waits: no other process returns one."""

    valid = True

    def __init__(self, limits: KitLimits) -> None:
        self._limits = limits

    def take(self, name: str, timeout_seconds: float | None) -> Callable[[], None] | None:
        """Return the function that returns a permit; None if there is none now."""
        return self._limits.borrow(name)
