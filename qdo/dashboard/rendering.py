"""Converts values to text and charts of a page, safely for text from other parties."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flask import Flask, request
from markupsafe import Markup, escape

from qdo.brokers.registry import kind_of
from qdo.dashboard.access import csrf_token, may_act
from qdo.dashboard.board import board
from qdo.ops.verdicts import QueueHealth
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
_EMPTY_CELL = re.compile(
    r"(<(td|dd)\b[^>]*>)(?:\s|-|</?(?:span|small|code)\b[^>]*>)*(</\2>)", re.ASCII
)
WIDTH = 600.0
HEIGHT = 120.0


def level(state: str) -> str:
    health = QueueHealth(state)
    if health.is_critical:
        return "critical"
    return LEVELS.get(state, "warning" if health.is_warning else "fine")


def shown(value: Any) -> Any:
    """Return a value as text, which Jinja then escapes; "-" for a missing value."""
    if value is None:
        return "-"
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def backlog(item: Mapping[str, Any]) -> str:
    """Return the backlog of a queue, with "~" before an estimate."""
    value = item["backlog"]
    return f"~{count(value)}" if value is not None and item["approximate"] else count(value)


def duration(seconds: float | None) -> str:
    return "-" if seconds is None else short_duration(seconds)


def precise(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 60:
        return short_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def since(at: float | None) -> str:
    return "-" if not at else f"{short_duration(time.time() - at)} ago"


def moment(at: float | str | None) -> str:
    """Return a Unix time or an ISO 8601 time as a date and time in UTC."""
    text = at if isinstance(at, str) else iso_time(at or None)
    return "-" if not text else text.replace("T", " ").removesuffix("Z")[:19]


def short(text: str | None) -> str | None:
    return None if not text else shorten(text, SHORT_CHARACTERS)


def lines(text: str | None) -> Markup:
    return escape(printable_lines(shorten(text or "-", LONG_CHARACTERS)))


def exact(text: str) -> Markup:
    """Return the unchanged text, escaped, for the value of a hidden field."""
    return escape(text)


def pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def values(found: Mapping[str, Any] | None) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in (found or {}).items()
        if value is not None
    )


def without_empty_cells(page: str) -> str:
    """Return a page with "-" in each empty cell. Templates then need not handle empty cells."""
    return _EMPTY_CELL.sub(r'\1<span class="none">-</span>\3', page)


def prepare(flask: Flask) -> None:
    flask.jinja_env.finalize = shown
    flask.jinja_env.trim_blocks = flask.jinja_env.lstrip_blocks = True
    texts = (backlog, count, duration, exact, level, lines, moment, precise, pretty)
    for function in (*texts, short, since, values):
        flask.jinja_env.filters[function.__name__] = function
    flask.jinja_env.filters["pluralize"] = plural
    flask.jinja_env.globals.update(command_text=command_text, params=params, toggled=toggled)
    flask.context_processor(_context)


def plural(number: int, noun: str) -> str:
    return pluralize(number, noun).replace(str(number), f"{number:,}", 1)


def params(**changes: Any) -> dict[str, Any]:
    """Return the parameters of the current page with changes. None removes a parameter."""
    found: dict[str, Any] = {**request.args.to_dict(flat=False), **changes}
    return {name: value for name, value in found.items() if value is not None}


def toggled(word: str, chosen: Sequence[str]) -> list[str]:
    if word in chosen:
        return [each for each in chosen if each != word]
    return [*chosen, word]


def _context() -> dict[str, Any]:
    dashboard = board()
    kind = kind_of(dashboard.settings.broker)
    stored = {"Requests": kind.stores_requests, "Streams": kind.stores_streams}
    return {
        "app_name": dashboard.app,
        "options": dashboard.options,
        "csrf_token": csrf_token,
        "may_act": may_act(),
        "missing_pages": [label for label, is_stored in stored.items() if not is_stored],
        "states": [each.value for each in QueueHealth],
    }


Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Values over time."""

    line: str
    # Position of the last value, or None if unknown.
    dot: tuple[float, float] | None
    # Unix time of the left edge.
    begin: float
    end: float
    # The value at the upper edge.
    top: float
    last: float | None
    most: float
    # Unix time of the first point. `first_x` is the position of this point.
    first: float
    first_x: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a bar. Position and size are in the units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    kind: str


def line_chart(
    points: Sequence[Point],
    gap_seconds: float,
    least_top: float = 1.0,
    span: tuple[float, float] | None = None,
) -> LineChart | None:
    """Return a chart of points in order of time, or None for fewer than two values.

    :param gap_seconds: maximum distance between connected points. Between points that are further
        apart, readings are missing.
    :param least_top: minimum value at the upper edge. With this minimum, an almost constant value
        makes a flat line.
    :param span: Unix times of the left and the right edge. The default is the times of the first
        and the last point.
    """
    values = [value for _, value in points if value is not None]
    if len(values) < 2 or points[-1][0] <= points[0][0]:
        return None
    first = points[0][0]
    begin, end = span or (first, points[-1][0])
    top = max(least_top, *values)

    def place(at: float, value: float) -> tuple[float, float]:
        x = (at - begin) / (end - begin) * WIDTH
        return round(x, 1), round(HEIGHT - value / top * HEIGHT, 1)

    path: list[str] = []
    previous: float | None = None
    for at, value in points:
        if value is None:
            previous = None
            continue
        x, y = place(at, value)
        joined = previous is not None and at - previous <= gap_seconds
        path.append(f"{'L' if joined else 'M'}{x:g} {y:g}")
        previous = at
    last = points[-1][1]
    dot = None if last is None else place(points[-1][0], last)
    first_x = place(first, 0.0)[0]
    return LineChart("".join(path), dot, begin, end, top, last, max(values), first, first_x)


def bars(counts: Sequence[tuple[float, int, int]], begin: float, end: float) -> list[Bar]:
    most = max((done + failed for _, done, failed in counts), default=0)
    if not most or end <= begin:
        return []
    width = round(60.0 / (end - begin) * WIDTH * 0.8, 1)
    parts = []
    for at, done, failed in counts:
        if not begin <= at < end:
            continue
        x = round((at - begin) / (end - begin) * WIDTH, 1)
        bottom = HEIGHT
        for count, kind in ((done, "done"), (failed, "failed")):
            height = count / most * HEIGHT
            if count:
                bottom -= height
                parts.append(Bar(x, round(bottom, 1), width, round(height, 1), kind))
    return parts
