"""Formats text for people, such as lists, counts, suggestions, errors and untrusted text.

The functions return a text even if an app's error has a `__str__` or `__repr__` that raises.
"""

from __future__ import annotations

import difflib
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

# Maximum length of the text of an error, which appears in log lines, tables and dead letters.
ERROR_CHARACTERS = 1000
# Maximum length of a traceback. A longer traceback keeps its beginning and its end.
TRACEBACK_CHARACTERS = 16_000
UNPRINTABLE = "(its text cannot be shown: str() of it raises)"
# Characters that Python considers printable although they are invisible or have no width.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]{0,99}")
_ERROR_NAME = re.compile(r"[A-Za-z_][\w.]{0,99}(Error|Exception|Exit|Interrupt|Timeout)")


def how_to_install(extra: str) -> str:
    """Return the remedy for a missing library that an optional part of qdo needs."""
    # pip takes the installed qdo, from a clone or a wheel, and adds the libraries of the extra.
    return f"run pip install 'qdo-queues[{extra}]'"


def printable(text: str) -> str:
    """Return a text that cannot control a terminal, begin a line or hide parts of the text.

    Control characters, line breaks, surrogates, and bidirectional and invisible characters become
    escapes such as ``\\x1b`` and ``\\u202e``. Untrusted text must pass through this function or
    `printable_lines` on its way to a terminal or a log.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each
        if each.isprintable() and each not in _INVISIBLE
        else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def printable_lines(text: str, indent: str = "") -> str:
    """Return `printable` text that keeps its lines. Indent all lines except the first."""
    return f"\n{indent}".join(map(printable, text.split("\n")))


def hide_credentials(address: str) -> str:
    """Return an address without its user name and password, for errors."""
    scheme, slashes, rest = address.partition("//")
    return f"{scheme}//***@{rest.rpartition('@')[2]}" if slashes and "@" in rest else address


def one_line(value: Any) -> str:
    """Return ``str(value)`` as one line of limited length, even if `str` raises an error."""
    try:
        return shorten(" ".join(str(value).split()))
    except BaseException:  # noqa: BLE001 - the app's code may raise anything
        return UNPRINTABLE


def shorten(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return a text, or the first `limit` characters and the full length of a longer text."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 message" or "2 messages"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as 59s, 2m 5s, 3h 4m or 2d 5h."""
    remainder = max(0, round(seconds))
    parts: list[tuple[int, str]] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, remainder = divmod(remainder, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in parts[:2] if count) or "0s"


def fine_duration(seconds: float) -> str:
    """Return a duration, with a fraction below ten seconds: 0.001s, 7.1s, 59s, 2m 5s."""
    return f"{max(0.001, seconds):.2g}s" if seconds < 9.5 else short_duration(seconds)


def iso_time(seconds: float | None) -> str | None:
    """Return a Unix time as ISO 8601 in UTC with whole seconds, or None if impossible."""
    if seconds is None:
        return None
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return None


def join_some(items: Sequence[object], most: int = 5) -> str:
    """Return up to `most` items and the number of the other items, such as "a, b and 7 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def closest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar known word, or None if no word is similar enough."""
    matches = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean 'x'?)" for the closest known word, or "" without a close word."""
    name = closest(word, known, cutoff)
    return "" if name is None else f" (did you mean {name!r}?)"


def wrong_form(url: str, *forms: str, other: str = "") -> str:
    """Return the reason for rejecting an address with an unknown scheme, and a suggestion.

    :param other: the suggestion for a scheme that resembles none.
    """
    address = hide_credentials(url)
    scheme, colon, rest = address.partition(":")
    meant = closest(scheme.lower(), [form.partition(":")[0] for form in forms])
    remedy = f"; write {meant}:{rest}" if colon and meant else other
    return f"it must have the form {' or '.join(forms)}, got {address!r}{remedy}"


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    name = type(error).__name__
    text = one_line(error)
    return f"{name}: {text}" if text else name


def describe_traceback(error: BaseException) -> str:
    """Return the traceback of an error, of limited length."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - see `one_line`
        text = "".join(traceback.format_tb(error.__traceback__)) + describe(error)
    omitted = len(text) - TRACEBACK_CHARACTERS
    if omitted <= 0:
        return text
    half = TRACEBACK_CHARACTERS // 2
    return f"{text[:half]}\n... {omitted} characters omitted ...\n{text[-half:]}"


def error_kind(text: str) -> str:
    """Return the error class in a description, or "hidden" for any other text of an app."""
    kind, colon, _ = text.partition(":")
    pattern = _CLASS_NAME if colon else _ERROR_NAME
    return kind if pattern.fullmatch(kind) else "hidden"
