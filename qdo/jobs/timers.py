"""Timers: the clock sends their messages. A schedule is a pure function of two times.

Times are whole Unix seconds. An expression follows Debian's cron at clock changes: a time of day
that a change leaves out comes at the end of the gap, and one that occurs twice comes once, except
where the minute or the hour begins with ``*``.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from qdo.errors import UsageError
from qdo.fleet.names import checked_name
from qdo.queues import check_queue_name

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

# zoneinfo takes 20 ms to import: only apps with cron expressions need it, and cronsim.

Missed: TypeAlias = Literal["once", "all", "skip"]

MOST_CHARACTERS = 200
"""Longest cron expression."""
MOST_SECONDS = 366 * 86_400
"""Longest period of a timer."""
MOST_SENT = 100
"""Occurrences that `missed="all"` sends one by one; of more it sends the latest."""
MOST_COUNTED = 1000
"""Missed occurrences that are counted: each takes 20 to 30 us, and they are counted in one go."""
SKIP_SECONDS = 60
"""Age from which `missed="skip"` sends no occurrence."""
_BEGIN = 946_684_800
"""2000-01-01T00:00:00Z: an expression must match within fifty years from here."""


_EPOCH = datetime.datetime(1970, 1, 1)
_DAY_SECONDS = 86_400
"""Clocks change less often than twice within this time."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A time of a timer.

    :ivar missed: number of earlier occurrences for which it stands, `MOST_COUNTED` for more.
    :ivar sends: False if it is too old to be sent, see `Missed`.
    """

    at: int
    missed: int = 0
    sends: bool = True


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer as the app declares it, see `qdo.App.timer`; either `cron` or `every_seconds`."""

    name: str
    queue: str
    cron: str | None = None
    every_seconds: int | None = None
    tz: str = "UTC"
    missed: Missed = "once"
    unless_waiting: bool = False

    @property
    def when(self) -> str:
        if self.cron is not None:
            return f"{self.cron} {self.tz}"
        return f"every {self.every_seconds} s"

    def after(self, moment: float) -> int:
        """Return the first occurrence after a Unix time."""
        if self.every_seconds is not None:
            return (int(moment // self.every_seconds) + 1) * self.every_seconds
        from zoneinfo import ZoneInfo

        moment, zone = int(moment // 1), ZoneInfo(self.tz)
        if any(field.startswith("*") for field in str(self.cron).split()[:2]):
            return self._after_wildcard(moment, zone)
        for found in self._matches(datetime.datetime.fromtimestamp(moment, zone)):
            # In the second pass of an hour, a time of day leads back to the first.
            if (at := int(found.timestamp())) > moment:
                return at
        raise ValueError("no time matches")

    def _matches(self, begin: datetime.datetime) -> Iterator[datetime.datetime]:
        from cronsim import CronSim

        return CronSim(str(self.cron), begin)

    def _after_wildcard(self, moment: int, zone: ZoneInfo) -> int:
        """Return the first minute after a time whose local time matches.

        cronsim gets times without a zone: it passes over minutes where clocks change by half an
        hour.
        """
        offset = _offset(zone, moment)
        while True:
            local = _EPOCH + datetime.timedelta(seconds=moment + offset)
            found = next(self._matches(local), None)
            if found is None:
                raise ValueError("no time matches")
            at = int((found - _EPOCH).total_seconds()) - offset
            change = _clock_change(zone, moment, at, offset)
            if change is None:
                return at
            moment, offset = change - 1, _offset(zone, change)

    def due(self, last: int, now: float) -> Occurrence | None:
        """Return the occurrence to send next, None if none is due.

        :param last: the recorded occurrence.
        """
        first = latest = self.after(last)
        if first > now:
            return None
        missed = 0
        while missed < MOST_COUNTED and (following := self.after(latest)) <= now:
            latest, missed = following, missed + 1
        if missed == MOST_COUNTED:
            latest = self._latest(latest, now)
        if self.missed == "all" and missed < MOST_SENT:
            return Occurrence(first)
        return Occurrence(latest, missed, self.missed != "skip" or now - latest < SKIP_SECONDS)

    def _latest(self, last: int, now: float) -> int:
        """Return the latest occurrence that is due; `last` is one."""
        low, high = last - 1, int(now)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.after(middle) <= now else (low, middle)
        return self.after(low)


def _offset(zone: ZoneInfo, moment: int) -> int:
    """Return the seconds that local time is ahead of UTC."""
    local = datetime.datetime.fromtimestamp(moment, zone).replace(tzinfo=None)
    return int((local - _EPOCH).total_seconds()) - moment


def _clock_change(zone: ZoneInfo, begin: int, end: int, offset: int) -> int | None:
    """Return the first second after `begin` with another offset, None if there is none to `end`."""
    for low in range(begin, end, _DAY_SECONDS):
        high = min(low + _DAY_SECONDS, end)
        if _offset(zone, high) != offset:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset(zone, middle) == offset else (low, middle)
            return high
    return None


class TimerDeclarations:
    """The timers of an app."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}
        """The timers that `timer` has declared, by name."""

    def timer(
        self,
        name: str,
        cron: str | None = None,
        *,
        every_seconds: float | None = None,
        tz: str = "UTC",
        queue: str,
        missed: Missed = "once",
        unless_waiting: bool = False,
    ) -> None:
        """Send a message to a queue whenever it is time, as long as a worker of the app runs.

        >>> app.timer("nightly", "30 2 * * *", tz="Europe/Berlin", queue="reports")

        Its body has the keys `timer`, `at` (the time in UTC) and `missed`.

        :param cron: five fields: minute, hour, day of the month, month, day of the week.
        :param every_seconds: a period instead, in whole seconds; it counts from 1970.
        :param tz: name of a time zone, for `cron`.
        :param missed: what to send if occurrences were missed, because no worker ran: "once" the
            latest one, "all" each of up to 100, "skip" none older than a minute.
        :param unless_waiting: send nothing while a message waits in the queue.
        :raises UsageError: a value is invalid, or the app has a timer of this name already.
        :raises SharedNameError: the name cannot be part of a znode's path.
        """
        checked_name("timer", name)
        if name in self.timers:
            raise UsageError(reason=f"timer {name!r} is declared twice; give each its own name")
        every: Any = every_seconds
        self.timers[name] = _checked(Timer(name, queue, cron, every, tz, missed, unless_waiting))


def _checked(timer: Timer) -> Timer:
    """Return a timer; raise UsageError for the first value that is not valid."""
    name, every = timer.name, timer.every_seconds
    check_queue_name(timer.queue)
    if timer.missed not in get_args(Missed):
        raise _invalid(name, "missed must be once, all or skip", timer.missed)
    if (timer.cron is None) == (every is None):
        raise UsageError(reason=f"timer {name!r} must have either cron or every_seconds")
    if timer.cron is None:
        is_number = isinstance(every, int | float) and not isinstance(every, bool)
        if not is_number or every is None or not 1 <= every <= MOST_SECONDS or every % 1:
            raise _invalid(name, f"every_seconds must be an integer, 1 to {MOST_SECONDS}", every)
        return replace(timer, every_seconds=int(every))
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(timer.tz)
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        rule = "tz must be a time zone such as 'Europe/Berlin' (`pip install tzdata` installs them)"
        raise _invalid(name, rule, timer.tz) from error
    _check_cron(timer)
    return timer


def _check_cron(timer: Timer) -> None:
    from cronsim import CronSimError

    cron: Any = timer.cron
    why = "wrong number of fields"
    if isinstance(cron, str) and len(cron) <= MOST_CHARACTERS and len(cron.split()) == 5:
        try:
            timer.after(_BEGIN)
            return
        except (CronSimError, ValueError) as error:
            why = str(error)
    rule = f"cron must be an expression of five fields such as '30 2 * * *' ({why})"
    raise _invalid(timer.name, rule, cron)


def _invalid(name: str, rule: str, found: Any) -> UsageError:
    return UsageError(reason=f"timer {name!r}: {rule}, got {found!r:.80}")
