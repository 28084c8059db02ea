"""Writes items to stdout, as tables or JSON, and messages to stderr."""

from __future__ import annotations

import csv
import datetime
import json
import os
import re
import shutil
import sys
import textwrap
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress, zip_longest
from types import TracebackType
from typing import Any, TextIO, TypeAlias

from qdo.errors import PartialFailureError, QdoError, UsageError
from qdo.text import describe, join_some, printable, printable_lines, short_duration
from qdo.text import iso_time as iso_time

_GAP = "  "
_NOTHING = "-"
# Minimum width of a column that contains texts instead of names. `table` may wrap such columns.
_WIDE = 40
# Minimum width of a wrapped column.
_ROOM = 30
# Maximum number of lines of a wrapped text. Another program may have written a very long text.
_LINES = 6
FORMATS = ("table", "json", "jsonl", "csv", "name")
# The columns that a table omits on a narrow terminal, in this order.
EXPENDABLE = ("last", "version", "started", "assigned", "dead_letters")
WIDTH = 80
# Width of the labels of facts.
LABEL = 14
_ALTERNATIVE = re.compile(", (?=qdo )| or (?=qdo )")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
# Maximum duration in days. Python's timers cannot wait three times as long.
MOST_DAYS = 36500

# The keys of an item for a table. A mapping has headings that differ from the key in capitals.
Columns: TypeAlias = Iterable[str] | Mapping[str, str]
Rows: TypeAlias = Callable[[Iterable[Any], Callable[[Any], Any]], Iterator[Any]]


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    width: int | None,
    expendable: Sequence[int] = (),
) -> tuple[list[str], list[str]]:
    """Return the lines of a table, and the headings of the omitted columns.

    If lines do not fit into `width`, wrap the first column with long texts. If lines still do not
    fit, move other columns with long texts below each row, with their headings. Then omit
    expendable columns, and then move more columns below. Never cut names, even if a line exceeds
    `width`.

    The library rich takes 4 s for 10,000 rows; this function takes 0.1 s.
    """
    if not rows:
        return [], []
    widths = [max(map(_display_width, column)) for column in zip(headings, *rows, strict=True)]
    kept: list[int] = [*range(len(widths))]
    wrapped: list[int] = []
    left_out: list[int] = []
    if width is not None:
        for index in _arrange(widths, width, expendable):
            kept.remove(index)
            (left_out if index in expendable else wrapped).append(index)
    lines = []
    for row in (headings, *rows):
        cells = [_wrapped(row[index], widths[index]) for index in kept]
        for line in zip_longest(*cells, fillvalue=""):
            padded = (
                _padded(text, widths[index], numeric[index])
                for index, text in zip(kept, line, strict=True)
            )
            lines.append(_GAP.join(padded).rstrip() + "\n")
        for index in sorted(wrapped) if row is not headings else ():
            if row[index] != _NOTHING:
                first, *others = _wrapped(row[index], (width or WIDTH) - LABEL - len(_GAP))
                lines.append(f"{_GAP}{headings[index]:{LABEL}}{first}\n")
                lines.extend(f"{_GAP}{'':{LABEL}}{each}\n" for each in others)
    return lines, [headings[index] for index in left_out]


def _arrange(widths: list[int], width: int, expendable: Sequence[int]) -> list[int]:
    """Return the indexes of the columns that do not fit. Set the width of the wrapped column."""

    def excess() -> int:
        kept = [each for index, each in enumerate(widths) if index not in removed]
        return sum(kept) + len(_GAP) * (len(kept) - 1) - width

    removed: list[int] = []
    if excess() <= 0:
        return removed
    wide = [index for index, each in enumerate(widths) if index and each > _WIDE]
    full = widths[wide[0]] if wide else 0
    if wide:
        widths[wide[0]] = _ROOM
    others = sorted(range(1, len(widths)), key=lambda index: -widths[index])
    for index in dict.fromkeys([*wide[1:], *expendable, *others]):
        if excess() <= 0:
            break
        removed.append(index)
    if wide and wide[0] not in removed:
        widths[wide[0]] = min(full, max(_ROOM, _ROOM - excess()))
    return removed


