"""Tables and JSON on stdout."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st

from qdo.cli.output import cell, emit, fitting, table

ITEMS = [{"queue": "a", "backlog": 5, "x": None}, {"queue": "bcd", "backlog": 12, "x": "y"}]
COLUMNS = {"queue": "QUEUE", "backlog": "BACKLOG", "x": "X"}


def written(form: str) -> str:
    out = io.StringIO()
    emit("qdo.test/1", ITEMS, form, COLUMNS, out)
    return out.getvalue()


def test_table() -> None:
    """Text to the left, numbers to the right, "-" for nothing."""
    assert written("table") == "QUEUE  BACKLOG  X\na            5  -\nbcd         12  y\n"


def test_json() -> None:
    """One object that names its schema; or an item a line."""
    assert json.loads(written("json")) == {"schema": "qdo.test/1", "items": ITEMS}
    assert [json.loads(line) for line in written("jsonl").splitlines()] == ITEMS


def test_nothing() -> None:
    """No items: no table at all, but valid JSON."""
    out = io.StringIO()
    emit("qdo.test/1", [], "table", COLUMNS, out)
    assert out.getvalue() == ""
    emit("qdo.test/1", [], "json", COLUMNS, out)
    assert json.loads(out.getvalue())["items"] == []


def test_the_widest_column_gives_way() -> None:
    """Lines fit into the terminal; cut text ends in an ellipsis."""
    lines = list(table(["QUEUE", "N"], [["x" * 30, "5"]], [False, True], 20))
    assert lines == ["QUEUE" + " " * 13 + " N\n", "x" * 16 + "…  5\n"]


def test_a_long_text_is_cut_in_one_pass() -> None:
    """Another program may have written it; a pass for each letter would take hours."""
    lines = list(table(["WHY", "N"], [["日" * 200_000, "5"]], [False, True], 20))
    assert lines[1] == "日" * 8 + "…  5\n"


@given(st.lists(st.text("aé日", max_size=9), min_size=1), st.integers(8, 30))
def test_lines_fit_the_terminal(names: list[str], width: int) -> None:
    """Wide letters count twice."""
    lines = table(["QUEUE", "N"], [[name, "1"] for name in names], [False, True], width)
    wide = [sum(2 if letter == "日" else 1 for letter in line.rstrip("\n")) for line in lines]
    assert max(wide) <= width


def test_cells_hold_no_line_breaks() -> None:
    """An error of several lines stays one row."""
    assert cell("a\n  b") == "a b"
    assert cell(0) == "0"


def test_narrow_terminals_leave_columns_out() -> None:
    """In the order that is asked for; the others stay, also if lines are too long then."""
    headings, rows = ["QUEUE", "LAST", "AGE", "WHY"], [["q", "12:00", "5s", "no such tenant"]]
    kept = [9, 0, 0, 10]
    for width, expected in [(40, [0, 1, 2, 3]), (27, [0, 1, 3]), (22, [0, 3]), (5, [0, 3])]:
        assert fitting(headings, rows, width, kept, [2, 1, 2]) == expected, width


def test_csv_and_names() -> None:
    """The keys of JSON; nested values as JSON; no control characters."""
    items = [{"queue": "a\x1b[31m", "n": None, "list": ["x"]}, {"queue": "b,c", "more": True}]
    out = io.StringIO()
    emit("qdo.test/1", items, "csv", COLUMNS, out)
    assert out.getvalue().splitlines() == [
        "queue,n,list,more",
        'a\\x1b[31m,,"[""x""]",',
        '"b,c",,,true',
    ]
    out = io.StringIO()
    emit("qdo.test/1", items, "name", COLUMNS, out)
    assert out.getvalue() == "a\\x1b[31m\nb,c\n"
