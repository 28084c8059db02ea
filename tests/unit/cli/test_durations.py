"""Durations as people type them."""

from __future__ import annotations

import click
import pytest

from qdo.cli.options import ANSWER_TIMEOUT, DURATION, PERIOD, Duration
from qdo.cli.output import MOST_DAYS, parse_duration, parse_time
from qdo.errors import UsageError
from qdo.text import short_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5s", 1.5),
        ("15m", 900.0),
        ("2h", 7200.0),
        ("7d", 604800),
        ("1w", 604800),
        (" 3s ", 3),
    ],
)
def test_a_duration_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text, "--for") == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "1y",
        "١",
        "99999999999",
        "-1",
        "1e3",
        "1e9",
        "nan",
        "inf",
        "2 h",
        "3y",
        f"{MOST_DAYS + 1}d",
        "999999999w",
    ],
)
def test_others_are_refused(text: str) -> None:
    """Also those for which no timer can wait: the command would end with a traceback."""
    with pytest.raises(UsageError):
        parse_duration(text, "--for")
    assert parse_duration(f"{MOST_DAYS}d", "--for") == MOST_DAYS * 86400.0


@pytest.mark.parametrize(
    "text", ["1327858464.5", "2012-01-29T17:34:24.500Z", "2012-01-29T18:34:24.500+01:00"]
)
def test_a_time_is_a_number_or_a_date(text: str) -> None:
    assert parse_time(text, "-") == 1_327_858_464.5
    assert parse_time("2012-01-29T17:34:24.500", "-") == 1_327_858_464.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (60, "1m"),
        (125, "2m 5s"),
        (3600, "1h"),
        (3605, "1h"),
        (86_400 * 3 + 3700, "3d 1h"),
        (-5, "0s"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    """Two units at most."""
    assert short_duration(seconds) == text


def test_an_option_is_in_seconds():
    option = click.Option(["-t", "--timeout"], type=DURATION)
    assert DURATION.convert("15m", option, None) == 900.0


@pytest.mark.parametrize(
    ("kind", "text"), [(PERIOD, "0.4s"), (ANSWER_TIMEOUT, "0"), (ANSWER_TIMEOUT, "2h")]
)
def test_an_option_bounds_its_duration(kind: Duration, text: str):
    option = click.Option(["-t", "--timeout"], type=kind)
    with pytest.raises(UsageError) as raised:
        kind.convert(text, option, None)
    assert str(raised.value).startswith("--timeout")
    assert repr(text) in str(raised.value)
