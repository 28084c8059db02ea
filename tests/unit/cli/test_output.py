"""Tables and JSON on stdout."""

from __future__ import annotations

import io
import json

from hypothesis import example, given
from hypothesis import strategies as st

from qdo.cli.output import cell, emit, table

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


def test_a_long_text_is_wrapped_in_its_column() -> None:
    """Nothing of it is cut; the other columns stay as they are."""
    why = "no such tenant in the database of customers"
    lines, left_out = table(["QUEUE", "WHY", "N"], [["a", why, "5"]], [False, False, True], 40)
    assert lines == [
        "QUEUE  WHY                             N\n",
        "a      no such tenant in the database  5\n",
        "       of customers\n",
    ]
    assert not left_out


def test_a_long_text_is_wrapped_in_one_pass() -> None:
    """Another program may have written it: no time for each letter, and no screens of lines."""
    lines, _ = table(["QUEUE", "WHY"], [["q", "日" * 200_000]], [False, False], 80)
    assert len(lines) == 2
    assert lines[1].endswith("…\n")
    assert len(lines[1]) < 6 * 40


def test_columns_that_do_not_fit_follow_below() -> None:
    """Each with its heading, if it has a value; the expendable ones are left out."""
    headings = ["QUEUE", "LAST", "ID", "FOUND", "REMEDY"]
    rows = [["a", "12:00:00", "0" * 32, "x " * 25, "y " * 25], ["b", "12:01:00", "1", "-", "-"]]
    rows = [[text.strip() for text in row] for row in rows]
    lines, left_out = table(headings, rows, [False] * 5, 72, [1])
    assert lines == [
        f"QUEUE  {'ID':32}  FOUND\n",
        f"a      {'0' * 32}  {'x ' * 15}x\n",
        f"{'':41}x x x x x x x x x\n",
        f"  {'REMEDY':14}{'y ' * 24}y\n",
        "b      1                                 -\n",
    ]
    assert left_out == ["LAST"]


@given(st.lists(st.text("aé日 ", max_size=99), min_size=4, max_size=4), st.integers(50, 90))
@example(
    [
        "aa",
        "日 éé éa日 a日éaa aa日 éa 日 é é a aé日aé日aé éé 日日a a日é aé日日日日é 日 a",
        "aé a 日aa aéaaaéé日 éé é 日a 日日日 a 日日aaa a日aaa日 aa éaa 日日éé é a é é éaé",
        "日ééaa日 éa日日aé",
    ],
    76,
)
def test_tables_lose_no_word(texts: list[str], width: int) -> None:
    """Words are whole, and lines with short words fit into the terminal."""
    texts = [cell(" ".join(text.split())) for text in texts]
    lines, _ = table(["A", "B", "C", "D"], [["name", *texts[1:]]], [False] * 4, width)
    shown = "".join(lines).split()
    assert all(word in shown for text in texts[1:] for word in text.split() if text != "-")
    if all(len(word) < 9 for text in texts for word in text.split()):
        wide = [sum(2 if letter == "日" else 1 for letter in line.rstrip("\n")) for line in lines]
        assert max(wide) <= width


def test_empty_columns_are_left_out() -> None:
    """Of every table, except those in which some item has a value."""
    out = io.StringIO()
    emit("qdo.test/1", [{"queue": "a", "x": None, "y": 0}], "table", ("queue", "x", "y"), out)
    assert out.getvalue() == "QUEUE  Y\na      0\n"


def test_cells_hold_no_line_breaks() -> None:
    """An error of several lines stays one row."""
    assert cell("a\n  b") == "a b"
    assert cell(0) == "0"


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
