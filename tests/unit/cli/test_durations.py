"""Durations as people type them."""

from __future__ import annotations

import pytest

from qdo.cli.output import MOST_DAYS, parse_duration
from qdo.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("1.5s", 1.5), ("15m", 900.0), ("2h", 7200.0), ("1w", 604800)],
)
def test_a_duration_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text, "--for") == seconds


@pytest.mark.parametrize(
    "text", ["", "-1", "1e9", "nan", "inf", "2 h", "3y", f"{MOST_DAYS + 1}d", "999999999w"]
)
def test_others_are_refused(text: str) -> None:
    """Also those for which no timer can wait: the command would end with a traceback."""
    with pytest.raises(UsageError):
        parse_duration(text, "--for")
    assert parse_duration(f"{MOST_DAYS}d", "--for") == MOST_DAYS * 86400.0
