"""How values become text of a page. Text of other parties cannot control or deceive it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flask import Flask, request
from markupsafe import Markup, escape

from qdo.dashboard.access import csrf_token, may_act
from qdo.dashboard.board import board
from qdo.ops.queue_health import QueueHealth
from qdo.queues import command_text
from qdo.text import iso_time, pluralize, printable, printable_lines, short_duration, shorten

LEVELS = {
    "ok": "fine",
    "idle": "quiet",
    "paused": "held",
    "catching-up": "fine",
    "unknown": "warning",
}
SHORT_CHARACTERS = 300
LONG_CHARACTERS = 40_000


def level(state: str) -> str:
    """Return how bad a state is: critical, warning, held, fine or quiet."""
    health = QueueHealth(state)
    if health.is_critical:
        return "critical"
    return LEVELS.get(state, "warning" if health.is_warning else "fine")


def shown(value: Any) -> Any:
    """Return a value as text of a page, which Jinja then escapes; "-" for no value."""
    if value is None:
        return "-"
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def count(value: int | None) -> str:
    """Return a number with separators; "-" if it is unknown."""
    return "-" if value is None else f"{value:,}"


def backlog(item: Mapping[str, Any]) -> str:
    """Return the backlog of a queue, with "~" if it is an estimate."""
    value = item["backlog"]
    return f"~{count(value)}" if value is not None and item["approximate"] else count(value)


def duration(seconds: float | None) -> str:
    """Return a duration; "-" if it is unknown."""
    return "-" if seconds is None else short_duration(seconds)


def precise(seconds: float | None) -> str:
    """Return a short duration with three digits."""
    if seconds is None:
        return "-"
    if seconds >= 60:
        return short_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def since(at: float | None) -> str:
    """Return how long ago a Unix time is."""
    return "-" if not at else f"{short_duration(time.time() - at)} ago"


def moment(at: float | str | None) -> str:
    """Return a Unix time, or one in ISO 8601, as a date and time in UTC."""
    text = at if isinstance(at, str) else iso_time(at or None)
    return "-" if not text else text.replace("T", " ").removesuffix("Z")[:19]


def short(text: str | None) -> str | None:
    """Return text of a table, of limited length."""
    return None if not text else shorten(text, SHORT_CHARACTERS)


def lines(text: str | None) -> Markup:
    """Return text that keeps its lines, of limited length."""
    return escape(printable_lines(shorten(text or "-", LONG_CHARACTERS)))


def exact(text: str) -> Markup:
    """Return text for the value of a hidden field, unchanged."""
    return escape(text)


def pretty(value: Any) -> str:
    """Return JSON of one line."""
    return json.dumps(value, ensure_ascii=False)


def values(found: Mapping[str, Any] | None) -> str:
    """Return the known values of an entry of the action log."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in (found or {}).items()
        if value is not None
    )


def prepare(flask: Flask) -> None:
    """Give the templates what they use."""
    flask.jinja_env.finalize = shown
    flask.jinja_env.trim_blocks = flask.jinja_env.lstrip_blocks = True
    for function in (
        *(backlog, count, duration, exact, level, lines, moment, precise, pretty, short, since),
        values,
    ):
        flask.jinja_env.filters[function.__name__] = function
    flask.jinja_env.filters["pluralize"] = plural
    flask.jinja_env.globals.update(command_text=command_text, params=params, toggled=toggled)
    flask.context_processor(_context)


def plural(number: int, noun: str) -> str:
    """Return a number of things, with separators."""
    return pluralize(number, noun).replace(str(number), f"{number:,}", 1)


def params(**changes: Any) -> dict[str, Any]:
    """Return the parameters of the present page with changes; None removes one."""
    found: dict[str, Any] = {**request.args.to_dict(flat=False), **changes}
    return {name: value for name, value in found.items() if value is not None}


def toggled(word: str, chosen: Sequence[str]) -> list[str]:
    """Return the chosen words with one more, or without it."""
    if word in chosen:
        return [each for each in chosen if each != word]
    return [*chosen, word]


def _context() -> dict[str, Any]:
    found = board()
    return {
        "app_name": found.app,
        "options": found.options,
        "csrf_token": csrf_token,
        "may_act": may_act(),
        "states": [each.value for each in QueueHealth],
    }
