"""Times and durations in the forms that people type."""

from __future__ import annotations

import datetime
import re

from qdo.errors import UsageError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
MOST_DAYS = 36500
"""The timers of Python cannot wait for three times as long."""


def parse_duration(text: str, flag: str) -> float:
    """Return the seconds of a duration such as 90, 1.5s, 15m, 2h, 7d or 1w.

    :raises UsageError: it is not a duration, or longer than `MOST_DAYS`; names the option.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw]?)", text.strip())
    if found is None:
        raise UsageError(
            reason=f"{flag} must be a duration such as 90, 15m, 2h or 7d, got {text!r}"
        )
    seconds = float(found.group(1)) * _UNITS[found.group(2)]
    if seconds > MOST_DAYS * 86400.0:
        raise UsageError(reason=f"{flag} must be at most {MOST_DAYS}d, got {text!r}")
    return seconds


def parse_time(text: str, flag: str) -> float:
    """Return the Unix time of an ISO 8601 time (UTC if it has no zone), or of a Unix time.

    :raises UsageError: it is neither; names the option.
    """
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise UsageError(
            reason=f"{flag} must be a time such as 2012-01-29T17:34:24Z, or a Unix time, "
            f"got {text!r}"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return moment.timestamp()
