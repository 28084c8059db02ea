"""Lines and bars over time, as paths of SVG. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 600.0, 120.0
_GAP_SHARE = 3.0
"""A gap of this many times the usual distance of samples is not drawn as a line."""

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Values over time.

    :ivar line: path of the line.
    :ivar dot: place of the last value, None if it is unknown.
    :ivar begin: Unix time of the left edge.
    :ivar top: value at the upper edge.
    """

    line: str
    dot: tuple[float, float] | None
    begin: float
    end: float
    top: float
    last: float | None
    most: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a bar: x, y, width and height in the units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    kind: str


def line_chart(points: Sequence[Point], least_top: float = 1.0) -> LineChart | None:
    """Return the drawing of points in the order of time; None without two known values.

    :param least_top: so that a value that hardly changes is not drawn as a mountain range.
    """
    known = [value for _, value in points if value is not None]
    if len(known) < 2 or points[-1][0] <= points[0][0]:
        return None
    begin, end = points[0][0], points[-1][0]
    top = max(least_top, *known)

    def place(at: float, value: float) -> tuple[float, float]:
        x = (at - begin) / (end - begin) * WIDTH
        return round(x, 1), round(HEIGHT - value / top * HEIGHT, 1)

    steps = sorted(after[0] - before[0] for before, after in pairwise(points))
    widest = _GAP_SHARE * max(steps[len(steps) // 2], 1e-9)
    path: list[str] = []
    previous: float | None = None
    for at, value in points:
        if value is None:
            previous = None
            continue
        x, y = place(at, value)
        joined = previous is not None and at - previous <= widest
        path.append(f"{'L' if joined else 'M'}{x:g} {y:g}")
        previous = at
    last = points[-1][1]
    dot = None if last is None else place(end, last)
    return LineChart("".join(path), dot, begin, end, top, last, max(known))


def bars(counts: Sequence[tuple[float, int, int]], begin: float, end: float) -> list[Bar]:
    """Return the bars of minutes: at, done, failed."""
    return list(_bars(counts, begin, end))


def _bars(counts: Sequence[tuple[float, int, int]], begin: float, end: float) -> Iterator[Bar]:
    most = max((done + failed for _, done, failed in counts), default=0)
    if not most or end <= begin:
        return
    width = 60.0 / (end - begin) * WIDTH
    for at, done, failed in counts:
        if not begin <= at < end:
            continue
        x, bottom = (at - begin) / (end - begin) * WIDTH, HEIGHT
        for count, kind in ((done, "done"), (failed, "failed")):
            height = count / most * HEIGHT
            if count:
                bottom -= height
                yield Bar(
                    round(x, 1), round(bottom, 1), round(width * 0.8, 1), round(height, 1), kind
                )
