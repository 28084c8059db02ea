"""Output: items on stdout, as a table for people or as JSON for programs; messages on stderr."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from qdo.cli.tables import fitting, table
from qdo.text import iso_time as iso_time
from qdo.text import printable, printable_lines

FORMATS = ("table", "json", "jsonl", "csv", "name")
NEVER_CUT = ("id", "queue", "worker", "owner", "target")
"""Columns whose values are arguments of other commands."""
KEPT_WIDTHS = {
    **dict.fromkeys(NEVER_CUT, math.inf),
    **dict.fromkeys(("reason", "error", "why"), 30),
    **dict.fromkeys(("time", "last", "started", "dead_time", "at", "until", "due"), 20),
    "state": 11,
}
"""The widths up to which columns are not cut: of names, of what is wrong, and of times."""
SHORT = 12
"""Other values of this width, such as durations, are not cut."""
NEVER_DROPPED = {*NEVER_CUT, "state", "reason", "error", "why", "age"}
DROPPED_FIRST = ("last", "dead_letters", "delayed", "version", "started", "assigned", "from")
"""What a narrow terminal leaves out first; then the other columns from the right."""
_GAP = "  "


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
        _write_table([*items], columns, out)
    out.flush()


def _write_table(
    items: Sequence[Mapping[str, Any]], columns: Mapping[str, str], out: TextIO
) -> None:
    headings, keys, width = [*columns.values()], [*columns], width_of(out)
    kept: list[float] = [KEPT_WIDTHS.get(key, SHORT) for key in keys]
    rows = [[cell(item.get(key)) for key in keys] for item in items]
    shown = list(range(len(keys)))
    if width is not None and rows:
        first = [keys.index(key) for key in DROPPED_FIRST if key in keys[1:]]
        others = [i for i, key in enumerate(keys) if i and key not in NEVER_DROPPED]
        shown = fitting(headings, rows, width, kept, [*first, *reversed(others)])
    numeric = _numeric_columns(items, keys)
    picked = [[row[index] for index in shown] for row in (headings, *rows)]
    kept, numeric = [kept[index] for index in shown], [numeric[index] for index in shown]
    out.writelines(table(picked[0], picked[1:], numeric, width, kept))
    left_out = [heading for index, heading in enumerate(headings) if index not in shown]
    if left_out:
        names = ", ".join(left_out)
        print_message(f"hint: no room for {names}; use a wider terminal, or -o json")


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
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int | float) else printable(" ".join(str(value).split()))


def width_of(stream: TextIO) -> int | None:
    """Return the width of a stream's terminal in columns, None if it is not a terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _numeric_columns(items: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[bool]:
    first = next(iter(items), {})
    values = [first.get(key) for key in columns]
    return [isinstance(each, int | float) and not isinstance(each, bool) for each in values]


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
    """Return the values that are given for a table, such as `last=7`."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in (values or {}).items()
        if value not in (None, "")
    )
