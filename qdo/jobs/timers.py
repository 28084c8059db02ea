"""Timers, which send messages at set times. A schedule is a pure function of two times.

Times are whole Unix seconds. At clock changes, an expression follows Debian's cron. A skipped time
of day occurs at the end of the gap, and a repeated time occurs once. Expressions whose minute or
hour begins with ``*`` do not follow this rule.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from qdo.errors import UsageError
from qdo.fleet.names import checked_name
from qdo.queues import check_queue_name
from qdo.text import did_you_mean

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

# The import of zoneinfo takes 20 ms. Only apps with cron expressions need zoneinfo and cronsim.

Missed: TypeAlias = Literal["once", "skip"]

# Maximum length of a cron expression.
MOST_CHARACTERS = 200
# Maximum period of a timer.
MOST_SECONDS = 366 * 86_400
# Maximum number of missed occurrences to count without a pause. Each takes 20 to 30 us.
MOST_COUNTED = 1000
# Age above which `missed="skip"` does not send an occurrence.
SKIP_SECONDS = 60
# 2000-01-01T00:00:00Z. An expression must match within fifty years of this time.
_BEGIN = 946_684_800
# Clocks change at most once within this time.
_DAY_SECONDS = 86_400
_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A due time of a timer. `sends` is False for an occurrence that is too old to send."""

    at: int
    # Number of missed occurrences that this occurrence replaces, at most `MOST_COUNTED`.
    missed: int = 0
    sends: bool = True


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that the app declares (see `qdo.App.timer`)."""

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

        from cronsim import CronSim

        cron = str(self.cron)
        zone = ZoneInfo(self.tz)
        last = int(moment // 1)
        if not any(field.startswith("*") for field in cron.split()[:2]):
            times = CronSim(cron, datetime.fromtimestamp(last, zone))
            # If an hour repeats, a local time means the first of the two hours.
            return next(at for each in times if (at := int(each.timestamp())) > last)
        # Pass local times without a zone. With zones, cronsim skips minutes where clocks change by
        # half an hour, and returns times that a change at midnight skips.
        begin: int | None = last + 1
        while begin is not None:
            local = datetime.fromtimestamp(begin, zone).replace(tzinfo=None)
            at = begin + (next(CronSim(cron, local - _SECOND)) - local) // _SECOND
            begin = _clock_change(zone, begin, at)
        return at

    def due(self, last: float, now: float) -> Occurrence | None:
        """Return the occurrence to send after the recorded occurrence, or None."""
        latest = self.after(last)
        missed = 0
        if latest > now:
            return None
        while missed < MOST_COUNTED and (following := self.after(latest)) <= now:
            latest = following
            missed += 1
        if missed == MOST_COUNTED:
            times = range(latest, int(now) + 1)
            latest = times[bisect_left(times, True, key=lambda each: self.after(each) > now)]
        return Occurrence(latest, missed, self.missed == "once" or now - latest < SKIP_SECONDS)

    def check(self) -> None:
        """Raise UsageError or SharedNameError for the first invalid value."""
        every: Any = self.every_seconds
        checked_name("timer", self.name)
        check_queue_name(self.queue)
        if self.missed not in get_args(Missed):
            raise self._invalid("missed must be once or skip", self.missed)
        if (self.cron is None) == (every is None):
            raise UsageError(reason=f"timer {self.name!r} must have either cron or every_seconds")
        if self.cron is not None:
            self._check_cron(self.cron)
        elif type(every) is not int or not 1 <= every <= MOST_SECONDS:
            raise self._invalid(f"every_seconds must be an integer, 1 to {MOST_SECONDS}", every)

    def _check_cron(self, cron: Any) -> None:
        from zoneinfo import ZoneInfo

        from cronsim import CronSimError

        why = "wrong number of fields"
        try:
            ZoneInfo(self.tz)
            if isinstance(cron, str) and len(cron) <= MOST_CHARACTERS and len(cron.split()) == 5:
                self.after(_BEGIN)
                return
        except (CronSimError, StopIteration) as error:
            why = str(error) or "no time matches"
        except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
            raise self._invalid(
                "tz must be a time zone such as 'Europe/Berlin'", self.tz, _zones(self.tz)
            ) from error
        rule = f"cron must be an expression of five fields such as '30 2 * * *' ({why})"
        raise self._invalid(rule, cron)

    def _invalid(self, rule: str, found: Any, hint: str = "") -> UsageError:
        return UsageError(reason=f"timer {self.name!r}: {rule}, got {found!r:.80}{hint}")


def _zones(name: Any) -> str:
    from zoneinfo import available_timezones

    known = available_timezones()
    if not known:
        return "; this machine has no time zones: run `pip install tzdata`"
    return did_you_mean(str(name), known)


def _clock_change(zone: ZoneInfo, begin: int, end: int) -> int | None:
    """Return the first second after `begin`, up to `end`, that has another offset, or None."""

    def is_other(moment: int) -> bool:
        return datetime.fromtimestamp(moment, zone).utcoffset() != offset

    offset = datetime.fromtimestamp(begin, zone).utcoffset()
    for low in range(begin, end, _DAY_SECONDS):
        times = range(low, min(low + _DAY_SECONDS, end) + 1)
        if is_other(times[-1]):
            return times[bisect_left(times, True, key=is_other)]
    return None
