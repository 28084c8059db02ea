"""Text for people: lists, counts, suggestions, errors of an app, and text of other parties.

An app's errors may have a `__str__` or `__repr__` that raises; the functions here still return.
"""

from __future__ import annotations

import difflib
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

# Limit of the text of an error: it is part of log lines, tables and dead letters.
ERROR_CHARACTERS = 1000
# Limit of a traceback: its beginning and its end are kept.
TRACEBACK_CHARACTERS = 16_000
UNPRINTABLE = "(its text cannot be shown: str() of it raises)"
# Characters that Python calls printable and that have no width or no ink.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]{0,99}")
_ERROR_NAME = re.compile(r"[A-Za-z_][\w.]{0,99}(Error|Exception|Exit|Interrupt|Timeout)")


def how_to_install(extra: str) -> str:
    """Return the remedy for a missing library of an optional part of qdo."""
    return f"run pip install -e '.[{extra}]' in the clone of qdo"


def printable(text: str) -> str:
    """Return a text that cannot control a terminal, begin a line or hide a part of itself.

    Control characters, line breaks, surrogates, and bidirectional and invisible characters become
    escapes such as ``\\x1b`` and ``\\u202e``. Every text of other parties passes through here, or
    through `printable_lines`, on its way to a terminal or a log.
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
    """Return `printable` text that keeps its lines, all but the first of them indented."""
    return f"\n{indent}".join(map(printable, text.split("\n")))


def hide_credentials(address: str) -> str:
    """Return an address without its user name and password, for errors."""
    scheme, slashes, rest = address.partition("//")
    return f"{scheme}//***@{rest.rpartition('@')[2]}" if slashes and "@" in rest else address


def one_line(value: Any) -> str:
    """Return ``str(value)`` as one line of limited length, even if it raises."""
    try:
        return shorten(" ".join(str(value).split()))
    except BaseException:  # noqa: BLE001 - it is the app's code, and only its text is needed
        return UNPRINTABLE


def shorten(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return a text with at most about `limit` characters, and its length if it was longer."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def pluralize(count: int, noun: str) -> str:
    """Return a number of things as text: "1 message", "2 messages"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short_duration(seconds: float) -> str:
    """Return a duration in its two largest units: 0s, 59s, 2m 5s, 3h 4m, 2d 5h."""
    remainder = max(0, round(seconds))
    parts: list[tuple[int, str]] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, remainder = divmod(remainder, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in parts[:2] if count) or "0s"


def fine_duration(seconds: float) -> str:
    """Return a duration with a fraction below ten seconds: 0.001s, 0.25s, 7.1s, 59s, 2m 5s."""
    return f"{max(0.001, seconds):.2g}s" if seconds < 9.5 else short_duration(seconds)


def iso_time(seconds: float | None) -> str | None:
    """Return a Unix time as ISO 8601 in UTC, to the second; None if it has no such form."""
    if seconds is None:
        return None
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return None


def join_some(items: Sequence[object], most: int = 5) -> str:
    """Return at most `most` items as text, and the number of the rest: "a, b and 7 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def closest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar, None if none is similar enough."""
    matches = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean 'x'?)" for the closest known word, "" if none is close."""
    name = closest(word, known, cutoff)
    return "" if name is None else f" (did you mean {name!r}?)"


def wrong_form(url: str, *forms: str) -> str:
    """Return the reason for an address with an unknown scheme, and what it may mean."""
    address = hide_credentials(url)
    scheme, colon, rest = address.partition(":")
    meant = closest(scheme.lower(), [form.partition(":")[0] for form in forms])
    remedy = f"; write {meant}:{rest}" if colon and meant else ""
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
    """Return the class of an error from its description; "hidden" for other text of an app."""
    kind, colon, _ = text.partition(":")
    pattern = _CLASS_NAME if colon else _ERROR_NAME
    return kind if pattern.fullmatch(kind) else "hidden"
