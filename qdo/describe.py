"""Errors of an app as text: whatever the app's own `__str__` and `__repr__` do."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

UNSPEAKABLE = "(its text cannot be shown: str() of it raises)"


def text_of(value: Any) -> str:
    """Return ``str(value)`` as one line, also where that raises."""
    try:
        return " ".join(str(value).split())
    except BaseException:  # noqa: BLE001 - it is the app's code, and only wanted for its text
        return UNSPEAKABLE


def counted(count: int, noun: str) -> str:
    """Return a number of things as text: "1 message", "2 messages"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    name = type(error).__name__
    text = text_of(error)
    return f"{name}: {text}" if text else name


def describe_traceback(error: BaseException) -> str:
    """Return the traceback of an error."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - see `text_of`
        return "".join(traceback.format_tb(error.__traceback__)) + describe(error)


def few(items: Sequence[object], most: int = 5) -> str:
    """Return the first of many as text, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