def _padded(text: str, width: int, numeric: bool) -> str:
    space = " " * (width - _display_width(text))
    return space + text if numeric else text + space


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in a few lines. Do not cut words, because they may be names."""
    size = _display_width(text)
    if size <= width:
        return [text]
    if size > width * _LINES:
        text = f"{text[: width * _LINES * len(text) // size - 1]}…"
    lines: list[str] = []
    line = ""
    for word in text.split():  # textwrap counts letters, but some letters need two cells
        longer = f"{line} {word}" if line else word
        if line and _display_width(longer) > width:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line]


def _display_width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def same_cells(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def emit(
    schema: str,
    items: Iterable[Mapping[str, Any]],
    form: str,
    columns: Columns = (),
    out: TextIO | None = None,
    *,
    cells: Callable[[Mapping[str, Any]], Mapping[str, Any]] = same_cells,
) -> None:
    """Write items to stdout.

    :param schema: name and version of the items' schema, such as "qdo.queues/1".
    :param form: "table", "json" (one object: schema, items), "jsonl" (one item per line), "csv"
        (the keys of JSON), or "name" (only the first key).
    :param cells: a function that returns the values of an item that differ between table and JSON.
    """
    out = sys.stdout if out is None else out
    headings = {key: key.replace("_", " ").upper() for key in columns}
    if isinstance(columns, Mapping):
        headings |= columns
    if form == "json":
        out.write(json.dumps({"schema": schema, "items": list(items)}, indent=1) + "\n")
    elif form == "jsonl":
        out.writelines(json.dumps(item) + "\n" for item in items)
    elif form == "csv":
        _write_csv([*items], out)
    elif form == "name":
        out.writelines(f"{cell(next(iter(item.values())))}\n" for item in items)
    else:
        _write_table([{**item, **cells(item)} for item in items], headings, out)
    out.flush()


@contextmanager
def each_shown(name: Callable[[Any], str]) -> Iterator[Rows]:
    """Yield a function that converts objects to items, and reports failures on stderr.

    :raises PartialFailureError: a conversion failed; raised at the end of the block.
    """
    total = 0
    failed = []

    def rows(things: Iterable[Any], item: Callable[[Any], Any]) -> Iterator[Any]:
        nonlocal total
        for thing in things:
            total += 1
            try:
                row = item(thing)
            except QdoError:
                raise
            # Other programs also write messages. One invalid message must not hide the other
            # messages.
            except Exception as error:  # noqa: BLE001
                failed.append(name(thing))
                print_message(f"cannot show {name(thing)}: {describe(error)}")
            else:
                yield row

    yield rows
    if failed:
        raise PartialFailureError(
            done=total - len(failed), total=total, what="can be shown", rest=join_some(failed)
        )


def emit_newest(
    schema: str,
    items: Sequence[Mapping[str, Any]],
    limit: int,
    form: str,
    columns: Columns,
    *,
    nouns: str,
    empty: str,
    cells: Callable[[Mapping[str, Any]], Mapping[str, Any]] = same_cells,
) -> None:
    """Write at most `limit` of the newest items.

    Report on stderr if there are no items or more items.

    :param items: up to `limit` + 1 of the newest items. The extra item shows that there are more.
    :param empty: the hint if there are no items.
    """
    if not items:
        print_message(f"hint: {empty}")
    emit(schema, items[:limit], form, columns, cells=cells)
    if len(items) > limit:
        print_message(f"hint: only the newest {limit} {nouns} are listed; see --limit and --since")


def _write_table(
    items: Sequence[Mapping[str, Any]], columns: Mapping[str, str], out: TextIO
) -> None:
    rows = [[cell(item.get(key)) for key in columns] for item in items]
    filled = [any(row[i] != _NOTHING for row in rows) for i in range(len(columns))]
    keys = [*compress(columns, filled)]
    expendable = [keys.index(key) for key in EXPENDABLE if key in keys[1:]]
    lines, left_out = table(
        [columns[key] for key in keys],
        [[*compress(row, filled)] for row in rows],
        _numeric_columns(items, keys),
        width_of(out),
        expendable,
    )
    out.writelines(lines)
    if left_out:
        names = ", ".join(left_out)
        print_message(f"hint: no room for {names}; use a wider terminal, or -o json")


def _write_csv(items: Sequence[Mapping[str, Any]], out: TextIO) -> None:
    """Write items with the keys of JSON, without control characters. Lists become JSON."""
    keys = dict.fromkeys(key for item in items for key in item)
    writer = csv.writer(out, lineterminator="\n")
    if keys:
        writer.writerow(keys)
    writer.writerows([_csv_value(item.get(key)) for key in keys] for item in items)


def _csv_value(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    return json.dumps(value) if isinstance(value, list | tuple | dict | bool) else value


def duration_text(seconds: float | None) -> str | None:
    return None if seconds is None else short_duration(seconds)


def ago(at: float) -> str:
    return f"{short_duration(time.time() - at)} ago"


def backlog_cells(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the age and the backlog of a queue for a table. A ~ marks an estimate."""
    count = item["backlog"]
    estimated = item["approximate"] and count is not None
    return {
        "age": duration_text(item["behind_seconds"]),
        "backlog": f"~{count}" if estimated else count,
    }


