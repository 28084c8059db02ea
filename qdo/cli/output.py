"""Output: items on stdout, as a table for people or as JSON for programs; messages on stderr."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from qdo.text import iso_time as iso_time
from qdo.text import printable, printable_lines

FORMATS = ("table", "json", "jsonl", "csv", "name")
NEVER_CUT = ("id", "queue", "worker", "owner")
"""Columns whose values are arguments of other commands."""
KEPT_WIDTHS = {"last": 27, "dead_time": 20, "reason": 100, "error": 100}
"""The widths up to which other columns are not cut: of times, and of what is wrong."""
_GAP = "  "
_ELLIPSIS = "…"


def emit(
    schema: str,
    items: Iterable[Mapping[str, Any]],
    form: str,
    columns: Mapping[str, str],
    out: TextIO | None = None,
) -> None:
    """Write items to stdout.

    :param schema: name and version of the items' schema, such as "qdo.queues/1".
    :param form: "table", "json" (one object: schema, items), "jsonl" (one item per line), "csv"
        (the keys of JSON), or "name" (only the first key).
    :param columns: for the table: the keys of an item and their headings.
    """
    out = sys.stdout if out is None else out
    if form == "json":
        out.write(json.dumps({"schema": schema, "items": list(items)}, indent=1) + "\n")
    elif form == "jsonl":
        out.writelines(json.dumps(item) + "\n" for item in items)
    elif form == "csv":
        _write_csv([*items], out)
    elif form == "name":
        out.writelines(f"{cell(next(iter(item.values())))}\n" for item in items)
    else:
        rows = [[cell(item.get(key)) for key in columns] for item in items]
        numeric = _numeric_columns(items, columns)
        kept = [math.inf if key in NEVER_CUT else KEPT_WIDTHS.get(key, 0) for key in columns]
        out.writelines(table([*columns.values()], rows, numeric, width_of(out), kept))
    out.flush()


def _write_csv(items: Sequence[Mapping[str, Any]], out: TextIO) -> None:
    """Write items with the keys of JSON; lists and objects as JSON, and no control characters."""
    keys = dict.fromkeys(key for item in items for key in item)
    writer = csv.writer(out, lineterminator="\n")
    if keys:
        writer.writerow(keys)
    writer.writerows([_csv_value(item.get(key)) for key in keys] for item in items)


def _csv_value(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    return json.dumps(value) if isinstance(value, list | tuple | dict | bool) else value


def approximate(count: int | None, estimated: bool) -> str | int | None:
    """Return a count for a table, with a mark if it is an estimate."""
    return f"~{count}" if estimated and count is not None else count


def cell(value: Any) -> str:
    """Return a value as a table cell: "-" for no value, no line breaks, nothing invisible."""
    if value is None or value == "":
        return "-"
    return str(value) if isinstance(value, int | float) else printable(" ".join(str(value).split()))


def width_of(stream: TextIO) -> int | None:
    """Return the width of a stream's terminal in columns, None if it is not a terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    width: int | None,
    kept: Sequence[float] = (),
) -> Iterable[str]:
    """Yield the lines of a table; the widest columns are cut until lines fit into `width`.

    :param kept: the width of each column up to which it is never cut; if necessary, lines are
        longer than `width`.

    Not rich: it takes 4 s for 10,000 rows, this function 0.1 s.
    """
    if not rows:
        return
    widths = [max(map(_cells, column)) for column in zip(headings, *rows, strict=True)]
    if width is not None:
        least = [_cells(heading) for heading in headings]
        for index, most in enumerate(kept):
            least[index] = max(least[index], int(min(widths[index], most)))
        _fit(widths, least, width)
    for row in (headings, *rows):
        cells = map(_padded, row, widths, numeric)
        yield _GAP.join(cells).rstrip() + "\n"


def _numeric_columns(items: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[bool]:
    first = next(iter(items), {})
    return [isinstance(first.get(key), int | float) for key in columns]


def _fit(widths: list[int], least: Sequence[int], width: int) -> None:
    """Narrow the widest columns until the line fits, or every column has its least width."""
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    while excess > 0:
        index = max(range(len(widths)), key=lambda i: widths[i] - least[i])
        if widths[index] <= least[index]:
            return
        widths[index] -= 1
        excess -= 1


def _padded(text: str, width: int, numeric: bool) -> str:
    text = _cut(text, width)
    space = " " * (width - _cells(text))
    return space + text if numeric else text + space


def _cut(text: str, width: int) -> str:
    if _cells(text) <= width:
        return text
    while text and _cells(text) > width - 1:
        text = text[:-1]
    return text + _ELLIPSIS


def _cells(text: str) -> int:
    """Return the width of a text on a terminal, in columns."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def print_message(message: str) -> None:
    """Write a line for people to stderr; further lines of a message are indented."""
    print(printable_lines(message, _GAP), file=sys.stderr, flush=True)


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write the traceback of an error to stderr; for `sys.excepthook`."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable_lines(text.rstrip("\n")), file=sys.stderr, flush=True)


def forget_stdout() -> None:
    """Redirect stdout to the null device after its reader has exited: the exit stays silent."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def values_text(values: Mapping[str, Any] | None) -> str:
    """Return the known values for a table, such as `last=7`."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in (values or {}).items()
        if value is not None
    )
