"""Schedules beside an independent evaluator, which looks at every minute; declarations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import qdo
from qdo.errors import QueueNameError, SharedNameError, UsageError
from qdo.jobs.timers import Timer

ZONES = (
    *("Europe/Berlin", "Europe/London", "America/New_York", "America/St_Johns"),
    *("Australia/Lord_Howe", "Africa/Casablanca", "Africa/Cairo", "America/Sao_Paulo"),
    *("America/Havana", "Antarctica/Troll", "Asia/Pyongyang", "Pacific/Apia"),
)
"""Clocks that change by half an hour, one or two; at midnight, in Ramadan, and for good."""
BEGIN, END = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (2016, 2026))
DAY, QUARTER = 86_400, 900
EPOCH = datetime(1970, 1, 1)
WORDS: dict[str, Any] = {"mon": 1, "tue": 2, "sun": 0, "jan": 1, "oct": 10}


def made_expressions(count: int) -> list[str]:
    """Return the same expressions in every run: most are due at hours at which clocks change."""
    dice, found = random.Random(7), ["30 2 * * *", "0 0 * * *", "*/10 3 * * *", "5 */2 * * *"]
    minutes = ("0", "5", "15,45", "30", "59", "10-50/20", "*/30", "*/20")
    hours = ("0", "1", "2", "2,3", "1-3", "3", "0-4/2", "23", "12", "*/6", "*/8")
    days, months = ("*", "*", "*", "1", "25-31", "*/7", "31"), ("*", "*", "*", "jan,3,4", "9-11")
    weekdays = ("*", "*", "*", "sun", "0,6", "7", "mon-5", "*/3")
    while len(found) < count:
        expression = " ".join(map(dice.choice, (minutes, hours, days, months, weekdays)))
        if expression not in found:
            found.append(expression)
    return found


EXPRESSIONS = made_expressions(200)


class Evaluator:
    """Knows of each expression the minutes, hours and days that match, as bits of integers.

    An expression with a time of day is due when the local clock first reaches that time or passes
    over it; one with a ``*`` in minute or hour is due whenever the local clock shows it.
    """

    def __init__(self, zone: str, expressions: list[str]) -> None:
        self.zone = ZoneInfo(zone)
        fields = [each.split() for each in expressions]
        self.minutes = [self._bits(fields, 0, each, 0, 59) for each in range(60)]
        self.hours = [self._bits(fields, 1, each, 0, 23) for each in range(24)]
        self.fields = fields
        stars = (each[0].startswith("*") or each[1].startswith("*") for each in fields)
        self.wild = sum(1 << index for index, star in enumerate(stars) if star)
        self._days: dict[int, int] = {}

    @classmethod
    def _bits(cls, fields: list[list[str]], place: int, value: int, low: int, high: int) -> int:
        lists = enumerate(each[place] for each in fields)
        return sum(1 << index for index, text in lists if value in cls.members(text, low, high))

    @staticmethod
    def members(text: str, low: int, high: int) -> set[int]:
        found: set[int] = set()
        for part in text.split(","):
            span, _, step = part.partition("/")
            ends = [int(WORDS.get(end, end)) for end in span.split("-") if end != "*"]
            first, last = (ends[0], ends[-1]) if ends else (low, high)
            found.update(range(first, last + 1, int(step or 1)))
        return found

    def day(self, number: int) -> int:
        if number not in self._days:
            date, bits = EPOCH + timedelta(days=number), 0
            for index, (_, _, days, months, weekdays) in enumerate(self.fields):
                is_day = date.day in self.members(days, 1, 31)
                is_weekday = date.isoweekday() % 7 in {
                    each % 7 for each in self.members(weekdays, 0, 7)
                }
                both = days.startswith("*") or weekdays.startswith("*")
                is_match = is_day and is_weekday if both else is_day or is_weekday
                bits |= (is_match and date.month in self.members(months, 1, 12)) << index
            self._days[number] = bits
        return self._days[number]

    def matching(self, local: int) -> int:
        minute = local // 60
        time = self.minutes[minute % 60] & self.hours[minute // 60 % 24]
        return time & self.day(local // DAY) if time else 0

    def offset(self, moment: int) -> int:
        found = datetime.fromtimestamp(moment, self.zone).utcoffset()
        return 0 if found is None else int(found.total_seconds())

    def occurrences(self, begin: int, end: int) -> dict[int, list[int]]:
        """Return the due times of each expression, by its index, looking at every minute."""
        found: dict[int, list[int]] = {index: [] for index in range(len(self.fields))}
        offset = self.offset(begin - 60)
        highest = begin - 60 + offset
        for moment in range(begin, end, 60):
            if moment % QUARTER == 0:
                offset = self.offset(moment)
            local = moment + offset
            due = self.matching(local) & self.wild
            while highest < local:  # more than once where the clock leaps
                highest += 60
                due |= self.matching(highest) & ~self.wild
            while due:
                index = (due & -due).bit_length() - 1
                found[index].append(moment)
                due &= due - 1
        return found

    def changes(self) -> list[int]:
        times = range(BEGIN, END, 1800)
        return [each for each in times if self.offset(each) != self.offset(each - 1800)]


def occurrences(timer: Timer, begin: int, end: int) -> Iterator[int]:
    at = timer.after(begin - 1)
    while at < end:
        yield at
        at = timer.after(at)


def differences(zone: str, begin: int, end: int, expressions: list[str]) -> list[str]:
    expected = Evaluator(zone, expressions).occurrences(begin, end)
    assert sum(map(len, expected.values())) > 0
    return [
        f"{each!r} in {zone} from {begin}"
        for index, each in enumerate(expressions)
        if list(occurrences(Timer("t", "t", each, None, zone), begin, end)) != expected[index]
    ]


EVERY = pytest.mark.long("every clock change of ten years")


@pytest.mark.parametrize("count", [2, pytest.param(None, marks=EVERY)])
@pytest.mark.parametrize("zone", ZONES)
def test_schedules_around_clock_changes(zone: str, count: int | None) -> None:
    changes = Evaluator(zone, []).changes()
    assert changes
    for change in random.Random(zone).sample(changes, min(count or 100, len(changes))):
        begin = change - change % DAY - DAY
        assert differences(zone, begin, begin + 3 * DAY, EXPRESSIONS) == []


@pytest.mark.long("every minute of ten years")
@pytest.mark.parametrize("zone", ZONES)
def test_schedules_of_ten_years(zone: str) -> None:
    """Beside its clock changes a zone is like any other, so each has a twelfth of them."""
    number = ZONES.index(zone)
    assert differences(zone, BEGIN, END, EXPRESSIONS[number :: len(ZONES)]) == []


def declared(*values: Any, **options: Any) -> Timer:
    app = qdo.App("clock")
    app.timer("t", *values, **{"queue": "q", **options})
    return app.timers["t"]


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        ("2026-03-27T12:00", ["28 02:30 +0100", "29 03:00 +0200", "30 02:30 +0200"]),
        ("2026-10-23T12:00", ["24 02:30 +0200", "25 02:30 +0200", "26 02:30 +0100"]),
    ],
)
def test_a_nightly_report_at_clock_changes(begin: str, expected: list[str]) -> None:
    """At 02:30, which the last Sunday of March does not have, and that of October has twice."""
    nightly, zone = declared("30 2 * * *", tz="Europe/Berlin"), ZoneInfo("Europe/Berlin")
    first = int(datetime.fromisoformat(begin).replace(tzinfo=zone).timestamp())
    found = islice(occurrences(nightly, first, END * 2), 3)
    assert [f"{datetime.fromtimestamp(at, zone):%d %H:%M %z}" for at in found] == expected


def test_a_schedule_begun_in_the_second_pass_of_an_hour() -> None:
    """The time of day was reached in the first pass already."""
    timer = declared("50 2 * * *", tz="Europe/Berlin")
    second_pass = datetime(2026, 10, 25, 1, 45, tzinfo=UTC)  # 02:45 for the second time
    found = datetime.fromtimestamp(timer.after(second_pass.timestamp()), UTC)
    assert found == datetime(2026, 10, 26, 1, 50, tzinfo=UTC)


def test_periods_count_from_1970() -> None:
    timer = declared(every_seconds=7)
    assert [timer.after(each) for each in (0, 6.9, 7, 700.5)] == [7, 7, 14, 707]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "cron"),
    ("* * * * *", {"every_seconds": 5}, "cron"),
    *((each, {}, "cron") for each in ("", "* * * *", "60 * * * *", "* 24 * * *", "0 0 30 2 *")),
    *((each, {}, "cron") for each in ("* * * * * *", "@daily", 5, "1 " * 500, "*/0 * * * *")),
    *(("* * * * *", {"tz": each}, "tz") for each in ("Berlin", "", 7, "../etc/passwd", "\0")),
    ("* * * * *", {"tz": "Europe/Berln"}, "did you mean 'Europe/Berlin'"),
    *((None, {"every_seconds": each}, "every_seconds") for each in (0, 0.5, -1, 1.5, True, "5")),
    *((None, {"every_seconds": each}, "every_seconds") for each in (float("nan"), float("inf"))),
    ("* * * * *", {"missed": "all"}, "missed"),
]


@pytest.mark.parametrize(("cron", "options", "named"), WRONG)
def test_a_wrong_declaration(cron: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as raised:
        declared(cron, **options)
    assert named in raised.value.details["reason"]


def test_a_declaration_with_a_wrong_name() -> None:
    app = qdo.App("clock")
    app.timer("t", every_seconds=5, queue="q")
    wrong = (("t", "q", UsageError), ("a/b", "q", SharedNameError), ("u", "a/b", QueueNameError))
    for name, queue, error in wrong:
        with pytest.raises(error):
            app.timer(name, every_seconds=5, queue=queue)
    assert list(app.timers) == ["t"]