def cell(value: Any) -> str:
    """Return a value as a table cell without invisible characters; "-" for a missing value."""
    if value is None or value == "":
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int | float) else printable(" ".join(str(value).split()))


def width_of(stream: TextIO) -> int | None:
    """Return the width in columns of a stream's terminal; None for other streams."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _numeric_columns(items: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> list[bool]:
    samples = [next((i[key] for i in items if i.get(key) is not None), None) for key in columns]
    return [isinstance(each, int | float) and not isinstance(each, bool) for each in samples]


def print_message(message: str) -> None:
    """Write a message for people to stderr. Indent all lines except the first."""
    print(printable_lines(message, _GAP), file=sys.stderr, flush=True)


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write the traceback of an error to stderr (a function for `sys.excepthook`)."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable_lines(text.rstrip("\n")), file=sys.stderr, flush=True)


def forget_stdout() -> None:
    """Redirect stdout to the null device after its reader has exited.

    Python then exits without an error.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def values_text(values: Mapping[str, Any] | None) -> str:
    """Return values as a table cell, such as `last=7`."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in (values or {}).items()
        if value not in (None, "")
    )


def change_cells(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the table cells for the values before and after an operator's change."""
    return {"from": values_text(item["from"]), "to": values_text(item["to"])}


def parse_duration(text: str, flag: str) -> float:
    """Return the seconds of a duration such as 90, 1.5s, 15m, 2h, 7d or 1w.

    :raises UsageError: the text is not a duration, or is longer than `MOST_DAYS`. The error names
        the option.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw]?)", text.strip())
    if match is None:
        raise UsageError(
            reason=f"{flag} must be a duration such as 90, 15m, 2h or 7d, got {text!r}"
        )
    seconds = float(match.group(1)) * _UNITS[match.group(2)]
    if seconds > MOST_DAYS * 86400.0:
        raise UsageError(reason=f"{flag} must be at most {MOST_DAYS}d, got {text!r}")
    return seconds


def parse_time(text: str, flag: str) -> float:
    """Return the Unix time of an ISO 8601 time (UTC if it has no zone), or of a Unix time.

    :raises UsageError: the text is not a time. The error names the option.
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
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()


def print_heading(heading: str, reason: str | None, remedy: str | None) -> None:
    print(cell(heading))
    print_step(reason, remedy)
    print()


def print_step(reason: str | None, remedy: str | None) -> None:
    # Write each command of a remedy on separate lines, so that users can copy it.
    steps = _ALTERNATIVE.split(remedy) if remedy else []
    for text in (reason, *(f"-> {step}" for step in steps)):
        if text:
            print(filled(cell(text), "  "))


def print_facts(facts: Iterable[tuple[str, str | None]]) -> None:
    """Print labels and texts in two columns; omit facts without a text."""
    for label, text in facts:
        if text:
            print(filled(f"{label:{LABEL}}{cell(text)}", "", " " * LABEL))


def labelled(label: str, texts: Iterable[str]) -> list[tuple[str, str | None]]:
    """Return facts. Only the first fact has the label."""
    return [("" if number else label, text) for number, text in enumerate(texts)]


def changes_texts(changes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in changes:
        to = values_text(each["to"])
        text = f"{each['time']} {each['by']}: {each['command']} {to}".rstrip()
        yield f"{text} ({each['reason']})" if each["reason"] else text


def filled(text: str, first: str, others: str | None = None) -> str:
    """Wrap a text to the width of the terminal without cutting ids and names."""
    return textwrap.fill(
        text,
        width_of(sys.stdout) or WIDTH,
        initial_indent=first,
        subsequent_indent=first if others is None else others,
        break_long_words=False,
        break_on_hyphens=False,
    )
